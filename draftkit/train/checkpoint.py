"""Checkpoints: `checkpoints/step-000100/`, written aside and renamed, so a directory that exists is whole.

`whole` is the writing itself, for any content. `save` and `load_newest` are a drafter training's: position in the data
and the learning rate follow from the step (`plan_epoch`, `lr_at`) and training draws no random numbers after the start,
so weights, optimizer state and the step are all that a resumed run needs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftkit.drafters.base import trained

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


def save(directory: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, keep: int) -> None:
    """Write the state after `step`, then drop all but the newest `keep` checkpoints."""
    with whole(directory, step, keep) as aside:
        save_file({name: t.contiguous() for name, t in trained(model).items()}, aside / "model.safetensors")
        torch.save(optimizer.state_dict(), aside / "optimizer.pt")


def _remove(checkpoint: Path) -> None:
    """Out of sight first: half a checkpoint must not pass for a whole one."""
    aside = checkpoint.with_name(f".{checkpoint.name}.old")
    checkpoint.rename(aside)
    shutil.rmtree(aside)


def found(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(directory.glob(f"{PREFIX}*")) if directory.exists() else []


def load_newest(directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore the newest checkpoint; its step, or 0 when there is none."""
    checkpoints = found(directory)
    if not checkpoints:
        return 0
    state = load_file(checkpoints[-1] / "model.safetensors")
    assert state.keys() == trained(model).keys(), f"{checkpoints[-1]} is of another kind of drafter"
    model.load_state_dict(state, strict=False)  # what is frozen is the verifier's, and there already
    optimizer.load_state_dict(torch.load(checkpoints[-1] / "optimizer.pt", weights_only=True))
    return step_of(checkpoints[-1])


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))
