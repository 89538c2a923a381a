"""The tuner against machines of known cost and acceptance: it finds what pays, and never pays more than allowed."""

from __future__ import annotations

import json
import random

import pytest

from draftkit.evals.drain import Requests, constant, lookup, ranges
from draftkit.evals.step_cost import StepCost, cells_of
from draftkit.rl.tuner import Tuner
from draftkit.types import EngineStep, SpecCounters

SLOTS, K, STEPS = 16, 4, 40


class Machine:
    """Rolls batches out, token by token. price: how much a drafted token costs beyond `free` tokens of a forward."""

    def __init__(self, free: int, price: float, survival: list[float], seed: int = 0) -> None:
        self.free, self.price, self.survival = free, price, survival
        self.rng = random.Random(seed)

    def seconds(self, n: int, k: int, drafts: bool) -> tuple[float, float]:
        draft = 0.001 + 0.0005 * max(k, 1) if drafts else 0.0
        verify = 0.02 + self.price * max(0, n * (k + 1) - self.free)
        return verify + draft, draft

    def roll(self, batch: Requests, schedule) -> tuple[list[EngineStep], SpecCounters]:
        k_of, steps, total = lookup(schedule, SLOTS), [], SpecCounters()
        always = any(k for _, _, k in schedule)
        left = list(batch.lengths)
        while left:
            n = len(left)
            k = int(k_of[n])
            given = [1 + sum(u < s for s in self.survival[:k] for u in [shared]) for shared in self.draw(n)]
            for g in given:
                if k:
                    row = tuple(int(g - 1 > i) for i in range(K))
                    total = total + SpecCounters(1, k, g - 1, row, tuple(int(i < k) for i in range(K)))
            whole, draft = self.seconds(n, k, always)
            noise = self.rng.lognormvariate(0, 0.03)
            tokens = sum(min(g, need) for g, need in zip(given, left, strict=True))
            steps.append(EngineStep(n, k, tokens, whole * noise, draft * noise, 0, 100 * n))
            left = [need - g for need, g in zip(left, given, strict=True) if need > g]
        return steps, total

    def draw(self, n: int) -> list[float]:
        return [self.rng.random() for _ in range(n)]


def batch_of(rng: random.Random) -> Requests:
    lengths = tuple(rng.randrange(20, 80) for _ in range(SLOTS))
    return Requests((30,) * SLOTS, lengths, SLOTS)


def tuned(machine: Machine, change=lambda step: None, steps: int = STEPS, explore: float = 0.05) -> tuple[Tuner, list]:
    """(the tuner, a row a step: what it said, seconds taken, seconds of a plain step)."""
    tuner, rng, rows = Tuner(K, SLOTS, explore, steps), random.Random(1), []
    seen: dict[int, list[EngineStep]] = {}
    for step in range(1, steps + 1):
        change(step)
        batch = batch_of(rng)
        schedule = tuner.upcoming
        log, counters = machine.roll(batch, schedule)
        for one in log:
            seen.setdefault(one.k, []).append(one)
        plain = sum(machine.seconds(n, 0, False)[0] for n in _running(batch))
        cost = StepCost.fit(cells_of(one for each in seen.values() for one in each))
        said = tuner.observe(step, batch, log, counters, cost, seen)
        rows.append({"used": schedule, "took": sum(one.seconds for one in log), "plain": plain, **said})
    return tuner, rows


def _running(batch: Requests) -> list[int]:
    return [sum(length > t for length in batch.lengths) for t in range(max(batch.lengths))]


def test_it_finds_the_draft_lengths_that_pay():
    machine = Machine(free=24, price=0.002, survival=[0.8, 0.6, 0.45, 0.3])
    tuner, rows = tuned(machine)
    batch, best = batch_of(random.Random(9)), []
    for n in range(1, SLOTS + 1):
        rate = [(1 + sum(machine.survival[:k])) / machine.seconds(n, k, k > 0)[0] for k in range(K + 1)]
        best.append(rate.index(max(rate)))
    took = {}
    for name, schedule in (("found", tuner.current), ("best", ranges(best))):
        took[name] = sum(sum(s.seconds for s in machine.roll(batch, schedule)[0]) for _ in range(30))
    assert took["found"] < 1.05 * took["best"], (tuner.current, ranges(best))
    late = rows[STEPS // 2 :]
    assert sum(r["took"] for r in late) < 0.75 * sum(r["plain"] for r in late)


@pytest.mark.parametrize("seed", range(3))
def test_where_nothing_pays_it_costs_no_more_than_allowed(seed):
    """A drafter that is never accepted on a machine without free tokens: the worst there is."""
    _, rows = tuned(Machine(free=0, price=0.004, survival=[0.02, 0.0, 0.0, 0.0], seed=seed))
    first = next(r for r in rows if any(k for _, _, k in r["used"]))
    took, plain = sum(r["took"] for r in rows), sum(r["plain"] for r in rows)
    assert took - plain < 0.05 * plain + first["took"] - first["plain"] + 0.01 * plain
    assert sum(r["used"] == constant(0, SLOTS) for r in rows) > 0.6 * STEPS
    assert all(r["why"] for r in rows)


def test_a_drafter_that_becomes_good_is_found_again():
    machine = Machine(free=24, price=0.002, survival=[0.02, 0.0, 0.0, 0.0])

    def change(step: int) -> None:
        if step == 8:
            machine.survival = [0.85, 0.7, 0.6, 0.5]

    _, rows = tuned(machine, change)
    late = rows[-8:]
    assert sum(r["took"] for r in late) < 0.8 * sum(r["plain"] for r in late)


def test_a_drafter_that_collapses_is_left():
    machine = Machine(free=8, price=0.003, survival=[0.85, 0.7, 0.6, 0.5])

    def change(step: int) -> None:
        if step == 20:
            machine.survival = [0.02, 0.0, 0.0, 0.0]

    _, rows = tuned(machine, change)
    late = rows[-8:]
    assert sum(r["took"] for r in late) < 1.1 * sum(r["plain"] for r in late)


def test_trials_are_named_and_fit_the_allowance():
    tuner, rows = tuned(Machine(free=24, price=0.002, survival=[0.8, 0.6, 0.45, 0.3]))
    trials = [r["why"] for r in rows if r["why"].startswith("trial of k = ")]
    assert trials and all("requests, at a risk of" in why for why in trials)
    assert tuner.lost_s <= tuner.allowance_s


def test_a_saved_tuner_decides_as_the_one_that_went_on():
    machine = Machine(free=24, price=0.002, survival=[0.8, 0.6, 0.45, 0.3])
    tuner, _ = tuned(machine, steps=6)
    restored = Tuner(K, SLOTS, 0.05, 6)
    restored.load(json.loads(json.dumps(tuner.state())))
    assert restored == tuner
