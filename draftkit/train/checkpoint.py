"""Checkpoints: `checkpoints/step-000100/`, written aside and renamed, so a directory that exists is whole.

What is in one is its writer's business: a drafter training's is in `spread`, an RL run's in `rl.resume`. Of a drafter
training position in the data and learning rate follow from the step (`plan_epoch`, `lr_at`), and it draws no random
numbers after the start, so weights, optimizer state and the step are all that a resumed run needs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "step-"


@contextmanager
def whole(
    directory: Path, step: int, keep: int, main: bool = True, barrier: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """`with whole(...) as aside:` fill the directory `aside`; it takes its place when the block ends without an error,
    and all but the newest `keep` checkpoints go. Several processes may fill it: `main` is one of them, `barrier` waits
    for all."""
    final = directory / f"{PREFIX}{step:06d}"
    aside = directory / f".{final.name}.new"
    if main:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".*"):  # kill -9 in the middle of a save or of a removal
            shutil.rmtree(leftover)
        aside.mkdir()
    barrier()
    yield aside
    barrier()
    if main:
        for file in aside.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        if final.exists():
            _remove(final)
        aside.rename(final)
        for old in found(directory)[:-keep]:
            _remove(old)
    barrier()


def _remove(checkpoint: Path) -> None:
    """Out of sight first: half a checkpoint must not pass for a whole one."""
    aside = checkpoint.with_name(f".{checkpoint.name}.old")
    checkpoint.rename(aside)
    shutil.rmtree(aside)


def found(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(directory.glob(f"{PREFIX}*")) if directory.exists() else []


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))
