"""Draft vocabulary: the verifier tokens that the drafter can propose, chosen from what is supervised.

The head is the widest product of a small drafter, so it gets only tokens that occur: the most frequent supervised ones
until they cover `coverage` of the corpus, with special and end tokens always in, and no filler. Order is by token id,
so that equal corpora give equal maps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from draftkit.errors import UserError

MULTIPLE = 64  # heads are padded with the next frequent tokens to a multiple that matrix kernels like


def choose_vocab(
    counts: Counter[int], always: Iterable[int], vocab_size: int, size: int | None, coverage: float
) -> torch.Tensor:
    """Ascending verifier ids [D] int64. counts: supervised token counts. size: exactly so many (overrides coverage).
    Raises UserError for a size that the tokens that are always in do not fit."""
    ranked = sorted(counts, key=lambda t: (-counts[t], t))
    chosen = dict.fromkeys(sorted(t for t in set(always) if 0 <= t < vocab_size))
    if size is not None and size < len(chosen):
        raise UserError(
            f"drafter.draft_vocab_size ({size}) is smaller than the {len(chosen)} special and end tokens that are "
            "always in it.",
            f"Give at least {len(chosen)}, or leave it out.",
        )
    total, covered = sum(counts.values()), sum(counts[t] for t in chosen)
    for token in ranked:
        if (len(chosen) >= size) if size is not None else (covered >= coverage * total):
            break
        if token not in chosen:
            chosen[token] = None
            covered += counts[token]
    goal = min(size if size is not None else -(-len(chosen) // MULTIPLE) * MULTIPLE, vocab_size)
    rest = (t for t in [*ranked, *range(vocab_size)] if t not in chosen)
    while len(chosen) < goal:
        chosen.setdefault(next(rest))
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def coverage_of(counts: Counter[int], draft_to_target: torch.Tensor) -> float:
    """Share of supervised tokens that the drafter can propose."""
    inside = set(draft_to_target.tolist())
    return sum(n for t, n in counts.items() if t in inside) / max(sum(counts.values()), 1)
