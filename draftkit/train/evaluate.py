"""What is logged of a step, and the same on held-out documents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch

from draftkit.data.batch import plan_epoch
from draftkit.data.capture import States, Verifier, collate
from draftkit.drafters.base import Drafter
from draftkit.drafters.losses import Teacher, drafter_loss
from draftkit.recipe import Recipe
from draftkit.train.predict import agreement, walk
from draftkit.types import DraftBatch, SpecCounters


class TeacherView:
    """The verifier's distribution at a batch's labels: p[label of slot r] = position slot_R + 1."""

    def __init__(self, drafter: Drafter, verifier: Verifier) -> None:
        ids, head = drafter.draft_to_target_D, verifier.head_VH.detach()
        self.temperature = verifier.temperature
        self.head_DH = head if len(ids) == len(head) else head[ids]  # the whole vocabulary needs no copy
        self.to_draft_V = torch.full((verifier.head_VH.shape[0],), -1, device=ids.device)
        self.to_draft_V[ids] = torch.arange(len(ids), device=ids.device)

    def at(self, batch: DraftBatch) -> Teacher:
        label = batch.slot_R + 1
        following = batch.tokens_N[(label + 1).clamp(max=len(batch.tokens_N) - 1)]
        return Teacher(
            batch.last_NH[label],
            batch.lse_N[label],
            self.to_draft_V[batch.top_N[label]],
            self.to_draft_V[following],
            self.head_DH,
            self.temperature,
        )


def summarise(sums: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Sums over slots of `drafter_loss` -> what is logged."""
    count = sums["count"].clamp(min=1)
    rate = {name: (sums[name] / count).tolist() for name in ("kl", "correct", "greedy", "sampled", "ceiling")}
    return {
        "loss": rate["kl"][0],
        "kl": rate["kl"],
        "cond_acc": rate["correct"],
        "expected_acceptance_greedy": rate["greedy"],
        "expected_acceptance_sampled": rate["sampled"],
        "vocab_ceiling": rate["ceiling"][0],
        "simulated_acceptance_length": chain_length(rate["correct"]),
    }


def chain_length(rates: Sequence[float]) -> float:
    """1 + the sum of the products along the chain: tokens a round whose steps are accepted at these rates."""
    return sum(accumulate(rates, mul), 1.0)


@torch.no_grad()
def evaluate(drafter: Drafter, teacher: TeacherView, states: States, recipe: Recipe) -> dict[str, Any]:
    """The same metrics on held-out documents, and the walk's counters: acceptance as serving would meet it."""
    steps, sums, served = recipe.train.ttt_steps, {}, SpecCounters()
    max_p, slots = 0.0, 0
    for members in plan_epoch([len(d.tokens) for d in states.documents], recipe.train.tokens_per_batch, 0, 0):
        batch = collate(states, members, steps, drafter.device)
        _, metrics = drafter_loss(
            drafter(batch), drafter.head_DH, teacher.at(batch), batch.valid_LR, recipe.train.ttt_decay, 1.0, True
        )
        for name in ("kl", "correct", "greedy", "sampled", "ceiling", "count"):
            sums[name] = sums.get(name, 0) + metrics[name]
        served = served + walk(agreement(drafter.draft_to_target_D[metrics["proposal_LR"]], batch), batch.segments)
        label = batch.slot_R + 1
        max_p += float((batch.max_N[label] - batch.lse_N[label]).exp().sum())
        slots += len(label)
    return summarise(sums) | {
        "walk_acceptance_length": served.acceptance_length,
        "walk_survival": served.survival(steps),
        "verifier_max_p": max_p / slots,  # no greedy draft can be accepted more often than this at the temperature
    }
