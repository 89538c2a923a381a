"""The policy's next-token distribution at chosen positions, without ever holding all of its logits.

    hidden_NH @ head_VH.T / temperature = logits            the policy's law: softmax(logits)
    top-k, then top-p on what is left, in vLLM's order       what was really sampled, `Sampling` says which

`token_logp` is differentiable: its forward goes over a few rows at a time and keeps two numbers a token; its backward
computes the logits again, a few vocabulary columns at a time, so that every gradient is summed in float32 and written
once. `token_statistics` reads off, from one pass over the same logits, what the losslessness tests need (of the law
that was sampled) and the drafter's teacher (of the whole law, as `data.capture` defines it).

A token that was sampled is never truncated away, even where the engine's rounding put the border elsewhere. Logits that
tie at the border are all kept (vLLM keeps them by sort order). The truncated gradient takes the set of kept tokens as
given: it moves probability within the set.

Suffixes: N chosen tokens, V vocabulary, H hidden size; rows: a few of the N, columns: a few of the V. Logits of
bfloat16 states are bfloat16 products, as the engine's and `data.capture`'s are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from draftkit.types import Sampling

LOGIT_ROWS = 64  # rows of full-vocabulary logits held at once: few enough to stay near the cache
LOGITS_HELD = 2**22  # of the backward: N tokens times so many columns that they stay under this


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """[N] each, of the sampled law: logp of the token, entropy, var: variance of log p under p, cdf: mass of the tokens
    before it, in falling order of probability and then by id (a sampler that favours its favourites moves this further
    than an order by id alone); of the untruncated logits: lse, max and top, their argmax. float32, top int64."""

    logp: torch.Tensor
    entropy: torch.Tensor
    var: torch.Tensor
    cdf: torch.Tensor
    lse: torch.Tensor
    max: torch.Tensor
    top: torch.Tensor


def token_logp(
    hidden_NH: torch.Tensor, head_VH: torch.Tensor, token_N: torch.Tensor, sampling: Sampling
) -> torch.Tensor:
    """Log-probabilities of the tokens under the sampled law, float32 [N], with gradients to both factors."""
    return _TokenLogp.apply(hidden_NH, head_VH, token_N, sampling)


@torch.no_grad()
def token_statistics(
    hidden_NH: torch.Tensor, head_VH: torch.Tensor, token_N: torch.Tensor, sampling: Sampling
) -> TokenStatistics:
    ids_V = torch.arange(len(head_VH), device=head_VH.device)
    parts = [
        _statistics_of_rows(_logits(hidden, head_VH, sampling), token, ids_V, sampling)
        for hidden, token in zip(hidden_NH.split(LOGIT_ROWS), token_N.split(LOGIT_ROWS), strict=True)
    ]
    return TokenStatistics(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(TokenStatistics)))


def truncates(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1


def kept_floor(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Smallest logit of each row that top-k, then top-p leave in.

    Kept is what comes before a mass of top_p is reached, from the top: vLLM drops, from the bottom, while the mass is
    at most 1 - top_p.
    """
    num_kept = min(sampling.top_k, logits.shape[-1]) or logits.shape[-1]
    falling = logits.topk(num_kept).values if num_kept < logits.shape[-1] else logits.sort(descending=True).values
    if sampling.top_p == 1:
        return falling[:, -1]
    p = falling.softmax(-1)
    last = (p.cumsum(-1) - p < sampling.top_p).sum(-1, keepdim=True) - 1
    return falling.gather(1, last).squeeze(1)


# ---- one pass over a few rows -----------------------------------------------------------------------------------


def _logits(hidden: torch.Tensor, head: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    logits = hidden @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # float64 stays, for checks of gradients
    return logits if sampling.temperature in (0.0, 1.0) else logits.div_(sampling.temperature)


def _statistics_of_rows(
    logits: torch.Tensor, token: torch.Tensor, ids_V: torch.Tensor, sampling: Sampling
) -> TokenStatistics:
    token = token.unsqueeze(1)
    maximum, top = logits.max(-1, keepdim=True)
    dropped = None
    if truncates(sampling):
        dropped = (logits < kept_floor(logits, sampling).unsqueeze(1)).scatter_(1, token, False)
    below = logits.sub_(maximum)  # log of the weight: zero at the favourite
    weight = below.exp()
    lse = maximum + weight.sum(-1, keepdim=True).log()
    if dropped is not None:
        weight.masked_fill_(dropped, 0)
    mass = weight.sum(-1, keepdim=True)
    mean = torch.linalg.vecdot(weight, below).unsqueeze(1) / mass
    own = below.gather(1, token)
    logp = own - mass.log()
    before = below > own
    tied = below == own
    if tied.sum() > len(tied):  # bfloat16 logits often are
        before |= tied & (ids_V < token)
    cdf = torch.linalg.vecdot(weight, before.to(weight.dtype)).unsqueeze(1) / mass
    # The variance of log p is that of the logits; taken around the mean, which cancels nothing.
    variance = torch.linalg.vecdot(weight.div_(mass), below.sub_(mean).square_()).unsqueeze(1)
    columns = (logp, mass.log() - mean, variance, cdf, lse, maximum)
    return TokenStatistics(*(column.squeeze(1).float() for column in columns), top.squeeze(1))


class _TokenLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, head_VH, token_N, sampling):
        logp, lse, floor = [], [], []
        for hidden, token in zip(hidden_NH.split(LOGIT_ROWS), token_N.split(LOGIT_ROWS), strict=True):
            logits, token = _logits(hidden, head_VH, sampling), token.unsqueeze(1)
            chosen = logits.gather(1, token)
            if truncates(sampling):
                lowest = kept_floor(logits, sampling)
                dropped = logits < lowest.unsqueeze(1)
                # Halfway to the next logit: the backward's product may round another way.
                floor.append((lowest + logits.masked_fill(~dropped, -torch.inf).amax(-1).clamp(lowest - 1)) / 2)
                logits.masked_fill_(dropped.scatter_(1, token, False), -torch.inf)
            maximum = logits.amax(-1, keepdim=True)
            mass = logits.sub_(maximum).exp_().sum(-1, keepdim=True)
            lse.append(mass.log() + maximum)
            logp.append(chosen - lse[-1])
        lse_N, logp_N = torch.cat(lse).squeeze(1), torch.cat(logp).squeeze(1)
        ctx.save_for_backward(hidden_NH, head_VH, token_N, lse_N, torch.cat(floor) if floor else None)
        ctx.sampling = sampling
        return logp_N

    @staticmethod
    def backward(ctx, grad_N):
        hidden_NH, head_VH, token_N, lse_N, floor_N = ctx.saved_tensors
        scale_N = grad_N / (ctx.sampling.temperature or 1.0)
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=lse_N.dtype)
        grad_head_VH = torch.empty_like(head_VH) if ctx.needs_input_grad[1] else None
        width = max(1, LOGITS_HELD // max(1, len(token_N)))
        for first in range(0, len(head_VH), width):
            head = head_VH[first : first + width]
            logits = _logits(hidden_NH, head, ctx.sampling)
            own = ((token_N >= first) & (token_N < first + len(head))).nonzero().squeeze(1)
            column = token_N[own] - first
            chosen = logits[own, column]
            dropped = None if floor_N is None else logits < floor_N.unsqueeze(1)
            p = logits.sub_(lse_N.unsqueeze(1)).exp_()
            if dropped is not None:
                p.masked_fill_(dropped, 0)
            p[own, column] = (chosen - lse_N[own]).exp_() - 1  # d logp / d logit = [its own] - p
            slope = p.mul_(-scale_N.unsqueeze(1)).to(hidden_NH.dtype)
            grad_hidden_NH += slope @ head
            if grad_head_VH is not None:
                torch.mm(slope.T, hidden_NH, out=grad_head_VH[first : first + width])
        return grad_hidden_NH.to(hidden_NH.dtype), grad_head_VH, None, None
