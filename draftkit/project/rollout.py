"""Seconds to generate the rollouts of a step: response lengths, draining batches, what speculation makes of them.

    lengths     log-normal, cut at the longest answer allowed; or your own sample
    replica     every replica gets its share of the requests at once and drains; the step waits for the slowest, taken
                to be one with an even sample of lengths and the longest response of all
    speculative tau(k) tokens a round; k may depend on the number running (a schedule)

Left out: prefill, prompts of different lengths, acceptance that changes along a response or between responses (tau is
one number a k), preemption (a replica admits as many as fit at the context they reach).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np

from draftkit.evals.speed_model import acceptance_length
from draftkit.project.cost import Server
from draftkit.project.phases import phases

GRID = 512  # quantiles of a length distribution where its mean is taken
NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """Tokens of a response. `sample`: measured ones, used as they are; else log-normal with `sigma`, cut at `longest`.

    mean: after the cut, so that it is what a run's log shows.
    """

    mean: float
    longest: int
    sigma: float = 0.7
    sample: tuple[float, ...] = ()

    @cached_property
    def median(self) -> float:
        """Of the uncut distribution, so that the cut mean is `mean`."""
        grid = np.exp(self.sigma * _normal(_even_shares(GRID, 0)))
        low, high = 0.0, float(self.longest) * 1e3
        for _ in range(50):
            middle = (low + high) / 2
            too_long = np.minimum(middle * grid, self.longest).mean() > self.mean
            low, high = (low, middle) if too_long else (middle, high)
        return (low + high) / 2

    def of_replica(self, requests: int, of_all: int) -> list[float]:
        """An even sample, its last the longest of all requests of the step."""
        shares = _even_shares(requests, of_all)
        if self.sample:
            return np.quantile(np.array(self.sample, dtype=float), shares).tolist()
        return np.minimum(self.median * np.exp(self.sigma * _normal(shares)), self.longest).tolist()


def _even_shares(count: int, of_all: int) -> tuple[float, ...]:
    """The middles of `count` equal parts; with of_all, the last one as far out as the largest of so many."""
    shares = (np.arange(count) + 0.5) / count
    if of_all:
        shares[-1] = 1 - 0.5 / of_all
    return tuple(shares.tolist())


@lru_cache(maxsize=256)
def _normal(shares: tuple[float, ...]) -> np.ndarray:
    return np.array([NORMAL.inv_cdf(share) for share in shares])


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The generation of one step on `replicas` servers."""

    server: Server
    requests: int
    replicas: int
    lengths: Lengths
    prompt: int = 256
    max_num_seqs: int | None = None

    def per_replica(self) -> list[float]:
        """Longest first: as they are sampled they would all start at once anyway."""
        share = max(1, -(-self.requests // self.replicas))
        return self.lengths.of_replica(share, self.requests)

    def slots(self) -> int:
        """Requests a replica runs at once: what fits at their mean final context, at most max_num_seqs."""
        fits = self.server.most_requests(self.prompt + self.lengths.mean)
        return min(fits, self.max_num_seqs or fits)

    def seconds(self, k: int | Callable[[int], int] = 0, survival: Sequence[float] = ()) -> float:
        """k: drafts a round, or by the number running."""
        k_of = k if callable(k) else lambda n: k
        tau = lambda n: acceptance_length(survival[: k_of(n)])  # noqa: E731
        running, rounds, made = np.array(list(phases(self.per_replica(), tau, self.slots()))).T
        drafts = np.array([k_of(int(n)) for n in running])
        total = 0.0
        for length in np.unique(drafts):
            of = drafts == length
            total += float(rounds[of] @ self.server.round(running[of], self.prompt + made[of], int(length)))
        return total

    def speedup(self, k: int | Callable[[int], int], survival: Sequence[float]) -> float:
        return self.seconds() / self.seconds(k, survival)

    def schedule(self, ks: Sequence[int], survival: Sequence[float]) -> Callable[[int], int]:
        """The k that makes most tokens a second with n requests running, at a middling context; 0 where none pays."""
        running = np.arange(1, min(self.slots(), self.requests) + 1, dtype=float)
        context = self.prompt + self.lengths.mean / 2
        choices = sorted({0, *ks})
        rates = [acceptance_length(survival[:k]) / self.server.round(running, context, k) for k in choices]
        best = np.argmax(np.array(rates), axis=0)
        return lambda n: choices[best[min(n, len(best)) - 1]]

    def pooled(self, batches: int) -> Rollouts:
        """Several steps' requests in flight together, as a policy that may lag lets them be."""
        return replace(self, requests=self.requests * batches)


def even_survival(tau: float, k: int) -> list[float]:
    """[s_1 .. s_k] of equal conditional acceptance whose acceptance length is tau; for a drafter known by tau alone."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if 1 + sum(middle ** (i + 1) for i in range(k)) > tau else (middle, high)
    return [((low + high) / 2) ** (i + 1) for i in range(k)]
