"""Speculation as a run switches it: off for whole batches, by schedule, with seeds, with a prefix cache; and what the
engine reports of every step."""

from __future__ import annotations

import pytest
import tiny
from safetensors.torch import load_file

from draftkit.engine import Engine
from draftkit.types import Generation, Sampling, SpecConfig, SpecCounters

pytestmark = pytest.mark.engine

GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = [Sampling(temperature=1.0, max_tokens=24, seed=i, ignore_eos=True) for i in range(12)]
ENGINES = pytest.mark.parametrize("name", ["spec", "sampled_drafts"])


def tokens(answers: list[Generation]) -> list[tuple[int, ...]]:
    return [answer.response_ids for answer in answers]


def total(answers: list[Generation]) -> SpecCounters:
    return sum((answer.spec for answer in answers), SpecCounters())


def model_runs(engine: Engine, monkeypatch) -> list[int]:
    """One entry for every forward of the drafter from now on."""
    model, runs = engine._runner.drafter.model, []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: (runs.append(1), forward(*args, **kwargs))[1])
    return runs


# ---- k = 0 ----------------------------------------------------------------------------------------------------------


@ENGINES
def test_k_0_is_plain_decoding(request, plain, name, monkeypatch):
    """The tokens of an engine without a drafter, greedy and for the same seeds, and not one drafter forward; then k = 3
    is as it was."""
    engine, asked = request.getfixturevalue(name), tiny.prompts(12)
    before = engine.generate(asked, SEEDED)
    engine.set_k(0)
    runs = model_runs(engine, monkeypatch)
    with monkeypatch.context() as without:
        without.setattr(engine._runner, "rejection_sampler", None)  # nor the detour of vLLM's sampling through it
        for sampling in (SEEDED, GREEDY):
            answers = engine.generate(asked, sampling)
            assert tokens(answers) == tokens(plain.generate(asked, sampling))
            assert total(answers).num_drafts == 0
    assert not runs
    engine.set_k(tiny.K)
    assert engine.generate(asked, SEEDED) == before
    assert runs


def test_k_0_beside_another_k_keeps_the_drafter_in_step(spec, monkeypatch):
    """Within a call k may rise again as the batch drains: then the drafter must have seen every token."""
    asked = tiny.prompts(8)
    expected = spec.generate(asked[:1], GREEDY)
    lengths = [Sampling(temperature=0.0, max_tokens=24 if i == 0 else 4, ignore_eos=True) for i in range(8)]
    spec.set_schedule([[1, 1, tiny.K], [2, 256, 0]])
    runs = model_runs(spec, monkeypatch)
    answers = spec.generate(asked, lengths)
    assert runs and answers[0].response_ids == expected[0].response_ids
    assert answers[0].spec.acceptance_length > 1.3
    assert total(answers[1:]).num_draft_tokens == 0
    spec.set_k(tiny.K)


def test_ngram_can_be_paused_too(plain):
    asked = [prompt * 3 for prompt in tiny.prompts(4)]
    with Engine(tiny.verifier_dir(), recipe_engine=tiny.SECTION, spec=SpecConfig("ngram", None, tiny.K)) as engine:
        assert total(engine.generate(asked, GREEDY)).num_drafts > 0
        engine.set_k(0)
        answers = engine.generate(asked, SEEDED[:4])
        assert total(answers).num_drafts == 0 and engine.aux_layers() is None
    assert tokens(answers) == tokens(plain.generate(asked, SEEDED[:4]))


def test_k_does_not_change_within_a_call(spec, monkeypatch):
    monkeypatch.setattr(spec, "between_steps", lambda: spec.set_k(1))
    with pytest.raises(AssertionError, match="between two calls"):
        spec.generate(tiny.prompts(2), GREEDY)
    monkeypatch.undo()
    assert total(spec.generate(tiny.prompts(4), GREEDY)).num_draft_tokens % tiny.K == 0


def test_a_seeded_request_with_sampled_drafts_repeats_whatever_runs_beside_it(sampled_drafts):
    together = sampled_drafts.generate(tiny.prompts(12), SEEDED)
    assert sampled_drafts.generate(tiny.prompts(12), SEEDED) == together
    assert sampled_drafts.generate(tiny.prompts(12)[:3], SEEDED[:3]) == together[:3]
    drafted = total(together)
    assert 0 < drafted.num_accepted < drafted.num_draft_tokens


# ---- steps ----------------------------------------------------------------------------------------------------------


def test_the_step_log_accounts_for_every_token_and_step(plain, spec):
    for engine, k in ((plain, 0), (spec, 3), (spec, 2), (spec, 0)):
        if engine is spec:
            spec.set_k(k)
        engine.step_log()
        answers = engine.generate(tiny.prompts(9), GREEDY, max_concurrency=4)
        steps = engine.step_log()
        assert sum(step.tokens for step in steps) == sum(len(answer.response_ids) for answer in answers)
        assert max(step.running for step in steps) == 4
        assert {step.k for step in steps} == {k}
        assert sum(step.running for step in steps if step.prefill) >= 9
        assert steps[0].prefill and not all(step.prefill for step in steps)
        assert all(0 <= step.draft_seconds < step.seconds for step in steps)
        assert all((step.draft_seconds > 0) == (k > 0) for step in steps)
        assert engine.step_log() == []
    spec.set_k(tiny.K)


def test_aux_layers_are_read_off_the_running_model(plain, spec):
    assert spec.aux_layers() == tuple(tiny.verifier().aux_layers)
    assert plain.aux_layers() is None
    inner = spec._runner.get_model().model
    served = inner.aux_hidden_state_layers
    inner.aux_hidden_state_layers = tuple(layer + 1 for layer in served)
    assert spec.aux_layers() == tuple(layer + 1 for layer in served)
    inner.aux_hidden_state_layers = served


def test_sleep_keeps_the_drafter(spec):
    expected = spec.generate(tiny.prompts(4), GREEDY)
    spec.sleep()
    spec.wake()
    assert spec.generate(tiny.prompts(4), GREEDY) == expected
    with pytest.raises(Exception, match="level 2 is refused: it drops the drafter's weights"):
        spec.sleep(level=2)


# ---- prefix cache ---------------------------------------------------------------------------------------------------


def test_a_prefix_cache_changes_nothing_but_the_time(spec):
    """Prompts with a common beginning of 96 tokens, greedy and seeded, with speculation and while it is off; what the
    cache holds is dropped by new weights and where drafting begins again."""
    section = tiny.SECTION.model_copy(update={"max_model_len": 256})
    shared = tiny.prompts(1, length=100, seed=3)[0]
    asked = [shared + prompt for prompt in tiny.prompts(8)]
    with Engine(tiny.verifier_dir(), recipe_engine=section, spec=spec.spec) as without:
        greedy, seeded = without.generate(asked, GREEDY), without.generate(asked, SEEDED[:8])
        without.set_k(0)
        paused = without.generate(asked, SEEDED[:8])
    cached = section.model_copy(update={"prefix_caching": True})
    with Engine(tiny.verifier_dir(), recipe_engine=cached, spec=spec.spec) as engine:

        def answer(sampling) -> tuple[list[int], list[tuple[int, ...]], float]:
            answers = engine.generate(asked, sampling)
            return [a.num_cached for a in answers], tokens(answers), total(answers).acceptance_length

        first, second = answer(GREEDY), answer(GREEDY)
        assert first[0][0] == 0 and min(first[0][1:]) >= 64 and min(second[0]) >= 64
        assert first[1:] == second[1:] == (tokens(greedy), total(greedy).acceptance_length)
        assert answer(SEEDED[:8])[1:] == (tokens(seeded), total(seeded).acceptance_length)
        engine.set_k(0)
        assert min(answer(SEEDED[:8])[0]) >= 64  # a drafter's states are not needed now
        assert answer(SEEDED[:8])[1] == tokens(paused)
        engine.set_k(tiny.K)
        again = answer(GREEDY)
        assert again[0][0] == 0 and again[1:] == first[1:]
        engine.load_verifier(load_file(tiny.verifier_dir() / "model.safetensors").items())
        assert answer(GREEDY)[0][0] == 0
        engine.load_drafter(load_file(tiny.drafter_dir() / "model.safetensors").items())
        assert answer(GREEDY)[0][0] == 0
