"""Statistics on simulated rows: intervals cover what they claim, planted differences are found, nothing is invented."""

import math

import numpy as np
import pytest

from draftkit.evals import acceptance as stats
from draftkit.types import SpecCounters


def request_from_rounds(prompt: str, accepted_R: list[int], k: int) -> dict:
    """The row of a request whose rounds accepted `accepted_R` draft tokens, counted as vLLM counts."""
    per_pos = [sum(a > i for a in accepted_R) for i in range(k)]
    counters = SpecCounters(len(accepted_R), k * len(accepted_R), sum(accepted_R), tuple(per_pos))
    return {
        "prompt": prompt,
        "tokens": 1 + counters.num_drafts + counters.num_accepted,
        "drafts": counters.num_drafts,
        "draft_tokens": counters.num_draft_tokens,
        "accepted": counters.num_accepted,
        "per_pos": per_pos,
    }


def row(k: int, wall_s: float, requests: list[dict], repeat: int = 0, block: int = 0, **fields) -> dict:
    base = {"event": "measured", "repeat": repeat, "temperature": 1.0, "concurrency": 1, "block": block, "k": k}
    return base | {"wall_s": wall_s, "parts_s": None, "requests": requests} | fields


def simulated_rounds(rng: np.random.Generator, num: int, k: int, mean: float, spread: float) -> list[list[int]]:
    """`num` prompts, each with its own acceptance rate (rounds of one prompt are dependent), 20 rounds each."""
    rates = np.clip(rng.normal(mean, spread, num), 0.02, 0.98)
    return [[int(np.argmin([*(rng.random(k) < rate), False])) for _ in range(20)] for rate in rates]


def test_acceptance_length_and_survival_equal_a_naive_loop():
    rng = np.random.default_rng(0)
    rounds = simulated_rounds(rng, 9, 4, 0.6, 0.2)
    requests = [request_from_rounds(str(i), accepted, 4) for i, accepted in enumerate(rounds)]
    flat = [accepted for of_prompt in rounds for accepted in of_prompt]
    naive = [sum(1 for accepted in flat if accepted >= i) / len(flat) for i in (1, 2, 3, 4)]
    assert stats.pooled_survival(requests, 4) == pytest.approx(naive)
    assert stats.pooled_acceptance_length(requests) == pytest.approx(1 + sum(flat) / len(flat))
    assert stats.pooled_acceptance_length(requests) == pytest.approx(1 + sum(naive))


def test_rounds_without_a_draft_count_as_rounds():
    """An n-gram drafter that proposed once in ten steps and had 3 tokens accepted: 13 tokens in 10 rounds."""
    request = {"prompt": "p", "tokens": 14, "drafts": 1, "draft_tokens": 3, "accepted": 3, "per_pos": [1, 1, 1]}
    assert stats.num_rounds(request) == 10
    assert stats.pooled_acceptance_length([request]) == pytest.approx(1.3)
    assert stats.pooled_survival([request], 3) == pytest.approx([0.1, 0.1, 0.1])


def test_a_last_round_cut_by_the_length_limit_adds_no_rounds():
    request = request_from_rounds("p", [3, 3, 3], 3) | {"tokens": 11}
    assert stats.num_rounds(request) == 3


def test_makespan_of_a_queue():
    assert stats.makespan([4, 4, 4, 4], 4) == 4
    assert stats.makespan([4, 4, 4, 4], 1) == 16
    assert stats.makespan([9, 1, 1, 1], 2) == 9  # the short ones pass through the other slot


@pytest.mark.parametrize(
    ("df", "quantile"), [(1, 12.7062), (2, 4.3027), (5, 2.5706), (11, 2.2010), (30, 2.0423), (1e4, 1.9602)]
)
def test_student_t_quantile_equals_the_printed_table(df, quantile):
    assert stats.student_t_quantile(df) == pytest.approx(quantile, abs=2e-4)


def test_acceptance_interval_covers_under_dependent_rounds():
    """16 prompts with rates of their own. An interval that took rounds for independent would cover far less."""
    k, mean, spread = 3, 0.5, 0.15
    population = simulated_rounds(np.random.default_rng(1), 20000, k, mean, spread)
    truth = 1 + np.mean(population)
    clustered = independent = 0
    trials = 200
    for trial in range(trials):
        rounds = simulated_rounds(np.random.default_rng(100 + trial), 16, k, mean, spread)
        requests = [request_from_rounds(str(i), accepted, k) for i, accepted in enumerate(rounds)]
        draws = stats.bootstrap_acceptance_length(requests, (0, trial))
        low, high = stats.expanded_percentile_interval(draws, 16)
        clustered += low <= truth <= high
        flat = np.concatenate([np.array(r) for r in rounds])
        independent += abs(1 + flat.mean() - truth) <= 1.96 * flat.std(ddof=1) / math.sqrt(len(flat))
    assert 0.91 <= clustered / trials <= 0.985
    assert independent / trials < 0.85


def bench_rows(rng, k: int, cost: float, rate: float, noise: float = 0.03, repeats: int = 3, num_blocks: int = 4):
    """Rows of a bench whose machine drifts by half, whose steps are noisy, and whose rounds cost `cost` plain steps."""
    prompts = [str(i) for i in range(16)]
    rates = np.clip(rng.normal(rate, 0.1, 16), 0.02, 0.98) if rate else np.zeros(16)
    rows = []
    for repeat in range(repeats):
        for block in range(num_blocks):
            part = range(block * 16 // num_blocks, (block + 1) * 16 // num_blocks)
            step_s = 0.03 * (1 + 0.5 * repeat) * math.exp(rng.normal(0, 0.1))
            for arm, arm_cost in ((0, 1.0), (k, cost)):
                requests = []
                for i in part:
                    accepted = [int(np.argmin([*(rng.random(arm) < rates[i]), False])) for _ in range(24)]
                    request = request_from_rounds(prompts[i], accepted, arm)
                    requests.append(request if arm else request | {"drafts": 0})
                steps = sum(map(stats.num_rounds, requests)) * arm_cost + len(requests)  # a prefill each
                wall = steps * step_s * math.exp(rng.normal(0, noise))
                rows.append(row(arm, wall, requests, repeat, block))
    return rows


def speculative_cell(rows, k):
    return next(cell for cell in stats.cells_from_rows(rows, seed=0) if cell["k"] == k)


def test_equal_arms_are_undecided_at_the_nominal_rate():
    """A against A: no acceptance, round cost 1. A verdict of 95 % intervals is wrong in about one of twenty."""
    wrong = sum(
        speculative_cell(bench_rows(np.random.default_rng(seed), 2, 1.0, 0.0), 2)["verdict"] != "undecided"
        for seed in range(200)
    )
    assert wrong / 200 <= 0.09


def test_break_even_cells_are_undecided_at_the_nominal_rate():
    """Tokens accepted, and every gain eaten by the cost: here the prompts' own spread must be in the interval."""
    k, rate = 3, 0.5
    rates = np.clip(np.random.default_rng(3).normal(rate, 0.1, 100_000), 0.02, 0.98)
    cost = 1 + np.mean(rates + rates**2 + rates**3)
    trials = 200
    wrong = sum(
        speculative_cell(bench_rows(np.random.default_rng(seed), k, cost, rate), k)["verdict"] != "undecided"
        for seed in range(trials)
    )
    assert wrong / trials <= 0.09


@pytest.mark.parametrize(("gain", "expected"), [(1.2, "faster"), (1 / 1.2, "slower")])
def test_a_planted_difference_is_found(gain, expected):
    k, rate = 3, 0.5
    cost = (1 + rate + rate**2 + rate**3) / gain
    cells = [speculative_cell(bench_rows(np.random.default_rng(seed), k, cost, rate), k) for seed in range(20)]
    assert sum(cell["verdict"] == expected for cell in cells) >= 18
    assert np.mean([cell["speedup"] for cell in cells]) == pytest.approx(gain, rel=0.05)
    assert np.mean([cell["round_cost"] for cell in cells]) == pytest.approx(cost, rel=0.03)


def test_a_difference_of_a_tenth_is_found_where_the_prompts_do_not_matter():
    cells = [speculative_cell(bench_rows(np.random.default_rng(seed), 2, 1.1, 0.0), 2) for seed in range(20)]
    assert sum(cell["verdict"] == "slower" for cell in cells) >= 18


def test_one_pair_has_no_interval_and_no_verdict():
    cell = speculative_cell(bench_rows(np.random.default_rng(0), 3, 1.2, 0.8, repeats=1, num_blocks=1), 3)
    assert cell["speedup"] > 1 and cell["speedup_ci"] is None and cell["verdict"] == "undecided"


def test_a_block_measured_again_counts_once_and_its_last_rows_count():
    first = row(0, 1.0, [request_from_rounds("a", [0] * 9, 0) | {"drafts": 0}])
    again = first | {"wall_s": 2.0}
    (cell,) = stats.cells_from_rows([first, again], seed=0)
    assert cell["tokens_per_s"] == pytest.approx(10 / 2.0)
    assert (cell["speedup"], cell["acceptance_length"], cell["survival"]) == (1.0, 1.0, [])


def test_cost_is_split_by_the_engines_own_times():
    plain = row(0, 10.0, [request_from_rounds("a", [0] * 99, 0) | {"drafts": 0}])
    fast = row(2, 5.0, [request_from_rounds("a", [1] * 50, 2)], parts_s={"draft_s": 1.0, "step_s": 4.5})
    cell = stats.cells_from_rows([plain, fast], seed=0)[1]
    assert cell["round_cost"] == pytest.approx(cell["acceptance_length"] / cell["speedup"])
    assert cell["draft_cost"] == pytest.approx(cell["round_cost"] * 0.2)
    assert cell["verify_cost"] == pytest.approx(cell["round_cost"] * 0.7)
