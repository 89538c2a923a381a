"""What a speculative round samples: laws, supports, greedy rows, seeds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draftkit.engine.sampling import BLOCK, draw, sample_drafts, sample_recovered

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


def assert_law(tokens: torch.Tensor, expected_V: torch.Tensor) -> None:
    """Nothing of probability 0, and the rest as often as it should be (chi-square; a false alarm in 100,000 runs)."""
    counts = torch.bincount(tokens, minlength=len(expected_V)).double()
    inside = expected_V > 0
    assert counts[~inside].sum() == 0
    num = len(tokens)
    chi = float(((counts - num * expected_V)[inside] ** 2 / (num * expected_V[inside])).sum())
    freedom = int(inside.sum()) - 1
    assert chi < freedom + 4.3 * (2 * freedom) ** 0.5 + 13, (chi, freedom)


# ---- drawing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5, BLOCK, BLOCK + 1, 5 * BLOCK - 3])
def test_draws_are_in_proportion_to_weights(size):
    made = torch.Generator().manual_seed(size)
    weight = torch.rand(size, generator=made) * (torch.rand(size, generator=made) < 0.7)
    weight[-1] = 0.5  # a row without weights has no law
    uniform = torch.rand(200_000, generator=made, dtype=torch.float64)
    assert_law(draw(weight.repeat(len(uniform), 1), uniform), weight.double() / weight.double().sum())


def test_draws_are_those_of_one_long_cumulated_sum():
    made = torch.Generator().manual_seed(3)
    weight = torch.rand(500, 700, generator=made) * (torch.rand(500, 700, generator=made) < 0.3)
    uniform = torch.rand(500, generator=made, dtype=torch.float64)
    sums = weight.double().cumsum(-1)
    long = torch.searchsorted(sums, uniform.unsqueeze(1) * sums[:, -1:], right=True).squeeze(1)
    assert (draw(weight, uniform) == long).float().mean() > 0.998  # float32 block sums may move a border


@pytest.mark.parametrize("size", [3, BLOCK, 2 * BLOCK + 1])
def test_the_last_weight_and_a_row_without_any(size):
    weight = torch.zeros(3, size)
    weight[0, -1], weight[1, 0] = 1e-30, 2.0
    for number in (0.0, 0.5, 1 - 2.0**-53):
        drawn = draw(weight, torch.full((3,), number, dtype=torch.float64))
        assert drawn[:2].tolist() == [size - 1, 0] and 0 <= drawn[2] < size
    assert draw(weight[:0], torch.zeros(0, dtype=torch.float64)).tolist() == []


# ---- drafts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outside", [(), (0, 5, 11)])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_drafts_follow_the_law_returned(temperature, outside, dtype):
    torch.manual_seed(1)
    given = logits(1, outside=outside).to(dtype)
    tokens, q = sample_drafts(given.repeat(DRAWS, 1), metadata([temperature] * DRAWS))
    expected = (given.double() / temperature).softmax(-1)[0]
    assert q.dtype == torch.float32 and torch.allclose(q[17].double(), expected, atol=1e-6)
    assert_law(tokens, expected)


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


# ---- recovered tokens -----------------------------------------------------------------------------------------------


def recovered(p, q, drafts, counts, given):
    cu = torch.tensor(counts).cumsum(0)
    return sample_recovered(max(counts), counts, cu, torch.tensor(drafts, dtype=torch.int32), q, p, given, p.device)


@pytest.mark.parametrize("certain", [False, True])
def test_a_rejected_draft_is_replaced_from_the_residual(certain):
    torch.manual_seed(2)
    p, q = (logits(1, outside=(), seed=seed).softmax(-1) for seed in (4, 5))
    residual = p.clone()
    if certain:
        residual[0, 3] = 0
    else:
        residual = (p - q).clamp(min=0)
    tokens = recovered(
        p.repeat(DRAWS, 1), None if certain else q.repeat(DRAWS, 1), [3] * DRAWS, [1] * DRAWS, metadata([1.0] * DRAWS)
    )
    assert tokens.dtype == torch.int32
    assert_law(tokens, (residual / residual.sum())[0].double())


def test_every_draft_has_its_own_residual_and_every_request_its_seed():
    p = torch.zeros(4, 6)
    p[range(4), [1, 2, 3, 4]] = 1.0  # one request with three drafts, one without, one with one
    q = torch.full((4, 6), 1 / 6)
    assert recovered(p, q, [0] * 4, [3, 0, 1], metadata([1.0] * 3)).tolist() == [1, 2, 3, 4]
    flat, even = torch.full((4, 500), 1 / 500), torch.full((4, 500), 0.0)
    draws = [recovered(flat, even, [0] * 4, [3, 0, 1], metadata([1.0] * 3, {0: 5, 2: 6})).tolist() for _ in range(2)]
    assert draws[0] == draws[1] and draws[0][0] == draws[0][2] != draws[0][3]
    generators = metadata([1.0] * 3, {1: 9})
    before = generators.generators[1].get_state()
    recovered(flat, even, [0] * 4, [3, 0, 1], generators)
    assert before.equal(generators.generators[1].get_state()), "a request without drafts draws nothing"
