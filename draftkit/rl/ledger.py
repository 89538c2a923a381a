"""Where a step's time goes, what speculation should have saved of it, what it did save, and what ate the difference.
Pure functions of measured numbers, and a clock.

    engine step log -> SpeedModel: T(n, k), seconds of a decoding step with n requests running and k drafts
    response lengths, survival, SpeedModel -> Forecast: seconds of the batch plain and speculative, and of the RL step
    plain probe steps among speculative ones -> realised speedup, with an interval
    forecast parts against measured parts -> draft, verify, sync, train_drafter, rest: they add up to the difference

A forecast for a step is honest when model and survival come from earlier steps. Seconds of a step leave its evaluation
out: it comes every n steps and samples too. Left out: overlap of rollouts and training (`rl.lag`), where the exposed
generation is what remains; the length of a context, which makes late steps of a long batch dearer than early ones.
Sources: measures.md (c), formulae 3 to 5, 10 and 11; Amdahl and tau(k) from evals.speed_model; the interval for few
steps from evals.acceptance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from draftkit.evals.acceptance import BOOTSTRAP_DRAWS, Interval, expanded_percentile_interval
from draftkit.evals.drain import drain
from draftkit.evals.speed_model import acceptance_length, amdahl
from draftkit.types import EngineStep

# --- the clock --------------------------------------------------------------------------------------------------

PARTS = ("data", "sync", "generate", "reward", "logprob", "train_policy", "train_drafter", "publish", "eval", "idle")


class StepClock:
    """`with clock("generate"): ...`; a part inside a part counts only as itself. One thread's time."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._inner: list[float] = []  # of each open part: seconds spent in parts inside it
        self._start = now()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        assert part in self._seconds, part
        start = self._now()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = self._now() - start
            self._seconds[part] += spent - self._inner.pop()
            if self._inner:
                self._inner[-1] += spent

    def lap(self) -> dict[str, float]:
        """Seconds by part since the last lap, with `other` (under no name) and `total`. The next step begins now."""
        assert not self._inner, "a part is still open"
        end = self._now()
        total = end - self._start
        seconds = self._seconds | {"other": total - sum(self._seconds.values()), "total": total}
        self._seconds, self._start = dict.fromkeys(PARTS, 0.0), end
        return seconds


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each part as a share of the total."""
    return {part: value / seconds["total"] for part, value in seconds.items() if part != "total"}


def step_seconds(seconds: Mapping[str, float]) -> float:
    """What a step took, its evaluation left out."""
    return seconds["total"] - seconds["eval"]


def generation_share(seconds: Mapping[str, float]) -> float:
    """R of this step as it ran. Amdahl's R is that of a plain step: `Forecast.generation_share`."""
    return seconds["generate"] / step_seconds(seconds)


# --- what a decoding step costs ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """intercept + slope * n, but never below the cheapest size seen (extrapolated steps must not become free)."""

    intercept: float
    slope: float
    floor: float

    def __call__(self, n: float) -> float:
        return max(self.floor, self.intercept + self.slope * n)


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Least squares; their mean where only one size was seen or where larger sizes seem cheaper (noise)."""
    x, y = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    floor = min(float(y[x == size].mean()) for size in np.unique(x))
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread if spread else 0.0
    if slope <= 0:
        return Line(float(y.mean()), 0.0, 0.0)
    return Line(float(y.mean() - slope * x.mean()), slope, floor)


@dataclass(frozen=True)
class SpeedModel:
    """step[k](n): seconds of a decoding step of n requests with k drafts each, drafting included; draft[k](n): of the
    drafter alone. k = 0 is plain decoding."""

    step: dict[int, Line]
    draft: dict[int, Line]

    @classmethod
    def fit(cls, steps: Sequence[EngineStep]) -> SpeedModel:
        """From all steps so far; those with a prompt in them are left to `prefill_excess`."""
        by_k: dict[int, list[EngineStep]] = {}
        for step in steps:
            if not step.prefill:
                by_k.setdefault(step.k, []).append(step)
        line = lambda of_k, name: fit_line([s.running for s in of_k], [getattr(s, name) for s in of_k])  # noqa: E731
        return cls(
            {k: line(of_k, "seconds") for k, of_k in by_k.items()},
            {k: line(of_k, "draft_seconds") for k, of_k in by_k.items()},
        )

    def prefill_excess(self, steps: Sequence[EngineStep]) -> float:
        """Seconds that the steps with a prompt in them took beyond decoding steps of their size."""
        return sum(s.seconds - self.step[s.k](s.running) for s in steps if s.prefill and s.k in self.step)


# --- what a batch costs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """One RL step, plain and speculative. parts: seconds of the speculative one, named as in `measured_parts`.

    generation_share: R of the plain step; overhead: drafter training and publishing over the plain step.
    """

    plain_generate_s: float
    generate_s: float
    plain_step_s: float
    parts: dict[str, float]
    generation_share: float
    overhead: float
    generation_speedup: float
    step_speedup: float


def forecast(
    lengths: Sequence[int],
    survival: Sequence[float],
    model: SpeedModel,
    *,
    k_of: Callable[[int], int],
    max_num_seqs: int,
    prefill_s: float,
    sync_s: float,
    rest_s: float,
    train_drafter_s: float = 0.0,
    publish_drafter_s: float = 0.0,
) -> Forecast | None:
    """survival: [s_1 .. s_k]; k_of(n): drafts a round with n requests running. prefill_s, sync_s, rest_s: what both
    arms pay beside decoding: prompts, publishing the policy, everything else; the last two only speculation pays.

    None until the model has seen plain steps and every k that is asked for.
    """
    needed = {0} | {k_of(n) for n in range(1, min(max_num_seqs, len(lengths)) + 1)}
    if not needed <= model.step.keys():
        return None
    plain = drain(lengths, 1.0, model.step[0], max_num_seqs) + prefill_s
    tau = lambda n: acceptance_length(survival[: k_of(n)])  # noqa: E731
    draft = drain(lengths, tau, lambda n: model.draft[k_of(n)](n), max_num_seqs)
    decode = drain(lengths, tau, lambda n: model.step[k_of(n)](n), max_num_seqs)
    generate = decode + prefill_s
    plain_step = plain + sync_s + rest_s
    share, overhead = plain / plain_step, (train_drafter_s + publish_drafter_s) / plain_step
    parts = {
        "draft": draft,
        "verify": generate - draft,
        "sync": sync_s + publish_drafter_s,
        "train_drafter": train_drafter_s,
        "rest": rest_s,
    }
    return Forecast(
        plain_generate_s=plain,
        generate_s=generate,
        plain_step_s=plain_step,
        parts=parts,
        generation_share=share,
        overhead=overhead,
        generation_speedup=plain / generate,
        step_speedup=amdahl(share, plain / generate, overhead),
    )


# --- what happened ----------------------------------------------------------------------------------------------


def measured_parts(seconds: Mapping[str, float], steps: Sequence[EngineStep]) -> dict[str, float]:
    """A step's clock and its rollouts' engine steps (not those of an evaluation) as the parts of a forecast.

    verify: engine steps without the drafter, prompts included. rest: what is under no other part, so also the time of
    `generate` between engine steps.
    """
    draft = sum(step.draft_seconds for step in steps)
    named = {
        "draft": draft,
        "verify": sum(step.seconds for step in steps) - draft,
        "sync": seconds["sync"] + seconds["publish"],
        "train_drafter": seconds["train_drafter"],
    }
    return named | {"rest": step_seconds(seconds) - sum(named.values())}


def attribute(predicted: Mapping[str, float], realised: Mapping[str, float]) -> dict[str, float]:
    """Seconds by which each part exceeded the forecast; `total` is their sum, and the difference of the totals."""
    differences = {part: realised[part] - predicted[part] for part in predicted}
    return differences | {"total": sum(differences.values())}


@dataclass(frozen=True, slots=True)
class StepTime:
    """One RL step: draft length (0: a plain probe), sampled tokens, seconds of generation and of the step (no eval)."""

    k: int
    tokens: int
    generate_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Realised:
    """Plain over speculative: generation time per token, and time per step, with 95 % intervals (None: one step)."""

    generation: float
    generation_ci: Interval | None
    step: float
    step_ci: Interval | None
    num_plain: int
    num_speculative: int


def realised(times: Sequence[StepTime], seed: int = 0) -> Realised | None:
    """Speedup of speculative steps over the plain ones among them; None while either is missing.

    The bootstrap resamples steps of each arm. Probes are few: the interval is widened as a t interval of the smaller
    arm would be, and with two or three probes it says little.
    """
    plain = np.array([(t.tokens, t.generate_s, t.step_s) for t in times if t.k == 0])
    speculative = np.array([(t.tokens, t.generate_s, t.step_s) for t in times if t.k > 0])
    fewer = min(len(plain), len(speculative))
    if not fewer:
        return None
    generation, step = _speedups(plain.mean(0), speculative.mean(0))
    rng = np.random.default_rng(seed)
    draws = _speedups(*(_resampled_means(arm, rng) for arm in (plain, speculative)))
    intervals = [expanded_percentile_interval(d, fewer) if fewer > 1 else None for d in draws]
    return Realised(float(generation), intervals[0], float(step), intervals[1], len(plain), len(speculative))


def _speedups(plain: np.ndarray, speculative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[..., 3] means of tokens, generation and step seconds -> speedups of generation per token and of a step."""
    per_token = [arm[..., 1] / arm[..., 0] for arm in (plain, speculative)]
    return per_token[0] / per_token[1], plain[..., 2] / speculative[..., 2]


def _resampled_means(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.multinomial(len(rows), [1 / len(rows)] * len(rows), size=BOOTSTRAP_DRAWS) @ rows / len(rows)


# --- drift, and whether training pays ---------------------------------------------------------------------------


def entropy_slope(entropy: Sequence[float], acceptance: Sequence[float], weight: Sequence[float]) -> float:
    """b of acceptance length = a + b entropy over early rollouts (weight: their rounds), where the drafter still fits.

    Never above 0: a policy that is less sure is not easier to guess, so a rising line is noise. 0 without spread.
    """
    x, y, w = (np.asarray(values, dtype=float) for values in (entropy, acceptance, weight))
    if not w.sum():
        return 0.0
    dx = x - np.average(x, weights=w)
    spread = float((w * dx**2).sum())
    return min(0.0, float((w * dx * y).sum()) / spread) if spread else 0.0


def drift_split(
    acceptance: float, entropy: float, *, acceptance_before: float, entropy_before: float, slope: float
) -> dict[str, float]:
    """delta acceptance = slope * delta entropy + mismatch. Only a mismatch can be trained away."""
    delta, explained = acceptance - acceptance_before, slope * (entropy - entropy_before)
    return {"acceptance_delta": delta, "entropy_part": explained, "mismatch": delta - explained}


def cotrain_pays(
    lost: float, dS_dtau: float, generate_s: float, horizon: int, train_s: float, publish_s: float
) -> dict[str, float | bool]:
    """Whether training the drafter earns its time back: lost * dS/dtau * generate_s * horizon > train_s + publish_s.

    lost: acceptance length lost to mismatch (a negative one is a gain, and nothing to win back). dS_dtau: relative
    speedup of generation per unit of acceptance length; while a round costs the same, 1 / tau. generate_s: generation
    seconds of a step now. Returns the inputs with both sides and `pays`, for the log.
    """
    saved, cost = max(0.0, lost) * dS_dtau * generate_s * horizon, train_s + publish_s
    return {
        "lost": lost,
        "dS_dtau": dS_dtau,
        "generate_s": generate_s,
        "horizon": horizon,
        "train_s": train_s,
        "publish_s": publish_s,
        "saved_s": saved,
        "cost_s": cost,
        "pays": saved > cost,
    }
