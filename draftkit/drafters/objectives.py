"""What a drafter is trained for, by name: pure functions of a few numbers a row.

A row is one slot at one TTT step. Every objective here depends on the student q through at most three numbers, and so
says only its value and its slopes in them; `losses` knows how each of the three moves with the student's logits z:

    kl        KL(p' || q), p' the teacher renormalised over the draft vocabulary    d kl / dz = q - p'
    ce        -log q(token), the token that the text goes on with                   d ce / dz = q - 1[token]
    overlap   alpha = sum min(p, q), p the teacher over the full vocabulary         d alpha / dz = q (1[q < p] - S),
                                                                                    S = sum of q where q < p

(all over the temperature). alpha is the probability that a *sampled* draft is accepted (measures.md, formula 8); a
greedy draft's, p(argmax q), has no gradient, and KL is what stands in for it.

    kl         forward KL (EAGLE-3)                    1 at which q = p'
    ce         cross-entropy with the sampled text     its mean over samples is KL plus a constant; noisier
    tv         1 - alpha: total variation              Zhou et al., DistillSpec, arXiv 2310.08461
    lk-alpha   -log alpha                              LK losses, arXiv 2602.23881
    lk-hybrid  l KL + (1 - l) TV, l = exp(-3 alpha)    the same: KL while the drafter is far, TV when it is near
    tv-chain   the chain's lost length, sum over steps i of 1 - alpha_1 .. alpha_i: a step counts as much as the steps
               before it let it happen, so it replaces the decay of TTT steps
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

HYBRID_RATE = 3.0
TINY = 1e-6  # an overlap of nothing would make -log alpha and its slope infinite


@dataclass(frozen=True, slots=True)
class Rows:
    """[n] each, n rows of one TTT step. chain_n: alpha_1 .. alpha_i of the row's slot, this step included; later_n: the
    slope of the slot's expected accepted drafts in this step's alpha. Both only for objectives of `CHAINED`."""

    kl_n: torch.Tensor
    ce_n: torch.Tensor
    overlap_n: torch.Tensor
    chain_n: torch.Tensor | None = None
    later_n: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Slopes:
    """d value / d (kl, ce, overlap), [n] each; 0.0 where it does not depend on one."""

    kl: torch.Tensor | float = 0.0
    ce: torch.Tensor | float = 0.0
    overlap: torch.Tensor | float = 0.0

    def __add__(self, other: Slopes) -> Slopes:
        return Slopes(self.kl + other.kl, self.ce + other.ce, self.overlap + other.overlap)

    def __mul__(self, weight: float) -> Slopes:
        return Slopes(self.kl * weight, self.ce * weight, self.overlap * weight)


def kl(rows: Rows) -> tuple[torch.Tensor, Slopes]:
    return rows.kl_n, Slopes(kl=1.0)


def ce(rows: Rows) -> tuple[torch.Tensor, Slopes]:
    return rows.ce_n, Slopes(ce=1.0)


def tv(rows: Rows) -> tuple[torch.Tensor, Slopes]:
    return 1.0 - rows.overlap_n, Slopes(overlap=-1.0)


def lk_alpha(rows: Rows) -> tuple[torch.Tensor, Slopes]:
    alpha = rows.overlap_n.clamp(min=TINY)
    return -alpha.log(), Slopes(overlap=-1.0 / alpha)


def lk_hybrid(rows: Rows) -> tuple[torch.Tensor, Slopes]:
    """The mixing weight is a constant to the gradient, as in the paper."""
    weight = (-HYBRID_RATE * rows.overlap_n).exp()
    return weight * rows.kl_n + (1.0 - weight) * (1.0 - rows.overlap_n), Slopes(kl=weight, overlap=weight - 1.0)


def tv_chain(rows: Rows) -> tuple[torch.Tensor, Slopes]:
    return 1.0 - rows.chain_n, Slopes(overlap=-rows.later_n)


OBJECTIVES: dict[str, Callable[[Rows], tuple[torch.Tensor, Slopes]]] = {
    "kl": kl,
    "ce": ce,
    "tv": tv,
    "lk-alpha": lk_alpha,
    "lk-hybrid": lk_hybrid,
    "tv-chain": tv_chain,
}
CHAINED = {"tv-chain"}  # need every step's alpha first, and weigh the steps themselves
OF_OVERLAP = {"tv", "lk-alpha", "lk-hybrid", "tv-chain"}


def weighted(objective: Mapping[str, float], rows: Rows, decay: float) -> tuple[torch.Tensor, Slopes]:
    """Sum of the named objectives, each times its weight and, unless it is chained, times `decay` of this TTT step."""
    value: torch.Tensor | float = 0.0
    slopes = Slopes()
    for name, weight in objective.items():
        weight = weight if name in CHAINED else weight * decay
        part, slope = OBJECTIVES[name](rows)
        value, slopes = value + weight * part, slopes + slope * weight
    return value, slopes  # type: ignore[return-value]


def chains(overlap_LR: torch.Tensor, valid_LR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(chain_LR, later_LR) from every step's alpha. A slot is valid for its first steps only; a step that is not valid
    counts as one that cannot happen.

    later[i] = d/d alpha_i of sum_k alpha_1 .. alpha_k = sum_{k >= i} prod_{j <= k, j != i} alpha_j
    """
    alpha = overlap_LR * valid_LR
    chain = alpha.cumprod(0)
    later = torch.zeros_like(alpha)
    for i in range(len(alpha)):
        before = chain[i - 1] if i else torch.ones_like(alpha[0])
        after = alpha[i + 1 :].cumprod(0).sum(0)  # of nothing: 0
        later[i] = before * (1.0 + after)
    return chain, later
