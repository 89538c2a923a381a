"""What a matrix of versions says, by hand; the measuring itself is in test_rl.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftkit.errors import UserError
from draftkit.recipe import Recipe
from draftkit.rl import matrix, snapshots

LENGTHS = {(p, d): 3.0 - 0.2 * (p - d) / 5 if d <= p else 2.9 for p in (5, 10, 15) for d in (5, 10, 15)}


def test_staleness_is_what_is_left_by_lag():
    rows = matrix.staleness(LENGTHS)
    assert [row["lag"] for row in rows] == [0, 5, 10] and [row["pairs"] for row in rows] == [3, 2, 1]
    assert [row["kept"] for row in rows] == pytest.approx([1.0, 2.8 / 3, 2.6 / 3])


def test_retraining_pays_when_the_lost_seconds_exceed_a_training():
    lost_10, lost_15 = 5 * 4.0 * (3 / 2.8 - 1), 5 * 4.0 * (3 / 2.6 - 1)
    oldest, middle, newest = matrix.retraining(LENGTHS, generate_s=4.0, train_s=2.0)
    assert oldest["lost_s"] == pytest.approx(lost_10 + lost_15) and oldest["pays_at"] == 15
    assert middle["lost_s"] == pytest.approx(lost_10) and middle["pays_at"] is None
    assert newest == {"drafter": 15, "lost_s": 0.0, "pays_at": None}
    assert matrix.retraining(LENGTHS, generate_s=40.0, train_s=2.0)[0]["pays_at"] == 10
    assert all(row["pays_at"] is None for row in matrix.retraining(LENGTHS, generate_s=4.0, train_s=0.0))


def test_a_drafter_without_successor_is_not_behind():
    """Trained at steps 5 and 10 of 20: from 10 on there is one newest drafter, whatever the policy does."""
    lengths = {(p, d): 3.0 if d == 10 else 2.7 for p in (5, 10, 15, 20) for d in (5, 10)}
    assert matrix.newest(lengths) == {5: 5, 10: 10, 15: 10, 20: 10}
    rows = matrix.staleness(lengths)
    assert [(row["lag"], row["pairs"]) for row in rows] == [(0, 4), (5, 1), (10, 1), (15, 1)]
    assert [row["kept"] for row in rows] == pytest.approx([1.0, 0.9, 0.9, 0.9])
    first, last = matrix.retraining(lengths, generate_s=4.0, train_s=2.0)
    assert first["lost_s"] == pytest.approx(15 * 4.0 * (3 / 2.7 - 1)) and first["pays_at"] == 10
    assert last["lost_s"] == 0.0


def test_snapshots_with_the_same_drafter_hold_one_version(tmp_path):
    found = []
    for step, value, note in [(5, None, ""), (10, 1.0, "a"), (15, 1.0, "another"), (20, 2.0, "a")]:
        drafter = tmp_path / str(step)
        drafter.mkdir()
        if value is not None:
            save_file({"w": torch.full((3,), value)}, drafter / "model.safetensors", metadata={"note": note})
        found.append(snapshots.Snapshot(step, tmp_path, None if value is None else drafter))
    assert [s.step for s in snapshots.drafter_versions(found)] == [10, 20]


def rows() -> list[dict]:
    made = []
    for (policy, drafter), length in LENGTHS.items():
        accepted = round(100 * (length - 1))
        requests = [
            {"prompt": f"p{i}", "tokens": 101 + accepted, "drafts": 100, "draft_tokens": 300, "accepted": accepted,
             "per_pos": [accepted, 0, 0]}
            for i in range(4)
        ]  # fmt: skip
        made.append({"policy": policy, "drafter": drafter, "requests": requests})
    return made


def test_the_report_holds_every_cell():
    results = matrix.results_from_rows(rows(), {"generate_s": 4.0, "train_s": 2.0}, Recipe())
    assert len(results["cells"]) == 9
    text = matrix.markdown(results, Path("run"))
    assert "| policy of step | drafter 5 | drafter 10 | drafter 15 |" in text and "| 15 | 2.60 | 2.80 | 3.00 |" in text
    assert "Drafter of step 5:" in text and "would have paid by step 15" in text
    assert matrix.headline(results) == "a drafter 10 steps behind keeps 86.7 % of the acceptance length"
    assert matrix.plot(results).startswith(b"\x89PNG")


def test_one_drafter_alone_is_said_to_be_so():
    alone = [row for row in rows() if row["drafter"] == 5]
    results = matrix.results_from_rows(alone, {"generate_s": 4.0, "train_s": 2.0}, Recipe())
    assert matrix.headline(results) == "one drafter throughout, of step 5: nothing to compare it with"
    assert matrix.retraining_text(results)[-1] == "Drafter of step 5: the newest to the end."


def test_a_run_without_snapshots_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no folder snapshots"):
        snapshots.read(tmp_path)
