"""Fitted step costs and drained batches, against a known law and a token-by-token simulation in plain Python."""

from __future__ import annotations

import random

import numpy as np
import pytest

from draftkit.evals.drain import Requests, best_schedule, constant, drained, lookup, ranges
from draftkit.evals.step_cost import StepCell, StepCost, bootstrap, cells_of, leave_one_out, round_costs, to_rows
from draftkit.types import EngineStep


def law(n: int, k: int, context: float = 0.0) -> tuple[float, float]:
    """(seconds, of the drafter) of a machine that is flat up to 16 tokens and climbs from there."""
    m = n * (k + 1)
    verify = 0.020 + 0.0008 * max(0, m - 16) + (0.002 + 0.0001 * n if k else 0.0) + 1e-6 * context
    draft = 0.001 + 0.00005 * m + (k - 1) * (0.0008 + 0.00002 * n) if k else 0.0
    return verify + draft, draft


def measured(ks, sizes, noise: float = 0.0, seed: int = 0, repeats: int = 20) -> list[EngineStep]:
    rng = random.Random(seed)
    steps = []
    for k in ks:
        for n in sizes:
            for _ in range(repeats):
                context = n * rng.randrange(50, 400)
                seconds, draft = law(n, k, context)
                factor = rng.lognormvariate(0, noise)
                steps.append(EngineStep(n, k, n, seconds * factor, draft * factor, 0, context))
    return steps


def test_it_recovers_a_law_of_its_own_form_also_where_nothing_was_measured():
    made = StepCost.fit(cells_of(measured([0, 1, 3, 5], [1, 2, 4, 8, 16, 32])))
    for n, k in ((3, 2), (6, 4), (24, 2), (12, 0), (1, 4)):
        assert float(made.step(n, k, n * 100)) == pytest.approx(law(n, k, n * 100)[0], rel=0.01)
        if k:
            assert float(made.draft(n, k)) == pytest.approx(law(n, k)[1], rel=0.01)


def test_noise_of_a_tenth_leaves_errors_of_a_few_percent():
    made = StepCost.fit(cells_of(measured([0, 1, 3, 5], [1, 2, 4, 8, 16, 32], 0.1)))
    errors = [
        abs(float(made.step(n, k, n * 200)) / law(n, k, n * 200)[0] - 1) for n in (3, 6, 12, 24) for k in (0, 2, 4)
    ]
    assert np.median(errors) < 0.03 and max(errors) < 0.08


def test_a_heavy_tail_of_slow_steps_does_not_pull_the_fit_below_the_mean():
    """Batches pay for slow steps too: what adds up is the mean, not the typical step."""
    rng, steps = random.Random(5), []
    for k in (0, 1, 3):
        for n in range(1, 33):
            seconds, draft = law(n, k)
            slow = 2.0 if rng.random() < 0.2 else 1.0
            steps.append(EngineStep(n, k, n, seconds * slow, draft * slow, 0, 0))
    made = StepCost.fit(cells_of(steps))
    predicted = sum(float(made.step(s.running, s.k)) for s in steps)
    assert predicted == pytest.approx(sum(s.seconds for s in steps), rel=0.03)


def test_more_work_never_costs_less():
    made = StepCost.fit(cells_of(measured([0, 2, 5], [1, 3, 9, 20], 0.3, seed=3)))
    sizes = np.arange(1, 80)
    for k in range(7):
        assert (np.diff(made.step(sizes, k)) >= 0).all()
        if k:
            assert (made.step(sizes, k + 1) >= made.step(sizes, k)).all()


def test_a_prompt_costs_what_its_steps_took_longer():
    steps = measured([0, 3], [1, 4, 16])
    steps += [EngineStep(4, 0, 4, law(4, 0)[0] + 0.01 + 1e-4 * t, 0.0, t, 0) for t in (50, 100, 400) for _ in range(5)]
    made = StepCost.fit(cells_of(steps))
    assert float(made.prompt_s(200)) == pytest.approx(0.03, rel=0.05) and float(made.prompt_s(0)) == 0
    drafted = lambda t: law(4, 3)[0] + 0.01 + 3e-4 * t  # noqa: E731
    steps += [EngineStep(4, 3, 4, drafted(t), law(4, 3)[1], t, 0) for t in (50, 100, 400) for _ in range(5)]
    made = StepCost.fit(cells_of(steps))
    assert float(made.prompt_s(200)) == pytest.approx(0.03, rel=0.1)
    assert float(made.prompt_s(200, drafts=True)) == pytest.approx(0.07, rel=0.1)


def test_cells_survive_json_and_hold_every_second():
    steps = measured([0, 2], [1, 5], 0.2)
    cells = [StepCell(*row) for row in to_rows(cells_of(steps))]
    assert cells == cells_of(steps) and sum(c.count for c in cells) == len(steps)
    assert sum(c.seconds for c in cells) == pytest.approx(sum(s.seconds for s in steps))
    assert sum(c.draft_seconds for c in cells) == pytest.approx(sum(s.draft_seconds for s in steps))


def test_nothing_measured_is_no_model():
    assert StepCost.fit([]) is None
    only_prompts = cells_of([EngineStep(1, 0, 1, 0.1, 0.0, 30, 0)])
    assert StepCost.fit(only_prompts) is None
    drafts_only = StepCost.fit(cells_of(measured([3], [1, 4])))
    assert not drafts_only.knows_plain and drafts_only.knows_drafts


def test_left_out_cells_are_predicted_by_the_others():
    groups = {(k, n): cells_of(measured([k], [n], 0.02, seed=k + n)) for k in (0, 1, 3) for n in (1, 4, 16)}
    rows = leave_one_out(groups)
    assert len(rows) == 9
    inner = {(row["k"], row["concurrency"]): row["error"] for row in rows}
    assert abs(inner[1, 4]) < 0.08 and abs(inner[3, 4]) < 0.08
    spoilt = dict(groups) | {(1, 4): cells_of([EngineStep(4, 1, 4, 1.0, 0.1, 0, 400)] * 5)}
    assert {(r["k"], r["concurrency"]): r["error"] for r in leave_one_out(spoilt)}[1, 4] < -0.9


def test_resampled_measurements_spread_as_the_noise_does():
    groups = [cells_of(measured([k], [n], 0.1, seed=7 * k + n, repeats=3)) for k in (0, 3) for n in (1, 2, 4, 8) * 3]
    costs = [model.round_cost(4, 3, 100) for model in bootstrap(groups, 30, seed=1)]
    true = law(4, 3, 400)[0] / law(4, 0, 400)[0]
    assert len(costs) > 20 and np.std(costs) > 0.005 and min(costs) < true * 1.05 and max(costs) > true * 0.95


def test_round_costs_cover_what_was_not_measured_with_intervals_around_the_truth():
    groups = [
        cells_of(measured([k], [n], 0.05, seed=9 * k + n + r, repeats=4))
        for k in (0, 1, 3)
        for n in (1, 4, 16)
        for r in range(3)
    ]
    rows = round_costs(groups, 3, seed=0)
    assert [(row["k"], row["running"]) for row in rows] == [(k, n) for k in (1, 2, 3) for n in (1, 2, 4, 8, 16)]
    assert all(row["measured"] == (row["k"] != 2 and row["running"] in (1, 4, 16)) for row in rows)
    inside = 0
    for row in rows:
        k, n = row["k"], row["running"]
        true = law(n, k, 225 * n)[0] / law(n, 0, 225 * n)[0]
        assert row["cost"] == pytest.approx(true, rel=0.12) and row["cost_ci"][0] < row["cost_ci"][1]
        inside += row["cost_ci"][0] * 0.97 < true < row["cost_ci"][1] * 1.03
    assert inside >= 11
    assert round_costs([cells_of(measured([0], [1, 4]))], 3, seed=0) == []


# --- a batch that drains ----------------------------------------------------------------------------------------


def simulated(batch: Requests, survival, k_of, seed: int) -> float:
    """Token by token, one request object at a time."""
    rng = random.Random(seed)
    always = any(k_of(n) for n in range(1, batch.slots + 1))
    queue = [[p, n, 0] for p, n in zip(batch.prompts, batch.lengths, strict=True)]
    running: list[list[int]] = []
    seconds = 0.0
    while queue or running:
        new = []
        while queue and len(running) + len(new) < batch.slots:
            new.append(queue.pop(0))
        n = len(running) + len(new)
        k = k_of(n)
        context = sum(p + done for p, _, done in running)
        whole, draft = law(n, k, context)
        if always and not k:
            whole += 0.001 + 0.00005 * n
        seconds += whole + (0.01 + 1e-4 * sum(p for p, _, _ in new) if new else 0.0)
        for request in running:
            gained = 1
            for i in range(k):
                given = survival[i] / (survival[i - 1] if i else 1.0)
                if rng.random() >= given:
                    break
                gained += 1
            request[2] += gained
        for request in new:
            request[2] += 1
        running = [r for r in running + new if r[2] < r[1]]
    return seconds


@pytest.fixture(scope="module")
def cost() -> StepCost:
    steps = measured([0, 1, 2, 3], [1, 2, 3, 4, 6, 8])
    steps += [EngineStep(n, 0, n, law(n, 0)[0] + 0.001 + 0.00005 * n, 0.001 + 0.00005 * n, 0, 0) for n in (1, 4, 8)]
    steps += [EngineStep(1, 0, 1, law(1, 0)[0] + 0.01 + 1e-4 * t, 0.0, t, 0) for t in (10, 50, 200) for _ in range(5)]
    return StepCost.fit(cells_of(steps))


@pytest.mark.parametrize("schedule", [[[1, 8, 0]], [[1, 8, 3]], [[1, 3, 3], [4, 8, 0]], [[1, 2, 2], [3, 8, 1]]])
@pytest.mark.parametrize("slots", [3, 8])
def test_a_drained_batch_takes_what_a_plain_simulation_takes(cost, schedule, slots):
    rng = random.Random(slots)
    lengths = tuple(rng.randrange(1, 60) for _ in range(12))
    batch = Requests(tuple(rng.randrange(5, 40) for _ in lengths), lengths, slots)
    survival = [0.8, 0.55, 0.4]
    k_of = lookup(schedule, 8)
    slow = [simulated(batch, survival, lambda n: int(k_of[n]), seed) for seed in range(150)]
    fast = drained(batch, survival, cost, schedule, draws=150).seconds
    assert fast.mean() == pytest.approx(np.mean(slow), rel=0.02)
    assert fast.std() == pytest.approx(np.std(slow), rel=0.5, abs=0.003)


def test_plain_decoding_of_one_request_is_its_steps(cost):
    batch = Requests((10,), (5,), 4)
    steps = float(cost.step(1, 0)) + float(cost.prompt_s(10)) + sum(float(cost.step(1, 0, 10 + i)) for i in range(1, 5))
    made = drained(batch, [], cost, [[1, 4, 0]], draws=2, request_s=0.5)
    assert made.seconds == pytest.approx([steps + 0.5] * 2) and not made.draft_seconds.any()


# --- schedules --------------------------------------------------------------------------------------------------


def test_the_schedule_takes_the_fastest_k_of_every_batch_size(cost):
    survival = [0.7, 0.5, 0.3]
    schedule = best_schedule(cost, survival, 8)
    k_of = lookup(schedule, 8)
    for n in range(1, 9):
        rates = [(1 + sum(survival[:k])) / float(cost.step(n, k)) for k in range(4)]
        assert rates[k_of[n]] == max(rates)
    assert schedule[0][0] == 1 and schedule[-1][1] == 8


def test_nothing_is_drafted_where_nothing_pays(cost):
    batch = Requests((10,) * 8, (4,) * 8, 8)
    seconds = lambda s: float(drained(batch, [0.02] * 3, cost, s).seconds.mean())  # noqa: E731
    assert best_schedule(cost, [0.02, 0.0, 0.0], 8, seconds=seconds) == constant(0, 8)
    assert best_schedule(cost, [0.02, 0.0, 0.0], 8) == constant(0, 8)


def test_a_margin_holds_small_gains_back(cost):
    survival = [0.5, 0.2, 0.1]
    gain = (1.5 / float(cost.step(1, 1))) * float(cost.step(1, 0)) - 1
    assert gain > 0
    assert lookup(best_schedule(cost, survival, 8), 8)[1] > 0
    assert best_schedule(cost, survival, 8, margin=3.0) == constant(0, 8)


def test_ranges_cover_every_size_without_a_gap():
    assert ranges([3, 3, 2, 0, 0]) == [[1, 2, 3], [3, 3, 2], [4, 5, 0]]
    assert list(lookup(ranges([3, 3, 2, 0, 0]), 5)) == [0, 3, 3, 2, 0, 0]
