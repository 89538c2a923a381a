"""Trackers mirror numbers and can never stop a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftkit import track
from draftkit.track import Trackers, flat_numbers


def test_nested_metrics_become_flat_numbers_and_the_rest_stays_out() -> None:
    values = {"reward": 0.5, "survival": [0.7, 0.4], "time_s": {"generate": 2}, "note": "x", "nan": float("nan")}
    expected = {"reward": 0.5, "survival/1": 0.7, "survival/2": 0.4, "time_s/generate": 2.0}
    assert dict(flat_numbers(values | {"none": None})) == expected


def test_tensorboard_holds_what_was_logged(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = Trackers(["tensorboard"], tmp_path, "run", {})
    for step in (1, 2):
        trackers.log(step, {"step": step, "time_s": {"generate": 2.0 * step}})
    trackers.close()
    board = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("time_s/generate")] == [(1, 2.0), (2, 4.0)]


def test_a_tracker_that_fails_is_named_once_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def write(step: int, numbers: dict[str, float]) -> None:
        calls.append(step)
        raise OSError("no route to host")

    def broken(*_: object) -> track.Writer:
        raise ImportError("No module named 'nowhere'")

    monkeypatch.setitem(track.OPEN, "wandb", lambda *_: (write, lambda: None))
    monkeypatch.setitem(track.OPEN, "mlflow", broken)
    trackers = Trackers(["wandb", "mlflow"], tmp_path, "run", {})
    trackers.log(1, {"reward": 1.0})
    trackers.log(2, {"reward": 1.0})
    trackers.close()
    said = capsys.readouterr().err
    assert calls == [1]
    assert said.count("wandb is left out (OSError: no route to host)") == 1
    assert "mlflow is left out (ImportError: No module named 'nowhere')" in said
