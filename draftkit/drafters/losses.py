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

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from draftkit.drafters.objectives import CHAINED, OF_OVERLAP, Rows, chains, weighted

CHUNK = 128  # labels a pass: at 4,096 draft tokens a float32 chunk is 2 MB, near what a core's cache holds
COMPILED_FROM = 2048  # draft tokens from which the passes over the logits are compiled
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
        run = _kernels(len(head))
        for low, high, t in _teacher_chunks(teacher, rows, states[0].dtype, run):
            for i, first, last, part in _steps_of(low, high, steps):
                ok, here = valid_LR[i, first:last].to(wide), slice(first, last)
                token = teacher.token_R[first + i : last + i]
                logits = states[i][here] @ head_used.T
                best = logits.max(-1).indices  # of a bfloat16 table seven times as fast as argmax
                lse, cross, overlap = run(_student_rows)(
                    logits, t.logits[part], t.norm[part], t.mass[part], teacher.temperature, with_overlap
                )
                kl = t.entropy[part] - cross + lse
                known = (token >= 0).to(wide)
                of_token = logits.gather(1, token.clamp(min=0).unsqueeze(1)).squeeze(1).to(wide) / teacher.temperature
                row = Rows(
                    kl,
                    (lse - of_token) * known,
                    overlap,
                    None if chain is None else chain[i, here],
                    None if later is None else later[i, here],
                )
                value, slopes = weighted(objective, row, settings.decays[i])
                loss += (value * ok).sum() * settings.scale
                # ---- metrics ----
                chance = t.logits[part].gather(1, best.unsqueeze(1)).squeeze(1).to(wide) / teacher.temperature
                chance = (chance - t.norm[part]).exp() * t.mass[part]
                right = (best == teacher.top_R[first + i : last + i]).to(wide)
                for k, number in enumerate((kl, right, chance, overlap, t.mass[part])):
                    sums[k, i] += (number * ok).sum()
                sums[5, i] += ok.sum()
                accept[i, here] = (chance * ok).float()
                proposal[i, here] = best * ok.long()
                # ---- gradient ----
                if needs_grad:
                    scale = ok * (settings.scale / teacher.temperature)
                    delta = run(_logit_gradient)(
                        logits,
                        t.logits[part],
                        t.norm[part],
                        t.mass[part],
                        lse,
                        scale * (slopes.kl + slopes.ce * known),
                        scale * slopes.kl,
                        scale * slopes.overlap if _matters(slopes.overlap) else None,
                        teacher.temperature,
                    )
                    if _matters(slopes.ce):
                        pull = -(scale * slopes.ce * known).to(delta.dtype)
                        delta.scatter_add_(1, token.clamp(min=0).unsqueeze(1), pull.unsqueeze(1))
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


@dataclass(frozen=True, slots=True)
class _TeacherChunk:
    """logits [n, D] as the LM head gave them; norm, entropy, mass [n]: log-sum-exp over the draft vocabulary of the
    logits over the temperature, entropy of p renormalised there (negative), and the draft vocabulary's share of p."""

    logits: torch.Tensor
    norm: torch.Tensor
    entropy: torch.Tensor
    mass: torch.Tensor


def _teacher_chunks(teacher: Teacher, rows: int, dtype: torch.dtype, run: Callable):
    """(first label, last label, what the teacher says of them), chunk by chunk."""
    head = teacher.head_DH.to(dtype)
    for low in range(0, rows, CHUNK):
        high = min(low + CHUNK, rows)
        logits = teacher.hidden_RH[low:high].to(dtype) @ head.T
        norm, entropy = run(_teacher_rows)(logits, teacher.temperature)
        yield low, high, _TeacherChunk(logits, norm, entropy, (norm - teacher.lse_R[low:high].to(norm.dtype)).exp())


def _steps_of(low: int, high: int, steps: int):
    """(step, first slot, last slot, rows of the chunk) of each step that predicts labels low .. high."""
    for i in range(steps):
        first, last = max(low - i, 0), high - i
        if last > first:
            yield i, first, last, slice(first + i - low, None)


# ---- what touches every logit: eager on small tables, one compiled pass on large ones -------------------------------
# Eagerly each line reads and writes the whole table: 128 rows of 49,152 took 165 ms on two AMX cores, compiled 22.


def _kernels(width: int) -> Callable:
    """How to run the three functions below on tables of that width."""
    return _compiled if width >= COMPILED_FROM else lambda function: function


@functools.cache
def _compiled(function: Callable) -> Callable:
    # One thread: workers forked after an engine wait for OpenMP threads that they do not have.
    return torch.compile(function, dynamic=True, options={"compile_threads": 1})


def _wide(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def _teacher_rows(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-sum-exp, sum p log p), [n] each."""
    z = _wide(logits, temperature)
    norm = z.logsumexp(-1)
    log_p = z - norm.unsqueeze(1)
    return norm, (log_p.exp() * log_p).sum(-1)


def _student_rows(
    logits: torch.Tensor,
    teacher: torch.Tensor,
    norm: torch.Tensor,
    mass: torch.Tensor,
    temperature: float,
    with_overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-sum-exp of the student's logits, sum p z, sum min(p, q) over the full vocabulary), [n] each."""
    z = _wide(logits, temperature)
    lse = z.logsumexp(-1)
    p = (_wide(teacher, temperature) - norm.unsqueeze(1)).exp()
    cross = (p * z).sum(-1)
    if not with_overlap:
        return lse, cross, torch.zeros_like(lse)
    q = (z - lse.unsqueeze(1)).exp()
    return lse, cross, torch.minimum(p * mass.unsqueeze(1), q).sum(-1)


def _logit_gradient(
    logits: torch.Tensor,
    teacher: torch.Tensor,
    norm: torch.Tensor,
    mass: torch.Tensor,
    lse: torch.Tensor,
    of_q: torch.Tensor,
    of_p: torch.Tensor,
    of_overlap: torch.Tensor | None,
    temperature: float,
) -> torch.Tensor:
    """[n, D] in the logits' dtype: of_q q - of_p p, and of_overlap times how the overlap moves."""
    q = (_wide(logits, temperature) - lse.unsqueeze(1)).exp()
    p = (_wide(teacher, temperature) - norm.unsqueeze(1)).exp()
    delta = q * of_q.unsqueeze(1) - p * of_p.unsqueeze(1)
    if of_overlap is not None:
        below = torch.where(q < p * mass.unsqueeze(1), q, 0.0)
        delta = delta + (below - q * below.sum(-1, keepdim=True)) * of_overlap.unsqueeze(1)
    return delta.to(logits.dtype)


def _matters(slope: torch.Tensor | float) -> bool:
    return isinstance(slope, torch.Tensor) or slope != 0.0


def _overlaps(teacher: Teacher, valid_LR, head, states, wide: torch.dtype) -> torch.Tensor:
    """[L, R]: sum min(p, q) of every valid slot and step, 0 elsewhere: a pass of its own, before the gradient's."""
    steps, rows = valid_LR.shape
    found = torch.zeros(steps, rows, dtype=wide, device=head.device)
    run = _kernels(len(head))
    for low, high, t in _teacher_chunks(teacher, rows, states[0].dtype, run):
        for i, first, last, part in _steps_of(low, high, steps):
            logits = states[i][first:last] @ head.T
            rows_of = (logits, t.logits[part], t.norm[part], t.mass[part], teacher.temperature, True)
            found[i, first:last] = run(_student_rows)(*rows_of)[2]
    return found * valid_LR
