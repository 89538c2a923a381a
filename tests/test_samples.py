"""Samples of drafts: rounds from a response and what was proposed, what is kept, and one real speculative engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftkit.evals import samples
from draftkit.recipe import Recipe
from draftkit.run import RunDir
from draftkit.types import Generation, Sampling, SpecCounters


class Letters:
    """A tokenizer whose tokens are letters; 99 is half a character that 98 completes."""

    def decode(self, ids) -> str:
        text = "".join("?" if i == 99 else chr(96 + i) if i < 98 else "~" for i in ids)
        return text.replace("?~", "é")


class Engine:
    def __init__(self, answer: Generation, proposed: list[list[int]]) -> None:
        self.answer, self.proposed = answer, proposed

    def generate_traced(self, prompts, sampling):
        return [self.answer for _ in prompts], [self.proposed for _ in prompts]


def answer(response: list[int], accepted: int) -> Generation:
    return Generation((1, 2), tuple(response), "stop", SpecCounters(3, 6, accepted, ()))


def test_rounds_follow_from_the_response() -> None:
    """1 from the prompt; [2 3] of which 2 is kept and 9 corrects; [4 5] kept with bonus 6; nothing drafted; the end."""
    found = samples.rounds([1, 2, 9, 4, 5, 6, 7, 8, 8], [[2, 3], [4, 5], [], [8, 8], [1, 1]])
    assert found == [([2, 3], 1), ([4, 5], 2), ([], 0), ([8, 8], 2)]


def test_a_response_of_one_token_has_no_round() -> None:
    assert samples.rounds([1], [[2, 3]]) == []


def test_a_row_says_token_by_token_what_became_of_the_drafts() -> None:
    engine = Engine(answer([1, 2, 9, 4, 5], 3), [[2, 3], [4, 5]])
    (row,) = samples.record(engine, Letters(), [[1, 2]], [Sampling(temperature=0.5)], 2, step=7)
    assert row["step"] == 7 and row["k"] == 2 and row["temperature"] == 0.5 and row["prompt"] == "ab"
    assert row["first"] == "a"
    assert row["rounds"] == [
        {"drafted": ["b", "c"], "accepted": 1, "own": "i"},
        {"drafted": ["d", "e"], "accepted": 2, "own": None},
    ]


def test_a_token_that_completes_a_character_stands_alone() -> None:
    engine = Engine(answer([1, 99, 98], 2), [[99, 98]])
    (row,) = samples.record(engine, Letters(), [[1]], [Sampling()], 2)
    assert row["rounds"][0]["drafted"] == ["?", "~"]


def test_proposals_that_were_not_the_verified_ones_are_not_shown() -> None:
    """The engine counted more accepted drafts than these proposals can explain."""
    engine = Engine(answer([1, 2, 3, 4], 9), [[7, 7], [7, 7], [7, 7]])
    assert samples.record(engine, Letters(), [[1]], [Sampling()], 2) == []


def test_the_file_keeps_the_first_and_the_last_step(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run", verb="rl", recipe=Recipe())
    try:
        for step in (4, 8, 12, 12):
            samples.keep(run, [{"step": step, "n": i} for i in range(2)])
        samples.keep(run, [])
    finally:
        run.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / samples.FILE).read_text().splitlines()]
    assert [(row["step"], row["n"]) for row in rows] == [(4, 0), (4, 1), (12, 0), (12, 1)]


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_real_engine_shows_what_it_counts_and_is_left_as_it_was(sampled_drafts, temperature: float) -> None:
    import tiny

    prompts = [[5 + i, 9, 17] for i in range(3)]
    settings = [Sampling(temperature, max_tokens=24, seed=i, ignore_eos=True) for i in range(3)]
    before = sampled_drafts.generate(prompts, settings)
    answers, proposed = sampled_drafts.generate_traced(prompts, settings)
    assert [a.response_ids for a in answers] == [a.response_ids for a in before]
    assert [a.response_ids for a in sampled_drafts.generate(prompts, settings)] == [a.response_ids for a in before]
    for one, drafts in zip(answers, proposed, strict=True):
        found = samples.rounds(one.response_ids, drafts)
        accepted = sum(n for _, n in found)
        assert accepted <= one.spec.num_accepted <= accepted + tiny.K
        assert len(found) == one.spec.num_drafts and all(len(d) == tiny.K for d, _ in found)
        assert 1 + sum(n + 1 for _, n in found) >= len(one.response_ids)
    rows = samples.record(sampled_drafts, Letters(), prompts, settings, tiny.K)
    assert len(rows) == 3
    for row, one in zip(rows, answers, strict=True):
        text = row["first"] + "".join("".join(r["drafted"][: r["accepted"]]) + (r["own"] or "") for r in row["rounds"])
        assert text == Letters().decode(one.response_ids)
