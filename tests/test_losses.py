"""The fused loss against a naive one made of full tables of logits and autograd."""

from __future__ import annotations

import pytest
import tiny
import torch
import torch.nn.functional as F

from draftkit.data.capture import StreamedStates, collate
from draftkit.drafters import losses
from draftkit.drafters.losses import Teacher, drafter_loss
from draftkit.drafters.objectives import CHAINED, OBJECTIVES, OF_OVERLAP
from draftkit.engine import Engine
from draftkit.train.documents import document
from draftkit.types import Sampling, SpecConfig

ROWS, STEPS, HIDDEN, VOCAB, DECAY = 23, 3, 6, 40, 0.8
CHOSEN = torch.tensor([0, 3, 4, 7, 11, 12, 20, 21, 22, 31, 39])  # the draft vocabulary
RUNS = (9, 1, 2, 11)  # slots come in runs; a run's last i slots have no label at step i


@pytest.fixture(params=[4, 128])
def chunk(request, monkeypatch) -> int:
    monkeypatch.setattr(losses, "CHUNK", request.param)
    return request.param


def _valid() -> torch.Tensor:
    left = torch.cat([torch.arange(n, 0, -1) for n in RUNS])
    return left.unsqueeze(0) > torch.arange(STEPS).unsqueeze(1)


class _Case:
    """Random verifier and drafter states. Only `target`, the verifier's full head, knows the whole vocabulary."""

    def __init__(self, temperature: float = 1.0, dtype: torch.dtype = torch.float64) -> None:
        made = torch.Generator().manual_seed(3)
        normal = lambda *shape: torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype)  # noqa: E731
        self.temperature, self.hidden, self.target = temperature, normal(ROWS, HIDDEN), normal(VOCAB, HIDDEN)
        self.states = [normal(ROWS, HIDDEN).requires_grad_() for _ in range(STEPS)]
        self.head = normal(len(CHOSEN), HIDDEN).requires_grad_()
        self.log_p = (self.hidden.double() @ self.target.double().T / temperature).log_softmax(-1)
        logits = self.hidden.double() @ self.target.double().T / temperature
        draft_id = torch.full((VOCAB,), -1)
        draft_id[CHOSEN] = torch.arange(len(CHOSEN))
        self.teacher = Teacher(
            hidden_RH=self.hidden,
            lse_R=logits.logsumexp(-1),
            top_R=draft_id[logits.argmax(-1)],
            token_R=draft_id[torch.randint(VOCAB, (ROWS,), generator=made)],
            head_DH=self.target[CHOSEN],
            temperature=temperature,
        )

    def fused(self, **kwargs):
        return drafter_loss(self.states, self.head, self.teacher, _valid(), DECAY, 17.0, **kwargs)

    def naive(self):
        """(loss, sums): everything from the definitions, rows one step at a time."""
        names = ("kl", "correct", "greedy", "sampled", "ceiling", "count")
        sums = {name: torch.zeros(STEPS, dtype=torch.float64) for name in names}
        accept, proposal = torch.zeros(STEPS, ROWS), torch.zeros(STEPS, ROWS, dtype=torch.int64)
        loss = torch.zeros((), dtype=torch.float64)
        for i, valid in enumerate(_valid()):
            for r in valid.nonzero().flatten().tolist():
                full = self.log_p[r + i].exp()
                q = (self.head.double() @ self.states[i][r].double() / self.temperature).log_softmax(-1)
                renormalised = self.log_p[r + i][CHOSEN].log_softmax(-1)
                kl = F.kl_div(q, renormalised, reduction="sum", log_target=True)
                loss = loss + DECAY**i * kl / 17.0
                best = q.argmax()
                accept[i, r], proposal[i, r] = full[CHOSEN[best]], best
                values = (
                    kl.detach(),
                    CHOSEN[best] == full.argmax(),
                    full[CHOSEN[best]],
                    torch.minimum(full[CHOSEN], q.detach().exp()).sum(),
                    full[CHOSEN].sum(),
                    1,
                )
                for name, value in zip(names, values, strict=True):
                    sums[name][i] += value
        return loss, sums | {"accept_LR": accept, "proposal_LR": proposal}


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_loss_gradient_and_metrics_equal_the_naive_ones(chunk, temperature):
    case = _Case(temperature)
    loss, metrics = case.fused(with_sampled=True)
    want_loss, want = case.naive()
    torch.testing.assert_close(loss, want_loss, rtol=1e-12, atol=0)
    for name, value in want.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-6 if name == "accept_LR" else 1e-11, atol=1e-12)
    inputs = [case.head, *case.states]
    for got, expected in zip(
        torch.autograd.grad(loss * 3, inputs), torch.autograd.grad(want_loss * 3, inputs), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-14)


# ---- every objective, by its definition and autograd --------------------------------------------------------------


def _by_definition(name: str, case: _Case) -> torch.Tensor:
    """The loss of one objective from full tables, a slot at a time, for autograd."""
    total = torch.zeros((), dtype=torch.float64)
    for r in range(ROWS):
        chain = torch.ones((), dtype=torch.float64)
        for i, valid in enumerate(_valid()):
            if not valid[r]:
                break
            full = case.log_p[r + i].exp()[CHOSEN]
            log_q = (case.head @ case.states[i][r] / case.temperature).log_softmax(-1)
            alpha = torch.minimum(full, log_q.exp()).sum()
            chain = chain * alpha
            kl = F.kl_div(log_q, case.log_p[r + i][CHOSEN].log_softmax(-1), reduction="sum", log_target=True)
            token = case.teacher.token_R[r + i]
            mix = torch.exp(-3 * alpha.detach())
            value = {
                "kl": kl,
                "ce": -log_q[token] if token >= 0 else torch.zeros((), dtype=torch.float64),
                "tv": 1 - alpha,
                "lk-alpha": -alpha.log(),
                "lk-hybrid": mix * kl + (1 - mix) * (1 - alpha),
                "tv-chain": 1 - chain,
            }[name]
            total = total + value * (1 if name == "tv-chain" else DECAY**i) / 17.0
    return total


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_and_its_gradient_equal_its_definition(chunk, name, temperature):
    case = _Case(temperature)
    assert (case.teacher.token_R < 0).any() and (case.teacher.token_R >= 0).any()
    inputs = [case.head, *case.states]
    loss, _ = case.fused(objective={name: 1.0})
    want = _by_definition(name, case)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    for got, expected in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(want, inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-14)


def test_objectives_add_up_by_their_weights(chunk):
    case, inputs_of = _Case(), lambda c: [c.head, *c.states]
    mixed = {"ce": 0.3, "lk-hybrid": 2.0, "tv-chain": 0.7, "kl": 0.1}
    loss, _ = case.fused(objective=mixed)
    want = sum(weight * _by_definition(name, case) for name, weight in mixed.items())
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    for got, expected in zip(
        torch.autograd.grad(loss, inputs_of(case)), torch.autograd.grad(want, inputs_of(case)), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-14)


def test_compiled_passes_equal_eager_ones(monkeypatch):
    case, mixed = _Case(0.9, torch.float32), {"kl": 1.0, "ce": 0.2, "tv": 0.5}
    inputs = [case.head, *case.states]
    loss, metrics = case.fused(objective=mixed, with_sampled=True)
    grads = torch.autograd.grad(loss, inputs)
    monkeypatch.setattr(losses, "COMPILED_FROM", 1)
    again, others = case.fused(objective=mixed, with_sampled=True)
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
    for name, value in metrics.items():
        torch.testing.assert_close(others[name], value, rtol=1e-5, atol=1e-6)
    for got, expected in zip(torch.autograd.grad(again, inputs), grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_a_frozen_head_gets_no_gradient_and_the_states_the_same_one(chunk):
    case = _Case()
    loss, _ = case.fused()
    want = torch.autograd.grad(loss, case.states)
    case.head = case.head.detach()
    loss, _ = case.fused()
    for got, expected in zip(torch.autograd.grad(loss, case.states), want, strict=True):
        assert torch.equal(got, expected)
    assert not case.head.requires_grad


@pytest.mark.parametrize("name", sorted(OF_OVERLAP - CHAINED))
def test_an_objective_of_acceptance_raises_it(name):
    """Gradient steps on one objective of the overlap raise the share of sampled drafts that would be accepted."""
    case = _Case()
    states = [s.detach().clone().requires_grad_() for s in case.states]
    optimizer = torch.optim.Adam(states, lr=0.05)
    shares = []
    for _ in range(60):
        loss, metrics = drafter_loss(
            states, case.head.detach(), case.teacher, _valid(), DECAY, 17.0, objective={name: 1.0}
        )
        shares.append(float((metrics["sampled"] / metrics["count"]).mean()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert shares[-1] > shares[0] + 0.1


def test_gradcheck(chunk):
    case = _Case(0.8)

    def scalar(head, *states):
        return drafter_loss(states, head, case.teacher, _valid(), DECAY, 17.0)[0]

    assert torch.autograd.gradcheck(scalar, (case.head, *case.states), fast_mode=True)


def test_bfloat16_states_with_float32_master_head():
    exact, case = _Case(1.3), _Case(1.3, torch.bfloat16)
    case.head = exact.head.detach().to(torch.bfloat16).float().requires_grad_()
    loss, metrics = case.fused(with_sampled=True)
    want_loss, want = case.naive()  # float64 arithmetic on the same rounded inputs
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want_loss, rtol=0.01, atol=0)
    for name in ("kl", "greedy", "sampled", "ceiling"):
        torch.testing.assert_close(metrics[name].double(), want[name], rtol=0.02, atol=0.01)
    grads = torch.autograd.grad(loss, [case.head, *case.states])
    assert [g.dtype for g in grads] == [torch.float32, *[torch.bfloat16] * STEPS]
    for got, expected in zip(grads, torch.autograd.grad(want_loss, [case.head, *case.states]), strict=True):
        torch.testing.assert_close(got.double(), expected.double(), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_a_drafter_that_equals_its_teacher_has_no_loss_and_full_acceptance(temperature):
    """With the verifier's own states and head: KL 0, sampled acceptance = the ceiling, argmax as good as it can be. At
    any temperature, since engines divide the logits of both by it."""
    case = _Case(temperature)
    shifted = [torch.cat([case.hidden[i:], case.hidden[:i]]) for i in range(STEPS)]  # slot r of step i says label r + i
    loss, metrics = drafter_loss(shifted, case.target[CHOSEN], case.teacher, _valid(), DECAY, 17.0, with_sampled=True)
    assert abs(loss.item()) < 1e-12
    best = case.log_p.exp()[:, CHOSEN].amax(-1)
    for i, valid in enumerate(_valid()):
        rows = valid.nonzero().flatten() + i
        assert metrics["greedy"][i].item() == pytest.approx(best[rows].sum().item())
        # q is renormalised over the draft vocabulary, so min(p, q) = p there
        assert metrics["sampled"][i].item() == pytest.approx(metrics["ceiling"][i].item())


def test_argmax_outside_the_draft_vocabulary_is_never_correct():
    case = _Case()
    outside = case.teacher.top_R < 0
    assert 0 < outside.sum() < ROWS
    _, metrics = case.fused()
    for i, valid in enumerate(_valid()):
        labels = valid.nonzero().flatten() + i
        assert metrics["correct"][i] <= (~outside[labels]).sum()


def test_logits_of_any_size_stay_finite():
    case = _Case()
    case.states = [(s.detach() * 500).requires_grad_() for s in case.states]
    loss, _ = case.fused()
    want, _ = case.naive()
    torch.testing.assert_close(loss, want, rtol=1e-11, atol=0)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, [case.head, *case.states]))


def test_no_gradient_is_computed_for_evaluation(monkeypatch):
    """Evaluation under no_grad must not pay for the fused gradient: it allocates none."""
    case, made = _Case(), []
    zeros_like = torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda x, **k: made.append(x.shape) or zeros_like(x, **k))
    with torch.no_grad():
        quiet, _ = case.fused(with_sampled=True)
    assert case.head.shape not in made
    loud, _ = case.fused(with_sampled=True)
    assert case.head.shape in made
    assert quiet == loud.detach() and not quiet.requires_grad


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [0.5, 1.6])
def test_an_engine_tempers_sampled_drafts_as_the_loss_does(temperature):
    """First drafts accepted in vLLM, round by round, against sum min(p, q) of the same rounds: at the temperature for
    the drafter as well, it fits; without it, it does not."""
    drafter, verifier = tiny.trained_drafter(), tiny.verifier()
    spec = SpecConfig("eagle3", str(tiny.drafter_dir()), 1, "probabilistic")
    with Engine(tiny.verifier_dir(), recipe_engine=tiny.SECTION, spec=spec) as engine:
        trace = engine.trace_drafts()
        sampling = Sampling(temperature=temperature, max_tokens=64, ignore_eos=True, seed=1)
        answers = engine.generate(tiny.prompts(96, seed=3), sampling)
    proposed: dict[int, list[int]] = {i: [] for i in range(len(answers))}
    for request, tokens in trace:
        proposed[int(request.split("-")[0])].append(tokens[0])

    docs = [document(a, 1000) for a in answers]
    batch = collate(StreamedStates(verifier, docs, keep=len(docs)), range(len(docs)), 1)
    p = ((batch.last_NH[batch.slot_R + 1] @ verifier.head_VH.T).double() / temperature).softmax(-1)
    with torch.no_grad():
        logits = (drafter(batch)[0] @ drafter.lm_head.weight.to(batch.aux_NF.dtype).T).double()
    rows, accepted, row = [], [], 0
    for i, (answer, (_, first, last)) in enumerate(zip(answers, batch.segments, strict=True)):
        at = 0
        for token in proposed[i]:
            if at >= last - first:
                break
            rows.append(row + at)
            accepted.append(token == answer.response_ids[at + 1])
            at += 1 + accepted[-1]
        row += last - first
    hits = torch.tensor(accepted, dtype=torch.float64)

    def z(drafts_at: float) -> float:
        q = torch.zeros_like(p)
        q[:, drafter.draft_to_target_D] = (logits / drafts_at).softmax(-1)
        chance = torch.minimum(p, q).sum(-1)[rows]
        return float((hits - chance).sum() / (chance * (1 - chance)).sum().sqrt())

    assert len(rows) > 3000 and abs(z(temperature)) < 4
    assert abs(z(1.0)) > 6
