"""The ledger: a clock under a fake time, forecasts against a step-by-step simulation, sums that close."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from draftkit.evals.drain import drain
from draftkit.evals.speed_model import acceptance_length, amdahl, implied_generation_share
from draftkit.rl.ledger import (
    PARTS,
    SpeedModel,
    StepClock,
    StepTime,
    attribute,
    cotrain_pays,
    drift_split,
    entropy_slope,
    fit_line,
    forecast,
    generation_share,
    measured_parts,
    realised,
    shares,
    step_seconds,
)
from draftkit.types import EngineStep

# --- the clock --------------------------------------------------------------------------------------------------


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_parts_count_what_passed_under_them_and_the_rest_is_other():
    clock = StepClock(time := Time())
    time.passes(1)
    with clock("generate"):
        time.passes(8)
    with clock("train_policy"):
        time.passes(4)
    with clock("generate"):
        time.passes(2)
    time.passes(0.5)
    seconds = clock.lap()
    assert seconds == dict.fromkeys(PARTS, 0.0) | {"generate": 10, "train_policy": 4, "other": 1.5, "total": 15.5}
    assert sum(shares(seconds).values()) == pytest.approx(1)
    assert shares(seconds)["generate"] == 10 / 15.5


def test_a_part_inside_a_part_is_counted_once():
    clock = StepClock(time := Time())
    with clock("generate"):
        time.passes(3)
        with clock("reward"):
            time.passes(2)
            with clock("sync"):
                time.passes(1)
        time.passes(4)
    seconds = clock.lap()
    assert [seconds[part] for part in ("generate", "reward", "sync", "other", "total")] == [7, 2, 1, 0, 10]


def test_laps_leave_no_gap_and_start_from_nothing():
    clock = StepClock(time := Time())
    with clock("data"):
        time.passes(3)
    first = clock.lap()
    time.passes(2)
    second = clock.lap()
    assert first["total"] == first["data"] == 3
    assert second["total"] == second["other"] == 2 and second["data"] == 0


def test_an_error_inside_a_part_is_timed_too():
    clock = StepClock(time := Time())
    with pytest.raises(KeyboardInterrupt), clock("generate"):
        time.passes(5)
        raise KeyboardInterrupt
    assert clock.lap()["generate"] == 5


def test_a_part_that_does_not_exist_is_refused():
    with pytest.raises(AssertionError, match="rollout"), StepClock()("rollout"):
        pass


def test_generation_share_leaves_evaluation_out():
    seconds = dict.fromkeys(PARTS, 0.0) | {"generate": 6.0, "eval": 5.0, "total": 15.0}
    assert step_seconds(seconds) == 10 and generation_share(seconds) == 0.6


# --- step times -------------------------------------------------------------------------------------------------


def steps(k: int, sizes, per_step, draft=lambda n: 0.0, prefill: bool = False) -> list[EngineStep]:
    return [EngineStep(n, k, n, per_step(n), draft(n), prefill) for n in sizes]


def test_lines_are_least_squares():
    rng = random.Random(0)
    sizes = [rng.randrange(1, 33) for _ in range(60)]
    seconds = [0.02 + 0.003 * n + rng.gauss(0, 0.002) for n in sizes]
    slope, intercept = np.polyfit(sizes, seconds, 1)
    line = fit_line(sizes, seconds)
    assert (line.slope, line.intercept) == pytest.approx((slope, intercept))
    assert line(10) == pytest.approx(intercept + 10 * slope)


def test_one_size_is_a_constant_and_so_is_a_falling_line():
    assert [fit_line([8, 8, 8], [1.0, 2.0, 3.0])(n) for n in (1, 8, 64)] == [2, 2, 2]
    falling = fit_line([1, 2, 3], [3.0, 2.0, 1.0])
    assert [falling(n) for n in (1, 100)] == [2, 2]


def test_an_extrapolated_step_is_never_cheaper_than_the_cheapest_seen():
    line = fit_line([16, 32], [1.0, 3.0])  # the line itself would be -0.875 at n = 1
    assert line(1) == 1.0 and line(32) == 3.0


def test_a_model_keeps_k_apart_and_leaves_prompts_out():
    made = SpeedModel.fit(
        steps(0, (1, 4, 8), lambda n: 1 + 0.1 * n)
        + steps(3, (1, 4, 8), lambda n: 2 + 0.2 * n, lambda n: 0.5 + 0.05 * n)
        + steps(0, (8, 8), lambda n: 50.0, prefill=True)
    )
    assert made.step.keys() == made.draft.keys() == {0, 3}
    assert made.step[0](6) == pytest.approx(1.6) and made.step[3](6) == pytest.approx(3.2)
    assert made.draft[0](6) == 0 and made.draft[3](6) == pytest.approx(0.8)
    prompt_steps = steps(3, (8,), lambda n: 10.0, prefill=True) + steps(0, (4,), lambda n: 2.0, prefill=True)
    assert made.prefill_excess(prompt_steps + steps(3, (8,), lambda n: 9.0)) == pytest.approx((10 - 3.6) + (2 - 1.4))


# --- draining ---------------------------------------------------------------------------------------------------


def simulated(lengths, step_s, max_num_seqs: int) -> float:
    """Plain decoding, one step after the other."""
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append(waiting.pop(0))
        seconds += step_s(len(running))
        running = [left - 1 for left in running if left > 1]
    return seconds


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 100])
def test_draining_without_drafts_equals_a_simulation_step_by_step(max_num_seqs):
    rng = random.Random(max_num_seqs)
    lengths = [rng.randrange(1, 40) for _ in range(24)]
    step_s = lambda n: 0.5 + 0.07 * n + 0.01 * n * n  # noqa: E731
    assert drain(lengths, 1.0, step_s, max_num_seqs) == pytest.approx(simulated(lengths, step_s, max_num_seqs))


def test_draining_by_hand():
    step_s = lambda n: {1: 1.0, 2: 1.5, 3: 2.0}[n]  # noqa: E731
    # 3 run until the first ends at 2 tokens, 2 until 5, one until 6
    assert drain([2, 5, 6], 1.0, step_s) == 2 * 2.0 + 3 * 1.5 + 1 * 1.0
    # a prompt's step gives one token, later ones two: 1 + 1/2, 1 + 4/2, 1 + 5/2 steps
    assert drain([2, 5, 6], 2.0, step_s) == 1.5 * 2.0 + 1.5 * 1.5 + 0.5 * 1.0
    assert drain([7], 3.0, step_s) == 3.0
    assert drain([1, 1, 1], 4.0, step_s) == 2.0
    assert drain([], 2.0, step_s) == drain([0, 0], 1.0, step_s) == 0


def test_draining_with_a_schedule():
    """Plain from two requests on, three tokens a round for the last one alone."""
    tau = lambda n: 3.0 if n == 1 else 1.0  # noqa: E731
    assert drain([4, 10], tau, lambda n: float(n)) == pytest.approx(4 * 2 + 6 / 3 * 1)


def test_the_makespan_of_random_rounds_is_what_draining_predicts():
    """Rounds that emit 1 to 4 tokens at random: the even flow is off by a last round's rounding only."""
    rng = random.Random(1)
    lengths = [rng.randrange(40, 120) for _ in range(32)]
    survival = [0.7, 0.5, 0.3]
    step_s = lambda n: 1 + 0.05 * n  # noqa: E731
    emit = lambda: 1 + sum(u < s for s in survival for u in [rng.random()])  # noqa: E731 same mean, other shape
    seconds, left = 0.0, list(lengths)
    seconds += step_s(len(left))
    left = [n - 1 for n in left]
    while left:
        seconds += step_s(len(left))
        left = [m for m in (n - emit() for n in left) if m > 0]
    assert drain(lengths, acceptance_length(survival), step_s) == pytest.approx(seconds, rel=0.04)


# --- forecasts --------------------------------------------------------------------------------------------------

MODEL = SpeedModel.fit(
    steps(0, (1, 8, 16), lambda n: 1 + 0.1 * n)
    + steps(1, (1, 8, 16), lambda n: 1.2 + 0.15 * n, lambda n: 0.1 + 0.01 * n)
    + steps(3, (1, 8, 16), lambda n: 1.5 + 0.2 * n, lambda n: 0.3 + 0.02 * n)
)
BATCH = dict(lengths=[20, 30, 40, 60] * 4, survival=[0.8, 0.6, 0.4], max_num_seqs=16, prefill_s=5.0, sync_s=2.0)
COST = dict(rest_s=50.0, train_drafter_s=6.0, publish_drafter_s=1.0)


def test_a_forecast_is_draining_and_amdahl():
    made = forecast(model=MODEL, k_of=lambda n: 3, **BATCH, **COST)
    plain = drain(BATCH["lengths"], 1.0, MODEL.step[0], 16) + 5
    generate = drain(BATCH["lengths"], 2.8, MODEL.step[3], 16) + 5
    assert (made.plain_generate_s, made.generate_s) == pytest.approx((plain, generate))
    assert made.plain_step_s == pytest.approx(plain + 52)
    assert made.generation_share == pytest.approx(plain / (plain + 52))
    assert made.overhead == pytest.approx(7 / (plain + 52))
    assert made.step_speedup == pytest.approx(amdahl(made.generation_share, plain / generate, made.overhead))
    assert made.step_speedup == pytest.approx(made.plain_step_s / sum(made.parts.values()))
    assert made.parts["draft"] == pytest.approx(drain(BATCH["lengths"], 2.8, MODEL.draft[3], 16))
    assert (made.parts["sync"], made.parts["train_drafter"], made.parts["rest"]) == (3, 6, 50)


def test_a_schedule_drafts_what_it_says():
    made = forecast(model=MODEL, k_of=lambda n: 3 if n <= 4 else 0, **BATCH, **COST)
    tau = lambda n: 2.8 if n <= 4 else 1.0  # noqa: E731
    expected = drain(BATCH["lengths"], tau, lambda n: MODEL.step[3 if n <= 4 else 0](n), 16) + 5
    assert made.generate_s == pytest.approx(expected)
    short = forecast(model=MODEL, k_of=lambda n: 1, **BATCH, **COST)
    assert short.generate_s == pytest.approx(drain(BATCH["lengths"], 1.8, MODEL.step[1], 16) + 5)


def test_no_forecast_before_both_kinds_of_step_were_seen():
    spec_only = SpeedModel.fit(steps(3, (1, 8), lambda n: 1.0))
    plain_only = SpeedModel.fit(steps(0, (1, 8), lambda n: 1.0))
    for model in (spec_only, plain_only, SpeedModel.fit([])):
        assert forecast(model=model, k_of=lambda n: 3, **BATCH, **COST) is None
    assert forecast(model=plain_only, k_of=lambda n: 0, **BATCH, **COST).generation_speedup == 1


@pytest.mark.parametrize(
    ("share", "speedup", "step"), [(0.67, 1.767, 1.410), (0.72, 1.536, 1.335), (310.1 / 400.7, 2.03, 1.65)]
)
def test_published_steps(share, speedup, step):
    """Fixtures of measures.md: one request of 1 + 99 tau tokens, a plain step that takes 1 s, a round tau / S."""
    survival = [0.886, 0.770, 0.663]
    assert acceptance_length(survival) == pytest.approx(3.319)
    length, tau = 1 + 99 * 3, 3.319
    round_s = length / speedup / (1 + (length - 1) / tau)
    model = SpeedModel.fit(steps(0, (1,), lambda n: 1.0) + steps(3, (1,), lambda n: round_s))
    rest = length * (1 - share) / share
    made = forecast([length], survival, model, k_of=lambda n: 3, max_num_seqs=1, prefill_s=0.0, sync_s=0.0, rest_s=rest)
    assert made.generation_share == pytest.approx(share)
    assert made.generation_speedup == pytest.approx(speedup)
    assert made.step_speedup == pytest.approx(step, abs=0.005)
    assert implied_generation_share(made.step_speedup, speedup) == pytest.approx(share)


# --- attribution ------------------------------------------------------------------------------------------------


def test_parts_of_a_step_add_up_to_it_without_its_evaluation():
    rng = random.Random(2)
    seconds = {part: rng.random() for part in PARTS} | {"other": rng.random()}
    seconds["generate"] = 30.0
    seconds["total"] = sum(seconds.values())
    log = steps(3, (8, 8, 4, 1), lambda n: 1 + n / 10, lambda n: 0.2) + steps(3, (8,), lambda n: 4.0, prefill=True)
    parts = measured_parts(seconds, log)
    assert sum(parts.values()) == pytest.approx(seconds["total"] - seconds["eval"], abs=1e-12)
    assert parts["draft"] == pytest.approx(0.8) and parts["verify"] == pytest.approx(6.1 - 0.8 + 4.0)
    assert parts["sync"] == seconds["sync"] + seconds["publish"]
    between = seconds["generate"] - 10.1  # of generation, outside engine steps
    rest = sum(seconds[part] for part in ("data", "reward", "logprob", "train_policy", "idle", "other"))
    assert parts["rest"] == pytest.approx(rest + between)


def test_differences_add_up_to_the_difference():
    made = forecast(model=MODEL, k_of=lambda n: 3, **BATCH, **COST)
    happened = {"draft": 40.0, "verify": 70.0, "sync": 2.5, "train_drafter": 9.0, "rest": 51.0}
    lost = attribute(made.parts, happened)
    assert lost["total"] == pytest.approx(sum(happened.values()) - sum(made.parts.values()), abs=1e-12)
    assert sum(value for part, value in lost.items() if part != "total") == lost["total"]
    assert lost["train_drafter"] == 3 and lost["sync"] == -0.5
    assert attribute(made.parts, made.parts)["total"] == 0


# --- realised speedup -------------------------------------------------------------------------------------------


def times(rng: random.Random, num: int, every: int, speedup: float = 1.5, noise: float = 0.05) -> list[StepTime]:
    made = []
    for step in range(num):
        k = 0 if step % every == 0 else 3
        tokens = rng.randrange(1500, 2500)
        generate = tokens * 0.01 / (speedup if k else 1.0) * math.exp(rng.gauss(0, noise))
        made.append(StepTime(k, tokens, generate, generate + 10 * math.exp(rng.gauss(0, noise))))
    return made


def test_realised_speedup_is_time_per_token_and_time_per_step():
    steps = [StepTime(0, 100, 10.0, 20.0), StepTime(3, 200, 8.0, 13.0), StepTime(3, 100, 4.0, 15.0)]
    got = realised(steps)
    assert got.generation == pytest.approx((10 / 100) / (12 / 300)) and got.step == pytest.approx(20 / 14)
    assert (got.num_plain, got.num_speculative) == (1, 2)
    assert got.generation_ci is None and got.step_ci is None  # one probe has no spread
    assert realised(steps[1:]) is None and realised(steps[:1]) is None and realised([]) is None


def test_the_interval_of_the_realised_speedup_holds_the_truth_about_as_often_as_it_says():
    rng = random.Random(3)
    covered = wide = 0
    for _ in range(200):
        got = realised(times(rng, 40, 5))
        low, high = got.generation_ci
        covered += low <= 1.5 <= high
        wide += high - low
    assert 180 <= covered <= 200  # 95 %: 190, three standard deviations are 9
    assert wide / 200 < 0.25


def test_two_probes_give_a_wider_interval_than_eight():
    width = lambda made: made.generation_ci[1] - made.generation_ci[0]  # noqa: E731
    few, many = (realised(times(random.Random(4), 24, every)) for every in (12, 3))
    assert few.num_plain == 2 and many.num_plain == 8
    assert width(few) > 0
    assert realised(times(random.Random(4), 24, 3), seed=1).generation == many.generation


# --- drift and the trigger --------------------------------------------------------------------------------------


def test_the_slope_is_weighted_least_squares_and_never_rises():
    rng = random.Random(5)
    entropy = [rng.uniform(0.5, 2) for _ in range(50)]
    acceptance = [3 - 0.8 * h + rng.gauss(0, 0.05) for h in entropy]
    weight = [rng.randrange(1, 30) for _ in range(50)]
    expected = np.polyfit(entropy, acceptance, 1, w=np.sqrt(weight))[0]
    assert entropy_slope(entropy, acceptance, weight) == pytest.approx(expected)
    assert entropy_slope(entropy, [-a for a in acceptance], weight) == 0
    assert entropy_slope([1.0, 1.0], [2.0, 3.0], [1, 1]) == entropy_slope([], [], []) == 0


def test_drift_splits_into_what_entropy_explains_and_a_mismatch():
    before = dict(acceptance_before=2.4, entropy_before=1.0, slope=-0.5)
    split = drift_split(2.1, 1.6, **before)
    assert split["acceptance_delta"] == pytest.approx(-0.3)
    assert split["entropy_part"] == pytest.approx(-0.3) and split["mismatch"] == pytest.approx(0)
    stale = drift_split(1.9, 1.0, **before)
    assert stale["entropy_part"] == 0 and stale["mismatch"] == pytest.approx(-0.5)
    hidden = drift_split(2.4, 0.6, **before)  # acceptance stands still although the policy has become surer
    assert hidden["mismatch"] == pytest.approx(-0.2)
    for split in (stale, hidden):
        assert split["entropy_part"] + split["mismatch"] == pytest.approx(split["acceptance_delta"])


def test_training_pays_when_the_time_it_saves_exceeds_its_own():
    asked = dict(lost=0.2, dS_dtau=0.5, generate_s=30.0, horizon=10, train_s=20.0, publish_s=2.0)
    verdict = cotrain_pays(**asked)
    assert verdict == asked | {"saved_s": pytest.approx(30.0), "cost_s": 22.0, "pays": True}
    assert not cotrain_pays(**asked | {"horizon": 7})["pays"]  # 21 s against 22
    assert not cotrain_pays(**asked | {"lost": -0.4, "train_s": 0.0, "publish_s": 0.0})["pays"]
    assert cotrain_pays(**asked | {"lost": -0.4})["saved_s"] == 0
