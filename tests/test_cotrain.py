"""Co-training: when it happens, what it computes, and that the policy never notices."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
import torch

import draftkit
from draftkit.data.batch import plan_epoch, slot_runs
from draftkit.data.capture import StreamedStates, Verifier, collate
from draftkit.drafters.eagle3 import Eagle3, default_aux_layers
from draftkit.drafters.losses import drafter_loss
from draftkit.errors import UserError
from draftkit.models import model_facts
from draftkit.recipe import CotrainSection, Recipe
from draftkit.rl.cotrain import CoTrainer, needed, provisional
from draftkit.rl.publish import Ends
from draftkit.rl.replay import SPAN, Replay
from draftkit.rl.trigger import HALF, Decision, Observation, Trigger
from draftkit.rl.world import World
from draftkit.train import optim
from draftkit.train.evaluate import TeacherView
from draftkit.train.predict import predicted
from draftkit.types import Document, SpecCounters, Trajectory, Turn

TEMPERATURE = 0.8


def recipe(**sections) -> Recipe:
    small = {"sampling": {"max_tokens": 48, "temperature": TEMPERATURE}, "spec": {"k": tiny.K}}
    return tiny.recipe(**small | sections)


def ends(verifier: Verifier, temperature: float = TEMPERATURE) -> Ends:
    return Ends(iter(verifier.model.state_dict().items()), temperature, verifier.embed_VH.dtype)


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return made_verifier(tiny.verifier_dir())


def made_verifier(path: Path) -> Verifier:
    """In float32, which no CPU has to emulate."""
    return Verifier(path, default_aux_layers(tiny.LAYERS), TEMPERATURE, torch.float32)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return tiny.sample_documents(tiny.verifier_dir(), 48, 24)


def weak_drafter(verifier: Verifier) -> Eagle3:
    drafter = tiny.random_drafter(verifier)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.4)
    return drafter


def cotrainer(verifier: Verifier, drafter: Eagle3 | None = None, **cotrain) -> CoTrainer:
    return CoTrainer(recipe(cotrain=cotrain), drafter or weak_drafter(verifier), ends(verifier), World())


# ---- one training ------------------------------------------------------------------------------------------------


def test_an_update_is_the_drafters_loss_clipped_and_stepped(verifier, documents):
    states = StreamedStates(verifier, documents)
    trainer = cotrainer(verifier, tokens_per_batch=10_000, grad_clip=0.05, lr=3e-3)
    ours = trainer.drafter
    plain = copy.deepcopy(ours)
    metrics = trainer.train(states, 1)

    [order] = plan_epoch([len(d.tokens) for d in documents], 10_000, "0/0", 0)  # what trains when: the order of sums
    batch = collate(states, order, tiny.K)
    head = verifier.head_VH[plain.draft_to_target_D].detach()
    optimizer = optim.build(plain, trainer.recipe.train.model_copy(update={"lr": trainer.lr_at(1)}))
    teacher = TeacherView(plain, verifier).at(batch)
    assert torch.equal(teacher.head_DH, head) and teacher.temperature == TEMPERATURE
    num_slots = sum(last - first for d in documents for first, last in slot_runs(d.mask))
    loss, _ = drafter_loss(
        plain(batch), plain.lm_head.weight, teacher, batch.valid_LR, trainer.recipe.train.ttt_decay, num_slots
    )
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    optimizer.step()

    assert metrics["slots"] == num_slots == len(batch.slot_R)
    assert metrics["grad_norm"] == float(norm) > 0.05
    assert len(metrics["kl"]) == tiny.K and metrics["skipped_updates"] == 0
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(ours.lm_head.weight, weak_drafter(verifier).lm_head.weight)


def test_training_raises_acceptance_and_leaves_the_rollouts_as_they_were(verifier, documents):
    states = StreamedStates(verifier, documents, keep=99)
    fields = [states.document(i) for i in range(len(documents))]
    before = [{name: tensor.clone() for name, tensor in field.items()} for field in fields]
    trainer = cotrainer(verifier, tokens_per_batch=512, lr=6e-3)
    first = trainer.train(states, 1)
    last = [trainer.train(states, 10) for _ in range(4)][-1]
    assert last["expected_acceptance_sampled"][0] > first["expected_acceptance_sampled"][0] + 0.1
    assert trainer.num_updates == 41 and trainer.num_trainings == 5
    for field, kept in zip(fields, before, strict=True):
        assert all(torch.equal(field[name], kept[name]) for name in kept)


def test_the_teacher_and_the_embedding_follow_what_was_published(verifier, documents):
    trainer = cotrainer(verifier)
    states = StreamedStates(verifier, documents)
    weights = {name: tensor.clone() for name, tensor in verifier.model.state_dict().items()}
    weights["model.embed_tokens.weight"].mul_(1.5)
    weights["lm_head.weight"].mul_(0.5)
    passed = dict(trainer.ends.watch(iter(weights.items())))
    assert passed.keys() == weights.keys()
    assert torch.equal(trainer.drafter.embed_VH, weights["model.embed_tokens.weight"])
    head = TeacherView(trainer.drafter, trainer.ends).head_DH
    assert torch.equal(head, weights["lm_head.weight"][trainer.drafter.draft_to_target_D])
    assert not torch.equal(verifier.embed_VH, trainer.drafter.embed_VH), "the policy's own table must not be written"
    assert trainer.train(states, 1)["updates"] == 1


def test_a_tied_head_is_the_embedding():
    table = torch.randn(8, 4)
    tied = Ends(iter([("model.embed_tokens.weight", table), ("model.norm.weight", torch.ones(4))]), 0.0, table.dtype)
    assert tied.head_VH is tied.embed_VH and tied.temperature == 1.0
    list(tied.watch(iter([("model.embed_tokens.weight", table + 1)])))
    assert torch.equal(tied.head_VH, table + 1)


def test_a_tied_head_that_was_stored_all_the_same_follows_the_embedding():
    table = torch.randn(8, 4)
    both = Ends(iter([("model.embed_tokens.weight", table), ("lm_head.weight", table)]), 1.0, table.dtype)
    list(both.watch(iter([("model.embed_tokens.weight", table + 1)])))
    assert torch.equal(both.head_VH, table + 1)
    untied = Ends(iter([("model.embed_tokens.weight", table), ("lm_head.weight", table + 2)]), 1.0, table.dtype)
    list(untied.watch(iter([("model.embed_tokens.weight", table + 1), ("lm_head.weight", table + 3)])))
    assert torch.equal(untied.embed_VH, table + 1) and torch.equal(untied.head_VH, table + 3)


def test_an_update_that_is_not_finite_is_left_out_and_said(verifier, documents):
    trainer = cotrainer(verifier)
    states = StreamedStates(verifier, documents, keep=99)
    states.document(0)["aux"].fill_(float("nan"))
    before = copy.deepcopy(trainer.drafter.state_dict())
    metrics = trainer.train(states, 1)
    assert metrics["skipped_updates"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.drafter.state_dict().items())


def test_batches_take_their_share_from_the_replay(verifier, documents):
    trainer = cotrainer(verifier, tokens_per_batch=240, replay_share=0.25)
    fresh, old = documents[:32], documents[32:]
    trainer_batches = []
    update = trainer._update
    trainer._update = lambda states, members, teacher: (
        trainer_batches.append(members) or update(states, members, teacher)
    )
    metrics = trainer.train(StreamedStates(verifier, fresh), 5, StreamedStates(verifier, old))
    for members in trainer_batches:
        tokens = [sum(len(documents[i].tokens) for i in members if (i >= 32) == replayed) for replayed in (False, True)]
        assert tokens == [180, 60]
    assert metrics["replayed_documents"] == 16
    assert len({tuple(m) for m in trainer_batches}) == 5


def test_few_rollouts_are_used_again_in_another_order(verifier, documents):
    trainer = cotrainer(verifier, tokens_per_batch=60)
    batches = trainer._batches(StreamedStates(verifier, documents[:4]), 4)
    drawn = [next(batches) for _ in range(8)]
    assert all(sorted(i for b in drawn[j : j + 2] for i in b) == [0, 1, 2, 3] for j in range(0, 8, 2))
    assert len({tuple(b) for b in drawn}) > 2


def test_the_learning_rate_warms_up_then_stays_and_a_growing_one_comes_down(verifier):
    steady = cotrainer(verifier, lr=1e-4)
    assert [steady.lr_at(n) for n in (1, 5, 10, 500)] == pytest.approx([1e-5, 5e-5, 1e-4, 1e-4])
    grows = CoTrainer(
        recipe(cotrain={"lr": 1e-4, "grow_batches": 40}), weak_drafter(verifier), ends(verifier), World(), grows=True
    )
    rates = [grows.lr_at(n) for n in range(1, 60)]
    assert max(rates) > 0.8 * grows.recipe.settled().train.lr and rates[39:] == pytest.approx([1e-4] * 20)
    assert rates[10:40] == sorted(rates[10:40], reverse=True)


def test_a_resumed_cotraining_goes_on_bit_for_bit(verifier, documents, tmp_path):
    def steps(trainer: CoTrainer, replay: Replay, numbers: range) -> None:
        for step in numbers:
            fresh = documents[8 * step : 8 * step + 8]
            drawn = replay.draw(60, step)
            trainer.train(StreamedStates(verifier, fresh), 2, StreamedStates(verifier, drawn) if drawn else None)
            replay.add(fresh, step)

    make = lambda: (cotrainer(verifier, tokens_per_batch=120), Replay(6, seed=0))  # noqa: E731
    whole, kept = make()
    steps(whole, kept, range(6))
    first, early = make()
    steps(first, early, range(3))
    first.save(tmp_path)
    early.save(tmp_path / "replay.safetensors")
    second, late = make()
    second.load(tmp_path)
    late.load(tmp_path / "replay.safetensors")
    steps(second, late, range(3, 6))
    assert late.documents == kept.documents and late.born == kept.born and second.num_updates == 12
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, second.drafter.state_dict()[name]), name
    for a, b in zip(whole.optimizer.state.values(), second.optimizer.state.values(), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


# ---- the policy does not notice ----------------------------------------------------------------------------------


def policy_gradients(documents: Sequence[Document], with_drafter: bool) -> dict[str, torch.Tensor]:
    """A policy-gradient loss on the same model, with a training of the drafter between its forward and its backward."""
    verifier = made_verifier(tiny.verifier_dir())
    trainer = cotrainer(verifier, lr=1e-2)
    model = verifier.model.requires_grad_(True)
    torch.manual_seed(3)
    tokens = torch.tensor([d.tokens for d in documents[:8]])
    logp = (model(tokens, use_cache=False).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
    chosen = logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    if with_drafter:
        trainer.train(StreamedStates(verifier, documents[:8]), 3)
        assert trainer.num_updates == 3
    advantage = torch.randn(8, 1)  # drawn after the drafter trained, which must not draw any
    (-(chosen * advantage).mean()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_policy_gradients_are_bit_equal_with_the_drafter_on_and_off(documents):
    on, off = policy_gradients(documents, True), policy_gradients(documents, False)
    assert on.keys() == off.keys() and all(on[name] is not None for name in on)
    for name in on:
        assert torch.equal(on[name], off[name]), name
    assert sum(float(g.abs().sum()) for g in on.values()) > 0


def test_states_that_would_reach_the_policy_are_refused(verifier, documents):
    class Attached(StreamedStates):
        def document(self, i: int) -> dict[str, torch.Tensor]:
            return {name: t.requires_grad_() if t.is_floating_point() else t for name, t in super().document(i).items()}

    with pytest.raises(AssertionError):
        cotrainer(verifier).train(Attached(verifier, documents), 1)


# ---- several ranks -----------------------------------------------------------------------------------------------


def run_ranks(size: int, shares: list[list[int]], out: Path) -> list[dict[str, torch.Tensor]]:
    """Each rank trains on its documents (numbers) for three updates; the drafters they end with."""
    port = str(random.Random(os.getpid()).randrange(20000, 40000))
    processes = []
    for rank in range(size):
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(draftkit.__file__).parent.parent),
        }  # fmt: skip
        arguments = [str(tiny.verifier_dir()), json.dumps(shares[rank]), str(out / f"{size}-{rank}.pt")]
        processes.append(subprocess.Popen([sys.executable, __file__, *arguments], env=env))
    assert [p.wait(240) for p in processes] == [0] * size
    return [torch.load(out / f"{size}-{rank}.pt") for rank in range(size)]


def rank_main(directory: str, share: str, file: str) -> None:
    path = Path(directory)
    tiny.verifier_dir = lambda: path
    world = World()
    verifier = made_verifier(path)
    documents = tiny.sample_documents(path, 12, 24)
    section = {"tokens_per_batch": 10_000, "lr": 3e-3}
    trainer = CoTrainer(recipe(cotrain=section), weak_drafter(verifier), ends(verifier), world)
    mine = [documents[i] for i in json.loads(share)] or [Document((1, 2, 3), (False,) * 3)]
    metrics = [trainer.train(StreamedStates(verifier, mine), 1) for _ in range(3)]
    figures = torch.tensor([[m["slots"], m["loss"], m["grad_norm"], m["tokens"]] for m in metrics])
    observed = Observation.of([], [], float(world.rank), world)
    assert observed is None
    torch.save(trainer.drafter.state_dict() | {"figures": figures}, file)


def test_two_ranks_train_the_drafter_of_one(tmp_path):
    """Unequal shares, and then one rank without any slot: the same drafter as alone, bit for bit the same on both."""
    (alone,) = run_ranks(1, [list(range(12))], tmp_path)
    for name, shares in {"unequal": [[0, 1, 2], list(range(3, 12))], "empty": [list(range(12)), []]}.items():
        both = run_ranks(2, shares, tmp_path)
        for key, tensor in alone.items():
            assert torch.equal(both[0][key], both[1][key]), f"{name}: {key} differs between ranks"
            torch.testing.assert_close(both[0][key], tensor, rtol=2e-3, atol=2e-4, msg=lambda m, k=key: f"{k}: {m}")
    moved = (alone["fc.weight"] - weak_drafter(tiny.verifier()).fc.weight).abs().max()
    assert moved > 1e-3


# ---- growing -----------------------------------------------------------------------------------------------------


def grown(documents: Sequence[Document], size: int, batches: int) -> tuple[CoTrainer, dict, Verifier]:
    verifier = made_verifier(tiny.verifier_dir())
    facts = model_facts(tiny.verifier_dir())
    r = recipe(
        drafter={"draft_vocab_size": size},
        cotrain={"grow_batches": batches, "tokens_per_batch": 512, "lr": 2e-3},
        train={"ttt_steps": tiny.K, "lr": 6e-3},
    )
    shared = ends(verifier)
    weights = needed(iter(verifier.model.state_dict().items()), facts.num_layers, 1)
    drafter = provisional(r, facts, verifier.aux_layers, shared, weights)
    trainer = CoTrainer(r, drafter, shared, World(), grows=True)
    assert not trainer.is_grown
    return trainer, trainer.grow(StreamedStates(verifier, documents, keep=99), [5, 63]), verifier


def test_a_grown_vocabulary_holds_what_was_seen_and_then_the_policys_likeliest(documents):
    few = documents[:2]
    trainer, metrics, verifier = grown(few, 40, 0)
    seen = Counter(t for d in few for t, m in zip(d.tokens, d.mask, strict=True) if m)
    chosen = set(trainer.drafter.draft_to_target_D.tolist())
    assert len(seen) < 38 and set(seen) | {5, 63} <= chosen and len(chosen) == 40
    likely = torch.zeros(tiny.VOCAB, dtype=torch.float64)
    for d in few:
        logits = verifier.model(torch.tensor([d.tokens]), use_cache=False).logits[0].double() / TEMPERATURE
        likely += logits[torch.tensor(d.mask)].softmax(-1).sum(0)
    left = sorted(set(range(tiny.VOCAB)) - set(seen) - {5, 63}, key=lambda t: -likely[t])
    assert chosen - set(seen) - {5, 63} == set(left[: 40 - len(set(seen) | {5, 63})])
    assert metrics["coverage"] == 1.0 and metrics["tokens_seen"] == len(seen)
    assert metrics["likely_coverage"] == pytest.approx(float(likely[sorted(chosen)].sum() / likely.sum()), abs=0.01)
    head = trainer.ends.head_VH[trainer.drafter.draft_to_target_D]
    assert torch.equal(trainer.drafter.lm_head.weight.to(head.dtype), head)


def test_more_seen_tokens_than_room_keeps_the_most_frequent(documents):
    trainer, metrics, _ = grown(documents, 24, 0)
    counts = Counter(t for d in documents for t, m in zip(d.tokens, d.mask, strict=True) if m)
    kept = set(trainer.drafter.draft_to_target_D.tolist()) - {5, 63}
    assert len(counts) > 24 and min(counts[t] for t in kept) >= max(counts[t] for t in set(counts) - kept - {5, 63})
    assert metrics["coverage"] < 1


def test_a_grown_drafter_learns_on_the_first_rollouts(documents):
    trainer, metrics, verifier = grown(documents, tiny.DRAFT_VOCAB, 0)
    held = StreamedStates(verifier, tiny.sample_documents(tiny.verifier_dir(), 24, 24, seed=9))
    before = predicted(trainer.drafter, held, tiny.K).acceptance_length
    trainer, metrics, _ = grown(documents, tiny.DRAFT_VOCAB, 60)
    after = predicted(trainer.drafter, held, tiny.K).acceptance_length
    assert metrics["updates"] == 60 and trainer.is_grown and trainer.num_updates == 60
    assert after > before + 0.15


def test_a_vocabulary_without_an_end_is_refused(verifier):
    facts = model_facts(tiny.verifier_dir())
    with pytest.raises(UserError, match="whole vocabulary"):
        provisional(recipe(drafter={"draft_vocab_size": tiny.VOCAB}), facts, verifier.aux_layers, ends(verifier), {})


# ---- replay ------------------------------------------------------------------------------------------------------


def answers(step: int, num: int) -> list[Document]:
    return [Document((step, i, 1, 2, 3), (False, False, True, True, True)) for i in range(num)]


def test_the_replay_is_bounded_and_its_ages_spread(tmp_path):
    replay = Replay(64, seed=1)
    for step in range(60):
        replay.add(answers(step, 20), step)
        assert len(replay.documents) <= 64
        assert [d.tokens[0] for d in replay.documents] == replay.born
    ages = [59 - born for born in replay.born]
    assert len(replay.documents) == 64 and len(set(replay.documents)) == 64
    assert ages.count(0) == 64 // SPAN and 4 < sum(ages) / 64 < 12 and max(ages) > 2 * SPAN

    replay.save(tmp_path / "replay.safetensors")
    again = Replay(64, seed=1)
    again.load(tmp_path / "replay.safetensors")
    assert again.documents == replay.documents and again.born == replay.born
    for kept in (replay, again):
        kept.add(answers(60, 20), 60)
    assert again.documents == replay.documents and again.draw(99, 60) == replay.draw(99, 60)


def test_the_replay_draws_about_so_many_tokens_each_once():
    replay = Replay(32, seed=0)
    replay.add(answers(0, 40), 0)
    drawn = replay.draw(52, step=1)
    assert len(drawn) == 11 and len(set(drawn)) == 11 and drawn != replay.draw(52, step=2)
    assert len(replay.draw(10**6, 1)) == 32 and replay.draw(0, 1) == []


def test_what_teaches_nothing_is_not_kept(tmp_path):
    replay = Replay(8, seed=0)
    replay.add([Document((1, 2, 3), (False, True, False))], 0)
    assert replay.documents == []
    none = Replay(0, seed=0)
    none.add(answers(0, 9), 0)
    none.save(tmp_path / "empty.safetensors")
    none.load(tmp_path / "empty.safetensors")
    assert none.documents == [] and none.draw(100, 0) == []


# ---- when to train -----------------------------------------------------------------------------------------------

B = -0.5  # acceptance length lost for a nat of entropy


def follow(observations: Sequence[tuple[float, float]], generate_s: float = 20.0, **section) -> list[Decision]:
    """(acceptance, entropy) by step; a training costs one second."""
    trigger = Trigger.new(CotrainSection(**section))
    decisions = []
    for step, (acceptance, entropy) in enumerate(observations):
        decisions.append(trigger.decide(step, Observation(acceptance, entropy, generate_s, B)))
        if decisions[-1].train:
            trigger.trained(1.0)
        copied = Trigger.new(CotrainSection(**section))
        copied.load(json.loads(json.dumps(trigger.state())))
        assert copied == trigger
        trigger = copied
    return decisions


STEADY = [(2.0, 1.0)] * 20


def test_a_strong_start_is_left_alone_after_a_few_tries():
    trained = [d.train for d in follow(STEADY)]
    assert trained == [True] * (2 * HALF - 1) + [False] * (21 - 2 * HALF)


def test_the_first_training_tells_what_one_costs():
    first, second = follow(STEADY[:2])
    assert first.train and first.cost_s is None and "costs" in first.why
    assert second.cost_s == 1.0


def test_a_weak_start_is_trained_as_long_as_acceptance_rises():
    rising = [(1.2 + 0.05 * min(step, 16), 1.0) for step in range(30)]
    decisions = follow(rising)
    trained = [d.train for d in decisions]
    assert all(trained[:17]) and not any(trained[17 + 2 * HALF :])
    assert decisions[12].saved_s == pytest.approx(0.05 / decisions_acceptance(rising, 12) * 20 * 20, rel=0.01)


def decisions_acceptance(observations: Sequence[tuple[float, float]], step: int) -> float:
    return (observations[step][0] + observations[step - 1][0]) / 2


def test_a_loss_that_entropy_explains_trains_nothing():
    surer = STEADY + [(2.0 + B * 0.1 * step, 1.0 + 0.1 * step) for step in range(1, 15)]
    decisions = follow(surer)
    assert not any(d.train for d in decisions[2 * HALF :])
    assert decisions[-1].acceptance_lost == pytest.approx(0.675) == decisions[-1].entropy_part


def test_a_mismatch_trains_until_it_is_made_good():
    lost = STEADY + [(1.6, 1.0)] * 3 + [(1.8, 1.0), (2.0, 1.0), (2.02, 1.0), (2.02, 1.0)] + STEADY
    decisions = follow(lost)
    begin = next(i for i, d in enumerate(decisions) if i > 10 and d.train)
    assert begin in (20, 21) and "mismatch" in decisions[begin].why
    assert decisions[begin].acceptance_lost > 0.15 and decisions[begin].entropy_part == 0
    assert decisions[begin].saved_s > decisions[begin].cost_s
    assert not any(d.train for d in decisions[26:])


def test_the_same_acceptance_with_a_surer_policy_is_a_mismatch():
    """Entropy fell, acceptance should have risen with it and did not: the drafter has fallen behind."""
    decisions = follow(STEADY + [(2.0, 0.2)] * 4)
    late = [d for d in decisions[20:] if d.train]
    assert late and late[0].acceptance_lost == pytest.approx(0) and late[0].entropy_part < -0.15


def test_a_loss_that_training_cannot_win_back_becomes_the_new_level():
    decisions = follow(STEADY + [(1.6, 1.0)] * 30)
    assert any(d.train for d in decisions[20:23]) and not any(d.train for d in decisions[20 + 2 * HALF + 2 :])


def test_no_training_for_rollouts_that_hardly_take_time():
    decisions = follow(STEADY + [(1.6, 1.0)] * 5, generate_s=0.1)
    assert not any(d.train for d in decisions[20:]) and decisions[-1].saved_s < decisions[-1].cost_s


def test_noise_is_no_loss():
    rng = random.Random(0)
    noisy = [(2.0 + rng.gauss(0, 0.03), 1.0) for _ in range(120)]
    trained = [d.train for d in follow(noisy)]
    assert sum(trained[2 * HALF :]) < 0.2 * len(trained)


def test_every_n_and_off():
    assert [d.train for d in follow(STEADY[:7], mode="every-n", every=3)] == [True, False, False] * 2 + [True]
    assert not any(d.train for d in follow(STEADY, mode="off"))
    assert follow(STEADY, mode="every-n")[-1].acceptance_lost == 0  # the inputs are there in every mode


def test_a_drafter_that_is_not_used_yet_is_trained_on():
    trigger = Trigger.new(CotrainSection())
    assert all(trigger.decide(step, None).train for step in range(20))
    for step in range(20, 40):
        trigger.decide(step, Observation(2.0, 1.0, 20.0, B))
        trigger.trained(1.0)
    assert not trigger.decide(40, None).train


class _Together(World):
    """What several ranks would hand to each other."""

    def __init__(self, others: list) -> None:
        super().__init__()
        self.others = others

    def gather(self, mine):
        return [mine, *self.others.pop(0)]


def trajectory(drafts: int, accepted: int, tokens: int) -> Trajectory:
    turns = [Turn(0, 1, "stop", SpecCounters(drafts - 1, 3 * drafts - 3, accepted)), Turn(1, 2, "stop", None)]
    turns.append(Turn(2, 3, "stop", SpecCounters(1, 3, 0)))
    mask = (True,) * tokens + (False,) * 4
    return Trajectory("p", "t", 0, 0, mask, mask, (0.0,) * len(mask), tuple(turns), 0.0, False, 1, 1, 3)


def test_an_observation_pools_rounds_over_turns_trajectories_and_ranks():
    mine = [trajectory(10, 10, 30), trajectory(30, 15, 50), trajectory(1, 0, 9)]
    theirs = [[(20, 4, 2.5, 20)]]
    world = _Together([theirs, [7.5]])
    seen = Observation.of(mine, [1.0, 2.0, 0.0], 5.0, world)
    assert seen.acceptance == pytest.approx(1 + 29 / 61)
    assert seen.entropy == pytest.approx((30 * 1.0 + 50 * 2.0 + 9 * 0.0 + 20 * 2.5) / 109)
    assert seen.generate_s == 7.5 and -0.8 < seen.slope < 0
    plain = [dataclasses.replace(t, turns=(Turn(0, 1, "stop", None),)) for t in mine]
    assert Observation.of(plain, [1.0, 2.0, 0.0], 5.0, World()) is None


if __name__ == "__main__":
    rank_main(*sys.argv[1:])
