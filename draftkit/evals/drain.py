"""How long a batch of rollouts takes as it drains: every round of every request, drawn at random, with fitted costs.

    all requests queue -> `slots` of them run; a step gives each 1 + (drafts accepted) tokens -> one that has its length
    leaves, the next one enters with its prompt -> until none is left

Accepted drafts of a round follow the measured survival: one uniform number u a round, and draft i is accepted while
u < s_i. Lengths are given, since what is asked is how long *these* answers take. Because the last requests decide, the
mean over drawn batches is not the time of the mean batch; several are drawn at once.

`best_schedule` picks k by the number of running requests: for each the one with most tokens a second, or no
speculation at all where that is predicted to be faster, so that a batch is never slower than plain decoding as far
as costs are known.
Left out: requests that arrive late, and turns of a conversation (a wave of them is a batch of its own).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from draftkit.evals.speed_model import acceptance_length
from draftkit.evals.step_cost import StepCost

DRAWS = 24
Schedule = list[list[int]]  # [lo, hi, k], as vLLM's num_speculative_tokens_per_batch_size


@dataclass(frozen=True, slots=True)
class Requests:
    """A batch in the order of its queue: tokens of each prompt and of each answer, and how many run at once."""

    prompts: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: int


@dataclass(frozen=True, slots=True)
class Drained:
    """[draws] seconds of the batch, and of its drafter."""

    seconds: np.ndarray
    draft_seconds: np.ndarray


def drained(
    batch: Requests,
    survival: Sequence[float],
    cost: StepCost,
    schedule: Schedule,
    *,
    request_s: float = 0.0,
    draws: int = DRAWS,
    seed: int = 0,
) -> Drained:
    """survival: [s_1 ..] of draft positions; a schedule that asks for more drafts is not rewarded for them. request_s:
    seconds of each request outside of engine steps."""
    lengths, prompts = np.array(batch.lengths), np.array(batch.prompts)
    num, slots = len(lengths), max(1, min(batch.slots, len(lengths)))
    k_of = lookup(schedule, slots)
    always = bool(k_of[1:].any())  # a drafter that may be needed again runs at k = 0 too
    s_K = np.array([*survival, *[0.0] * (int(k_of.max()) - len(survival))])[: int(k_of.max())]
    rng = np.random.default_rng(seed)
    left = np.tile(lengths, (draws, 1))  # tokens each request still needs
    begun = np.full(draws, slots)  # requests that have entered, in queue order
    done = np.zeros((draws, num), dtype=int)
    total, drafter = np.full(draws, num * request_s), np.zeros(draws)
    place = np.arange(num)
    read = np.zeros((draws, num), dtype=bool)  # prompts that were processed
    rows = np.arange(draws)
    while True:
        active = (place < begun[:, None]) & (left > 0)
        running = active.sum(1)
        if not running.any():
            return Drained(total, drafter)
        k = k_of[np.minimum(running, slots)]
        new = active & ~read
        context = np.where(active & read, prompts + done, 0).sum(1)
        seconds = cost.step(np.maximum(running, 1), k, context, drafts=np.full(draws, always))
        seconds += cost.prompt_s(np.where(new, prompts, 0).sum(1), drafts=always)
        total += np.where(running > 0, seconds, 0.0)
        if always:
            drafter += np.where(running > 0, cost.draft(np.maximum(running, 1), k), 0.0)
        accepted = np.zeros((draws, num), dtype=int)
        if len(s_K):
            u = rng.random((draws, num))
            for i, s in enumerate(s_K):
                accepted += (u < s) & (k[:, None] > i)
        gained = np.where(active, np.where(new, 1, 1 + accepted), 0)
        gained = np.minimum(gained, left)
        left, done, read = left - gained, done + gained, read | new
        finished = (active & (left == 0)).sum(1)
        begun[rows] = np.minimum(begun + finished, num)


def lookup(schedule: Schedule, slots: int) -> np.ndarray:
    """k by the number of running requests, 0 to slots."""
    k_of = np.zeros(slots + 1, dtype=int)
    for low, high, k in schedule:
        k_of[low : high + 1] = k
    return k_of


def constant(k: int, slots: int) -> Schedule:
    return [[1, slots, k]]


def best_schedule(
    cost: StepCost,
    survival: Sequence[float],
    slots: int,
    *,
    context: float = 0.0,
    margin: float = 0.0,
    seconds: Callable[[Schedule], float] | None = None,
    allowed: np.ndarray | None = None,
) -> Schedule:
    """context: tokens in the cache of each request. margin: relative gain over k = 0 below which it stays 0. seconds:
    predicts a whole batch under a schedule, to choose between this schedule, each constant k and no speculation.
    allowed bool [k, slots]: which k may be chosen for 1 .. slots requests, k = 0 always; default: all.

    A k is only ever chosen up to len(survival)."""
    ks = range(len(survival) + 1)
    tau = np.array([acceptance_length(survival[:k]) for k in ks])
    sizes = np.arange(1, slots + 1)
    rates = np.array([tau[k] / cost.step(sizes, k, sizes * context) for k in ks])
    rates[1:] /= 1 + margin
    may = np.ones_like(rates, dtype=bool) if allowed is None else allowed[: len(rates), :slots].copy()
    may[0] = True
    rates = np.where(may, rates, 0.0)
    chosen = rates.argmax(0)
    if chosen.any() and not chosen.all():  # beside speculation k = 0 pays for the drafter's pass: is it still best?
        kept = 1 / cost.step(sizes, 0, sizes * context, drafts=True)
        chosen = np.where(chosen == 0, np.vstack([kept, rates[1:]]).argmax(0), chosen)
    mixed = ranges([int(k) for k in chosen])
    if seconds is None:
        return mixed
    candidates = [constant(0, slots), mixed, *(constant(k, slots) for k in ks if k and may[k].all())]
    times = [seconds(candidate) * (1 if place == 0 else 1 + margin) for place, candidate in enumerate(candidates)]
    return candidates[int(np.argmin(times))]


def ranges(k_of: Sequence[int]) -> Schedule:
    """k for 1, 2, .. running requests -> [[lo, hi, k], ..]."""
    found, low = [], 1
    for k, alike in groupby(k_of):
        width = len(list(alike))
        found.append([low, low + width - 1, k])
        low += width
    return found
