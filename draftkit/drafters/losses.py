"""The drafter's loss and what it predicts about acceptance, in one pass that never holds a full table of logits.

The teacher's distribution at a label position is the same for every TTT step that predicts it, so the pass walks over
*labels* in chunks that fit the cache: teacher logits once, then each step's student logits, loss, gradient, metrics.

    slot r, step i  ->  label r + i        rows of step i for labels [c, d)  =  [c - i, d - i)

Loss of step i: KL(p || q), p the teacher's softmax renormalised over the draft vocabulary (EAGLE-3, section 3.1),
summed with weights decay^i and divided by the *global* number of supervised slots of step 0: a step with fewer valid
slots must not weigh more. Both softmaxes are taken at the sampling temperature: that of the student too, because an
engine that samples its drafts divides the draft logits by the request's temperature (vLLM 0.32, `llm_base_proposer`),
and a student trained without it would be tempered twice. Acceptance is measured against the full vocabulary
(measures.md, formula 8): greedy drafts are accepted with probability p(argmax q), sampled ones with sum min(p, q); a
token outside the draft vocabulary can never be proposed, and that mass is `ceiling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

CHUNK = 128  # labels a pass: at 4,096 draft tokens a float32 chunk is 2 MB, near what a core's cache holds


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the verifier says at each label. hidden_RH: final-normed states; lse_R: log-sum-exp of the full-vocabulary
    logits over the temperature; top_R int64: the full-vocabulary argmax as a draft id, -1 outside the draft
    vocabulary; head_DH: the verifier's LM head rows of the draft vocabulary; temperature > 0, the student's too."""

    hidden_RH: torch.Tensor
    lse_R: torch.Tensor
    top_R: torch.Tensor
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
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted KL over all TTT steps.

    states: per step the normed drafter state [R, H]; head_DH: the drafter's LM head; valid_LR: bool. denominator: the
    global number of valid slots of step 0. Returns (scalar loss, metrics): per step [L] sums over valid slots of
    kl, correct (argmax agrees), greedy (p(argmax q)), sampled (sum min(p, q); zeros unless asked), ceiling, count; and
    accept_LR float32 = p(argmax q), proposal_LR int64 = argmax q as a draft id (both 0 where not valid).
    """
    weights = torch.tensor([decay**i / denominator for i in range(len(states))], dtype=torch.float64)
    with_grad = torch.is_grad_enabled()  # inside a Function it is always off
    loss, *outputs = _FusedKL.apply(teacher, valid_LR, weights, with_sampled, with_grad, head_DH, *states)
    names = ("kl", "correct", "greedy", "sampled", "ceiling", "count", "accept_LR", "proposal_LR")
    return loss, dict(zip(names, outputs, strict=True))


class _FusedKL(torch.autograd.Function):
    """Loss, and its gradient already in the forward: the student's logits are in the cache then and never again."""

    @staticmethod
    def forward(ctx, teacher, valid_LR, weights, with_sampled, with_grad, head, *states):
        steps, rows = valid_LR.shape
        wide = torch.promote_types(head.dtype, torch.float32)
        head_used = head.to(states[0].dtype)
        teacher_head = teacher.head_DH.to(states[0].dtype)
        needs_grad = with_grad and any(ctx.needs_input_grad)
        grads = [torch.zeros_like(s) for s in states] if needs_grad else []
        grad_head = torch.zeros_like(head, dtype=wide) if needs_grad else None
        sums = torch.zeros(6, steps, dtype=wide, device=head.device)
        accept = torch.zeros(steps, rows, dtype=torch.float32, device=head.device)
        proposal = torch.zeros(steps, rows, dtype=torch.int64, device=head.device)
        for low in range(0, rows, CHUNK):
            high = min(low + CHUNK, rows)
            logits = (teacher.hidden_RH[low:high].to(states[0].dtype) @ teacher_head.T).to(wide)
            logits.div_(teacher.temperature)
            inside = logits.logsumexp(-1, keepdim=True)
            mass = (inside.squeeze(-1) - teacher.lse_R[low:high].to(wide)).exp()
            logits.sub_(inside)  # log p over the draft vocabulary
            p = logits.exp()
            entropy = (p * logits).sum(-1)
            for i in range(steps):
                first, last = max(low - i, 0), high - i  # rows of step i that predict these labels
                if last <= first:
                    continue
                part = slice(first + i - low, None)
                ok = valid_LR[i, first:last].to(wide)
                student = (states[i][first:last] @ head_used.T).to(wide)
                top, best = student.max(-1, keepdim=True)  # before the division, which may round two logits into one
                best = best.squeeze(-1)
                student.div_(teacher.temperature)
                top = top / teacher.temperature
                cross = (p[part] * student).sum(-1)
                student.sub_(top).exp_()
                norm = student.sum(-1, keepdim=True)
                kl = entropy[part] - cross + (top + norm.log()).squeeze(-1)
                student.div_(norm)  # q
                chance = p[part].gather(1, best.unsqueeze(1)).squeeze(1) * mass[part]
                right = (best == teacher.top_R[first + i : last + i]).to(wide)
                sampled = (
                    torch.minimum(p[part] * mass[part].unsqueeze(1), student).sum(-1)
                    if with_sampled
                    else torch.zeros_like(kl)
                )
                for k, value in enumerate((kl, right, chance, sampled, mass[part])):
                    sums[k, i] += (value * ok).sum()
                sums[5, i] += ok.sum()
                accept[i, first:last] = (chance * ok).float()
                proposal[i, first:last] = best * ok.long()
                if needs_grad:
                    scale = ok * weights[i].to(wide) / teacher.temperature
                    student.sub_(p[part]).mul_(scale.unsqueeze(1))
                    delta = student.to(states[i].dtype)
                    grads[i][first:last] = delta @ head_used
                    grad_head += delta.T @ states[i][first:last]
        ctx.grads = (grad_head, grads)
        ctx.head_dtype = head.dtype
        loss = (sums[0] * weights.to(sums)).sum()
        outputs = (*sums, accept, proposal)
        ctx.mark_non_differentiable(*outputs)
        return loss, *outputs

    @staticmethod
    def backward(ctx, grad, *_):
        grad_head, grads = ctx.grads
        return (
            None,
            None,
            None,
            None,
            None,
            (grad_head * grad).to(ctx.head_dtype),
            *[g * grad.to(g.dtype) for g in grads],
        )
