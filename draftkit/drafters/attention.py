"""Test-time-training attention whose memory grows with the length, not with its square.

At TTT step i the query of slot p sees the step-0 keys of its document up to p and, of steps 1..i, only its own slot
(EAGLE-3, arXiv 2503.01840, section 3.2 and the reference mask). The softmax over both parts is one softmax:

    keys of step 0:   start ... first-1 | first ... p        two flash blocks: a full one, a causal square
    keys of step j:                               p          one column per step, 1 <= j <= i

Each flash block returns its log-sum-exp, so the parts merge exactly. The backward needs no second derivation: with
the *merged* output and log-sum-exp in place of its own, the flash backward yields the gradient of the whole softmax,
because dS = P * (dO . V - dO . O) with P = exp(S - lse) holds for any subset of the keys.

Left out: a fused GPU kernel with these segments. Off the CPU the same blocks run as plain chunked products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Segment = tuple[int, int, int]
CHUNK = 512  # query rows of one product off the CPU


def ttt_attention(
    q_RHD: torch.Tensor,
    k_NHD: torch.Tensor,
    v_NHD: torch.Tensor,
    own_k: Sequence[torch.Tensor],
    own_v: Sequence[torch.Tensor],
    segments: Sequence[Segment],
    scale: float,
) -> torch.Tensor:
    """Attention of R slots. k, v: step-0 keys and values of all N tokens; own_k, own_v: those of steps 1..i, each
    [R, H, D]. Keys have as many heads as queries. segments as in `DraftBatch`. Returns [R, H, D] in q's dtype."""
    tensors = (q_RHD, k_NHD, v_NHD, *own_k, *own_v)
    if q_RHD.device.type == "cpu":
        # Small bfloat16 products are slow on CPUs: in float32 the backward took half the time (43 against 20 ms).
        tensors = tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)
    return _TTTAttention.apply(tuple(segments), scale, len(own_k), *tensors).to(q_RHD.dtype)


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, segments, scale, num_own, q, k, v, *own):
        own_k, own_v = own[:num_own], own[num_own:]
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide)
        for row, end, start, first, last in _rows(segments):
            block = _forward(q[row:end], k[first:last], v[first:last], True, scale)
            if first > start:
                block = _merge(block, _forward(q[row:end], k[start:first], v[start:first], False, scale))
            out[row:end], lse[row:end] = block
        if num_own:
            scores = torch.stack([(q.to(wide) * kj.to(wide)).sum(-1) * scale for kj in own_k])
            total = torch.logaddexp(lse, scores.logsumexp(0))
            merged = out.to(wide) * (lse - total).exp().unsqueeze(-1)
            for score, vj in zip(scores, own_v, strict=True):
                merged += (score - total).exp().unsqueeze(-1) * vj.to(wide)
            out, lse = merged.to(q.dtype), total
        ctx.segments, ctx.scale, ctx.num_own = segments, scale, num_own
        ctx.save_for_backward(q, k, v, out, lse, *own)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, *own = ctx.saved_tensors
        own_k, own_v, scale = own[: ctx.num_own], own[ctx.num_own :], ctx.scale
        grad = grad.contiguous()
        wide = lse.dtype
        dq, dk, dv = torch.zeros_like(q, dtype=wide), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for row, end, start, first, last in _rows(ctx.segments):
            for low, high, causal in ((first, last, True), (start, first, False)):
                if low < high:
                    parts = _backward(
                        grad[row:end], q[row:end], k[low:high], v[low:high], out[row:end], lse[row:end], causal, scale
                    )
                    for total, slot, part in (
                        (dq, (row, end), parts[0]),
                        (dk, (low, high), parts[1]),
                        (dv, (low, high), parts[2]),
                    ):
                        total[slot[0] : slot[1]] += part
        d_own_k, d_own_v = [], []
        if ctx.num_own:
            wide_grad, wide_q = grad.to(wide), q.to(wide)
            delta = (wide_grad * out.to(wide)).sum(-1)
            for kj, vj in zip(own_k, own_v, strict=True):
                p = ((wide_q * kj.to(wide)).sum(-1) * scale - lse).exp()
                ds = (p * ((wide_grad * vj.to(wide)).sum(-1) - delta) * scale).unsqueeze(-1)
                dq += ds * kj.to(wide)
                d_own_k.append((ds * wide_q).to(kj.dtype))
                d_own_v.append((p.unsqueeze(-1) * wide_grad).to(vj.dtype))
        return None, None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *d_own_k, *d_own_v


def _rows(segments: Sequence[Segment]):
    """Each segment with the rows of the slots that it covers: (row, end, start, first, last)."""
    row = 0
    for start, first, last in segments:
        yield row, row + last - first, start, first, last
        row += last - first


def _merge(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]):
    """Two softmax parts over disjoint keys, (out, lse) each, as one."""
    lse = torch.logaddexp(a[1], b[1])
    weights = [(part[1] - lse).exp().unsqueeze(-1) for part in (a, b)]
    return (a[0] * weights[0] + b[0] * weights[1]).to(a[0].dtype), lse


# ---- one block: every query against every key, or the causal square -------------------------------------------------


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    return x.squeeze(0).transpose(0, 1)


def _has_flash(q: torch.Tensor) -> bool:
    return q.device.type == "cpu"


def _forward(q, k, v, causal: bool, scale: float):
    """([Q, H, D], lse [Q, H])."""
    if _has_flash(q):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(*map(_heads_first, (q, k, v)), 0.0, causal, attn_mask=None, scale=scale)
        return _tokens_first(out), _tokens_first(lse)
    outs, lses = [], []
    for low in range(0, len(q), CHUNK):
        scores = _scores(q, k, low, causal, scale)
        lses.append(scores.logsumexp(-1))
        outs.append(torch.einsum("hqk,khd->qhd", (scores - lses[-1].unsqueeze(-1)).exp().to(v.dtype), v))
    return torch.cat(outs), torch.cat(lses, 1).transpose(0, 1)


def _backward(grad, q, k, v, out, lse, causal: bool, scale: float):
    if _has_flash(q):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        tensors = [_heads_first(x) for x in (grad, q, k, v, out, lse)]
        return [_tokens_first(g) for g in flash(*tensors, 0.0, causal, attn_mask=None, scale=scale)]
    dq, dk, dv = [], torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(0, 1)
    for low in range(0, len(q), CHUNK):
        rows = slice(low, low + CHUNK)
        p = (_scores(q, k, low, causal, scale) - lse[rows].transpose(0, 1).unsqueeze(-1)).exp()
        dp = torch.einsum("qhd,khd->hqk", grad[rows], v).to(lse.dtype)
        ds = (p * (dp - delta[:, rows].unsqueeze(-1)) * scale).to(q.dtype)
        dq.append(torch.einsum("hqk,khd->qhd", ds, k))
        dk += torch.einsum("hqk,qhd->khd", ds, q[rows])
        dv += torch.einsum("hqk,qhd->khd", p.to(q.dtype), grad[rows])
    return torch.cat(dq), dk, dv


def _scores(q, k, low: int, causal: bool, scale: float) -> torch.Tensor:
    """[H, Q, K] in at least float32 for query rows low .. low + CHUNK."""
    rows = q[low : low + CHUNK]
    scores = torch.einsum("qhd,khd->hqk", rows, k).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if causal:
        position = torch.arange(low, low + len(rows), device=q.device).unsqueeze(1)
        scores.masked_fill_(torch.arange(len(k), device=q.device) > position, float("-inf"))
    return scores
