"""A step may have k above 0 and no draft: its schedule has none at the sizes that it ran at."""

from typing import Any

import pytest

from draftkit.recipe import load_recipe
from draftkit.rl import finish, view

ROWS: list[dict[str, Any]] = [
    {"step": 1, "k": 0, "acceptance_length": None},
    {"step": 2, "k": 2, "acceptance_length": None},
    {"step": 3, "k": 2, "acceptance_length": 1.5},
]


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    common = {
        "reward_mean": 0.5,
        "response_tokens": 8,
        "entropy": 1.0,
        "engine_trainer_logp_gap": None,
        "surprise_z": None,
        "predicted_speedup": None,
        "predicted_generation_speedup": None,
        "realised_speedup": None,
        "realised": None,
        "generation_share": 0.5,
        "lossless": {"alarms": []},
        "canary": None,
        "time_s": dict.fromkeys([*finish.PARTS, "eval"], 1.0) | {"total": 20.0},
    }
    return [common | row for row in ROWS]


def test_it_is_not_among_the_drafted_steps_of_the_summary(rows: list[dict[str, Any]]) -> None:
    recipe, _ = load_recipe("rl-quickstart")
    found = finish.summary(recipe, rows, None)
    assert found["acceptance_length_first"] == found["acceptance_length_last"] == 1.5
    assert found["steps_without_speculation"] == 2


def test_a_run_of_nothing_else_has_no_acceptance_length(rows: list[dict[str, Any]]) -> None:
    recipe, _ = load_recipe("rl-quickstart")
    found = finish.summary(recipe, rows[:2], None)
    assert found["acceptance_length_last"] is None and "acceptance" not in finish.headline(found)


def test_its_line_says_so(rows: list[dict[str, Any]]) -> None:
    assert [view.note(row).split(", entropy")[0] for row in rows] == [
        "reward 0.500, plain",
        "reward 0.500, k 2, nothing drafted",
        "reward 0.500, k 2 AL 1.50",
    ]
    assert view.table(rows).row_count == 3
