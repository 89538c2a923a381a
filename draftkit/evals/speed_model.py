"""What speculation should cost and gain: small pure functions, numbers in, numbers out.

Notation: s_i survival, the share of verify rounds in which the first i draft tokens were all accepted; tau(k)
acceptance length, tokens a round with the bonus token; c(k) round cost, the time of one draft-and-verify round in
plain decoding steps. Speedup is tau / c, so c is also the acceptance length at which speculation breaks even.

Holds for chain drafters: with block drafters or block verification tau(k') is not a prefix of tau(k). Asynchronous
overlap and drafter training are left to `project`. Sources: Leviathan et al., arXiv 2211.17192, eq. 1 and theorem
3.8, for the IID forms; the marginal rule and the schedule follow from speedup = tau / c.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

# --- acceptance -------------------------------------------------------------------------------------------------


def acceptance_length(survival: Sequence[float]) -> float:
    """tau(k) = 1 + s_1 + .. + s_k; a prefix of `survival` gives tau of a shorter draft."""
    return 1.0 + sum(survival)


def iid_acceptance_length(alpha: float, k: int) -> float:
    """tau(k) when every draft token is accepted with the same probability: (1 - alpha^(k+1)) / (1 - alpha)."""
    return float(k + 1) if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


# --- cost of a round --------------------------------------------------------------------------------------------


def round_cost(acceptance_length: float, speedup: float) -> float:
    """c = tau / speedup: what a round cost, in plain steps, given what was measured."""
    return acceptance_length / speedup


def modelled_round_cost(k: int, *, plain_s: float, verify_s: float, draft_s: float, overhead_s: float = 0.0) -> float:
    """c(k) = (T_verify + k T_draft + T_overhead) / T_plain, `verify_s` being a step over k + 1 tokens a sequence."""
    return (verify_s + k * draft_s + overhead_s) / plain_s


def limit(k: int, cost: float, speedup: float) -> str | None:
    """What holds back a cell that is not faster than plain decoding: "k", when even a drafter that is always accepted
    would lose there ((k + 1) / c <= 1), else "drafter". None for a cell that is faster."""
    if speedup > 1:
        return None
    return "k" if (k + 1) / cost <= 1 else "drafter"


# --- from a round to a whole step -------------------------------------------------------------------------------


def amdahl(generation_share: float, generation_speedup: float, overhead: float = 0.0) -> float:
    """Speedup of an RL step: 1 / (R / S + (1 - R) + overhead), everything in plain step times."""
    return 1.0 / (generation_share / generation_speedup + (1.0 - generation_share) + overhead)


def implied_generation_share(step_speedup: float, generation_speedup: float) -> float:
    """The inverse of `amdahl` without overhead: which share of the step generation must have had."""
    return (1.0 - 1.0 / step_speedup) / (1.0 - 1.0 / generation_speedup)


def draining_speedup(
    plain_steps: Mapping[int, float], plain_s: Mapping[int, float], speedup: Mapping[int, float]
) -> float:
    """Speedup of a batch that drains: `plain_steps[b]` plain steps were spent with b sequences running.

    Time is what adds up, so each batch size counts with its plain *time*, not with its tokens.
    """
    before = sum(steps * plain_s[b] for b, steps in plain_steps.items())
    after = sum(steps * plain_s[b] / speedup[b] for b, steps in plain_steps.items())
    return before / after


# --- which k ----------------------------------------------------------------------------------------------------


def marginal_k(survival: Sequence[float], cost: Sequence[float]) -> int:
    """Raise k while one more draft token pays: s_{k+1} > tau(k) * (c(k+1) - c(k)) / c(k). `cost[0]` is 1.

    It stops at the first token that does not pay, where `best_k` looks at all of them. They agree as long as costs
    rise evenly, because survival only falls; a jump in cost (a kernel's tile edge) can hide a better k from it.
    """
    k = 0
    while k < len(survival) and k + 1 < len(cost):
        if survival[k] <= acceptance_length(survival[:k]) * (cost[k + 1] - cost[k]) / cost[k]:
            break
        k += 1
    return k


def best_k(survival: Sequence[float], cost: Sequence[float]) -> int:
    """argmax over k of tau(k) / c(k), k = 0 included; the smaller k on a tie."""
    return max(range(len(cost)), key=lambda k: (acceptance_length(survival[:k]) / cost[k], -k))


def recommended_k(cells: Iterable[Mapping]) -> int:
    """The fastest cell whose speedup interval lies above 1; without one, 0: a k has to show that it pays."""
    paying = [cell for cell in cells if cell["k"] > 0 and cell["verdict"] == "faster"]
    return max(paying, key=lambda cell: cell["speedup"])["k"] if paying else 0


def schedule(cells: Iterable[Mapping], max_num_seqs: int) -> list[list[int]]:
    """[[lo, hi, k], ..] for vLLM's `num_speculative_tokens_per_batch_size`, from cells of one temperature.

    A batch size takes the k of the tested concurrency nearest to it on a log scale (neighbours meet at their
    geometric mean). The ranges cover 1..max_num_seqs without a gap: vLLM demands that the first begins at 1.
    """
    by_concurrency: dict[int, list[Mapping]] = {}
    for cell in cells:
        by_concurrency.setdefault(cell["concurrency"], []).append(cell)
    tested = sorted(by_concurrency)
    uppers = [math.isqrt(a * b) for a, b in pairwise(tested)] + [max_num_seqs]
    ranges: list[list[int]] = []
    for concurrency, upper in zip(tested, uppers, strict=True):
        k = recommended_k(by_concurrency[concurrency])
        lower = ranges[-1][1] + 1 if ranges else 1
        if ranges and ranges[-1][2] == k:
            ranges[-1][1] = upper
        elif lower <= upper:
            ranges.append([lower, upper, k])
    return ranges
