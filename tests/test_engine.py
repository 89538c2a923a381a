"""The engine room on a tiny real model: what it samples, what it counts, how its weights change, and its two cures.

The distribution test, exactly: one prompt is asked 3,000 times with fixed seeds, and the first three tokens of the
answers are tested jointly (Pearson, cells with under five expected answers pooled) against the probabilities that
transformers gives by enumerating all 64^3 continuations. A test fails below p = 1e-4: a right engine would do so once
in ten thousand choices of seeds, and the seeds are fixed. Power: a temperature that is off by a tenth is rejected in
practically every run (`test_the_distribution_test_is_calibrated` simulates both).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from draftkit.engine import Engine, self_tests
from draftkit.errors import UserError
from draftkit.types import Generation, Sampling, SpecCounters

NUM_ANSWERS, ALPHA = 3000, 1e-4
PROMPT = tiny.prompts(1)[0]
GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
TIE = 0.15  # logits; bfloat16 keeps 8 bits, and the best logits of this model are near 10


@pytest.fixture(scope="module")
def exact():
    return tiny.load_exact(tiny.verifier_dir())


def total(generations: list[Generation]) -> SpecCounters:
    return sum((g.spec for g in generations), SpecCounters())


# ---- what is sampled ---------------------------------------------------------------------------------------------


def test_the_distribution_test_is_calibrated(exact):
    """Of 200 honest samples few fall under 5% and none under ALPHA; 20 at another temperature all fall under ALPHA."""
    law = tiny.exact_joint(exact, PROMPT, 1.0)
    warm = tiny.exact_joint(exact, PROMPT, 1.1)
    torch.manual_seed(0)
    honest = [tiny.goodness_of_fit(tiny.draw(law, NUM_ANSWERS), law) for _ in range(200)]
    wrong = [tiny.goodness_of_fit(tiny.draw(warm, NUM_ANSWERS), law) for _ in range(20)]
    assert min(honest) > ALPHA
    assert 2 <= sum(p < 0.05 for p in honest) <= 22  # 10 expected; binomial, three standard deviations
    assert max(wrong) < ALPHA


def sampled(
    engine: Engine, temperature: float, top_k: int = 0, seeded: bool = True
) -> tuple[torch.Tensor, SpecCounters]:
    """The first three tokens of each answer, asked as `prepare` asks: a seed of its own for each request."""
    asked = [
        Sampling(temperature=temperature, top_k=top_k, max_tokens=4, seed=i if seeded else None, ignore_eos=True)
        for i in range(NUM_ANSWERS)
    ]
    answers = engine.generate([PROMPT] * NUM_ANSWERS, asked)
    counters = total(answers) if engine.spec else SpecCounters()
    return torch.tensor([g.response_ids[:3] for g in answers]), counters


SETTINGS = pytest.mark.parametrize(
    ("temperature", "top_k", "seeded"), [(1.0, 0, True), (1.0, 0, False), (0.7, 0, True), (0.8, 5, True)]
)


@pytest.mark.engine
@SETTINGS
def test_speculation_samples_from_the_verifier(spec, exact, temperature, top_k, seeded):
    tokens, counters = sampled(spec, temperature, top_k, seeded)
    assert 0.2 < counters.survival(1)[0] < 0.8  # accepted and recovered tokens are both under test
    assert tiny.goodness_of_fit(tokens, tiny.exact_joint(exact, PROMPT, temperature, top_k)) > ALPHA


@pytest.mark.engine
def test_plain_decoding_samples_from_the_verifier(plain, exact):
    """The yardstick of the test above: it must pass where nothing is drafted."""
    tokens, _ = sampled(plain, 1.0)
    assert tiny.goodness_of_fit(tokens, tiny.exact_joint(exact, PROMPT, 1.0)) > ALPHA


@pytest.mark.engine
def test_sampled_drafts_sample_from_the_verifier(sampled_drafts, exact):
    tokens, counters = sampled(sampled_drafts, 1.0)
    assert 0.2 < counters.survival(1)[0] < 0.9
    assert tiny.goodness_of_fit(tokens, tiny.exact_joint(exact, PROMPT, 1.0)) > ALPHA


@pytest.mark.engine
def test_speculation_does_not_change_greedy_answers(plain, spec, exact):
    """Both are argmax all along, and they part only where the two best logits all but tie."""
    asked = tiny.prompts(32, seed=4)
    without, with_drafts = plain.generate(asked, GREEDY), spec.generate(asked, GREEDY)
    assert total(with_drafts).acceptance_length > 1.3
    for prompt, a, b in zip(asked, without, with_drafts, strict=True):
        assert len(a.response_ids) == len(b.response_ids) == GREEDY.max_tokens
        for answer in (a.response_ids, b.response_ids):
            assert tiny.greedy_regret(exact, prompt, answer) < TIE
    same = sum(a.response_ids == b.response_ids for a, b in zip(without, with_drafts, strict=True))
    assert same >= 0.8 * len(asked)


# ---- the cures, taken out ----------------------------------------------------------------------------------------

UNCURED = """
import json, sys
from pathlib import Path
tests, verifier_dir, drafter_dir = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
sys.path.insert(0, tests)
import test_engine, tiny
from draftkit import engine
from draftkit.data.capture import Verifier
from draftkit.drafters.layouts import from_drafter
from draftkit.errors import RunFailed
from draftkit.train.parity import check_parity
from draftkit.types import SpecConfig

engine.faults.cure_sampling = engine.faults.cure_draft_seeds = lambda: False
engine.weights.repack_tied_heads = lambda module: []

checks = {one["name"]: one for one in engine.self_tests()}
spec = SpecConfig("eagle3", str(drafter_dir), tiny.K)
with engine.Engine(verifier_dir, recipe_engine=tiny.SECTION, spec=spec) as uncured:
    tokens, _ = test_engine.sampled(uncured, 1.0)
    greedy = [g.response_ids for g in uncured.generate(tiny.prompts(8), test_engine.GREEDY)]
with engine.Engine(verifier_dir, recipe_engine=tiny.SECTION) as plain:
    plain_tokens, _ = test_engine.sampled(plain, 1.0)
exact = tiny.load_exact(verifier_dir)
law = tiny.exact_joint(exact, test_engine.PROMPT, 1.0)
verifier = Verifier(verifier_dir, tiny.default_aux_layers(tiny.LAYERS), 1.0)
drafter = from_drafter(drafter_dir, verifier.embed_VH)
try:
    check_parity(tiny.recipe(), verifier_dir, drafter_dir, drafter, verifier, tiny.prompts(32))
    parity = ""
except RunFailed as error:
    parity = str(error)
print(json.dumps({
    "checks": checks,
    "p": tiny.goodness_of_fit(tokens, law),
    "p_plain": tiny.goodness_of_fit(plain_tokens, law),
    "regret": max(tiny.greedy_regret(exact, p, a) for p, a in zip(tiny.prompts(8), greedy)),
    "parity": parity,
}))
"""


@pytest.fixture(scope="module")
def uncured() -> dict:
    """What a process sees in which `faults.cure_sampling` does nothing: vLLM's own function stays."""
    places = [str(Path(__file__).parent), str(tiny.verifier_dir()), str(tiny.drafter_dir())]
    command = [sys.executable, "-c", UNCURED, *places]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.engine
def test_without_the_cure_the_distribution_test_fails(uncured):
    """Only speculation above temperature 0 is hit: plain sampling and greedy answers are right all the same."""
    assert uncured["p"] < ALPHA
    assert uncured["p_plain"] > ALPHA
    assert uncured["regret"] < TIE


@pytest.mark.engine
def test_without_the_cure_doctor_says_why(uncured):
    fault = uncured["checks"]["speculative sampling at temperature > 0"]
    assert not fault["ok"] and not fault["cure"]
    assert "expand_batch_to_tokens(torch.float32) returned" in fault["detail"]
    fault = uncured["checks"]["speculative sampling with top-k"]
    assert not fault["ok"] and "apply_top_k_top_p fails on no rows" in fault["detail"]
    fault = uncured["checks"]["seeds of sampled drafts"]
    assert not fault["ok"] and "differ from one time to the next" in fault["detail"]
    assert not uncured["checks"]["weight update of a tied LM head"]["ok"]


@pytest.mark.engine
def test_without_the_cure_a_training_run_does_not_call_itself_finished(uncured):
    assert "The engine does not sample from the policy: run `draftkit doctor`." in uncured["parity"]


@pytest.mark.engine
def test_with_the_cures_doctor_finds_no_fault_left(plain):
    sampling, top_k, seeds, reload, tied = self_tests()
    assert all(one["ok"] for one in (sampling, top_k, seeds, reload, tied))
    assert "load_weights fails on a running engine" in reload["detail"] and "layerwise reload" in reload["cure"]
    assert "leaves the old head" in tied["detail"] and "packed again" in tied["cure"]


# ---- weights of a running engine ---------------------------------------------------------------------------------


def shuffled(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Another model of the same shapes: every matrix with its rows moved by one."""
    return {name: torch.roll(w, 1, 0) if w.dim() == 2 else w.clone() for name, w in weights.items()}


@pytest.mark.engine
def test_a_new_drafter_changes_acceptance_and_nothing_else(spec):
    asked, trained = tiny.prompts(16, seed=2), load_file(tiny.drafter_dir() / "model.safetensors")
    first = spec.generate(asked, GREEDY)
    spec.load_drafter(shuffled(trained).items())
    second = spec.generate(asked, GREEDY)
    spec.load_drafter(trained.items())
    third = spec.generate(asked, GREEDY)
    assert total(first).acceptance_length > 1.3 > 1.15 > total(second).acceptance_length
    assert first == third  # answers and counters of every request
    assert [g.response_ids for g in second] == [g.response_ids for g in first]


@pytest.mark.engine
@pytest.mark.parametrize("name", ["plain", "spec"])
def test_new_verifier_weights_are_served_and_taken_back(request, name, exact):
    engine, asked = request.getfixturevalue(name), tiny.prompts(16, seed=3)
    original = load_file(tiny.verifier_dir() / "model.safetensors")
    changed = shuffled(original)
    other = tiny.load_exact(tiny.verifier_dir())
    other.load_state_dict({key: w.float() for key, w in changed.items()})
    first = engine.generate(asked, GREEDY)
    engine.load_verifier(changed.items())
    second = engine.generate(asked, GREEDY)
    engine.load_verifier(original.items())
    third = engine.generate(asked, GREEDY)
    assert first == third
    for prompt, before, after in zip(asked, first, second, strict=True):
        assert tiny.greedy_regret(exact, prompt, before.response_ids) < TIE
        assert tiny.greedy_regret(other, prompt, after.response_ids) < TIE  # all of the new weights, not a part
        assert tiny.greedy_regret(exact, prompt, after.response_ids) > TIE


@pytest.mark.engine
def test_the_drafter_embeds_with_the_verifier_weights_of_now(spec, tmp_path):
    """The drafter has no embedding of its own: after an update it proposes what a fresh engine would."""
    asked, changed = tiny.prompts(8), shuffled(load_file(tiny.verifier_dir() / "model.safetensors"))
    model = tiny.load_exact(tiny.verifier_dir()).to(torch.bfloat16)
    model.load_state_dict(changed)
    model.save_pretrained(tmp_path / "changed")
    spec.load_verifier(changed.items())
    updated = spec.generate(asked, GREEDY)
    spec.load_verifier(load_file(tiny.verifier_dir() / "model.safetensors").items())
    with Engine(tmp_path / "changed", recipe_engine=tiny.SECTION, spec=spec.spec) as fresh:
        assert fresh.generate(asked, GREEDY) == updated


# ---- draft length and counters -----------------------------------------------------------------------------------


@pytest.mark.engine
def test_k_changes_on_a_running_engine(spec):
    for k in (1, 2, 3):
        spec.set_k(k)
        counters = total(spec.generate(tiny.prompts(8), GREEDY))
        # A round may draft fewer only where max_tokens is near.
        assert counters.num_draft_tokens == k * counters.num_drafts
        assert max((i + 1 for i, n in enumerate(counters.accepted_per_pos) if n), default=0) <= k
    spec.set_schedule([[1, 4, 3], [5, 256, 1]])
    few, many = total(spec.generate(tiny.prompts(2), GREEDY)), total(spec.generate(tiny.prompts(64), GREEDY))
    assert few.num_draft_tokens == 3 * few.num_drafts
    assert many.num_draft_tokens < 1.5 * many.num_drafts
    spec.set_k(tiny.K)


@pytest.mark.engine
def test_counters_are_the_sum_over_requests_and_account_for_every_token(plain, spec):
    before = spec.counters()
    answers = spec.generate(tiny.prompts(16), GREEDY)
    plain.generate(tiny.prompts(16), GREEDY)  # another engine of the process must not leak into them
    window = spec.counters() - before
    assert window == total(answers)
    assert window.num_accepted == sum(window.accepted_per_pos)
    for answer in answers:
        # One token from the prompt, then a round is its accepted drafts and one more; the last may overshoot.
        made = 1 + answer.spec.num_drafts + answer.spec.num_accepted
        assert 0 <= made - len(answer.response_ids) <= tiny.K
    assert plain.counters() == SpecCounters()


@pytest.mark.engine
def test_a_seeded_request_repeats_whatever_runs_beside_it(spec):
    asked = [Sampling(temperature=1.0, max_tokens=24, seed=i, ignore_eos=True) for i in range(12)]
    together = spec.generate(tiny.prompts(12), asked)
    again = spec.generate(tiny.prompts(12), asked)
    assert together == again
    assert len({g.response_ids for g in spec.generate([PROMPT] * 12, asked)}) == 12


@pytest.mark.engine
def test_closing_one_engine_leaves_the_others_alone(plain):
    expected = plain.generate(tiny.prompts(4), GREEDY)
    with Engine(tiny.verifier_dir(), recipe_engine=tiny.SECTION) as other:
        assert other.generate(tiny.prompts(4), GREEDY) == expected
    assert torch.distributed.is_initialized()  # the trainer's too, where there is one
    assert plain.generate(tiny.prompts(4), GREEDY) == expected


# ---- requests ----------------------------------------------------------------------------------------------------


def watch(engine: Engine, monkeypatch) -> list[int]:
    """Number of running requests at every step from now on."""
    running: list[int] = []
    step = engine._llm.llm_engine.step

    def watched():
        outputs = step()
        running.append(len(engine._scheduler.running))
        return outputs

    monkeypatch.setattr(engine._llm.llm_engine, "step", watched)
    return running


@pytest.mark.engine
def test_concurrency_is_what_was_asked(plain, monkeypatch):
    running = watch(plain, monkeypatch)
    for asked in (1, 3, 16):
        running.clear()
        plain.generate(tiny.prompts(16), GREEDY, max_concurrency=asked)
        assert max(running) == asked
    running.clear()
    plain.generate(tiny.prompts(16), GREEDY)
    assert max(running) == 16


@pytest.mark.engine
def test_answers_come_in_the_order_of_the_prompts(spec):
    asked = tiny.prompts(24, seed=6)
    lengths = [1 + 7 * i % 20 for i in range(24)]  # they finish in another order
    seen: list[int] = []
    sampling = [Sampling(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    answers = spec.generate(asked, sampling, max_concurrency=5, progress=seen.append)
    assert [list(g.prompt_ids) for g in answers] == asked
    assert [len(g.response_ids) for g in answers] == lengths
    assert sum(seen) == 24


@pytest.mark.engine
@pytest.mark.parametrize("name", ["plain", "spec"])
def test_a_prompt_without_room_is_refused_and_nothing_is_left_behind(request, name):
    engine = request.getfixturevalue(name)
    longest = tiny.SECTION.max_model_len - (tiny.K + 2 if engine.spec else 1)
    [answer] = engine.generate([[5] * longest], GREEDY)
    assert len(answer.response_ids) == 1
    with pytest.raises(UserError, match=f"{longest + 1} tokens leaves no room .*engine.max_model_len=128"):
        engine.generate([*tiny.prompts(3), [5] * (longest + 1)], GREEDY)
    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert len(engine.generate(tiny.prompts(2), GREEDY)) == 2


@pytest.mark.engine
def test_an_interrupted_call_leaves_no_request_behind(spec):
    expected = spec.generate(tiny.prompts(12), GREEDY)
    before = spec.counters()

    def stop(_num_finished: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spec.generate(tiny.prompts(40, seed=5), GREEDY, max_concurrency=4, progress=stop)
    after = spec.counters()
    assert (after - before).num_drafts > 0
    assert spec.generate(tiny.prompts(12), GREEDY) == expected
    assert spec.counters() - after == total(expected)
