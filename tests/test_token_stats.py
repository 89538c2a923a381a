"""Log-probabilities and statistics of chosen tokens against float64 loops over whole distributions."""

from __future__ import annotations

import math

import pytest
import torch

from draftkit.rl import token_stats
from draftkit.rl.token_stats import kept_floor, token_logp, token_statistics
from draftkit.types import Sampling

N, H, V = 23, 8, 37
LAWS = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(top_k=5),
    Sampling(temperature=1.4, top_p=0.8),
    Sampling(temperature=0.7, top_p=0.9, top_k=9),
    Sampling(top_k=V + 3, top_p=0.999),
]


@pytest.fixture(params=[(4, 100), (64, 2**22), (1, 1)], ids=["chunks", "whole", "one"])
def chunks(request, monkeypatch) -> None:
    """Rows and columns of logits held at once."""
    monkeypatch.setattr(token_stats, "LOGIT_ROWS", request.param[0])
    monkeypatch.setattr(token_stats, "LOGITS_HELD", request.param[1])


def problem(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=made, dtype=torch.float64).to(dtype)
    head = torch.randn(V, H, generator=made, dtype=torch.float64).to(dtype)
    return hidden, head, torch.randint(V, (N,), generator=made)


def law(logits: list[float], sampling: Sampling, sampled: int) -> list[float]:
    """The distribution that vLLM samples from, by its own order of operations, in float64; `sampled` is never cut."""
    scaled = [x / sampling.temperature for x in logits]
    kept = set(range(len(scaled)))
    if sampling.top_k:
        border = sorted(scaled, reverse=True)[min(sampling.top_k, len(scaled)) - 1]
        kept = {v for v in kept if scaled[v] >= border}
    if sampling.top_p < 1:
        total = sum(math.exp(scaled[v]) for v in kept)
        mass = 0.0
        for v in sorted(kept, key=lambda v: scaled[v])[:-1]:
            mass += math.exp(scaled[v]) / total
            if mass <= 1 - sampling.top_p:
                kept.discard(v)
    kept.add(sampled)
    total = sum(math.exp(scaled[v]) for v in kept)
    return [math.exp(x) / total if v in kept else 0.0 for v, x in enumerate(scaled)]


@pytest.mark.parametrize("sampling", LAWS, ids=str)
def test_statistics_are_those_of_a_loop(sampling, chunks):
    hidden, head, token = problem()
    logits = (hidden.double() @ head.double().T).tolist()
    ours = token_statistics(hidden, head, token, sampling)
    for n, sampled in enumerate(token.tolist()):
        p = law(logits[n], sampling, sampled)
        entropy = -sum(x * math.log(x) for x in p if x)
        whole = [x / sampling.temperature for x in logits[n]]
        expected = {
            "logp": math.log(p[sampled]),
            "entropy": entropy,
            "var": sum(x * (math.log(x) + entropy) ** 2 for x in p if x),
            "cdf": sum(x for v, x in enumerate(p) if (-p[v], v) < (-p[sampled], sampled)),
            "lse": math.log(sum(math.exp(x) for x in whole)),
            "max": max(whole),
            "top": whole.index(max(whole)),
        }
        for name, value in expected.items():
            assert float(getattr(ours, name)[n]) == pytest.approx(value, rel=2e-5, abs=2e-5), name


def test_no_law_is_another(chunks):
    """The parameters of the test above would be the same test if truncation did nothing here."""
    hidden, head, token = problem()
    seen = {tuple(token_statistics(hidden, head, token, s).entropy.tolist()) for s in LAWS}
    assert len(seen) == len(LAWS)


@pytest.mark.parametrize("sampling", LAWS, ids=str)
def test_logp_and_gradients_are_those_of_autograd(sampling, chunks):
    hidden, head, token = problem(torch.float64)
    weight = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = hidden @ head.T
    dropped = torch.tensor(
        [[x == 0 for x in law(row, sampling, t)] for row, t in zip(logits.tolist(), token.tolist(), strict=True)]
    )
    results = []
    for reference in (True, False):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        if reference:
            masked = (h @ w.T / sampling.temperature).masked_fill(dropped, -torch.inf)
            logp = masked.log_softmax(-1).gather(1, token.unsqueeze(1)).squeeze(1)
        else:
            logp = token_logp(h, w, token, sampling)
        (logp * weight).sum().backward()
        results.append((logp.detach(), h.grad, w.grad))
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_gradcheck():
    hidden, head, token = problem(torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logp(h, w, token[:5], Sampling(temperature=0.8)),
        (hidden[:5].requires_grad_(), head.requires_grad_()),
    )


def test_float32_gradients_do_not_drift_with_the_number_of_chunks(monkeypatch):
    """Summed in float32 over many tokens, they stay as near to float64 as one product is."""
    made = torch.Generator().manual_seed(3)
    hidden, head = torch.randn(3000, H, generator=made), torch.randn(V, H, generator=made)
    token = torch.randint(V, (3000,), generator=made)
    monkeypatch.setattr(token_stats, "LOGITS_HELD", 3000 * 2)
    grads = []
    for dtype in (torch.float64, torch.float32):
        h, w = hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()
        token_logp(h, w, token, Sampling()).sum().backward()
        grads.append((h.grad.double(), w.grad.double()))
    for exact, ours in zip(*grads, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


def test_bfloat16_is_off_by_its_own_rounding_only(chunks):
    """Inputs exactly representable: what differs is the rounding of logits and of the slopes to bfloat16."""
    hidden, head, token = problem(torch.bfloat16)
    exact = token_statistics(hidden.double(), head.double(), token, Sampling())
    ours = token_statistics(hidden, head, token, Sampling())
    assert ours.logp.dtype == torch.float32
    for name in ("logp", "entropy", "var", "cdf", "lse", "max"):
        torch.testing.assert_close(getattr(ours, name), getattr(exact, name), rtol=0.02, atol=0.06)
    grads = []
    for dtype in (torch.float64, torch.bfloat16):
        h, w = hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()
        token_logp(h, w, token, Sampling()).sum().backward()
        assert h.grad.dtype == w.grad.dtype == dtype
        grads.append((h.grad.double(), w.grad.double()))
    for expected, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.03, atol=0.03 * float(expected.abs().max()))


def test_forward_of_training_equals_the_statistics(chunks):
    for sampling in LAWS:
        hidden, head, token = problem()
        ours = token_logp(hidden, head, token, sampling)
        torch.testing.assert_close(ours, token_statistics(hidden, head, token, sampling).logp, rtol=1e-6, atol=1e-6)


def test_a_frozen_head_costs_no_gradient():
    hidden, head, token = problem()
    token_logp(hidden.requires_grad_(), head, token, Sampling()).sum().backward()
    assert head.grad is None and hidden.grad is not None


def test_tied_logits_are_counted_by_id():
    """Three tokens share the highest logit: those before the sampled one, and no others, are below it."""
    head = torch.tensor([[1.0], [2.0], [0.5], [2.0], [2.0]])
    hidden, token = torch.ones(3, 1), torch.tensor([1, 3, 4])
    read = token_statistics(hidden, head, token, Sampling())
    p = torch.tensor([1.0, 2.0, 0.5, 2.0, 2.0]).softmax(0)
    torch.testing.assert_close(read.cdf, torch.tensor([0.0, 1.0, 2.0]) * p[1])


@pytest.mark.engine
def test_truncation_is_vllms():
    """No engine, but vLLM's own function: sort, mask below top-k, cumulate from the bottom."""
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    made = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(400, 500, generator=made)
    for top_k, top_p in ((0, 0.7), (20, 1.0), (50, 0.9), (1, 0.3), (0, 0.999)):
        k = torch.full((400,), top_k or 500) if top_k else None
        p = torch.full((400,), top_p) if top_p < 1 else None
        theirs = sampler.apply_top_k_top_p_pytorch(logits.clone(), k, p) > -torch.inf
        ours = logits >= kept_floor(logits, Sampling(top_k=top_k, top_p=top_p)).unsqueeze(1)
        assert (ours != theirs).sum() <= 4, (top_k, top_p)  # some roundings at a border in 200,000 are not a rule
        assert 0 < ours.sum() < ours.numel()


def test_no_tokens_at_all():
    hidden, head, _ = problem()
    nothing = torch.zeros(0, dtype=torch.int64)
    assert token_statistics(hidden[:0], head, nothing, Sampling()).logp.shape == (0,)
    logp = token_logp(hidden[:0].requires_grad_(), head, nothing, Sampling())
    logp.sum().backward()
    assert logp.shape == (0,)
