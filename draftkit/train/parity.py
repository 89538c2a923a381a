"""Is the drafter that vLLM serves the drafter that was trained? Asked before a run calls itself finished.

1. Proposals: vLLM answers held-out prompts greedily with the exported drafter; every round's proposals are recorded and
   compared with what the PyTorch drafter proposes at the same slots of the same text.
2. Acceptance at temperature 0: the rounds that PyTorch's proposals predict by walking the text, against those counted.
3. Acceptance at the rollout temperature: first drafts accepted against the sum of p(draft) over the same rounds, in
   standard deviations. A sampler that does not sample from the policy shows here.

A mismatch raises RunFailed and names the likely cause: the drafter is changed in one known way at a time (auxiliary
layers, vocabulary map, norm flag, rope, head) until PyTorch proposes what vLLM proposed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from draftkit.console import say
from draftkit.data.capture import StreamedStates, Verifier, collate
from draftkit.drafters.eagle3 import Eagle3
from draftkit.engine import Engine
from draftkit.errors import RunFailed
from draftkit.recipe import Recipe
from draftkit.train.predict import agreement, rounds, walk
from draftkit.types import Document, DraftBatch, Generation, Sampling, SpecConfig, SpecCounters

MIN_AGREEMENT = 0.9  # share of first proposals that agree; bfloat16 flips near-ties, a wrong tensor leaves ~ nothing
MAX_LENGTH_GAP = 0.1  # acceptance length at temperature 0, as a share of its excess over 1
MAX_Z = 5.0
Trace = list[list[list[int]]]  # per request, per round, the proposed tokens


def check_parity(
    recipe: Recipe, model: Path, directory: Path, drafter: Eagle3, verifier: Verifier, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Serve `directory` and compare it with `drafter`. Returns the figures; raises RunFailed on a mismatch."""
    k, temperature = recipe.train.ttt_steps, recipe.sampling.temperature or 1.0
    section = recipe.engine.model_copy(update={"compiled": False, "max_num_seqs": max(len(prompts), 1)})
    greedy = Sampling(temperature=0.0, max_tokens=recipe.eval.max_tokens)
    sampled = dataclasses.replace(greedy, temperature=temperature, seed=recipe.train.seed)
    with Engine(model, recipe_engine=section, spec=SpecConfig("eagle3", str(directory), k)) as engine:
        trace = engine.trace_drafts()
        answers = engine.generate(prompts, greedy)
        proposals = _by_request(trace, len(prompts))
        hot = engine.generate(prompts, sampled)

    batch = _batch(verifier, answers, k)
    ours = _proposals(drafter, batch)
    first, position = _agreement(ours, proposals, batch, answers)
    predicted = walk(agreement(ours, batch), batch.segments)
    served = sum((g.spec for g in answers), SpecCounters())
    z, expected_share, served_share = _sampled_check(drafter, verifier, hot, k)
    result = {
        "prompts": len(prompts),
        "first_proposal_agreement": first,
        "agreement_per_position": position,
        "greedy_acceptance_length": {"predicted": predicted.acceptance_length, "served": served.acceptance_length},
        "greedy_survival": {"predicted": predicted.survival(k), "served": served.survival(k)},
        "sampled_first_acceptance": {"predicted": expected_share, "served": served_share, "z": z},
    }
    gap = abs(served.acceptance_length - predicted.acceptance_length)
    if first < MIN_AGREEMENT or gap > MAX_LENGTH_GAP * max(predicted.acceptance_length - 1, 0.2):
        cause = likely_cause(drafter, verifier, answers, proposals, k)
        raise RunFailed(
            f"The served drafter is not the trained one: {first:.0%} of first proposals agree, acceptance length "
            f"{served.acceptance_length:.2f} served against {predicted.acceptance_length:.2f} predicted.",
            f"Likely cause: {cause}.",
        )
    if abs(z) > MAX_Z:
        raise RunFailed(
            f"At temperature {temperature:g} vLLM accepted {served_share:.3f} of first drafts where the verifier's own "
            f"distribution gives {expected_share:.3f} ({z:+.1f} standard deviations).",
            "The engine does not sample from the policy: run `draftkit doctor`.",
        )
    say(
        f"parity: {first:.1%} of first proposals agree; acceptance length {served.acceptance_length:.2f} served, "
        f"{predicted.acceptance_length:.2f} predicted at temperature 0; first draft at temperature {temperature:g} "
        f"{served_share:.3f} served, {expected_share:.3f} predicted (z {z:+.1f})"
    )
    return result


def _by_request(trace: Sequence[tuple[str, list[int]]], num_requests: int) -> Trace:
    rows: Trace = [[] for _ in range(num_requests)]
    for request, tokens in trace:
        rows[int(request.split("-")[0])].append(tokens)
    return rows


def _batch(verifier: Verifier, answers: Sequence[Generation], k: int) -> DraftBatch:
    docs = [
        Document((*g.prompt_ids, *g.response_ids), (False,) * len(g.prompt_ids) + (True,) * len(g.response_ids))
        for g in answers
        if len(g.response_ids) > 1
    ]
    return collate(StreamedStates(verifier, docs, keep=len(docs)), range(len(docs)), k, verifier.device)


@torch.no_grad()
def _proposals(drafter: Eagle3, batch: DraftBatch) -> torch.Tensor:
    """[L, R] verifier ids that the drafter proposes at every slot, feeding itself."""
    return torch.stack([drafter.propose(state) for state in drafter(batch, own_tokens=True)])


def _agreement(
    ours: torch.Tensor, proposals: Trace, batch: DraftBatch, answers: Sequence[Generation]
) -> tuple[float, list[float]]:
    """(share of rounds whose first proposal agrees, per position the share among rounds equal so far)."""
    steps = len(ours)
    equal, reached = [0] * steps, [0] * steps
    row = 0
    useful = [(g, p) for g, p in zip(answers, proposals, strict=True) if len(g.response_ids) > 1]
    for (answer, theirs), (_, first, last) in zip(useful, batch.segments, strict=True):
        at = 0  # index of the round's last known token in the response
        for tokens in theirs:
            if at >= last - first:
                break
            for i in range(steps):
                reached[i] += 1
                if int(ours[i, row + at]) != tokens[i]:
                    break
                equal[i] += 1
            actual = answer.response_ids[at + 1 : at + 1 + steps]
            matches = [a == b for a, b in zip(tokens, actual, strict=False)] + [False]
            at += matches.index(False) + 1
        row += last - first
    shares = [e / r if r else 0.0 for e, r in zip(equal, reached, strict=True)]
    return shares[0], shares


@torch.no_grad()
def _sampled_check(
    drafter: Eagle3, verifier: Verifier, answers: Sequence[Generation], k: int
) -> tuple[float, float, float]:
    """(z, expected share, served share) of first drafts accepted over the rounds of these sampled answers."""
    batch = _batch(verifier, answers, k)
    ours = _proposals(drafter, batch)
    rows = [row for row, _ in rounds(agreement(ours, batch), batch.segments)]
    label = (batch.slot_R + 1)[rows]
    logits = (batch.last_NH[label] * verifier.head_VH[ours[0, rows]]).float().sum(-1) / verifier.temperature
    chance = (logits - batch.lse_N[label]).exp().clamp(max=1.0)
    served = sum((g.spec for g in answers), SpecCounters())
    share = served.survival(k)[0]
    deviation = float((chance * (1 - chance)).sum().sqrt()) / len(rows)
    return (share - float(chance.mean())) / max(deviation, 1e-9), float(chance.mean()), share


def likely_cause(drafter: Eagle3, verifier: Verifier, answers: Sequence[Generation], proposals: Trace, k: int) -> str:
    """The known mistake under which PyTorch proposes what vLLM proposed, or that none of them explains it."""
    best = ("none of the known ones (auxiliary layers, vocabulary map, norm flag, rope, head)", MIN_AGREEMENT)
    for name, batch, changed in _variants(drafter, verifier, answers, k):
        share, _ = _agreement(_proposals(changed, batch), proposals, batch, answers)
        if share > best[1]:
            best = (name, share)
    return best[0]


def _variants(drafter: Eagle3, verifier: Verifier, answers: Sequence[Generation], k: int):
    batch = _batch(verifier, answers, k)

    def changed(edit: Callable[[Eagle3], None]) -> Eagle3:
        other = copy.deepcopy(drafter)
        with torch.no_grad():
            edit(other)
        return other

    def flip_norm(d: Eagle3) -> None:
        d.config = dataclasses.replace(d.config, norm_before_residual=not d.config.norm_before_residual)

    def verifier_head(d: Eagle3) -> None:
        d.lm_head.weight.copy_(verifier.head_VH[d.draft_to_target_D])

    yield "vocabulary map (d2t): draft ids were proposed as verifier ids", batch, changed(lambda d: d.d2t.zero_())
    yield "norm flags: norm_before_residual differs", batch, changed(flip_norm)
    yield "shared head: vLLM proposed with the verifier's LM head", batch, changed(verifier_head)
    yield "rope: another base frequency", batch, changed(lambda d: d.rope.inv_freq.copy_(_default_rope(d)))
    for shift in (-1, 1):
        shifted = Verifier.shifted(verifier, shift)
        yield f"auxiliary layers: served as {list(shifted.aux_layers)}", _batch(shifted, answers, k), drafter


def _default_rope(drafter: Eagle3) -> torch.Tensor:
    dim = drafter.config.head_dim
    return 1.0 / (10000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
