"""TTT attention against one dense masked softmax, on the flash path of the CPU and on the chunked path of the rest."""

from __future__ import annotations

import pytest
import torch

from draftkit.drafters import attention
from draftkit.drafters.attention import ttt_attention

HEADS, DIM, SCALE = 2, 4, 0.37
# Two documents of 9 and 6 tokens: the first has two runs of slots, the second is all slots; token 14 is never seen.
SEGMENTS = ((0, 2, 5), (0, 7, 8), (9, 9, 14))
TOKENS, SLOTS = 15, 9


@pytest.fixture(params=["flash", "chunked"])
def path(request, monkeypatch) -> str:
    if request.param == "chunked":
        monkeypatch.setattr(attention, "_has_flash", lambda q: False)
        monkeypatch.setattr(attention, "CHUNK", 2)
    return request.param


def _tensors(num_own: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v and num_own more keys and values."""
    made = torch.Generator().manual_seed(num_own)
    shapes = [(SLOTS, HEADS, DIM), (TOKENS, HEADS, DIM), (TOKENS, HEADS, DIM), *[(SLOTS, HEADS, DIM)] * 2 * num_own]
    return [torch.randn(s, generator=made, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def _run(num_own: int, q, k, v, *own) -> torch.Tensor:
    return ttt_attention(q, k, v, own[:num_own], own[num_own:], SEGMENTS, SCALE)


def _dense(num_own: int, q, k, v, *own) -> torch.Tensor:
    """Row r against all TOKENS + num_own * SLOTS keys at once, behind one mask."""
    keys, values = torch.cat([k, *own[:num_own]]), torch.cat([v, *own[num_own:]])
    seen = torch.zeros(SLOTS, len(keys), dtype=torch.bool)
    slots = [(start, p) for start, first, last in SEGMENTS for p in range(first, last)]
    for row, (start, p) in enumerate(slots):
        seen[row, start : p + 1] = True
        for j in range(num_own):
            seen[row, TOKENS + j * SLOTS + row] = True
    scores = torch.einsum("rhd,khd->rhk", q, keys) * SCALE
    weights = scores.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(-1)
    return torch.einsum("rhk,khd->rhd", weights, values)


@pytest.mark.parametrize("num_own", [0, 1, 3])
def test_equals_dense_softmax(path, num_own):
    tensors = _tensors(num_own)
    out, want = _run(num_own, *tensors), _dense(num_own, *tensors)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-14)
    upstream = torch.randn(out.shape, dtype=out.dtype)
    for got, expected in zip(
        torch.autograd.grad(out, tensors, upstream), torch.autograd.grad(want, tensors, upstream), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-13)


def test_gradcheck(path):
    assert torch.autograd.gradcheck(lambda *t: _run(2, *t), _tensors(2))


def test_unseen_tokens_get_no_gradient(path):
    tensors = _tensors(1)
    _, dk, dv, *_ = torch.autograd.grad(_run(1, *tensors).sum(), tensors)
    for unseen in (5, 6, 8, 14):  # after a run of slots, between runs: later than every slot that could see them
        seen_later = any(start <= unseen < last for start, _, last in SEGMENTS)
        assert dk[unseen].any() == seen_later and dv[unseen].any() == seen_later


def test_large_scores_do_not_overflow(path):
    q, k, v, own_k, own_v = _tensors(1)
    out = ttt_attention(q * 300, k * 30, v, [own_k * 30], [own_v], SEGMENTS, SCALE)
    torch.testing.assert_close(out, _dense(1, q * 300, k * 30, v, own_k * 30, own_v), rtol=1e-11, atol=1e-13)


def test_bfloat16_is_as_good_as_a_dense_bfloat16_softmax(path):
    exact = _tensors(2)
    rounded = [t.detach().to(torch.bfloat16).requires_grad_() for t in exact]
    widened = [t.detach().double().requires_grad_() for t in rounded]
    out, want = _run(2, *rounded), _dense(2, *widened)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), want, rtol=0.02, atol=0.02)
    got = torch.autograd.grad(out.sum(), rounded)
    for g, expected in zip(got, torch.autograd.grad(want.sum(), widened), strict=True):
        assert g.dtype == torch.bfloat16
        torch.testing.assert_close(g.double(), expected, rtol=0.05, atol=0.05)


def test_memory_grows_with_length_not_with_its_square():
    """Bytes kept for the backward and the largest temporary of the forward, at twice the length."""

    def kept_and_largest(tokens: int) -> tuple[int, int]:
        q, k, v, own_k, own_v = (torch.randn(tokens, HEADS, DIM, requires_grad=True) for _ in range(5))
        kept: dict[int, int] = {}

        def save(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
        ):
            ttt_attention(q, k, v, [own_k], [own_v], ((0, 0, tokens),), SCALE)
        return sum(kept.values()), max(event.cpu_memory_usage for event in profile.events())

    short, long = kept_and_largest(1024), kept_and_largest(2048)
    assert long[0] == 2 * short[0]
    assert long[1] <= 2.1 * short[1]
