"""Mirrors of a run's metrics in TensorBoard, wandb, trackio or mlflow. `metrics.jsonl` stays the record.

A tracker can never stop a run: one that cannot start or fails later is named once and dropped. Nested metrics become
`time_s/generate`, lists become `survival/1 ..`; what is no number stays out. Secrets are left to each tracker's own
environment variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from draftkit.console import say_once

Writer = tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]  # (write a step, close)


def flat_numbers(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a metrics object, under slash-separated names; lists are numbered from 1."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple):
            yield from flat_numbers({str(i): item for i, item in enumerate(value, 1)}, f"{prefix}{name}/")
        elif isinstance(value, bool | int | float) and math.isfinite(value):
            yield prefix + name, float(value)


class Trackers:
    """`log(step, values)` sends to every tracker that is still alive. run_dir: where those that write files do."""

    def __init__(self, names: Sequence[str], run_dir: Path, name: str, config: dict[str, Any]) -> None:
        self._alive: dict[str, Writer] = {}
        for tracker in names:
            try:
                self._alive[tracker] = OPEN[tracker](run_dir, name, config)
            except Exception as error:  # whatever third-party code does at start, the run goes on
                _dropped(tracker, error)

    def log(self, step: int, values: dict[str, Any]) -> None:
        numbers = dict(flat_numbers({key: value for key, value in values.items() if key != "step"}))
        for tracker, (write, _) in list(self._alive.items()):
            try:
                write(step, numbers)
            except Exception as error:
                del self._alive[tracker]
                _dropped(tracker, error)

    def close(self) -> None:
        for tracker, (_, close) in self._alive.items():
            try:
                close()
            except Exception as error:
                _dropped(tracker, error)
        self._alive.clear()


def _dropped(tracker: str, error: Exception) -> None:
    say_once(f"rl.track: {tracker} is left out ({type(error).__name__}: {error}); metrics.jsonl has everything.")


def _tensorboard(run_dir: Path, name: str, config: dict[str, Any]) -> Writer:
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(run_dir / "tensorboard"))

    def write(step: int, numbers: dict[str, float]) -> None:
        for key, value in numbers.items():
            board.add_scalar(key, value, step)
        board.flush()

    return write, board.close


def _wandb(run_dir: Path, name: str, config: dict[str, Any]) -> Writer:
    import wandb

    run = wandb.init(project="draftkit", name=name, dir=str(run_dir), config=config)
    return lambda step, numbers: run.log(numbers, step=step), run.finish


def _trackio(run_dir: Path, name: str, config: dict[str, Any]) -> Writer:
    import trackio

    trackio.init(project="draftkit", name=name, config=config)
    return lambda step, numbers: trackio.log(numbers, step=step), trackio.finish


def _mlflow(run_dir: Path, name: str, config: dict[str, Any]) -> Writer:
    import mlflow

    mlflow.start_run(run_name=name)
    mlflow.log_params(config)
    return lambda step, numbers: mlflow.log_metrics(numbers, step=step), mlflow.end_run


OPEN: dict[str, Callable[[Path, str, dict[str, Any]], Writer]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}
