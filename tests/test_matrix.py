"""What a matrix of versions says, by hand; the measuring itself is in test_rl.py."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_a_run_without_snapshots_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no folder snapshots"):
        snapshots.read(tmp_path)
