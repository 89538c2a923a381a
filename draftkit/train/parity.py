"""Is the drafter that vLLM serves the drafter that was trained? Asked before a run calls itself finished.

1. Proposals: vLLM answers held-out prompts greedily with the exported drafter; every round's proposals are recorded and
   compared with what the PyTorch drafter proposes at the same slots of the same text.
2. Acceptance at temperature 0: the rounds that PyTorch's proposals predict by walking the text, against those counted.
3. Acceptance at the rollout temperature: first drafts accepted against the sum of p(draft) over the same rounds, in
   standard deviations. A sampler that does not sample from the policy shows here.
4. Known mistakes (`mistakes`): the PyTorch drafter is changed in one way at a time. None may propose what vLLM proposed
   more often than the drafter as it is: a wrong rope base in the served `config.json` leaves 92% of the demo drafter's
   first proposals as they were, and no threshold sees it.

A mismatch raises RunFailed and names the likely cause, the change that agrees best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftkit.console import say
from draftkit.data.capture import StreamedStates, Verifier, collate
from draftkit.drafters.base import Drafter
from draftkit.engine import Engine
from draftkit.errors import RunFailed
from draftkit.recipe import Recipe
from draftkit.train import mistakes
from draftkit.train.predict import agreement, own_proposals, rounds, walk
from draftkit.train.served import spec_config
from draftkit.types import Document, DraftBatch, Generation, Sampling, SpecCounters

MIN_AGREEMENT = 0.9  # share of first proposals that agree; bfloat16 flips near-ties, a wrong tensor leaves ~ nothing
MAX_LENGTH_GAP = 0.1  # acceptance length at temperature 0, as a share of its excess over 1
MAX_Z = 5.0  # of the sampled acceptance
RIVAL_Z = 3.0  # of the rounds that only a known mistake explains, against those that only the drafter as it is explains
NO_KNOWN_CAUSE = "none of the known ones"
Trace = list[list[list[int]]]  # per request, per round, the proposed tokens


def check_parity(
    recipe: Recipe, model: Path, directory: Path, drafter: Drafter, verifier: Verifier, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Serve `directory` and compare it with `drafter`. Returns the figures; raises RunFailed on a mismatch."""
    k, temperature = recipe.train.ttt_steps, recipe.sampling.temperature or 1.0
    section = recipe.engine.model_copy(update={"compiled": False, "max_num_seqs": max(len(prompts), 1)})
    greedy = Sampling(temperature=0.0, max_tokens=recipe.eval.max_tokens)
    sampled = dataclasses.replace(greedy, temperature=temperature, seed=recipe.train.seed)
    with Engine(model, recipe_engine=section, spec=spec_config(drafter, directory, k)) as engine:
        trace = engine.trace_drafts()
        answers = engine.generate(prompts, greedy)
        proposals = _by_request(trace, len(prompts))
        hot = engine.generate(prompts, sampled)

    batch = _batch(verifier, answers, k)
    ours = own_proposals(drafter, batch)
    leading = _leading(ours, proposals, batch, answers)
    cause, rival = _best_mistake(drafter, verifier, answers, proposals, k)
    predicted = walk(agreement(ours, batch), batch.segments)
    served = sum((g.spec for g in answers), SpecCounters())
    z, expected_share, served_share = _sampled_check(drafter, verifier, hot, k)
    result = {
        "prompts": len(prompts),
        "first_proposal_agreement": _share(leading),
        "agreement_per_position": [_share(leading[leading >= i] - i) for i in range(k)],
        "greedy_acceptance_length": {"predicted": predicted.acceptance_length, "served": served.acceptance_length},
        "greedy_survival": {"predicted": predicted.survival(k), "served": served.survival(k)},
        "sampled_first_acceptance": {"predicted": expected_share, "served": served_share, "z": z},
    }
    gap = abs(served.acceptance_length - predicted.acceptance_length)
    mistaken = _explains_better(rival, leading)
    far_apart = gap > MAX_LENGTH_GAP * max(predicted.acceptance_length - 1, 0.2)
    if mistaken or far_apart or _share(leading) < MIN_AGREEMENT:
        known = _share(rival) > max(MIN_AGREEMENT, _share(leading))
        raise RunFailed(
            f"The served drafter is not the trained one: {_share(leading):.0%} of first proposals agree, acceptance "
            f"length {served.acceptance_length:.2f} served against {predicted.acceptance_length:.2f} predicted.",
            f"Likely cause: {f'{cause} ({_share(rival):.0%} agree with that)' if known else NO_KNOWN_CAUSE}.",
        )
    if abs(z) > MAX_Z:
        raise RunFailed(
            f"At temperature {temperature:g} vLLM accepted {served_share:.3f} of first drafts where the verifier's own "
            f"distribution gives {expected_share:.3f} ({z:+.1f} standard deviations).",
            "The engine does not sample from the policy: run `draftkit doctor`.",
        )
    say(
        f"parity: {_share(leading):.1%} of first proposals agree; acceptance length "
        f"{served.acceptance_length:.2f} served, {predicted.acceptance_length:.2f} predicted at temperature 0; "
        f"first draft at temperature {temperature:g} {served_share:.3f} served, {expected_share:.3f} predicted "
        f"(z {z:+.1f})"
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


def _leading(ours: torch.Tensor, proposals: Trace, batch: DraftBatch, answers: Sequence[Generation]) -> torch.Tensor:
    """Per round of the engine, how many leading proposals are the same. The rounds follow from what was served alone,
    so that two drafters can be compared round by round."""
    steps = len(ours)
    result: list[int] = []
    row = 0
    useful = [(g, p) for g, p in zip(answers, proposals, strict=True) if len(g.response_ids) > 1]
    for (answer, theirs), (_, first, last) in zip(useful, batch.segments, strict=True):
        at = 0  # index of the round's last known token in the response
        for tokens in theirs:
            if at >= last - first:
                break
            result.append(_common(ours[:, row + at].tolist(), tokens))
            at += _common(tokens, answer.response_ids[at + 1 : at + 1 + steps]) + 1
        row += last - first
    return torch.tensor(result)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return ([x == y for x, y in zip(a, b, strict=False)] + [False]).index(False)


def _share(leading: torch.Tensor) -> float:
    """Share of rounds whose first proposal agrees."""
    return float((leading > 0).double().mean()) if len(leading) else 0.0


@torch.no_grad()
def _sampled_check(
    drafter: Drafter, verifier: Verifier, answers: Sequence[Generation], k: int
) -> tuple[float, float, float]:
    """(z, expected share, served share) of first drafts accepted over the rounds of these sampled answers."""
    batch = _batch(verifier, answers, k)
    ours = own_proposals(drafter, batch)
    rows = [row for row, _ in rounds(agreement(ours, batch), batch.segments)]
    label = (batch.slot_R + 1)[rows]
    logits = (batch.last_NH[label] * verifier.head_VH[ours[0, rows]]).float().sum(-1) / verifier.temperature
    chance = (logits - batch.lse_N[label]).exp().clamp(max=1.0)
    served = sum((g.spec for g in answers), SpecCounters())
    share = served.survival(k)[0]
    deviation = float((chance * (1 - chance)).sum().sqrt()) / len(rows)
    return (share - float(chance.mean())) / max(deviation, 1e-9), float(chance.mean()), share


def _explains_better(rival: torch.Tensor, leading: torch.Tensor) -> bool:
    """Sign test over the rounds that one of the two explains and the other does not."""
    gained, lost = int(((rival > 0) & (leading == 0)).sum()), int(((rival == 0) & (leading > 0)).sum())
    return gained - lost > RIVAL_Z * (gained + lost) ** 0.5


def _best_mistake(
    drafter: Drafter, verifier: Verifier, answers: Sequence[Generation], proposals: Trace, k: int
) -> tuple[str, torch.Tensor]:
    """(name, `_leading`) of the known mistake under which PyTorch proposes most of what vLLM proposed."""
    batch = _batch(verifier, answers, k)
    tried = [
        (name, _leading(own_proposals(changed, batch), proposals, batch, answers))
        for name, changed in mistakes.of_drafter(drafter, verifier)
    ]
    for name, other in mistakes.of_states(drafter, verifier):
        shifted = _batch(other, answers, k)
        tried.append((name, _leading(own_proposals(drafter, shifted), proposals, shifted, answers)))
    return max(tried, key=lambda one: _share(one[1]))
