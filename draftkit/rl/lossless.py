"""Does the engine sample from the policy? Statistics of the live run, an alarm with a stated error rate, and the exact
law of a speculative round.

Live. The trainer's forward gives the distribution p_t that each sampled token x_t should have come from. Under the
hypothesis that it did, each of these is a sum of terms whose mean, given all that went before, is known:

    surprise    -log p_t(x_t) - H(p_t)          moved by a temperature that is off, by truncation, by garbage
    favourite   1[x_t = y_t] - p_t(y_t)         y_t = argmax q_t of the drafter: by drafts accepted too often
    overlap     a_t(x_t) - E a_t, a = min(1, q/p)   the chance that x_t would have been accepted as a sampled draft: by
                                                recovery from another residual than (p - q)^+, by tokens of q
    PIT         F_t(x_t^-) + v p_t(x_t)         uniform; v uniform and seeded. Kolmogorov-Smirnov sees shapes, if tokens
                                                are counted in falling order of probability (by token id: next to none)

Tokens of one answer depend on each other, and these sums do not mind: they are martingales, so their variance is the
sum of the known conditional variances, and PIT values are independent. The gap between engine and trainer
log-probabilities has no such law: its variance is taken over sequences.

p_t is the *trainer's*. Engine kernels round otherwise, so a small bias is there with and without speculation. Hence two
kinds of tests: speculation on against off, free of that bias, and each arm alone with a tolerance, which has the power
of all tokens (`TOLERANCE`, in total variation). Where p_t cannot be the sampling distribution at all (rollouts of an
older policy), only the first kind holds.

Left out: tests of what follows from the tokens (lengths, rewards), which have far less power for the same tokens.
Sources: measures.md 5.3; Kolmogorov's law with Stephens' correction (JRSS B 32, 1970); repeated looks: Siegmund,
Sequential Analysis (1985), sections 4.4 and 10.2; acceptance-rejection: Leviathan et al., arXiv 2211.17192, 2.3.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from statistics import NormalDist
from typing import Any

import numpy as np

BINS = 1000  # of the PIT histogram; binning can only hide a distance below 1 / BINS
TOLERANCE = 0.005  # total variation between engine and trainer that rounding may explain
GAP_TOLERANCE = 1.5  # |delta log p| with speculation over that without: verification rounds in other shapes
ALPHA = 0.01  # chance that a faithful run raises any alarm
_NORMAL = NormalDist()

# --- statistics of tokens ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sums:
    """Everything that the tests need, as sums over tokens and sequences: adding two pools their rollouts.

    surprise_sd: sum of the conditional standard deviations. favourite, overlap: over the `drafted` tokens for which the
    drafter was asked (`rl.directions`). pit: histogram of PIT values. gap: sum of |delta log p|; gap_kl of r - 1 -
    log r with r = trainer / engine; weight, weight_sq of r. gap_gg, gap_gn, gap_nn: over sequences, products of a
    sequence's gap and its number of tokens.
    """

    sequences: float = 0.0
    tokens: float = 0.0
    surprise: float = 0.0
    surprise_var: float = 0.0
    surprise_sd: float = 0.0
    drafted: float = 0.0
    favourite: float = 0.0
    favourite_var: float = 0.0
    overlap: float = 0.0
    overlap_var: float = 0.0
    gap: float = 0.0
    gap_kl: float = 0.0
    weight: float = 0.0
    weight_sq: float = 0.0
    gap_gg: float = 0.0
    gap_gn: float = 0.0
    gap_nn: float = 0.0
    pit: np.ndarray = field(default_factory=lambda: np.zeros(BINS))

    def __add__(self, other: Sums) -> Sums:
        return Sums(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def state(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"pit": self.pit.tolist()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Sums:
        return cls(**state | {"pit": np.array(state["pit"])})


def sequence_sums(
    logp_N: Any, entropy_N: Any, var_N: Any, before_N: Any, engine_logp_N: Any, *, seed: Sequence[int]
) -> Sums:
    """The N sampled tokens of one sequence (arrays, lists or CPU tensors), without what concerns the drafter.

    logp, entropy, var (of log p under p), before (probability of the tokens that come before the sampled one, in an
    order that the context fixes): the trainer's. seed: of v; another one for every sequence.
    """
    logp, entropy, var, before, engine = (
        np.asarray(values, dtype=np.float64) for values in (logp_N, entropy_N, var_N, before_N, engine_logp_N)
    )
    pit = before + np.random.default_rng(list(seed)).random(len(logp)) * np.exp(logp)
    log_weight = logp - engine
    gap, weight, num = np.abs(log_weight).sum(), np.exp(log_weight), len(logp)
    return Sums(
        sequences=1.0,
        tokens=float(num),
        surprise=float((-logp - entropy).sum()),
        surprise_var=float(var.sum()),
        surprise_sd=float(np.sqrt(var).sum()),
        gap=float(gap),
        gap_kl=float((weight - 1 - log_weight).sum()),
        weight=float(weight.sum()),
        weight_sq=float((weight**2).sum()),
        gap_gg=float(gap * gap),
        gap_gn=float(gap * num),
        gap_nn=float(num * num),
        pit=np.bincount(np.clip(pit * BINS, 0, BINS - 1).astype(np.int64), minlength=BINS).astype(np.float64),
    )


# --- one arm ----------------------------------------------------------------------------------------------------


MARTINGALES = {"surprise": "tokens", "favourite": "drafted", "overlap": "drafted"}  # sum -> its number of terms


def z(sums: Sums, name: str) -> float:
    """Standard normal for a faithful engine; name: one of MARTINGALES."""
    return _ratio(getattr(sums, name), math.sqrt(getattr(sums, f"{name}_var")))


def pit_ks(sums: Sums) -> tuple[float, float]:
    """(Kolmogorov-Smirnov distance of the PIT values from uniform, its p-value)."""
    distance = _distance(sums.pit, np.ones(BINS))
    return distance, kolmogorov_p(distance, sums.tokens)


def gap_means(sums: Sums) -> dict[str, float]:
    """Engine against trainer: mean |delta log p|, KL(engine || trainer) by k3, effective share of the sample (ESS / N)
    left by the importance weights trainer / engine."""
    return {
        "logp_gap": _ratio(sums.gap, sums.tokens),
        "logp_gap_kl": _ratio(sums.gap_kl, sums.tokens),
        "ess": _ratio(sums.weight**2, sums.weight_sq * sums.tokens),
    }


def kolmogorov_p(distance: float, num: float) -> float:
    """P(D >= distance) for `num` independent uniform values."""
    root = math.sqrt(num)
    x = (root + 0.12 + 0.11 / root) * distance if num else 0.0
    if x < 0.3:  # 1 to seven digits, where the alternating series no longer converges
        return 1.0
    return min(1.0, 2 * sum((-1) ** (j - 1) * math.exp(-2 * (j * x) ** 2) for j in range(1, 101)))


def absolute_p(sums: Sums, tolerance: float) -> dict[str, float]:
    """p-values of "the engine is within `tolerance` (total variation) of the trainer's distributions".

    The KS distance and the mean of a term between 0 and 1 move by at most the total variation. A temperature that moves
    a bell-shaped log p by a total variation of t moves its mean by t sqrt(2 pi) standard deviations.
    """
    allowed = {
        "surprise": tolerance * math.sqrt(2 * math.pi) * sums.surprise_sd,
        "favourite": tolerance * sums.drafted,
        "overlap": tolerance * sums.drafted,
    }
    p = {
        name: _two_sided(abs(getattr(sums, name)) - allowed[name], getattr(sums, f"{name}_var")) for name in MARTINGALES
    }
    return p | {"pit": kolmogorov_p(max(0.0, pit_ks(sums)[0] - tolerance), sums.tokens)}


# --- speculation on against off ---------------------------------------------------------------------------------


def compare(on: Sums, off: Sums) -> dict[str, float]:
    """The differences on - off: z of the means of the martingales and of the log mean gap, the ratio of the gaps, the
    distance between the PIT histograms, and p-values `p_*`. All nothing (0, 1) while an arm is empty."""
    values, p = {}, {}
    for name, number in MARTINGALES.items():
        sums, variances, numbers = ([getattr(arm, key) for arm in (on, off)] for key in (name, f"{name}_var", number))
        values[f"{name}_z"] = _two_sample_z(sums, variances, numbers)
        p[f"p_{name}"] = _two_sided(abs(values[f"{name}_z"]), 1.0)
    distance = _distance(on.pit, off.pit) if on.tokens and off.tokens else 0.0
    ratio, gap_sd = _gap_ratio(on, off)
    return values | {
        "pit_distance": distance,
        "gap_ratio": ratio,
        "gap_z": _ratio(math.log(ratio), gap_sd),
        **p,
        "p_pit": kolmogorov_p(distance, _ratio(on.tokens * off.tokens, on.tokens + off.tokens)),
        "p_gap": _two_sided(abs(math.log(ratio)) - math.log(GAP_TOLERANCE), gap_sd**2),
    }


def _two_sample_z(sums: Sequence[float], variances: Sequence[float], numbers: Sequence[float]) -> float:
    if not all(numbers):
        return 0.0
    spread = sum(variance / number**2 for variance, number in zip(variances, numbers, strict=True))
    return _ratio(sums[0] / numbers[0] - sums[1] / numbers[1], math.sqrt(spread))


def _gap_ratio(on: Sums, off: Sums) -> tuple[float, float]:
    """(mean gap on / off, standard deviation of its log): each mean is a ratio of sums over sequences, which vary."""
    if not on.gap or not off.gap:
        return 1.0, 0.0
    variance = 0.0
    for arm in (on, off):
        mean = arm.gap / arm.tokens
        spread = arm.gap_gg - 2 * mean * arm.gap_gn + mean**2 * arm.gap_nn
        variance += max(0.0, spread) / arm.gap**2
    return (on.gap / on.tokens) / (off.gap / off.tokens), math.sqrt(variance)


def _distance(histogram: np.ndarray, other: np.ndarray) -> float:
    if not histogram.sum():
        return 0.0
    return float(np.abs(histogram.cumsum() / histogram.sum() - other.cumsum() / other.sum()).max())


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def _two_sided(excess: float, variance: float) -> float:
    """P(|Z| >= excess) for Z of that variance; 1 where there is no excess or nothing varies."""
    return 2 * _NORMAL.cdf(-excess / math.sqrt(variance)) if excess > 0 and variance > 0 else 1.0


# --- the alarm --------------------------------------------------------------------------------------------------


def pointwise_level(alpha: float, looks: int) -> float:
    """The level of each of `looks` tests of a growing sum at which some test rejects with probability alpha.

    Sums at neighbouring looks are alike, so this is far above alpha / looks. With evenly growing information the chance
    that some |z_j| >= c is 2 Phi(-c) + c phi(c) sum_j 1/j nu(c / sqrt(j)), j = 2 .. looks, nu(x) = exp(-0.583 x), to a
    tenth of alpha (the test computes it exactly); solved for c.
    """
    low, high = 0.0, 40.0
    for _ in range(60):
        c = (low + high) / 2
        crossing = sum(math.exp(-0.583 * c / math.sqrt(j)) / j for j in range(2, looks + 1))
        chance = 2 * _NORMAL.cdf(-c) + c * _NORMAL.pdf(c) * crossing
        low, high = (c, high) if chance > alpha else (low, c)
    return 2 * _NORMAL.cdf(-low)


@dataclass(frozen=True)
class Report:
    """One look: `values` for metrics.jsonl, p-values by test, and the tests that are in alarm, worst first."""

    values: dict[str, float]
    p: dict[str, float]
    alarms: list[str]


class Monitor:
    """Accumulates both arms over a run and tests after every step.

    A faithful run raises an alarm with probability at most alpha: it is shared evenly by the tests (Bonferroni) and by
    windows of `window` steps, inside which the sums grow. A new window forgets the last one, so that a fault that
    begins late is not diluted by all that went well. absolute: whether each arm is also tested alone.
    """

    def __init__(
        self, steps: int, *, alpha: float = ALPHA, tolerance: float = TOLERANCE, absolute: bool = True, window: int = 30
    ) -> None:
        self.window = min(window, steps)
        self.tolerance, self.absolute = tolerance, absolute
        num_tests = 5 + (8 if absolute else 0)
        self.level = pointwise_level(alpha / num_tests / math.ceil(steps / self.window), self.window)
        self.look, self.on, self.off = 0, Sums(), Sums()

    def add(self, on: Sums | None = None, off: Sums | None = None) -> Report:
        """Add one step's rollouts, with and without speculation, and test."""
        if self.look == self.window:
            self.look, self.on, self.off = 0, Sums(), Sums()
        self.look += 1
        self.on, self.off = self.on + (on or Sums()), self.off + (off or Sums())
        difference = compare(self.on, self.off)
        p = {f"difference.{name[2:]}": value for name, value in difference.items() if name.startswith("p_")}
        values = {f"difference.{name}": value for name, value in difference.items() if not name.startswith("p_")}
        for name, arm in (("on", self.on), ("off", self.off)):
            if not arm.tokens:
                continue
            values |= {f"{name}.{key}": value for key, value in gap_means(arm).items()}
            values |= {f"{name}.{key}_z": z(arm, key) for key in MARTINGALES}
            values |= {f"{name}.pit_distance": pit_ks(arm)[0], f"{name}.tokens": arm.tokens}
            if self.absolute:
                p |= {f"{name}.{key}": value for key, value in absolute_p(arm, self.tolerance).items()}
        alarms = sorted((name for name in p if p[name] < self.level), key=p.__getitem__)
        return Report(values, p, alarms)

    def state(self) -> dict[str, Any]:
        return {"look": self.look, "on": self.on.state(), "off": self.off.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.look, self.on, self.off = state["look"], Sums.from_state(state["on"]), Sums.from_state(state["off"])


MEANING = {
    "surprise": "tokens are more or less likely than the policy's own entropy allows (a temperature or truncation)",
    "favourite": "the drafter's favourite token comes more or less often than the policy gives it",
    "overlap": "tokens that the drafter likes come more or less often than the policy gives them",
    "pit": "sampled tokens do not fill the policy's distribution evenly",
    "gap": "engine and trainer log-probabilities are further apart with speculation than without",
}


def explain(alarm: str) -> str:
    """One sentence for a name in `Report.alarms`."""
    arm, _, test = alarm.partition(".")
    where = {
        "on": "with speculation",
        "off": "without speculation",
        "difference": "with speculation, compared with the same policy without",
    }
    return f"{where[arm]}: {MEANING[test]}"


# --- the exact law of a round -----------------------------------------------------------------------------------

Prefix = tuple[int, ...]
Law = Callable[[Prefix], np.ndarray]  # probabilities of the next token, given the tokens since the round began
Believed = Callable[[Prefix, int], tuple[np.ndarray, np.ndarray]]


def acceptance(p_V: np.ndarray, q_V: np.ndarray, token: int) -> float:
    return float(min(1.0, p_V[token] / q_V[token])) if q_V[token] > 0 else 0.0


def recovery(p_V: np.ndarray, q_V: np.ndarray) -> np.ndarray:
    """The law of the token that takes the place of a rejected draft: (p - q)^+, normalised."""
    residual = np.maximum(p_V - q_V, 0.0)
    return residual / residual.sum()


def bonus(p_V: np.ndarray, q_V: np.ndarray) -> np.ndarray:
    """The law of the token after k accepted drafts: the target's. q, which a drafter would say there, plays no part."""
    return p_V


def speculative_round(target: Law, drafter: Law, k: int, believed: Believed | None = None) -> dict[Prefix, float]:
    """Probability of every tuple of tokens (1 to k + 1 of them) that one draft-and-verify round may emit.

    drafter: the law that drafts are really drawn from. believed(prefix, draft): the q that acceptance takes for it, and
    the q that recovery takes; both are the drafter's law unless a fault is to be studied. Exponential in k: a
    reference, not a sampler.
    """
    law: dict[Prefix, float] = defaultdict(float)

    def extend(prefix: Prefix, chance: float) -> None:
        p_V, drawn_V = target(prefix), drafter(prefix)
        if len(prefix) == k:
            for token, share in enumerate(bonus(p_V, drawn_V)):
                law[*prefix, token] += chance * float(share)
            return
        for draft in np.flatnonzero(drawn_V).tolist():
            accept_V, recover_V = believed(prefix, draft) if believed else (drawn_V, drawn_V)
            accepted = acceptance(p_V, accept_V, draft)
            proposed = chance * float(drawn_V[draft])
            if accepted > 0:
                extend((*prefix, draft), proposed * accepted)
            if accepted < 1:
                for token, share in enumerate(recovery(p_V, recover_V)):
                    law[*prefix, token] += proposed * (1 - accepted) * float(share)

    extend((), 1.0)
    return {tokens: chance for tokens, chance in law.items() if chance > 0}
