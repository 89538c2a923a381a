"""The drafter's loss and what it predicts about acceptance, in one pass that never holds a full table of logits.

The teacher's distribution at a label position is the same for every TTT step that predicts it, so the pass walks over
*labels* in chunks that fit the cache: teacher logits once, then each step's student logits, loss, gradient, metrics.

    slot r, step i  ->  label r + i        rows of step i for labels [c, d)  =  [c - i, d - i)

What is minimised is a weighted sum of `objectives`; the default is KL(p || q), p the teacher's softmax renormalised
over the draft vocabulary (EAGLE-3, section 3.1). Steps are summed with weights decay^i and divided by the *global*
number of supervised slots of step 0: a step with fewer valid slots must not weigh more. Both softmaxes are taken at the
sampling temperature: that of the student too, because an engine that samples its drafts divides the draft logits by the
request's temperature (vLLM 0.32, `llm_base_proposer`), and a student trained without it would be tempered twice.
Acceptance is measured against the full vocabulary (measures.md, formula 8): greedy drafts are accepted with probability
p(argmax q), sampled ones with sum min(p, q); a token outside the draft vocabulary can never be proposed, and that mass
is `ceiling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from draftkit.drafters.objectives import CHAINED, OF_OVERLAP, Rows, Slopes, chains, weighted

CHUNK = 128  # labels a pass: at 4,096 draft tokens a float32 chunk is 2 MB, near what a core's cache holds
KL = {"kl": 1.0}


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the verifier says at each label. hidden_RH: final-normed states; lse_R: log-sum-exp of the full-vocabulary
    logits over the temperature; top_R int64: the full-vocabulary argmax as a draft id, -1 outside the draft
    vocabulary; token_R int64: the same of the token that the text goes on with; head_DH: the verifier's LM head rows of
    the draft vocabulary; temperature > 0, the student's too."""

    hidden_RH: torch.Tensor
    lse_R: torch.Tensor
    top_R: torch.Tensor
    token_R: torch.Tensor
    head_DH: torch.Tensor
    temperature: float


def drafter_loss(
    states: Sequence[torch.Tensor],
    head_DH: torch.Tensor,
    teacher: Teacher,
    valid_LR: torch.Tensor,
    decay: float,
    denominator: float,
    with_sampled: bool = False,
    objective: Mapping[str, float] = KL,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted objectives over all TTT steps.

    states: per step the normed drafter state [R, H]; head_DH: the drafter's LM head, which gets a gradient if it wants
    one; valid_LR: bool. denominator: the global number of valid slots of step 0. objective: weights by name
    (`objectives`). Returns (scalar loss, metrics): per step [L] sums over valid slots of kl, correct (argmax agrees),
    greedy (p(argmax q)), sampled (sum min(p, q); zeros unless asked for or minimised), ceiling, count; and accept_LR
    float32 = p(argmax q), proposal_LR int64 = argmax q as a draft id (both 0 where not valid).
    """
    weights = [decay**i for i in range(len(states))]
    with_grad = torch.is_grad_enabled()  # inside a Function it is always off
    settings = _Settings(dict(objective), weights, 1.0 / denominator, with_sampled, with_grad)
    loss, *outputs = _FusedLoss.apply(teacher, valid_LR, settings, head_DH, *states)
    names = ("kl", "correct", "greedy", "sampled", "ceiling", "count", "accept_LR", "proposal_LR")
    return loss, dict(zip(names, outputs, strict=True))


@dataclass(frozen=True, slots=True)
class _Settings:
    objective: dict[str, float]
    decays: list[float]
    scale: float
    with_sampled: bool
    with_grad: bool


class _FusedLoss(torch.autograd.Function):
    """Loss, and its gradient already in the forward: the student's logits are in the cache then and never again."""

    @staticmethod
    def forward(ctx, teacher, valid_LR, settings, head, *states):
        steps, rows = valid_LR.shape
        wide = torch.promote_types(head.dtype, torch.float32)
        head_used, objective = head.to(states[0].dtype), settings.objective
        wants_head, *wants_states = ctx.needs_input_grad[3:]
        needs_grad = settings.with_grad and (wants_head or any(wants_states))
        grads = [torch.zeros_like(s) for s in states] if needs_grad else []
        grad_head = torch.zeros_like(head, dtype=wide) if needs_grad and wants_head else None
        sums = torch.zeros(6, steps, dtype=wide, device=head.device)
        loss = torch.zeros((), dtype=wide, device=head.device)
        accept = torch.zeros(steps, rows, dtype=torch.float32, device=head.device)
        proposal = torch.zeros(steps, rows, dtype=torch.int64, device=head.device)
        with_overlap = settings.with_sampled or not OF_OVERLAP.isdisjoint(objective)
        chain = later = None
        if not CHAINED.isdisjoint(objective):
            chain, later = chains(_overlaps(teacher, valid_LR, head_used, states, wide), valid_LR)
        for low, high, log_p, mass in _teacher_chunks(teacher, rows, states[0].dtype, wide):
            p = log_p.exp()
            entropy = (p * log_p).sum(-1)
            for i, first, last, part in _steps_of(low, high, steps):
                ok = valid_LR[i, first:last].to(wide)
                here = slice(first, last)
                token = teacher.token_R[first + i : last + i]
                q, best, lse, cross, token_logit = _student(states[i][here], head_used, teacher, p[part], token, wide)
                kl = entropy[part] - cross + lse
                known = (token >= 0).to(wide)
                full_p = p[part] * mass[part].unsqueeze(1) if with_overlap else None
                overlap = torch.minimum(full_p, q).sum(-1) if with_overlap else torch.zeros_like(kl)
                row = Rows(
                    kl,
                    (lse - token_logit) * known,
                    overlap,
                    None if chain is None else chain[i, here],
                    None if later is None else later[i, here],
                )
                value, slopes = weighted(objective, row, settings.decays[i])
                loss += (value * ok).sum() * settings.scale
                # ---- metrics ----
                chance = p[part].gather(1, best.unsqueeze(1)).squeeze(1) * mass[part]
                right = (best == teacher.top_R[first + i : last + i]).to(wide)
                for k, number in enumerate((kl, right, chance, overlap, mass[part])):
                    sums[k, i] += (number * ok).sum()
                sums[5, i] += ok.sum()
                accept[i, here] = (chance * ok).float()
                proposal[i, here] = best * ok.long()
                # ---- gradient ----
                if needs_grad:
                    scale = ok * (settings.scale / teacher.temperature)
                    delta = _logit_gradient(slopes, scale, q, p[part], full_p, token, known).to(states[i].dtype)
                    grads[i][here] = delta @ head_used
                    if grad_head is not None:
                        grad_head += delta.T @ states[i][here]
        ctx.grads = (grad_head, grads)
        ctx.head_dtype = head.dtype
        outputs = (*sums, accept, proposal)
        ctx.mark_non_differentiable(*outputs)
        return loss, *outputs

    @staticmethod
    def backward(ctx, grad, *_):
        grad_head, grads = ctx.grads
        head = None if grad_head is None else (grad_head * grad).to(ctx.head_dtype)
        return None, None, None, head, *[g * grad.to(g.dtype) for g in grads]


def _teacher_chunks(teacher: Teacher, rows: int, dtype: torch.dtype, wide: torch.dtype):
    """(first label, last label, log p over the draft vocabulary, its mass in the full one), chunk by chunk."""
    head = teacher.head_DH.to(dtype)
    for low in range(0, rows, CHUNK):
        high = min(low + CHUNK, rows)
        logits = (teacher.hidden_RH[low:high].to(dtype) @ head.T).to(wide)
        logits.div_(teacher.temperature)
        inside = logits.logsumexp(-1, keepdim=True)
        mass = (inside.squeeze(-1) - teacher.lse_R[low:high].to(wide)).exp()
        yield low, high, logits.sub_(inside), mass


def _steps_of(low: int, high: int, steps: int):
    """(step, first slot, last slot, rows of the chunk) of each step that predicts labels low .. high."""
    for i in range(steps):
        first, last = max(low - i, 0), high - i
        if last > first:
            yield i, first, last, slice(first + i - low, None)


def _student(state, head, teacher: Teacher, p, token, wide: torch.dtype):
    """(q [n, D], argmax, log-sum-exp of z, sum p z, z of the token), z the logits over the temperature."""
    logits = (state @ head.T).to(wide)
    top, best = logits.max(-1, keepdim=True)  # before the division, which may round two logits into one
    logits.div_(teacher.temperature)
    top = top / teacher.temperature
    cross = (p * logits).sum(-1)
    token_logit = logits.gather(1, token.clamp(min=0).unsqueeze(1)).squeeze(1)
    logits.sub_(top).exp_()
    norm = logits.sum(-1, keepdim=True)
    return logits.div_(norm), best.squeeze(-1), (top + norm.log()).squeeze(-1), cross, token_logit


def _logit_gradient(slopes: Slopes, scale, q, p, full_p, token, known) -> torch.Tensor:
    """[n, D]: d loss / d logits of these rows; q is overwritten."""
    moved = None
    if _matters(slopes.overlap):
        below = torch.where(q < full_p, q, 0.0)
        moved = below.sub_(q * below.sum(-1, keepdim=True)).mul_((scale * slopes.overlap).unsqueeze(1))
    delta = q.mul_((scale * (slopes.kl + slopes.ce * known)).unsqueeze(1))
    if _matters(slopes.kl):
        delta.addcmul_(p, (scale * slopes.kl).unsqueeze(1), value=-1.0)
    if _matters(slopes.ce):
        delta.scatter_add_(1, token.clamp(min=0).unsqueeze(1), -(scale * slopes.ce * known).unsqueeze(1))
    return delta if moved is None else delta.add_(moved)


def _matters(slope: torch.Tensor | float) -> bool:
    return isinstance(slope, torch.Tensor) or slope != 0.0


def _overlaps(teacher: Teacher, valid_LR, head, states, wide: torch.dtype) -> torch.Tensor:
    """[L, R]: sum min(p, q) of every valid slot and step, 0 elsewhere: a pass of its own, before the gradient's."""
    steps, rows = valid_LR.shape
    found = torch.zeros(steps, rows, dtype=wide, device=head.device)
    for low, high, log_p, mass in _teacher_chunks(teacher, rows, states[0].dtype, wide):
        full_p = log_p.exp_().mul_(mass.unsqueeze(1))
        for i, first, last, part in _steps_of(low, high, steps):
            logits = (states[i][first:last] @ head.T).to(wide).div_(teacher.temperature)
            found[i, first:last] = torch.minimum(full_p[part], logits.softmax(-1)).sum(-1)
    return found * valid_LR
