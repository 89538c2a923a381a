"""Publishing: what is sent, in which order, under which version; and that a running engine then holds it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny
import torch
from tiny import TinyPolicy

from draftkit.drafters.export import served_tensors
from draftkit.drafters.layouts import export
from draftkit.engine import Engine, expected_probe, probe_mismatches
from draftkit.rl.publish import Ends, Publisher
from draftkit.types import Sampling, SpecConfig


class Recorder:
    """What an engine was asked for, in order."""

    def __init__(self) -> None:
        self.calls: list = []

    def load_verifier(self, weights: Iterator) -> None:
        self.calls.append(("verifier", dict(weights)))

    def load_drafter(self, weights: Iterator) -> None:
        self.calls.append(("drafter", dict(weights)))

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")


@pytest.fixture
def policy() -> TinyPolicy:
    return TinyPolicy(tiny.verifier_dir())


@pytest.fixture
def publisher(policy) -> Publisher:
    shared = Ends(policy.weights(), 1.0, policy.dtype)
    drafter = tiny.random_drafter(tiny.verifier())
    drafter.embed_VH = shared.embed_VH
    return Publisher(Recorder(), policy, drafter, shared)


def test_only_what_changed_is_sent_and_counted(publisher):
    sent = publisher.publish(policy=True, drafter=False)
    assert (sent.policy_version, sent.draft_version, sent.policy, sent.drafter) == (1, 0, True, False)
    assert [name for name, _ in publisher.engine.calls] == ["verifier"] and sent.seconds_drafter < sent.seconds
    sent = publisher.publish(policy=False, drafter=True)
    assert (sent.policy_version, sent.draft_version) == (1, 1)
    publisher.publish(policy=False, drafter=False)
    assert [name for name, _ in publisher.engine.calls] == ["verifier", "drafter"]
    sent = publisher.publish(policy=True, drafter=True)
    assert [name for name, _ in publisher.engine.calls][2:] == ["verifier", "drafter"]
    assert publisher.state() == {"policy_version": 2, "draft_version": 2}
    again = Publisher(Recorder(), publisher.policy, publisher.drafter, publisher.ends)
    again.load(publisher.state())
    assert again.publish(policy=True, drafter=True).policy_version == 3


def test_the_drafter_is_sent_as_vllm_wants_it_without_what_it_shares(publisher):
    publisher.publish(policy=False, drafter=True)
    [(_, sent)] = publisher.engine.calls
    drafter = publisher.drafter
    assert sent.keys() == {name for name, _ in drafter.named_parameters()} | {"d2t"}
    assert not any("embed" in name for name in sent)
    assert sent["d2t"].dtype == torch.int64 and torch.equal(sent["d2t"], drafter.d2t)
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in sent.items() if name != "d2t")
    torch.testing.assert_close(sent["fc.weight"].float(), drafter.fc.weight.detach(), rtol=0.01, atol=1e-4)


def test_the_drafter_of_the_trainer_shares_what_was_published(publisher, policy):
    policy.scale(1.25)
    assert not torch.equal(publisher.drafter.embed_VH, policy.tensors["model.embed_tokens.weight"])
    publisher.publish(policy=True, drafter=False)
    assert torch.equal(publisher.drafter.embed_VH, policy.tensors["model.embed_tokens.weight"])
    assert torch.equal(publisher.ends.head_VH, policy.tensors["lm_head.weight"])
    [(_, sent)] = publisher.engine.calls
    assert sent.keys() == policy.tensors.keys()
    policy.scale(2.0)
    assert not torch.equal(publisher.drafter.embed_VH, policy.tensors["model.embed_tokens.weight"]), "a copy, no view"


def test_an_engine_that_sleeps_is_woken_to_be_published_to(publisher):
    publisher.sleep()
    publisher.sleep()
    assert publisher.publish(policy=False, drafter=True).slept
    assert publisher.engine.calls[:2] == ["sleep", "wake"] and len(publisher.engine.calls) == 3
    assert not publisher.publish(policy=False, drafter=True).slept
    publisher.wake()
    assert publisher.engine.calls.count("wake") == 1


@pytest.mark.engine
def test_a_running_engine_holds_what_was_published(tmp_path, policy):
    shared = Ends(policy.weights(), 1.0, policy.dtype)
    drafter = tiny.random_drafter(tiny.verifier())
    drafter.embed_VH = shared.embed_VH
    export(drafter, tmp_path / "drafter", tiny.FINGERPRINT, tiny.card())

    def differs(engine: Engine) -> list[str]:
        expected = expected_probe(policy.weights(), "verifier", engine.dtype)
        expected |= expected_probe(served_tensors(drafter).items(), "drafter", engine.dtype)
        return probe_mismatches(engine.probe(), expected)

    spec = SpecConfig("eagle3", str(tmp_path / "drafter"), tiny.K)
    with Engine(tiny.verifier_dir(), recipe_engine=tiny.SECTION, spec=spec) as engine:
        publisher = Publisher(engine, policy, drafter, shared)
        assert differs(engine) == []
        policy.scale(1.1)
        assert any(name.startswith("verifier") for name in differs(engine))
        publisher.publish(policy=True, drafter=False)
        assert differs(engine) == []
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.mul_(1.01)
        assert len(differs(engine)) == len(list(drafter.parameters()))
        publisher.publish(policy=False, drafter=True)
        assert differs(engine) == []
        answers = engine.generate(tiny.prompts(2), Sampling(temperature=0.0, max_tokens=8))
        assert all(len(a.response_ids) == 8 for a in answers)
