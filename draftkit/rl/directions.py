"""How the sampled tokens lie towards the drafter: the two losslessness tests that need its distribution (`lossless`).

At every slot the drafter says q and the policy p about the same token x. The terms and their laws, given the past:

    favourite   1[x = argmax q]        mean p(argmax q), a Bernoulli variable
    overlap     a(x) = min(1, q / p)   mean sum_v p a = sum_v min(p, q), second moment sum_v p a^2

A token outside the draft vocabulary has q = 0 and is no sum's business. The drafter must not have been trained on these
rollouts yet: q has to be a function of the past alone, while which drafter it is only matters for the tests' power. p
is the whole law at the sampling temperature: with top-p or top-k the terms have another mean, and there is no test.
"""

from __future__ import annotations

import torch

from draftkit.data.batch import plan_epoch
from draftkit.data.capture import States, collate
from draftkit.drafters.eagle3 import Eagle3
from draftkit.drafters.losses import CHUNK, Teacher
from draftkit.rl.lossless import Sums
from draftkit.train.evaluate import TeacherView


@torch.no_grad()
def direction_sums(drafter: Eagle3, view: TeacherView, states: States, tokens_per_batch: int) -> Sums:
    """Over all slots of the documents: the first draft of a round, had one begun there."""
    sums = Sums()
    for members in plan_epoch([len(d.tokens) for d in states.documents], tokens_per_batch, 0, 0):
        batch = collate(states, members, 1, drafter.d2t.device)
        (state_RH,) = drafter(batch)
        token_R = view.to_draft_V[batch.tokens_N[batch.slot_R + 2]]
        sums += slot_sums(view.at(batch), state_RH, drafter.lm_head.weight, token_R)
    return sums


def slot_sums(teacher: Teacher, state_RH: torch.Tensor, head_DH: torch.Tensor, token_R: torch.Tensor) -> Sums:
    """token_R: the sampled token of each slot as a draft id, -1 outside the draft vocabulary."""
    parts = (teacher.hidden_RH, teacher.lse_R, state_RH, token_R)
    sums = torch.zeros(4, dtype=torch.float64, device=state_RH.device)
    for hidden, lse, state, token in zip(*(part.split(CHUNK) for part in parts), strict=True):
        wide = torch.promote_types(state.dtype, torch.float32)
        # In the head's own dtype, as the policy computed its normaliser: in another one p would not sum to one.
        logits = (hidden.to(teacher.head_DH.dtype) @ teacher.head_DH.T).to(wide) / teacher.temperature
        p = (logits - lse.to(wide).unsqueeze(1)).exp()
        q = ((state @ head_DH.to(state.dtype).T).to(wide) / teacher.temperature).softmax(-1)
        a = torch.where(q >= p, 1.0, q / p)
        mean = (p * a).sum(-1)
        seen = a.gather(1, token.clamp(min=0).unsqueeze(1)).squeeze(1) * (token >= 0)
        best = q.argmax(-1)
        chance = p.gather(1, best.unsqueeze(1)).squeeze(1)
        terms = (
            (token == best).to(wide) - chance,
            chance * (1 - chance),
            seen - mean,
            ((p * a.square()).sum(-1) - mean.square()).clamp(min=0),
        )
        sums += torch.stack([term.double().sum() for term in terms])
    favourite, favourite_var, overlap, overlap_var = sums.tolist()
    return Sums(
        drafted=float(len(token_R)),
        favourite=favourite,
        favourite_var=favourite_var,
        overlap=overlap,
        overlap_var=overlap_var,
    )
