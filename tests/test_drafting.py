"""Sampling of drafts: the law, the support, greedy rows, seeds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draftkit.engine.drafting import sample_drafts

DRAWS = 40_000


def metadata(temperature: list[float], seeds: dict[int, int] | None = None) -> SimpleNamespace:
    """What vLLM's SamplingMetadata says of these requests."""
    greedy = [t < 1e-5 for t in temperature]
    return SimpleNamespace(
        all_greedy=all(greedy),
        all_random=not any(greedy),
        temperature=torch.tensor(temperature),
        generators={row: torch.Generator().manual_seed(seed) for row, seed in (seeds or {}).items()},
    )


def logits(rows: int, vocab: int = 12, outside: tuple[int, ...] = (0, 5, 11), seed: int = 0) -> torch.Tensor:
    made = 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    made[:, list(outside)] = -torch.inf
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outside", [(), (0, 5, 11)])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_drafts_follow_the_law_returned(temperature, outside, dtype):
    torch.manual_seed(1)
    given = logits(1, outside=outside).to(dtype)
    tokens, q = sample_drafts(given.repeat(DRAWS, 1), metadata([temperature] * DRAWS))
    expected = (given.double() / temperature).softmax(-1)[0]
    assert q.dtype == torch.float32 and torch.allclose(q[17].double(), expected, atol=1e-6)
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    assert counts[list(outside)].sum() == 0
    inside = expected > 0
    chi = ((counts - DRAWS * expected)[inside] ** 2 / (DRAWS * expected[inside])).sum()
    assert chi < 40  # 11 degrees of freedom at most: p = 4e-5


def test_rows_may_differ_in_what_is_outside():
    given = torch.full((2, 4), -torch.inf)
    given[0, 1], given[1, 3] = 0.0, 0.0
    tokens, q = sample_drafts(given, metadata([1.0, 1.0]))
    assert tokens.tolist() == [1, 3]
    assert q.tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]


def test_a_cold_request_takes_its_likeliest_draft():
    given = logits(3)
    for _ in range(20):
        tokens, _ = sample_drafts(given, metadata([0.0, 1.0, 0.0]))
        assert tokens[[0, 2]].tolist() == given.argmax(-1)[[0, 2]].tolist()
    tokens, returned = sample_drafts(given, metadata([0.0] * 3))
    assert tokens.tolist() == given.argmax(-1).tolist() and returned is given


def test_a_seeded_request_draws_the_same_in_any_company():
    given = logits(4, vocab=200)
    alone = [
        sample_drafts(given[2:3], metadata([1.0], {0: 7}))[0].item(),
        sample_drafts(given[[3, 0, 2]], metadata([0.9, 1.0, 1.0], {0: 1, 2: 7}))[0][2].item(),
        sample_drafts(given, metadata([1.0] * 4, {2: 7}))[0][2].item(),
    ]
    assert len(set(alone)) == 1
    others = {sample_drafts(given[2:3], metadata([1.0], {0: seed}))[0].item() for seed in range(40)}
    assert len(others) > 10


@pytest.mark.parametrize(("number", "expected"), [(0.0, 0), (0.5, 1), (1 - 2.0**-53, 1)])
def test_borders_of_the_cumulated_sums(number, expected, monkeypatch):
    """Where an index off by one, or beyond the last token, would show."""
    given = torch.zeros(2, 3)
    given[:, 2] = -torch.inf
    monkeypatch.setattr(torch, "rand", lambda n, **kwargs: torch.full((n,), number, **kwargs))
    assert sample_drafts(given, metadata([1.0, 1.0]))[0].tolist() == [expected] * 2
