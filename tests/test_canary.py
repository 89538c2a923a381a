"""The canary on a real engine: healthy publishes pass, and each of seven sabotages is named within one step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator

import pytest
import tiny
import torch
from tiny import TinyPolicy

from draftkit.drafters.eagle3 import Eagle3
from draftkit.drafters.export import served_tensors
from draftkit.drafters.layouts import export
from draftkit.engine import Engine
from draftkit.recipe import CanarySection
from draftkit.rl.canary import Canary, CanaryRecord, Findings, agree, fault, judge
from draftkit.rl.publish import Ends, Published, Publisher
from draftkit.rl.world import World
from draftkit.types import Sampling, SpecConfig

SECTION = CanarySection(prompts=8, max_tokens=24)

# ---- the verdict, without an engine ------------------------------------------------------------------------------


def record(**changes) -> CanaryRecord:
    healthy = CanaryRecord(
        ok=True, cause=None, policy_intact=True, speculate=True, served=2.0, predicted=2.05, num_rounds=60,
        num_cached=0, mismatched=(), seconds=0.0,
    )  # fmt: skip
    return dataclasses.replace(healthy, **changes)


@pytest.mark.parametrize(
    ("served", "predicted", "rounds", "ok", "speculate"),
    [
        (2.0, 2.05, 60, True, True),
        (1.6, 2.0, 60, True, True),  # worse than predicted, within what a near-tie may do
        (1.0, 2.0, 60, False, False),  # collapsed
        (1.3, 2.0, 60, False, True),  # far below, but still worth its time
        (1.0, 1.02, 60, True, False),  # a drafter that is simply not good yet
        (1.04, 1.06, 60, True, False),
        (1.0, 2.0, 7, True, True),  # too few rounds to say anything
    ],
)
def test_acceptance_decides_whether_to_speculate(served, predicted, rounds, ok, speculate):
    judged = judge(record(served=served, predicted=predicted, num_rounds=rounds), 1.05)
    assert (judged.ok, judged.speculate) == (ok, speculate)
    assert ok or f"{served:.2f} served, {predicted:.2f} predicted" in judged.cause


def test_a_decision_stays_until_there_is_evidence():
    assert not judge(record(speculate=False, num_rounds=3), 1.05).speculate
    assert judge(record(speculate=False), 1.05).speculate
    assert judge(record(served=None, speculate=False), 1.05).speculate is False


def test_a_cause_that_was_found_is_not_replaced():
    judged = judge(record(ok=False, cause="drafter weights not published: x", served=1.0), 1.05)
    assert judged.cause == "drafter weights not published: x" and not judged.speculate


def test_one_rank_at_fault_speaks_for_all():
    bad = record(ok=False, cause="sleep dropped the drafter: ...", speculate=False, policy_intact=False)
    together = agree([record(), bad, record()])
    assert together.cause == bad.cause and not together.speculate and not together.policy_intact
    assert agree([record(served=1.5), record()]) == record(served=1.5)


def findings(**changes) -> Findings:
    made = torch.Generator().manual_seed(0)
    probe = lambda *names: {name: torch.randn(6, generator=made) for name in names}  # noqa: E731
    before = probe("verifier.model.embed_tokens.weight", "verifier.model.norm.weight", "drafter.fc.weight")
    before |= probe("drafter.norm.weight") | {"drafter.d2t": torch.arange(6)}
    expected = probe(*(name for name in before if name != "drafter.d2t")) | {"drafter.d2t": torch.arange(6)}
    return dataclasses.replace(
        Findings(dict(expected), expected, before, 0, (1, 2, 3), (1, 2, 3), slept=False), **changes
    )


def with_held(found: Findings, **values: torch.Tensor) -> Findings:
    held = found.held | {name.replace("__", "."): value for name, value in values.items()}
    return dataclasses.replace(found, held=held)


def test_nothing_wrong_is_no_fault():
    assert fault(findings()) == (None, True)
    assert fault(findings(layers=None, trained_on=None)) == (None, True)


@pytest.mark.parametrize("offset", [1, -1])
def test_auxiliary_layers_off_by_one(offset):
    cause, intact = fault(findings(layers=(1 + offset, 2 + offset, 3 + offset)))
    assert cause.startswith(f"auxiliary layers off by {offset:+d}") and intact
    assert fault(findings(layers=(1, 2)))[0].startswith("auxiliary layers differ")
    assert fault(findings(layers=None))[0].startswith("auxiliary layers differ")


def test_part_of_a_drafter_that_was_not_published():
    found = findings()
    stale = with_held(found, drafter__fc__weight=found.before["drafter.fc.weight"])
    cause, intact = fault(stale)
    assert (
        cause.startswith("drafter weights not published: the engine holds drafter.fc.weight of an earlier") and intact
    )


def test_a_policy_that_was_not_published_comes_before_anything_else():
    found = findings(num_cached=64)
    stale = dataclasses.replace(found, held=found.before)
    cause, intact = fault(stale)
    assert cause.startswith("policy weights not published") and not intact
    other = with_held(found, verifier__model__norm__weight=torch.full((6,), 3.0))
    assert fault(other) == ("policy weights differ: verifier.model.norm.weight", False)


def test_a_verifiers_tensor_that_holds_the_drafters():
    found = findings()
    taken = with_held(found, verifier__model__norm__weight=found.expected["drafter.norm.weight"])
    cause, intact = fault(taken)
    assert cause == "published to the wrong tensors: verifier.model.norm.weight holds drafter.norm.weight"
    assert not intact


def test_a_sleeping_engines_garbage_is_laid_to_the_sleep():
    found = findings(slept=True)
    garbage = {name: value + 7 for name, value in found.held.items() if name.startswith("drafter")}
    lost = dataclasses.replace(found, held=found.held | garbage)
    assert fault(lost)[0].startswith("sleep dropped the drafter")
    assert fault(dataclasses.replace(lost, slept=False))[0].startswith("drafter weights differ")
    nothing = {name: torch.full_like(value, float("nan")) for name, value in garbage.items() if "d2t" not in name}
    broken = dataclasses.replace(found, held=found.held | nothing, slept=False)
    assert fault(broken)[0].startswith("sleep dropped the drafter")


# ---- on a real engine --------------------------------------------------------------------------------------------

engine_test = pytest.mark.engine


@dataclasses.dataclass
class Bench:
    """A policy and a drafter in training, and the engine that they are published to."""

    engine: Engine
    policy: TinyPolicy
    drafter: Eagle3
    publisher: Publisher
    canary: Canary

    def step(self) -> None:
        """Both have learned a little; the drafter so little that it stays good."""
        self.policy.scale(1.01)
        with torch.no_grad():
            for parameter in self.drafter.parameters():
                parameter.mul_(1.003)

    def check(self, published: Published | None = None) -> CanaryRecord:
        return self.canary.check(published or self.publisher.publish(policy=True, drafter=True))

    def heal(self) -> CanaryRecord:
        """The next step, published as it should be."""
        self.step()
        return self.check()


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[Bench]:
    policy = TinyPolicy(tiny.verifier_dir())
    shared = Ends(policy.weights(), 1.0, policy.dtype)
    drafter = copy.deepcopy(tiny.trained_drafter())
    drafter.embed_VH = shared.embed_VH
    directory = tmp_path_factory.mktemp("canary") / "drafter"
    export(drafter, directory, tiny.FINGERPRINT, tiny.card())
    section = tiny.SECTION.model_copy(update={"prefix_caching": True, "max_num_seqs": 16})
    with Engine(
        tiny.verifier_dir(), recipe_engine=section, spec=SpecConfig("eagle3", str(directory), tiny.K)
    ) as engine:
        publisher = Publisher(engine, policy, drafter, shared)
        prompts = tiny.prompts(SECTION.prompts, seed=7)
        canary = Canary(engine, policy, drafter, prompts, SECTION, tiny.K, policy.rescore, World())
        made = Bench(engine, policy, drafter, publisher, canary)
        assert made.heal().ok
        yield made


@engine_test
def test_honest_publishes_pass(bench):
    for policy, drafter in ((True, True), (True, False), (False, True), (False, False)):
        seen = bench.check(bench.publisher.publish(policy=policy, drafter=drafter))
        assert seen.ok and seen.cause is None and seen.policy_intact and seen.speculate and seen.mismatched == ()
        assert (seen.num_cached > 0) is not (policy or drafter)  # where nothing came, the cache is right
        assert seen.seconds > 0
        assert seen.served > 1.3 and abs(seen.served - seen.predicted) < 0.2 and seen.num_rounds > 40
    assert bench.heal().ok


def without_the_drafter(bench: Bench) -> Published:
    """The publish says that it sent the drafter."""
    published = bench.publisher.publish(policy=True, drafter=False)
    return dataclasses.replace(published, drafter=True)


def gate_and_up_exchanged(bench: Bench) -> Published:
    published = bench.publisher.publish(policy=True, drafter=True)
    tensors = served_tensors(bench.drafter)
    gate, up = "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]
    bench.engine.load_drafter(tensors.items())
    return published


def with_a_map_of_zeros(bench: Bench) -> Published:
    published = bench.publisher.publish(policy=True, drafter=True)
    tensors = served_tensors(bench.drafter)
    bench.engine.load_drafter((tensors | {"d2t": torch.zeros_like(tensors["d2t"])}).items())
    return published


def without_a_cache_reset(bench: Bench) -> Published:
    bench.engine._llm.reset_prefix_cache, kept = lambda: True, bench.engine._llm.reset_prefix_cache
    try:
        return bench.publisher.publish(policy=True, drafter=True)
    finally:
        bench.engine._llm.reset_prefix_cache = kept


def with_a_sleep_that_drops(bench: Bench) -> Published:
    """What level 2 does: the memory is there again after waking up, its contents are not."""
    bench.publisher.sleep()
    empty = {name: torch.zeros_like(tensor) for name, tensor in served_tensors(bench.drafter).items()}
    bench.engine.load_drafter(empty.items())
    return bench.publisher.publish(policy=True, drafter=False)


def with_an_embedding_of_the_drafters_own(bench: Bench) -> Published:
    """A drafter checkpoint that brings the embedding it was once trained with, loaded into the shared table."""
    published = bench.publisher.publish(policy=True, drafter=True)
    table = bench.engine._draft_model.model.embed_tokens
    assert table is bench.engine._runner.get_model().model.embed_tokens
    with torch.inference_mode():
        table.weight.copy_(tiny.verifier().embed_VH)
    return published


def with_auxiliary_layers_one_later(bench: Bench) -> Published:
    layers = tuple(layer + 1 for layer in bench.drafter.config.aux_layers)
    bench.engine._runner.get_model().set_aux_hidden_state_layers(layers)
    return bench.publisher.publish(policy=True, drafter=True)


def undo_auxiliary_layers(bench: Bench) -> None:
    bench.engine._runner.get_model().set_aux_hidden_state_layers(bench.drafter.config.aux_layers)


@engine_test
@pytest.mark.parametrize(
    ("sabotage", "cause", "intact", "collapses"),
    [
        (without_the_drafter, "drafter weights not published", True, False),
        (
            gate_and_up_exchanged,
            "published to the wrong tensors: drafter.layers.0.mlp.gate_proj.weight holds",
            True,
            None,
        ),
        (with_a_map_of_zeros, "vocabulary map zeroed", True, None),
        (without_a_cache_reset, "stale prefix cache", False, False),
        (with_a_sleep_that_drops, "sleep dropped the drafter", True, True),
        (with_an_embedding_of_the_drafters_own, "target embeddings overwritten", False, None),
        (with_auxiliary_layers_one_later, "auxiliary layers off by +1", True, None),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_sabotage_is_named_within_one_step(
    bench, sabotage: Callable[[Bench], Published], cause: str, intact: bool, collapses: bool | None
):
    bench.step()
    try:
        seen = bench.check(sabotage(bench))
    finally:
        undo_auxiliary_layers(bench)
    assert not seen.ok and seen.cause.startswith(cause), seen
    assert seen.policy_intact is intact
    if collapses is not None:
        assert (seen.served < SECTION.min_acceptance) is collapses
    assert seen.speculate is (seen.served >= SECTION.min_acceptance)
    if not seen.speculate:
        plain = bench.engine.generate(tiny.prompts(2), Sampling(temperature=0.0, max_tokens=8))
        assert all(a.spec is None or a.spec.num_drafts == 0 for a in plain), "rollouts must not pay for it"

    healed = bench.heal()
    assert healed.ok and healed.speculate, healed
    fast = bench.engine.generate(tiny.prompts(2), Sampling(temperature=0.0, max_tokens=8))
    assert sum(a.spec.num_drafts for a in fast) > 0


@engine_test
def test_a_drafter_that_lost_its_skill_is_switched_off_and_on_again(bench):
    """Published faithfully, and yet useless: no fault, but nothing to pay for either."""
    kept = {name: tensor.clone() for name, tensor in bench.drafter.state_dict().items()}
    with torch.no_grad():
        bench.drafter.lm_head.weight.copy_(bench.drafter.lm_head.weight.roll(7, 0))
    seen = bench.check()
    assert seen.ok and seen.cause is None and not seen.speculate and seen.predicted < 1.2
    assert not bench.check().speculate
    bench.drafter.load_state_dict(kept)
    assert bench.heal().speculate


@engine_test
def test_a_drafter_to_grow_is_off_until_it_is_accepted_once(bench):
    canary = Canary(
        bench.engine, bench.policy, bench.drafter, tiny.prompts(8, seed=7), SECTION, tiny.K, bench.policy.rescore,
        World(), speculating=False,
    )  # fmt: skip
    assert not canary.speculating
    assert canary.check(bench.publisher.publish(policy=True, drafter=True)).speculate and canary.speculating


@engine_test
def test_an_engine_without_a_drafter_of_ours_is_checked_for_its_policy_alone():
    policy = TinyPolicy(tiny.verifier_dir())
    with Engine(tiny.verifier_dir(), recipe_engine=tiny.SECTION) as engine:
        publisher = Publisher(engine, policy, None)
        canary = Canary(engine, policy, None, tiny.prompts(2), SECTION, 0, policy.rescore, World())
        policy.scale(1.02)
        seen = canary.check(publisher.publish(policy=True, drafter=False))
        assert seen.ok and not seen.speculate and seen.served is None and seen.predicted is None
        policy.scale(1.02)
        seen = canary.check(publisher.publish(policy=False, drafter=False))
        assert seen.cause.startswith("policy weights not published") and not seen.policy_intact
