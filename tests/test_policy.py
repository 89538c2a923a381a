"""The policy trainer against plain transformers and torch, for every ZeRO stage, alone and in two processes."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from draftkit.data.capture import Verifier, collate
from draftkit.drafters.losses import drafter_loss
from draftkit.errors import RunFailed, UserError
from draftkit.recipe import PolicySection, Recipe
from draftkit.rl import token_model, zero
from draftkit.rl.directions import slot_sums
from draftkit.rl.grpo import TokenBatch, policy_loss, resolve_settings
from draftkit.rl.policy import Policy, Sample, lr_at, samples, token_batch
from draftkit.rl.publish import Ends
from draftkit.train.evaluate import TeacherView
from draftkit.types import Sampling, Trajectory, Turn

AUX = (1, 2, 4)
MASKS = (  # prompt, then sampled tokens with a tool's answer between them; lengths from 4 to 41
    "..xxxxxx",
    "...x",
    ".....xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "..xxx..xxxx",
    "....xx....xxxxxxx...xxxxxxxxxxxxxxxxxxxxx",
    ".x",
    "......xxxxxxxxxxxxx",
)


@pytest.fixture(autouse=True)
def closed():
    """DeepSpeed keeps what it made alive: take its hooks off after each test."""
    made: list[Policy] = []
    yield made.append
    for policy in made:
        policy.close()


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    return save_tied(tmp_path_factory.mktemp("policy") / "tied")


@pytest.fixture(params=["tied", "untied"])
def model_dir(request, tied) -> Path:
    return tied if request.param == "tied" else tiny.verifier_dir()


def save_tied(path: Path) -> Path:
    """Four layers, saved in bfloat16; one tensor is embedding and LM head, as in the demo model."""
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=tiny.HIDDEN,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=tiny.VOCAB,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def recipe(**sections) -> Recipe:
    policy = {"dtype": "float32", "zero_stage": 0, "lr": 1e-3, "tokens_per_batch": 90, "weight_decay": 0.1}
    sections["policy"] = policy | sections.get("policy", {})
    return tiny.recipe(**sections)


def trajectories(num: int = len(MASKS), seed: int = 0) -> list[Trajectory]:
    made = torch.Generator().manual_seed(seed)
    result = []
    for i in range(num):
        mask = tuple(c == "x" for c in MASKS[i % len(MASKS)])
        tokens = tuple(torch.randint(tiny.VOCAB, (len(mask),), generator=made).tolist())
        engine_logp = tuple((-torch.rand(len(mask), generator=made) * torch.tensor(mask)).tolist())
        turns = (Turn(0, len(mask), "stop", None),)
        result.append(Trajectory(str(i), "t", i // 2, i % 2, tokens, mask, engine_logp, turns, 0.0, False, 0, 0, 3))
    return result


def plain_logp(model: torch.nn.Module, t: Trajectory, temperature: float = 1.0) -> torch.Tensor:
    """[supervised tokens], with gradient, from transformers' own logits of one unpadded sequence."""
    logits = model(torch.tensor([t.tokens]), use_cache=False).logits[0].float() / temperature
    places = torch.tensor(t.mask).nonzero().squeeze(1)
    return logits.log_softmax(-1)[places - 1, torch.tensor(t.tokens)[places]]


def weighted(logp_N: torch.Tensor, batch: TokenBatch, denominator: float = 100.0):
    """A loss that tells every token and sequence apart."""
    loss = -(logp_N * batch.advantage_N * (1 + batch.engine_logp_N) / batch.length_S[batch.sequence_N]).sum()
    return loss / denominator, {"tokens": torch.tensor(float(len(logp_N))), "logp": logp_N.detach().sum()}


def batch_of(ts: list[Trajectory]) -> list[Sample]:
    return [Sample(t.tokens, t.mask, 0.5 - i % 3, engine_logp=torch.tensor(t.engine_logp)) for i, t in enumerate(ts)]


def plain_loss(model: torch.nn.Module, ts: list[Trajectory]) -> torch.Tensor:
    total = torch.zeros(())
    for sample in batch_of(ts):
        logp = plain_logp(model, sample)
        own = sample.engine_logp[torch.tensor(sample.mask)]
        total = total - (logp * sample.advantage * (1 + own)).sum() / len(logp) / 100.0
    return total


def plain_steps(path: Path, ts: list[Trajectory], settings: PolicySection, steps: int) -> dict[str, torch.Tensor]:
    """`steps` updates by torch alone, in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas)
    norms = []
    for _ in range(steps):
        plain_loss(model, ts).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, **{name: p.detach() for name, p in model.named_parameters()}}


def assert_weights(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], start: dict, share: float) -> None:
    """Equal up to `share` of how far the step moved the tensor (Adam divides by tiny second moments)."""
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        moved = (expected[name] - start[name]).abs().mean()
        assert (tensor - expected[name]).abs().mean() <= share * moved, name
        assert moved > 0, name


# ---- batches ----------------------------------------------------------------------------------------------------


def test_rows_are_the_states_before_sampled_tokens():
    first = Sample((5, 6, 7, 8, 9), (False, False, True, False, True))
    second = Sample((3, 4, 2), (False, True, True))
    packed = token_model.pack([[first], [second]])
    assert packed.tokens_BT.tolist() == [[5, 6, 7, 8, 9], [3, 4, 2, 0, 0]]
    assert packed.position_BT is None and packed.allowed_B1TT is None
    assert packed.row_N.tolist() == [1, 3, 5, 6] and packed.token_N.tolist() == [7, 9, 4, 2]
    with_teacher = token_model.pack([[first], [second]], teacher=True)
    assert with_teacher.row_N.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert [column.tolist() for column in packed.by_sequence(torch.tensor([1.0, 2.0, 3.0, 4.0]))] == [
        [0, 1, 0, 2, 0],
        [3, 4, 0],
    ]


def test_answers_behind_one_prompt():
    """Each sees the prompt and itself, at the positions of a row of its own."""
    prompt = (False, False)
    answers = [Sample((5, 6, 7, 8), (*prompt, True, True)), Sample((5, 6, 9, 1, 2), (*prompt, True, False, True))]
    alone = Sample((3, 4), (False, True))
    packed = token_model.pack([answers, [alone]])
    assert packed.tokens_BT.tolist() == [[5, 6, 7, 8, 9, 1, 2], [3, 4, 0, 0, 0, 0, 0]]
    assert packed.position_BT[0].tolist() == [0, 1, 2, 3, 2, 3, 4] and packed.position_BT[1, :2].tolist() == [0, 1]
    assert packed.row_N.tolist() == [1, 2, 1, 5, 7] and packed.token_N.tolist() == [7, 8, 9, 2, 4]
    assert [place.tolist() for place in packed.place] == [[0, 1, 2, 3], [0, 1, 4, 5, 6], [7, 8]]
    seen = [[j for j in range(7) if packed.allowed_B1TT[0, 0, i, j]] for i in range(7)]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5], [0, 1, 4, 5, 6]]


def test_plan_holds_every_sequence_once_and_fits():
    made = random.Random(0)
    sequences = [
        Sample((group,) * prompt + (7,) * answer, (False,) * prompt + (True,) * answer)
        for group, prompt in enumerate((5, 30, 1, 12))
        for answer in [made.randint(1, 40) for _ in range(9)]
    ]
    for worth in (0.0, 20.0, 1000.0):
        plan = token_model.plan(sequences, 100, worth)
        assert sorted(i for batch in plan for row in batch for i in row) == list(range(len(sequences)))
        for batch in plan:
            rows = [[sequences[i] for i in row] for row in batch]
            assert all(len({s.tokens[: token_model.prompt_length(s)] for s in row}) == 1 for row in rows)
            assert token_model.pack(rows).tokens_BT.numel() <= 100
    rows = [len([row for batch in token_model.plan(sequences, 100, w) for row in batch]) for w in (0.0, 20.0, 1000.0)]
    assert rows[0] == len(sequences) > rows[1] > rows[2]


def test_long_answers_to_a_short_prompt_keep_their_own_rows():
    """A prompt of 200 tokens shared by answers of 4000 saves less than the attention between the answers costs."""
    answers = [Sample((1,) * 200 + (i,) * 4000, (False,) * 200 + (True,) * 4000) for i in range(2, 6)]
    short = [Sample((1,) * 200 + (i,) * 50, (False,) * 200 + (True,) * 50) for i in range(2, 6)]
    assert len(token_model.plan(answers, 10**6, 8000.0)[0]) == 4
    assert len(token_model.plan(short, 10**6, 8000.0)[0]) == 1


@pytest.mark.parametrize("stage", [0, 3])
def test_shared_prompts_change_no_number(tied, stage, closed):
    """Scores, states, loss, gradient: of three answers to each prompt, as if each had come with its own."""
    made = torch.Generator().manual_seed(4)
    ts = []
    for group in range(4):
        prompt = torch.randint(tiny.VOCAB, (3 + 2 * group,), generator=made).tolist()
        for mask in ("xxxxx", "xx..xxx", "xxxxxxxxxx"):
            answer = torch.randint(tiny.VOCAB, (len(mask),), generator=made).tolist()
            tokens, sampled = (*prompt, *answer), (False,) * len(prompt) + tuple(c == "x" for c in mask)
            engine_logp = (0.0,) * len(prompt) + tuple((-torch.rand(len(mask), generator=made)).tolist())
            ts.append(Trajectory("p", "t", group, 0, tokens, sampled, engine_logp, (), 0.0, False, 0, 0, 3))
    results = []
    for shared in (False, True):
        policy = Policy(tied, recipe(policy={"zero_stage": stage, "tokens_per_batch": 60}), AUX)
        closed(policy)
        assert policy._engine.module.worth > 0
        policy._engine.module.worth = 1e9 if shared else 0.0
        rows = [row for batch in policy._rounds(ts) for row in batch]
        assert len(rows) == (4 if shared else 12)
        scores = policy.score(ts, capture=True)
        update = policy.update(batch_of(ts), weighted)
        results.append((scores, update, {name: w.clone() for name, w in policy.weights()}))
    (alone, single, weights), (scores, update, shared_weights) = results
    for name in ("logp", "entropy", "var", "cdf"):
        for ours, expected in zip(getattr(scores, name), getattr(alone, name), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    for ours, expected in zip(scores.states, alone.states, strict=True):
        for name in ("aux", "last", "lse", "max"):
            torch.testing.assert_close(ours[name], expected[name], rtol=1e-3, atol=1e-3)
        assert ours["top"].equal(expected["top"])
    assert update.loss == pytest.approx(single.loss, rel=1e-4)
    assert update.grad_norm == pytest.approx(single.grad_norm, rel=1e-4)
    start = {n: w.float() for n, w in AutoModelForCausalLM.from_pretrained(tied).named_parameters()}
    assert_weights(shared_weights, weights, start, 1e-2)


def test_windowed_attention_shares_no_rows():
    from transformers import MistralConfig, Qwen3Config

    assert not token_model._attends_everywhere(MistralConfig(sliding_window=4096))
    assert token_model._attends_everywhere(MistralConfig(sliding_window=None))
    assert token_model._attends_everywhere(Qwen3Config()) and token_model._attends_everywhere(LlamaConfig())


def test_constants_follow_the_rows():
    ts = trajectories(3)
    old = [torch.rand(len(t.tokens)) for t in ts]
    batch = token_batch([dataclasses.replace(s, old_logp=o) for s, o in zip(batch_of(ts), old, strict=True)])
    packed = token_model.pack([[t] for t in ts])
    width = packed.tokens_BT.shape[1]
    for n, row in enumerate(packed.row_N.tolist()):
        sequence, place = row // width, row % width + 1
        assert batch.sequence_N[n] == sequence
        assert batch.old_logp_N[n] == old[sequence][place]
        assert batch.engine_logp_N[n] == torch.tensor(ts[sequence].engine_logp[place])
        assert batch.advantage_N[n] == batch_of(ts)[sequence].advantage
    assert batch.length_S.tolist() == [sum(t.mask) for t in ts] and batch.ref_logp_N is None


def test_learning_rate_is_a_function_of_the_step():
    assert [lr_at(s, PolicySection(lr=1.0, lr_warmup_steps=4)) for s in (1, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert lr_at(1, PolicySection(lr=1.0)) == 1.0


# ---- the log-probability forward --------------------------------------------------------------------------------


def test_scores_are_those_of_unpadded_sequences(model_dir, closed):
    """In float32, at a temperature; padded micro-batches of several lengths."""
    policy = Policy(model_dir, recipe(sampling={"temperature": 0.7, "max_tokens": 48}), AUX)
    closed(policy)
    ts = trajectories()
    scores = policy.score(ts)
    assert scores.states is None and scores.ref_logp is None
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for i, t in enumerate(ts):
        mask = torch.tensor(t.mask)
        with torch.no_grad():
            p = (model(torch.tensor([t.tokens])).logits[0] / 0.7).double().softmax(-1)[:-1][mask[1:]]
        own = p.gather(1, torch.tensor(t.tokens)[mask].unsqueeze(1))
        entropy = -(p * p.log()).sum(-1)
        expected = {
            "logp": own.squeeze(1).log(),
            "entropy": entropy,
            "var": (p * (p.log() + entropy.unsqueeze(1)).square()).sum(-1),
            "cdf": (p * (p > own)).sum(-1),
        }
        for name, values in expected.items():
            ours = getattr(scores, name)[i]
            assert ours.shape == mask.shape and ours.dtype == torch.float32
            torch.testing.assert_close(ours[mask].double(), values, rtol=1e-4, atol=1e-4)
            assert not ours[~mask].any()


@pytest.mark.parametrize("stage", [0, 3])
def test_captured_states_are_the_verifiers(model_dir, stage, closed):
    """The same documents in the same micro-batches: hidden states bit for bit, the teacher's numbers to float32."""
    policy = Policy(model_dir, recipe(policy={"zero_stage": stage, "tokens_per_batch": 1000}), AUX)
    closed(policy)
    verifier = Verifier(model_dir, AUX, 1.0, torch.float32)
    ts = trajectories()
    scores = policy.score(ts, capture=True)
    _assert_states(scores.states, verifier.states(ts), exact=True)
    batch = collate(scores, [0, 2, 4], tiny.K)  # and it serves as States
    expected = collate(_Held(ts, verifier.states(ts)), [0, 2, 4], tiny.K)
    for field in dataclasses.fields(batch):
        ours, theirs = getattr(batch, field.name), getattr(expected, field.name)
        if isinstance(ours, torch.Tensor) and ours.is_floating_point():
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not any(t.requires_grad for state in scores.states for t in state.values())


@dataclasses.dataclass
class _Held:
    documents: list
    states: list

    def document(self, i):
        return self.states[i]


def _assert_states(ours: list[dict], theirs: list[dict], exact: bool) -> None:
    for own, verifiers in zip(ours, theirs, strict=True):
        assert own.keys() == verifiers.keys()
        for name in ("aux", "last"):
            assert own[name].dtype == verifiers[name].dtype
            assert own[name].equal(verifiers[name]) or not exact, name
        for name in ("lse", "max"):
            torch.testing.assert_close(own[name], verifiers[name], rtol=1e-5, atol=1e-5)
        assert own["top"].equal(verifiers["top"])


def test_bfloat16_states_are_the_verifiers(tied, closed, monkeypatch):
    monkeypatch.setattr(zero, "native_bf16", lambda: True)
    policy = Policy(tied, recipe(policy={"dtype": "bfloat16", "zero_stage": 2, "tokens_per_batch": 1000}), AUX)
    closed(policy)
    ts = trajectories()
    verifier = Verifier(tied, AUX, 1.0, torch.bfloat16)
    _assert_states(policy.score(ts, capture=True).states, verifier.states(ts), exact=True)


def test_scoring_changes_nothing(tied, closed):
    policy = Policy(tied, recipe(policy={"zero_stage": 2}), AUX)
    closed(policy)
    before = {name: w.clone() for name, w in policy.weights()}
    policy.score(trajectories(), capture=True)
    assert all(w.equal(before[name]) and w.grad is None for name, w in policy.weights())
    assert all(p.grad is None for p in policy.model.parameters())


def test_processed_distribution(tied, closed):
    """With top-k the scores are of the truncated law, in training as in scoring, and the teacher's stay whole."""
    settings = {"temperature": 0.8, "top_k": 5, "max_tokens": 48}
    policy, whole = (Policy(tied, recipe(sampling=s), AUX) for s in (settings, settings | {"top_k": 0}))
    closed(policy), closed(whole)
    ts = trajectories(3)
    scores, others = policy.score(ts, capture=True), whole.score(ts, capture=True)
    for i in range(3):
        assert (scores.logp[i][list(ts[i].mask)] > others.logp[i][list(ts[i].mask)]).all()
        assert scores.states[i]["lse"].equal(others.states[i]["lse"])
    seen = []
    policy.update(batch_of(ts), lambda logp_N, batch: (seen.append(logp_N.detach()), weighted(logp_N, batch))[1])
    mine = torch.cat([scores.logp[i][list(ts[i].mask)] for i in range(3)])
    torch.testing.assert_close(torch.cat(seen).sort().values, mine.sort().values, rtol=1e-5, atol=1e-5)


# ---- one optimizer step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage, kind, checkpointing",
    [
        (0, "tied", False),
        (1, "tied", False),
        (2, "tied", False),
        (3, "tied", False),
        (3, "untied", False),
        (0, "untied", True),
        (2, "untied", True),
        (3, "tied", True),
    ],
)
def test_every_zero_stage_makes_the_steps_of_torch(tied, stage, kind, checkpointing, closed):
    """Three steps with several micro-batches each, scored in between, clipped: those of an unpadded loop with AdamW."""
    model_dir = tied if kind == "tied" else tiny.verifier_dir()
    settings = recipe(
        policy={"zero_stage": stage, "gradient_checkpointing": checkpointing, "grad_clip": 0.02, "lr_warmup_steps": 0}
    )
    policy = Policy(model_dir, settings, AUX)
    closed(policy)
    ts = trajectories()
    start = {name: w.clone() for name, w in policy.weights()}
    updates = []
    for _ in range(3):
        updates.append(policy.update(batch_of(ts), weighted))
        policy.score(ts, capture=True)
    expected = plain_steps(model_dir, ts, settings.policy, 3)
    assert [u.grad_norm for u in updates] == pytest.approx(expected.pop("norms"), rel=1e-3)
    assert updates[0].grad_norm > 0.02  # or clipping was not looked at
    with torch.no_grad():
        loss = plain_loss(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), ts)
    assert updates[0].loss == pytest.approx(float(loss), rel=1e-4)
    assert updates[0].sums["tokens"] == sum(sum(t.mask) for t in ts)
    assert_weights(dict(policy.weights()), expected, start, 1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_keeps_float32_masters(stage, closed, monkeypatch):
    """Steps far below bfloat16's resolution add up: without masters, or with bfloat16 ones, nothing would move."""
    monkeypatch.setattr(zero, "native_bf16", lambda: True)
    settings = recipe(policy={"dtype": "bfloat16", "zero_stage": stage, "lr": 4e-5, "weight_decay": 0.0})
    policy = Policy(tiny.verifier_dir(), settings)
    closed(policy)
    ts, name = trajectories(), "model.layers.1.mlp.up_proj.weight"
    start = {n: w.clone() for n, w in policy.weights()}[name]
    for _ in range(8):
        policy.update(batch_of(ts), weighted)
    moved = (dict(policy.weights())[name].float() - start.float()).abs()
    expected = plain_steps(tiny.verifier_dir(), ts, settings.policy, 8)[name]
    # A master that moved by 8 steps of 4e-5 shows in those bfloat16 weights near a rounding border, on average truly.
    assert float(moved.mean()) == pytest.approx(float((expected - start.float()).abs().mean()), rel=0.2)


def test_gradients_do_not_know_of_the_drafter(tied, closed):
    """Bit-equal weights after two steps whether or not states are captured and a drafter is trained on them."""
    results = []
    for drafting in (False, True):
        policy = Policy(tied, recipe(policy={"zero_stage": 2}), AUX)
        closed(policy)
        ts = trajectories()
        for _ in range(2):
            scores = policy.score(ts, capture=drafting)
            if drafting:
                _train_drafter(policy, scores)
            policy.update(samples(scores, [0.5 - i % 3 for i in range(len(ts))]), weighted)
        results.append({name: w.clone() for name, w in policy.weights()})
    off, on = results
    assert all(on[name].equal(off[name]) for name in off)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_drafters_side_knows_the_policys_own_probabilities(tied, dtype, closed, monkeypatch):
    """Losslessness tests add up p of chosen tokens. p comes from two places, a normaliser and a copy of the head: were
    they rounded in two ways, every p would be off by one factor, and a faithful engine would look biased."""
    monkeypatch.setattr(zero, "native_bf16", lambda: True)
    policy = Policy(tied, recipe(policy={"zero_stage": 2, "dtype": dtype}), AUX)
    closed(policy)
    stored = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.bfloat16).state_dict()
    ends = Ends(iter(stored.items()), 1.0, policy.dtype)
    ts = trajectories()
    for _ in range(3):
        policy.update(batch_of(ts), weighted)
    weights = {name: w.clone() for name, w in ends.watch(policy.weights())}
    drafter = tiny.random_drafter(ends, target_hidden_size=ends.embed_VH.shape[1], aux_layers=AUX)
    scores = policy.score(ts, capture=True)
    batch = collate(scores, range(len(ts)), 1)
    with torch.no_grad():
        (state,) = drafter(batch)
        nothing_R = torch.full((len(state),), -1)  # no token is the favourite: the sum is minus its chances
        got = -slot_sums(TeacherView(drafter, ends).at(batch), state, drafter.lm_head.weight, nothing_R).favourite
    head = weights["model.embed_tokens.weight"]
    p_RV = (batch.last_NH[batch.slot_R + 1] @ head.T).double().softmax(-1)
    best_R = drafter.draft_to_target_D[(state @ drafter.lm_head.weight.to(state.dtype).T).argmax(-1)]
    assert len(best_R) > 60
    assert got == pytest.approx(
        float(p_RV.gather(1, best_R.unsqueeze(1)).sum()), rel=1e-5 if dtype == "float32" else 1e-3
    )


def _train_drafter(policy: Policy, scores) -> None:
    """One step of the real drafter loss on the captured states."""
    embed_VH = policy.model.get_input_embeddings().weight
    ends = _Ends(embed_VH.detach(), policy.model.get_output_embeddings().weight.detach(), 1.0)
    drafter = tiny.random_drafter(ends, target_hidden_size=embed_VH.shape[1], aux_layers=AUX)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    batch = collate(scores, range(len(scores.documents)), tiny.K)
    loss, _ = drafter_loss(
        drafter(batch), drafter.lm_head.weight, TeacherView(drafter, ends).at(batch), batch.valid_LR, 0.8, 1.0, True
    )
    loss.backward()
    optimizer.step()
    assert all(p.grad is None for p in policy.model.parameters())


@dataclasses.dataclass
class _Ends:
    embed_VH: torch.Tensor
    head_VH: torch.Tensor
    temperature: float


def test_grpo_loss_through_the_trainer(tied, closed):
    """The first update from scores of the same weights has ratio 1 at every token, and a KL to the reference of 0."""
    settings = recipe(rl={"kl_coef": 0.1, "loss": "grpo"})
    policy = Policy(tied, settings)
    closed(policy)
    ts = trajectories()
    scores = policy.score(ts)
    batch = samples(scores, [0.5 - i % 3 for i in range(len(ts))])
    loss_function = partial(policy_loss, settings=resolve_settings(settings), denominator=float(len(ts)))
    first = policy.update(batch, loss_function)
    assert first.sums["ratio"] / first.sums["tokens"] == pytest.approx(1.0, abs=1e-5)
    assert first.sums["ref_kl"] == pytest.approx(0.0, abs=1e-5)
    again = policy.score(ts)
    assert torch.cat(again.ref_logp).equal(torch.cat(scores.ref_logp))  # frozen
    assert not torch.allclose(torch.cat(again.logp), torch.cat(scores.logp), rtol=0.01)  # moved
    assert policy.update(samples(again, [1.0] * len(ts)), loss_function).sums["ref_kl"] > 1e-4


def test_a_gradient_that_is_not_finite_moves_nothing(tied, closed):
    for stage in (0, 2, 3):
        policy = Policy(tied, recipe(policy={"zero_stage": stage}))
        closed(policy)
        before = {name: w.clone() for name, w in policy.weights()}
        with pytest.raises(RunFailed, match="not finite"):
            policy.update(batch_of(trajectories(2)), lambda logp_N, b: (logp_N.sum() * float("nan"), {}))
        assert all(w.equal(before[name]) for name, w in policy.weights()), stage


def test_offload_needs_zero():
    with pytest.raises(UserError, match=r"policy\.offload_optimizer needs policy\.zero_stage 1, 2 or 3"):
        zero.offloads(PolicySection(zero_stage=0, offload_optimizer=True))


# ---- what leaves the trainer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_saved_policy_is_a_model_directory(tied, stage, dtype, closed, tmp_path, monkeypatch):
    monkeypatch.setattr(zero, "native_bf16", lambda: True)
    (tied / "tokenizer_config.json").write_text("{}")
    policy = Policy(tied, recipe(policy={"zero_stage": stage, "dtype": dtype}))
    closed(policy)
    ts = trajectories()
    policy.update(batch_of(ts), weighted)
    policy.save(tmp_path / "saved")
    (tied / "tokenizer_config.json").unlink()
    assert (tmp_path / "saved" / "tokenizer_config.json").read_text() == "{}"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    published = dict(policy.weights(torch.bfloat16))
    assert {name for name, _ in loaded.named_parameters()} == published.keys()
    for name, parameter in loaded.named_parameters():
        assert parameter.equal(published[name]), name
    fresh = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.bfloat16)
    fresh.load_state_dict(published, strict=False)
    fresh.tie_weights()
    tokens = torch.tensor([ts[2].tokens])
    with torch.no_grad():
        assert loaded(tokens).logits.equal(fresh(tokens).logits)
    # And a policy can begin from it.
    policy = Policy(tmp_path / "saved", recipe())
    closed(policy)
    assert all(w.to(torch.bfloat16).equal(published[name]) for name, w in policy.weights())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resume_is_exact(stage, dtype, closed, tmp_path, monkeypatch):
    monkeypatch.setattr(zero, "native_bf16", lambda: True)
    settings = recipe(policy={"zero_stage": stage, "dtype": dtype, "lr_warmup_steps": 5})
    ts = trajectories()
    whole = Policy(tiny.verifier_dir(), settings)
    closed(whole)
    for _ in range(2):
        whole.update(batch_of(ts), weighted)
    whole.save_state(tmp_path / "state")
    resumed = Policy(tiny.verifier_dir(), settings)
    closed(resumed)
    resumed.load_state(tmp_path / "state")
    assert resumed.steps == 2
    left, right = whole.score(ts), resumed.score(ts)
    assert all(a.equal(b) for a, b in zip(left.logp, right.logp, strict=True))
    for _ in range(2):
        a, b = whole.update(batch_of(ts), weighted), resumed.update(batch_of(ts), weighted)
        assert (a.loss, a.grad_norm, a.lr) == (b.loss, b.grad_norm, b.lr)
    mine = dict(resumed.weights())
    assert all(w.equal(mine[name]) for name, w in whole.weights())


def test_state_of_another_layout_is_refused(closed, tmp_path):
    policy = Policy(tiny.verifier_dir(), recipe())
    closed(policy)
    policy.save_state(tmp_path)
    other = Policy(tiny.verifier_dir(), recipe(policy={"zero_stage": 2}))
    closed(other)
    with pytest.raises(UserError, match=r"was saved with policy\.zero_stage 0; this run has 2"):
        other.load_state(tmp_path)


# ---- models that it cannot train --------------------------------------------------------------------------------


def test_logits_of_another_form_are_refused(tmp_path):
    """Granite divides its logits by a number, which the drafters and this trainer do not know of."""
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=50,
        logits_scaling=3.0,
        initializer_range=0.2,
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="GraniteForCausalLM are not its last state times the LM head"):
        token_model.load(tmp_path, Sampling(), torch.float32)


def test_weights_under_other_names_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny.save_verifier(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    held = load_file(file)
    held["lm_head.other"] = held.pop("lm_head.weight")
    save_file(held, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"other names .*lm_head\.weight is not among them"):
        token_model.load(tmp_path, Sampling(), torch.float32)


# ---- two processes ----------------------------------------------------------------------------------------------

RANK = """
import json, sys
from pathlib import Path
import test_policy as t
t.run_rank(*map(Path, sys.argv[1:3]), int(sys.argv[3]))
"""


def run_rank(model_dir: Path, out: Path, stage: int) -> None:
    """Two steps on this process' share (uneven: rank 0 has five sequences of seven), as its metrics and weights."""
    policy = Policy(model_dir, recipe(policy={"zero_stage": stage, "tokens_per_batch": 45}), AUX)
    batch = batch_of(trajectories())
    part = slice(0, 5) if policy.rank == 0 else slice(5, None)
    part = part if policy.world_size > 1 else slice(None)
    states = policy.score(trajectories()[part], capture=True).states
    updates = []
    for _ in range(2):
        update = policy.update(batch[part], weighted)
        updates.append([update.loss, update.grad_norm, float(update.sums["tokens"]), float(update.sums["logp"])])
    scores = policy.score(trajectories()[part])
    policy.save(out / "saved")
    policy.save_state(out / "state")
    resumed = Policy(model_dir, recipe(policy={"zero_stage": stage, "tokens_per_batch": 45}), AUX)
    resumed.load_state(out / "state")
    again = resumed.score(trajectories()[part])
    torch.save(
        {
            "weights": {name: w.clone() for name, w in policy.weights()},
            "logp": scores.logp,
            "resumed": again.logp,
            "rounds": len(policy._rounds(batch[part])),
            "aux": [state["aux"] for state in states],
        },
        out / f"rank{policy.rank}.pt",
    )
    (out / f"rank{policy.rank}.json").write_text(json.dumps(updates))


def launch(model_dir: Path, out: Path, stage: int) -> None:
    """`run_rank` in two processes."""
    out.mkdir()
    script = out / "rank.py"
    script.write_text(RANK)
    arguments = [str(script), str(model_dir), str(out), str(stage)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    here = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parent}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_make_the_steps_of_one(tied, stage, tmp_path):
    """Uneven shares, so that one of them runs weightless micro-batches; gloo."""
    launch(tied, tmp_path / "two", stage)
    (tmp_path / "one").mkdir()
    run_rank(tied, tmp_path / "one", 0)
    one = torch.load(tmp_path / "one" / "rank0.pt")
    ranks = [torch.load(tmp_path / "two" / f"rank{rank}.pt") for rank in (0, 1)]
    steps = [json.loads((tmp_path / "two" / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert steps[0] == steps[1]
    for ours, expected in zip(steps[0], json.loads((tmp_path / "one" / "rank0.json").read_text()), strict=True):
        assert ours == pytest.approx(expected, rel=1e-4)
    start = {n: w.float() for n, w in AutoModelForCausalLM.from_pretrained(tied).named_parameters()}
    for rank in ranks:
        assert all(w.shape == start[name].shape for name, w in rank["weights"].items())
        assert_weights(rank["weights"], one["weights"], start, 1e-3)
        assert all(w.equal(ranks[0]["weights"][name]) for name, w in rank["weights"].items())
        assert all(a.equal(b) for a, b in zip(rank["logp"], rank["resumed"], strict=True))
        assert rank["rounds"] == ranks[0]["rounds"]
    for ours, expected in zip(ranks[0]["logp"] + ranks[1]["logp"], one["logp"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    for ours, expected in zip(ranks[0]["aux"] + ranks[1]["aux"], one["aux"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "saved", dtype=torch.bfloat16)
    for name, parameter in saved.named_parameters():
        assert parameter.equal(ranks[0]["weights"][name].to(torch.bfloat16)), name
