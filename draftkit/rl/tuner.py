"""`spec.adapt`: which k for which number of running requests, learnt while the run goes on.

    a plain step -> drafts for the last few requests of a batch -> from then on after every step: refit what an engine
    step costs, update survival
    -> the schedule that is predicted to be fastest on this step's batch, of cells (k, size) that were measured, k = 0
       among them; kept until another one is predicted to beat it by HYSTERESIS
    -> beside it, the unmeasured cell that is predicted to save most is tried in the next step

Exploring is paid from an allowance: spec.explore of the rollout seconds that the whole run would take without
speculation. What speculation lost is *measured*, as seconds of its steps beyond those of plain decoding of as many
tokens, gains set against it; a trial is made only while its risk still fits, and when losses reach the allowance the
run goes on without speculation. Every decision is a row with its reason.

Chain drafts make survival of short drafts known from long ones, so only costs have to be explored upwards; positions
that no draft reaches any more keep their last estimate, and are drafted again for the last few requests after RETRY
steps. Left out: other drafters
than the one in the engine. Source: measures.md (c), formulae 4 and 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from draftkit.evals.drain import Requests, Schedule, best_schedule, constant, drained, lookup, ranges
from draftkit.evals.step_cost import StepCost
from draftkit.types import EngineStep, SpecCounters

HYSTERESIS = 0.02  # of the predicted rollout time
DOUBT = 0.25  # how much dearer than predicted an unmeasured cell may turn out
ENOUGH_STEPS = 5  # engine steps that measure a cell
ENOUGH_ROUNDS = 30  # rounds that measure a draft position
RETRY = 10  # RL steps after which what was not looked at is looked at again
MEMORY = 0.5  # weight of the newest step in survival


@dataclass
class Tuner:
    """k: most drafts a round; slots: most requests running; explore: allowance as a share; steps: of the run.

    upcoming: the schedule of the next rollouts, read by the engine's turn of the pipeline.
    """

    k: int
    slots: int
    explore: float
    steps: int
    current: Schedule = field(default_factory=list)
    upcoming: Schedule = field(default_factory=list)
    survival: list[float | None] = field(default_factory=list)
    pending: list[list[int]] = field(default_factory=list)  # [accepted, drafted] of each position since its last update
    last_seen: list[int] = field(default_factory=list)  # RL step that last measured each draft position
    lost_s: float = 0.0
    plain_s: float = 0.0  # what the rollouts so far would have taken without speculation
    observed: int = 0
    reach: int = 0  # requests that the first look went up to

    def __post_init__(self) -> None:
        self.current = self.current or constant(0, self.slots)
        self.upcoming = self.upcoming or constant(0, self.slots)
        self.survival = self.survival or [None] * self.k
        self.last_seen = self.last_seen or [0] * self.k
        self.pending = self.pending or [[0, 0] for _ in range(self.k)]

    def observe(
        self,
        step: int,
        batch: Requests,
        steps: Sequence[EngineStep],
        drafted: SpecCounters,
        cost: StepCost | None,
        seen: Mapping[int, Sequence[EngineStep]],
    ) -> dict[str, Any]:
        """After RL step `step`, whose rollouts took `steps`; cost: fitted to all steps so far, which `seen` holds by k.
        Sets `upcoming` and returns what was decided, and why."""
        self.observed += 1
        self._learn_survival(step, drafted)
        self._charge(steps, cost)
        self.upcoming, why = self._decide(step, batch, cost, _measured(seen))
        return {
            "schedule": self.upcoming,
            "why": why,
            "lost_s": self.lost_s,
            "allowance_s": self.allowance_s,
            "survival": list(self.survival),
        }

    @property
    def allowance_s(self) -> float:
        return self.explore * self.plain_s / max(1, self.observed) * self.steps

    def _learn_survival(self, step: int, drafted: SpecCounters) -> None:
        for i, (accepted, rounds) in enumerate(self.pending):
            mine = drafted.accepted_per_pos[i] if i < len(drafted.accepted_per_pos) else 0
            accepted, rounds = accepted + mine, rounds + drafted.rounds_at(i)
            if rounds >= ENOUGH_ROUNDS:
                old = self.survival[i]
                new = accepted / rounds
                stale = old is None or step - self.last_seen[i] >= RETRY
                self.survival[i] = new if stale else MEMORY * new + (1 - MEMORY) * old
                self.last_seen[i] = step
                accepted = rounds = 0
            self.pending[i] = [accepted, rounds]

    def _charge(self, steps: Sequence[EngineStep], cost: StepCost | None) -> None:
        """Seconds of this step's decoding beyond plain decoding of its tokens, which the fitted costs stand for."""
        if cost is None or not cost.knows_plain:
            return
        for s in steps:
            plain = float(cost.step(s.running, 0, s.context, drafts=False))
            if s.prefill:  # both arms pay for prompts
                self.plain_s += s.seconds
            elif s.k or s.draft_seconds:
                worth = s.tokens / s.running * plain
                self.plain_s += worth
                self.lost_s += s.seconds - worth
            else:
                self.plain_s += s.seconds

    def _decide(
        self, step: int, batch: Requests, cost: StepCost | None, measured: Counter[tuple[int, int]]
    ) -> tuple[Schedule, str]:
        off = constant(0, self.slots)
        if cost is None or not cost.knows_plain:
            return off, "to learn what plain decoding costs"
        if self.lost_s > self.allowance_s:
            self.current = off
            return off, "the allowance is spent: no speculation"
        if not cost.knows_drafts or self.survival[0] is None:
            return self._first_look(), "to learn what drafts cost and how many are accepted"
        known = [s for s in self.survival if s is not None]
        seconds = lambda schedule: float(drained(batch, known, cost, schedule, draws=8).seconds.mean())  # noqa: E731
        busiest = max(1, min(self.slots, len(batch.lengths)))
        context = float(np.mean([p + n / 2 for p, n in zip(batch.prompts, batch.lengths, strict=True)]))
        search = lambda allowed: self._whole(  # noqa: E731
            best_schedule(cost, known, busiest, context=context, seconds=seconds, allowed=allowed)
        )
        found = search(self._allowed(busiest, measured))
        before, after = seconds(self.current), seconds(found)
        why = f"the best known; another is predicted {after / before:.2f} of its time"
        if after < before * (1 - HYSTERESIS):
            self.current, why = found, f"predicted to take {after / before:.2f} of the time of the last schedule"
        return self._trial(step, batch, busiest, measured, seconds, search(None)) or (self.current, why)

    def _first_look(self) -> Schedule:
        """The longest drafts for the last few requests of a batch; for more of them if that was too few to tell."""
        self.reach = min(self.slots, 2 * self.reach if self.reach else max(1, self.slots // 8))
        return _with(constant(0, self.slots), self.k, 1, self.reach, self.slots)

    def _allowed(self, busiest: int, measured: Counter[tuple[int, int]]) -> np.ndarray:
        """bool [k, size]: cells whose cost was measured."""
        allowed = np.zeros((self.k + 1, busiest), dtype=bool)
        for low, high in _sizes(busiest):
            for k in range(1, self.k + 1):
                allowed[k, low - 1 : high] = measured[k, low] >= ENOUGH_STEPS
        return allowed

    def _whole(self, schedule: Schedule) -> Schedule:
        """Over all batch sizes: what lies beyond the busiest one goes on as that."""
        return [*schedule[:-1], [schedule[-1][0], self.slots, schedule[-1][2]]]

    def _trial(
        self,
        step: int,
        batch: Requests,
        busiest: int,
        measured: Counter[tuple[int, int]],
        seconds: Callable[[Schedule], float],
        dreamt: Schedule,
    ) -> tuple[Schedule, str] | None:
        """(schedule with one unmeasured cell in it, why), the cell taken from `dreamt`, the best schedule of all; or a
        second look at drafts that have not been made for long. None where nothing promises anything, or all of it is
        too risky."""
        base, wished = seconds(self.current), lookup(dreamt, self.slots)
        found = []
        for low, high in _sizes(busiest):
            k = int(wished[low])
            if k and measured[k, low] < ENOUGH_STEPS:
                tried = _with(self.current, k, low, high, self.slots)
                saves = base - seconds(tried)
                found.append((saves, tried, f"trial of k = {k} at {low} to {high} requests", low, high))
        found = [one for one in found if one[0] > 0]
        oldest = min(self.last_seen)
        if not found and step - oldest >= RETRY:
            low, high = 1, max(self.reach, 1)
            tried = _with(self.current, self.k, low, high, self.slots)
            found = [(base - seconds(tried), tried, f"a new look at drafts not made since step {oldest}", low, high)]
        if not found:
            return None
        saves, tried, what, low, high = max(found, key=lambda one: one[0])
        risk = max(0.0, -saves) + DOUBT * _share(batch, low, high) * base
        if max(0.0, self.lost_s) + risk > self.allowance_s:
            return None
        return tried, f"{what}, at a risk of {risk:.2f} s"

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def load(self, state: dict[str, Any]) -> None:
        """What was learnt; the settings are the recipe's."""
        for name in state.keys() - {"k", "slots", "explore", "steps"}:
            setattr(self, name, state[name])


def _sizes(busiest: int) -> list[tuple[int, int]]:
    """1, 2-3, 4-7, .. up to the busiest."""
    return [(2**i, min(2 ** (i + 1) - 1, busiest)) for i in range(busiest.bit_length())]


def _measured(seen: Mapping[int, Sequence[EngineStep]]) -> Counter[tuple[int, int]]:
    """(k, lowest of its sizes) -> decoding steps that had it."""
    return Counter((k, 1 << (s.running.bit_length() - 1)) for k, steps in seen.items() for s in steps if not s.prefill)


def _with(schedule: Schedule, k: int, low: int, high: int, slots: int) -> Schedule:
    k_of = lookup(schedule, slots)
    k_of[low : high + 1] = k
    return ranges([int(value) for value in k_of[1:]])


def _share(batch: Requests, low: int, high: int) -> float:
    """Part of the batch's plain steps in which low to high requests run, all having begun together."""
    ends = sorted(batch.lengths)
    inside = [0, *ends]
    steps = sum(b - a for i, (a, b) in enumerate(zip(inside, ends, strict=False)) if low <= len(ends) - i <= high)
    return steps / max(1, ends[-1])
