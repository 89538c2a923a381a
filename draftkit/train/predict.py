"""What a drafter will do when served, read off documents that the verifier has already sampled.

A greedy draft is accepted with probability p(draft), and a sampled token equals the draft with that same probability:
so walking a sampled document and accepting while draft and text agree has the distribution of serving (measures.md,
formulae 1 and 8). At temperature 0 the walk is what the engine does, token for token.

    round at slot p: drafts for x[p+2] .. x[p+1+k], j leading ones agree  ->  next round at slot p + j + 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from draftkit.data.capture import States, collate
from draftkit.drafters.base import Drafter
from draftkit.types import DraftBatch, SpecCounters

Segment = tuple[int, int, int]


def agreement(proposal_LR: torch.Tensor, batch: DraftBatch) -> torch.Tensor:
    """[L, R] bool: the proposal (verifier ids) of slot r at step i is the document's token, and that is supervised."""
    last = len(batch.tokens_N) - 1
    actual = torch.stack([batch.tokens_N[(batch.slot_R + 2 + i).clamp(max=last)] for i in range(len(proposal_LR))])
    return (proposal_LR == actual) & batch.valid_LR


def rounds(agree_LR: torch.Tensor, segments: Sequence[Segment]) -> Iterator[tuple[int, int]]:
    """(slot row, accepted draft tokens) of each round of a walk; every segment starts with one."""
    leading = agree_LR.long().cumprod(0).sum(0).tolist()
    row = 0
    for _, first, last in segments:
        end = row + last - first
        while row < end:
            yield row, leading[row]
            row += leading[row] + 1
        row = end


@torch.no_grad()
def own_proposals(drafter: Drafter, batch: DraftBatch) -> torch.Tensor:
    """[L, R] verifier ids that the drafter proposes at every slot, feeding itself."""
    return torch.stack([drafter.propose(state) for state in drafter(batch, own_tokens=True)])


def predicted(drafter: Drafter, states: States, k: int) -> SpecCounters:
    """Counters that an engine drafting greedily would report for these documents at draft length k."""
    batch = collate(states, range(len(states.documents)), k, drafter.device)
    return walk(agreement(own_proposals(drafter, batch), batch), batch.segments)


def walk(agree_LR: torch.Tensor, segments: Sequence[Segment]) -> SpecCounters:
    """Counters of the walk, as an engine would report them for k = L."""
    steps = len(agree_LR)
    accepted = [j for _, j in rounds(agree_LR, segments)]
    per_pos = tuple(sum(j > i for j in accepted) for i in range(steps))
    return SpecCounters(len(accepted), steps * len(accepted), sum(accepted), per_pos)
