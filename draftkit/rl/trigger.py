"""When the drafter is trained: `cotrain.mode` off, every-n, or triggered by what a training would save.

Triggered has two states. *Chasing*: train at every step as long as acceptance rises by more than it costs; a run begins
so, because neither the cost of a training nor what it brings is known, and a grown or a weak drafter stays in it. When
acceptance stops rising, the level reached becomes the reference. *Settled*: compare with the reference,

    acceptance lost = explained by entropy (slope x entropy change) + mismatch

and begin to chase again when the mismatch, won back, would save more rollout seconds within `cotrain.horizon` steps
than a training takes. A chase ends early when nothing is lost any more. What a training cannot win back becomes part of
the next reference, so a policy that is merely less sure, or a drafter that can learn no more, costs nothing.

The slope comes from the trajectories of each step (acceptance length against entropy, both of one trajectory): there
the drafter is the same for all, so it says what entropy alone does. Arithmetic: `ledger`; measures.md, formulae 10, 11.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftkit.recipe import CotrainSection
from draftkit.rl import ledger
from draftkit.rl.world import World
from draftkit.types import SpecCounters, Trajectory

NOW = 2  # steps whose mean is compared with the reference
HALF = 4  # steps whose mean is compared with that of as many before, while chasing
NOISE_Z = 2.0  # standard errors that a loss must exceed
COSTS = 3  # trainings whose mean cost is expected of the next


@dataclass(frozen=True, slots=True)
class Observation:
    """One step's rollouts, over all ranks. acceptance: length, bonus token included. slope: of acceptance on entropy
    across its trajectories."""

    acceptance: float
    entropy: float
    generate_s: float
    slope: float

    @classmethod
    def of(
        cls, trajectories: Sequence[Trajectory], entropy: Sequence[float], generate_s: float, world: World
    ) -> Observation | None:
        """entropy: mean over the sampled tokens of each trajectory. None when nothing was drafted."""
        counters = [sum((turn.spec or SpecCounters() for turn in t.turns), SpecCounters()) for t in trajectories]
        mine = [(c.num_drafts, c.num_accepted, h, sum(t.mask)) for c, h, t in zip(
            counters, entropy, trajectories, strict=True
        )]  # fmt: skip
        rows = [row for row in world.joined(mine) if row[0]]
        if not rows:
            return None
        drafts, accepted, h, tokens = zip(*rows, strict=True)
        lengths = [1 + a / d for a, d in zip(accepted, drafts, strict=True)]
        return cls(
            acceptance=1 + sum(accepted) / sum(drafts),
            entropy=sum(x * n for x, n in zip(h, tokens, strict=True)) / sum(tokens),
            generate_s=max(world.gather(generate_s)),
            slope=ledger.entropy_slope(h, lengths, drafts),
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """train, and why. acceptance_lost: below the reference, None while there is none; entropy_part: how much of that
    the policy's entropy explains; saved_s: rollout seconds that training would save over the horizon; cost_s: seconds
    of a training and its publish, None until one was measured."""

    train: bool
    why: str
    acceptance_lost: float | None = None
    entropy_part: float | None = None
    saved_s: float | None = None
    cost_s: float | None = None


@dataclass(slots=True)
class Trigger:
    """seen: observations since the present state began (and some before). reference: the level of the last settling.
    costs: seconds of the last trainings."""

    section: CotrainSection
    seen: list[Observation]
    costs: list[float]
    chasing: bool = True
    since: int = 0  # observations of the present state
    reference: Observation | None = None

    @classmethod
    def new(cls, section: CotrainSection) -> Trigger:
        return cls(section, [], [])

    def trained(self, seconds: float) -> None:
        """What a training cost, with its publish; the slowest rank's."""
        self.costs = [*self.costs, seconds][-COSTS:]

    def decide(self, step: int, observation: Observation | None) -> Decision:
        """Call once a step, in the order of steps. observation None: nothing was drafted in this step."""
        if observation is not None:
            self.seen = [*self.seen, observation][-4 * HALF :]
            self.since += 1
        decision = self._triggered(observation)
        if self.section.mode == "triggered":
            return decision
        train = self.section.mode == "every-n" and step % self.section.every == 0
        why = "off" if self.section.mode == "off" else f"every {self.section.every} steps"
        return Decision(train, why, decision.acceptance_lost, decision.entropy_part, decision.saved_s, decision.cost_s)

    def _triggered(self, observation: Observation | None) -> Decision:
        cost = statistics.fmean(self.costs) if self.costs else None
        if observation is None:
            why = "not speculating: the drafter is not accepted yet" if self.chasing else "not speculating"
            return Decision(self.chasing, why, cost_s=cost)
        lost = entropy_part = None
        now = _mean(self.seen[-min(NOW, self.since) :])
        if self.reference is not None:
            split = self._split(now, self.reference)
            lost, entropy_part = -split["acceptance_delta"], -split["entropy_part"]
        if cost is None:
            return Decision(True, "to learn what a training costs", lost, entropy_part)
        if self.reference is not None and not self.chasing:
            return self._settled(now, lost, entropy_part, cost)
        if self.reference is not None and lost - entropy_part <= 0:
            self._settle()
            return Decision(False, "nothing is lost any more", lost, entropy_part, 0.0, cost)
        if self.since < 2 * HALF:
            return Decision(True, "too early to tell what training brings", lost, entropy_part, None, cost)
        rise = self._split(_mean(self.seen[-HALF:]), _mean(self.seen[-2 * HALF : -HALF]))["mismatch"]
        pays = self._pays(rise / HALF, now, cost)
        if pays["pays"]:
            return Decision(True, "acceptance still rises", lost, entropy_part, pays["saved_s"], cost)
        self._settle()
        return Decision(False, "acceptance rises no more", lost, entropy_part, pays["saved_s"], cost)

    def _settled(self, now: Observation, lost: float, entropy_part: float, cost: float) -> Decision:
        mismatch = lost - entropy_part
        pays = self._pays(mismatch, now, cost)
        why = "the loss is within its noise"
        if not pays["pays"]:
            why = "the loss does not pay for a training"
        elif mismatch > NOISE_Z * self._noise():
            self.chasing, self.since = True, 0
            return Decision(True, "a mismatch that pays for training", lost, entropy_part, pays["saved_s"], cost)
        return Decision(False, why, lost, entropy_part, pays["saved_s"], cost)

    def _settle(self) -> None:
        self.chasing, self.since = False, 0
        self.reference = _mean(self.seen[-HALF:])

    def _split(self, now: Observation, before: Observation) -> dict[str, float]:
        return ledger.drift_split(
            now.acceptance,
            now.entropy,
            acceptance_before=before.acceptance,
            entropy_before=before.entropy,
            slope=before.slope,
        )

    def _pays(self, lost: float, now: Observation, cost: float) -> dict[str, float | bool]:
        return ledger.cotrain_pays(lost, 1 / now.acceptance, now.generate_s, self.section.horizon, cost, 0.0)

    def _noise(self) -> float:
        """Standard error of now against the reference, from how much neighbouring steps differ."""
        values = [o.acceptance for o in self.seen]
        steps = [(b - a) ** 2 / 2 for a, b in zip(values, values[1:], strict=False)]
        return (statistics.fmean(steps) * (1 / NOW + 1 / HALF)) ** 0.5 if steps else 0.0

    def state(self) -> dict[str, Any]:
        state = asdict(self)
        del state["section"]
        return state

    def load(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.seen = [Observation(**o) for o in state["seen"]]
        self.reference = None if state["reference"] is None else Observation(**state["reference"])


def _mean(observations: Sequence[Observation]) -> Observation:
    names = ("acceptance", "entropy", "generate_s", "slope")
    return Observation(*(statistics.fmean(getattr(o, name) for o in observations) for name in names))
