"""The drafter against `reference_eagle3`: forward, loss and every gradient, packed and unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import reference_eagle3 as reference
import torch

from draftkit.data.batch import layout
from draftkit.drafters import losses
from draftkit.drafters.eagle3 import Eagle3, Eagle3Config
from draftkit.drafters.losses import Teacher, drafter_loss
from draftkit.types import Document, DraftBatch

VOCAB, DRAFT, AUX, TARGET_HIDDEN, DECAY, TEMPERATURE = 31, 11, 2, 6, 0.8, 0.7
CONFIG = Eagle3Config(
    hidden_size=8,
    target_hidden_size=TARGET_HIDDEN,
    intermediate_size=10,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT,
    aux_layers=(1, 3),
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    max_position_embeddings=64,
)
MASKS = (
    "...xxxxxx",
    "..xxxx..xx.xxx.xxxxx.",  # several turns: runs of 4, 2, 3 and 5 supervised tokens
    ".....",  # nothing supervised
    "xxxx",  # supervised from the first token: no slot before it
    "...x.x",  # never two in a row: no slot
    "....xx",  # one slot, valid at step 0 only
)


class _ExactRope(torch.nn.Module):
    """LlamaRotaryEmbedding turns angles in float32, as vLLM does; here they are float64 like everything else."""

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exponents = torch.arange(0, CONFIG.head_dim, 2, dtype=torch.float64) / CONFIG.head_dim
        angles = positions.double().unsqueeze(-1) / CONFIG.rope_parameters["rope_theta"] ** exponents
        angles = torch.cat([angles, angles], -1).unsqueeze(1)
        return angles.cos(), angles.sin()


VARIANTS = (
    {"num_hidden_layers": 2},
    {"num_hidden_layers": 3, "norm_before_residual": True, "norm_output": True},
    {"fc_norm": True, "norm_output": True},  # EAGLE-3.1
    {"norm_before_fc": True, "num_hidden_layers": 2},
    {"qk_norm": True},
    {"attention_bias": True, "num_hidden_layers": 2},
    {"attention_bias": True, "qk_norm": True},
)


def _drafter(norm_before_residual: bool = False, num_kv_heads: int = 2, exact_rope: bool = True, **variant) -> Eagle3:
    torch.manual_seed(5)
    changes = {"norm_before_residual": norm_before_residual, "num_key_value_heads": num_kv_heads} | variant
    config = replace(CONFIG, **changes)
    draft_to_target = torch.randperm(VOCAB)[:DRAFT].sort().values
    drafter = Eagle3(config, torch.randn(VOCAB, config.hidden_size), draft_to_target)
    if exact_rope:
        drafter.rope = _ExactRope()
    for parameter in drafter.parameters():  # norms away from 1, matrices large enough for attention to be uneven
        torch.nn.init.normal_(parameter, std=0.5)
    return drafter.double()


@pytest.fixture(scope="module")
def head_VH() -> torch.Tensor:
    return torch.randn(VOCAB, TARGET_HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def docs() -> list[reference.Doc]:
    made = torch.Generator().manual_seed(2)
    return [_doc(mask, made) for mask in MASKS]


def _doc(mask: str, made: torch.Generator) -> reference.Doc:
    length = len(mask)
    tokens = torch.randint(VOCAB, (length,), generator=made).tolist()
    aux = torch.randn(length, AUX * TARGET_HIDDEN, dtype=torch.float64, generator=made)
    last = torch.randn(length, TARGET_HIDDEN, dtype=torch.float64, generator=made)
    return reference.Doc(tokens, [c == "x" for c in mask], aux, last)


def _batch(docs: Sequence[reference.Doc], head_VH: torch.Tensor, num_steps: int) -> DraftBatch:
    tokens, pos, segments, slots, valid = layout([Document(tuple(d.tokens), tuple(d.mask)) for d in docs], num_steps)
    last = torch.cat([d.last for d in docs])
    logits = last @ head_VH.T / TEMPERATURE
    return DraftBatch(
        tokens_N=torch.from_numpy(tokens),
        pos_N=torch.from_numpy(pos),
        aux_NF=torch.cat([d.aux for d in docs]),
        last_NH=last,
        lse_N=logits.logsumexp(-1),
        max_N=logits.amax(-1),
        top_N=logits.argmax(-1),
        segments=segments,
        slot_R=torch.from_numpy(slots),
        valid_LR=torch.from_numpy(valid),
    )


def _loss(drafter: Eagle3, batch: DraftBatch, head_VH: torch.Tensor, denominator: float):
    chosen, labels = drafter.draft_to_target_D, batch.slot_R + 1
    draft_id = torch.full((VOCAB,), -1)
    draft_id[chosen] = torch.arange(DRAFT)
    teacher = Teacher(
        hidden_RH=batch.last_NH[labels],
        lse_R=batch.lse_N[labels],
        top_R=draft_id[batch.top_N[labels]],
        token_R=draft_id[batch.tokens_N[(labels + 1).clamp(max=len(batch.tokens_N) - 1)]],
        head_DH=head_VH[chosen],
        temperature=TEMPERATURE,
    )
    states = drafter(batch)
    loss, metrics = drafter_loss(
        states, drafter.lm_head.weight, teacher, batch.valid_LR, DECAY, denominator, with_sampled=True
    )
    return loss, metrics, states


def _gradients(loss: torch.Tensor, drafter: Eagle3) -> dict[str, torch.Tensor]:
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def _assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-11) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-9, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def _shape(drafter: Eagle3) -> reference.Shape:
    config = drafter.config
    return reference.Shape(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps,
        config.rope_parameters["rope_theta"],
        config.norm_before_residual,
        len(config.aux_layers),
        config.norm_before_fc,
        config.fc_norm,
        config.norm_output,
        config.num_hidden_layers,
        config.qk_norm,
        config.attention_bias,
    )


def _reference(drafter: Eagle3, docs: Sequence[reference.Doc], head_VH: torch.Tensor, num_steps: int):
    """(states {(document, p, i)}, loss, gradients, shared denominator) of the plain loops."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in drafter.named_parameters()}
    shape = _shape(drafter)
    embed_VH, draft_to_target = drafter.embed_VH, drafter.draft_to_target_D.tolist()
    denominator = reference.num_trained(docs, 0)
    with torch.no_grad():
        states = {
            (number, p, i): state
            for number, doc in enumerate(docs)
            for (p, i), state in reference.draft_states(weights, shape, embed_VH, doc, num_steps).items()
        }
    loss = reference.loss(
        weights, shape, embed_VH, head_VH, draft_to_target, docs, num_steps, DECAY, TEMPERATURE, denominator
    )
    loss.backward()
    return states, loss.detach(), {name: w.grad for name, w in weights.items()}, denominator


@pytest.mark.parametrize(
    ("num_steps", "norm_before_residual", "num_kv_heads"),
    [(1, False, 2), (2, True, 2), (3, False, 1), (4, False, 2), (4, True, 4)],
)
def test_forward_loss_and_gradients_equal_the_plain_loops(
    docs, head_VH, num_steps, norm_before_residual, num_kv_heads, monkeypatch
):
    monkeypatch.setattr(losses, "CHUNK", 5)  # labels cross chunk borders
    _check(_drafter(norm_before_residual, num_kv_heads), docs, head_VH, num_steps)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "+".join(v))
def test_every_variant_equals_the_plain_loops(docs, head_VH, variant, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", 5)
    _check(_drafter(**variant), docs, head_VH, 3)


def _check(drafter: Eagle3, docs, head_VH, num_steps: int) -> None:
    want_states, want_loss, want_gradients, denominator = _reference(drafter, docs, head_VH, num_steps)

    batch = _batch(docs, head_VH, num_steps)
    loss, metrics, states = _loss(drafter, batch, head_VH, denominator)

    starts = torch.tensor([0, *(len(d.tokens) for d in docs)]).cumsum(0).tolist()
    rows = [(number, p) for number, doc in enumerate(docs) for p in reference.slots(doc)]
    assert batch.slot_R.tolist() == [starts[number] + p for number, p in rows]
    compared = 0
    for r, (number, p) in enumerate(rows):
        for i in range(num_steps):
            assert bool(batch.valid_LR[i, r]) == reference.is_trained(docs[number], p, i)
            if batch.valid_LR[i, r]:
                torch.testing.assert_close(states[i][r], want_states[number, p, i], rtol=1e-9, atol=1e-11)
                compared += 1
    assert compared == sum(reference.num_trained(docs, i) for i in range(num_steps)) == metrics["count"].sum()
    torch.testing.assert_close(loss, want_loss, rtol=1e-11, atol=0)
    _assert_close(_gradients(loss, drafter), want_gradients)


def test_own_rope_turns_as_the_plain_loops_do(docs, head_VH):
    """The drafter's own rotary embedding computes angles in float32: equal to float32's rounding."""
    drafter = _drafter(exact_rope=False)
    _, want_loss, want_gradients, denominator = _reference(drafter, docs, head_VH, 3)
    loss, _, _ = _loss(drafter, _batch(docs, head_VH, 3), head_VH, denominator)
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=0)
    for name, gradient in _gradients(loss, drafter).items():
        torch.testing.assert_close(gradient, want_gradients[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("variant", [{}, {"norm_before_residual": True}, *VARIANTS], ids=lambda v: "+".join(v))
def test_drafting_on_its_own_tokens_equals_the_plain_loops(docs, head_VH, variant):
    drafter, num_steps = _drafter(**variant), 4
    weights = {name: p.detach() for name, p in drafter.named_parameters()}
    with torch.no_grad():
        states = drafter(_batch(docs, head_VH, num_steps), own_tokens=True)
        forced = drafter(_batch(docs, head_VH, num_steps))
    row, differs = 0, False
    chosen = drafter.draft_to_target_D.tolist()
    for doc in docs:
        want = reference.draft_states(weights, _shape(drafter), drafter.embed_VH, doc, num_steps, chosen)
        for p in reference.slots(doc):
            for i in range(num_steps):
                if (p, i) in want:
                    torch.testing.assert_close(states[i][row], want[p, i], rtol=1e-9, atol=1e-11)
                    proposal = chosen[int((drafter.lm_head.weight @ want[p, i]).argmax())]
                    assert int(drafter.propose(states[i])[row]) == proposal
            differs |= not states[1][row].equal(forced[1][row])
            row += 1
    assert row == len(states[0]) and differs


def test_metrics_equal_their_definitions(docs, head_VH):
    """Per step: agreement with the full argmax, p(argmax q), sum min(p, q) and p(draft vocabulary), p over all of V."""
    drafter, num_steps = _drafter(), 3
    states, _, _, denominator = _reference(drafter, docs, head_VH, num_steps)
    _, metrics, _ = _loss(drafter, _batch(docs, head_VH, num_steps), head_VH, denominator)
    chosen = drafter.draft_to_target_D
    for i in range(num_steps):
        want = dict.fromkeys(("correct", "greedy", "sampled", "ceiling", "count"), 0.0)
        for (number, p, step), state in states.items():
            if step != i or not reference.is_trained(docs[number], p, i):
                continue
            full = reference.teacher_log_probs(head_VH, docs[number], p + 1 + i, TEMPERATURE).exp()
            q = torch.softmax(drafter.lm_head.weight @ state / TEMPERATURE, 0)
            proposed = chosen[q.argmax()]
            want["correct"] += float(proposed == full.argmax())
            want["greedy"] += full[proposed].item()
            want["sampled"] += torch.minimum(full[chosen], q).sum().item()
            want["ceiling"] += full[chosen].sum().item()
            want["count"] += 1
        for name, value in want.items():
            assert metrics[name][i].item() == pytest.approx(value, rel=1e-9), name


def test_packed_equals_unpacked(docs, head_VH):
    drafter, denominator = _drafter(), 17.0
    loss, metrics, _ = _loss(drafter, _batch(docs, head_VH, 4), head_VH, denominator)
    gradients = _gradients(loss, drafter)

    alone_loss, alone_sums = torch.zeros((), dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    alone_gradients = {name: torch.zeros_like(p) for name, p in drafter.named_parameters()}
    for doc in docs:
        part, part_metrics, _ = _loss(drafter, _batch([doc], head_VH, 4), head_VH, denominator)
        alone_loss = alone_loss + part.detach()
        alone_sums += part_metrics["kl"]
        for name, gradient in _gradients(part, drafter).items():
            alone_gradients[name] += gradient
    torch.testing.assert_close(loss, alone_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(metrics["kl"], alone_sums, rtol=1e-12, atol=0)
    _assert_close(gradients, alone_gradients, atol=1e-13)


def test_a_document_does_not_see_its_neighbours(docs, head_VH):
    """Leaving a document out, changing it or moving it changes no number of another."""
    drafter = _drafter()
    first, second, third = docs[0], docs[1], docs[3]
    stranger = _doc(MASKS[1], torch.Generator().manual_seed(77))

    def rows_of(members: Sequence[reference.Doc], wanted: reference.Doc) -> torch.Tensor:
        """States and per-slot acceptance of one document inside a batch, where they are valid."""
        _, metrics, states = _loss(drafter, _batch(members, head_VH, 4), head_VH, 1.0)
        low = sum(len(reference.slots(m)) for m in members[: members.index(wanted)])
        rows = slice(low, low + len(reference.slots(wanted)))
        valid = torch.tensor([[reference.is_trained(wanted, p, i) for p in reference.slots(wanted)] for i in range(4)])
        kept = torch.stack([state[rows] for state in states]) * valid.unsqueeze(-1)
        return torch.cat([x.flatten() for x in (kept, metrics["accept_LR"][:, rows], metrics["proposal_LR"][:, rows])])

    for wanted in (first, third):
        packed = rows_of([first, second, third], wanted)
        for members in ([wanted], [first, third], [first, stranger, third], [third, first]):
            torch.testing.assert_close(rows_of(members, wanted), packed, rtol=1e-12, atol=1e-13)


def test_no_gradient_reaches_another_document_or_an_unsupervised_label(docs, head_VH):
    drafter, second = _drafter(), docs[1]
    batch = _batch([docs[0], second, docs[3]], head_VH, 4)
    aux = batch.aux_NF.clone().requires_grad_()
    states = drafter(replace(batch, aux_NF=aux))
    start, end = len(docs[0].tokens), len(docs[0].tokens) + len(second.tokens)
    low = len(reference.slots(docs[0]))
    mine = slice(low, low + len(reference.slots(second)))
    (gradient,) = torch.autograd.grad(sum(state[mine].sum() for state in states), aux)
    assert gradient[start : end - 2].abs().sum() > 0
    assert not gradient[:start].any()
    assert not gradient[end:].any()
    assert not gradient[end - 2 :].any()  # no slot can see the last two tokens' states


def test_a_batch_without_slots_trains_nothing(docs, head_VH):
    drafter = _drafter()
    loss, metrics, states = _loss(drafter, _batch([docs[2], docs[4]], head_VH, 3), head_VH, 1.0)
    assert [state.shape for state in states] == [(0, CONFIG.hidden_size)] * 3
    assert loss.item() == 0 and metrics["count"].tolist() == [0, 0, 0]


def test_state_dict_has_the_published_names_and_shapes():
    shapes = {name: tuple(tensor.shape) for name, tensor in _drafter().state_dict().items()}
    assert shapes == {
        "fc.weight": (8, 12),
        "midlayer.hidden_norm.weight": (8,),
        "midlayer.input_layernorm.weight": (8,),
        "midlayer.self_attn.q_proj.weight": (16, 16),
        "midlayer.self_attn.k_proj.weight": (8, 16),
        "midlayer.self_attn.v_proj.weight": (8, 16),
        "midlayer.self_attn.o_proj.weight": (8, 16),
        "midlayer.post_attention_layernorm.weight": (8,),
        "midlayer.mlp.gate_proj.weight": (10, 8),
        "midlayer.mlp.up_proj.weight": (10, 8),
        "midlayer.mlp.down_proj.weight": (8, 10),
        "norm.weight": (8,),
        "lm_head.weight": (11, 8),
        "d2t": (11,),
    }


def test_d2t_holds_offsets():
    drafter = _drafter()
    chosen = drafter.draft_to_target_D
    assert chosen.tolist() == sorted(set(chosen.tolist())) and int(chosen.max()) < VOCAB
    assert [i + offset for i, offset in enumerate(drafter.d2t.tolist())] == chosen.tolist()
