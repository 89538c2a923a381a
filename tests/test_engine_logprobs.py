"""The log-probability of every sampled token, against a float32 forward of transformers over the same tokens.

Tolerance: what the engine's precision does to a log-probability. Cutting by top-p or top-k may, within that precision,
cut at another token, which changes one token's log-probability by more (or makes it impossible in the reference): a
small share of tokens may lie outside.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch

from draftkit.engine import Engine
from draftkit.recipe import EngineSection
from draftkit.types import Generation, Sampling, SpecConfig, SpecCounters

pytestmark = pytest.mark.engine

TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (0.2, 0.03)}  # of one token, of the mean
OUTSIDE = 0.005


@pytest.fixture(scope="module")
def exact():
    return tiny.load_exact(tiny.verifier_dir())


@torch.no_grad()
def reference(model, answer: Generation, s: Sampling) -> torch.Tensor:
    """Of every response token, by sorting and cutting as the definitions of top-k and top-p say. At temperature 0 vLLM
    reports the distribution at temperature 1."""
    tokens = torch.tensor([[*answer.prompt_ids, *answer.response_ids]])
    logits = model(tokens, use_cache=False).logits[0, len(answer.prompt_ids) - 1 : -1].double()
    if s.temperature > 0:
        logits = logits / s.temperature
        probs, order = logits.softmax(-1).sort(-1, descending=True)
        if s.top_k:
            probs[:, s.top_k :] = 0
            probs = probs / probs.sum(-1, keepdim=True)
        before = probs.cumsum(-1) - probs
        probs[before >= s.top_p] = 0
        kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, probs > 0)
        logits = logits.masked_fill(~kept, -torch.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(answer.response_ids).unsqueeze(1)).squeeze(1)


def check(engine: Engine, exact, asked: list[Sampling]) -> None:
    answers = engine.generate(tiny.prompts(len(asked), seed=7), asked)
    gaps = []
    for answer, sampling in zip(answers, asked, strict=True):
        assert len(answer.logprobs) == len(answer.response_ids) == sampling.max_tokens
        gaps.append((torch.tensor(answer.logprobs).double() - reference(exact, answer, sampling)).abs())
    gap = torch.cat(gaps)
    one, mean = TOLERANCE[engine.dtype]
    inside = gap <= one  # false for inf
    assert (~inside).double().mean() <= OUTSIDE
    assert gap[inside].mean() <= mean


SETTINGS = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.9, 0), (0.8, 1.0, 5), (1.0, 0.8, 10), (0.0, 1.0, 0)]


@pytest.mark.parametrize("name", ["plain", "spec", "sampled_drafts"])
@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SETTINGS)
def test_logprobs_are_those_of_the_distribution_sampled_from(request, exact, name, temperature, top_p, top_k):
    asked = [
        Sampling(temperature, top_p, top_k, max_tokens=20, seed=i, ignore_eos=True, logprobs=True) for i in range(24)
    ]
    check(request.getfixturevalue(name), exact, asked)


@pytest.mark.parametrize("name", ["plain", "spec", "sampled_drafts"])
def test_requests_of_one_batch_keep_their_own_settings(request, exact, name):
    """Greedy, hot and cut requests side by side, of different lengths; who does not ask gets none."""
    engine = request.getfixturevalue(name)
    asked = [
        Sampling([0.0, 0.7, 1.3][i % 3], [1.0, 0.8][i % 2] if i % 3 else 1.0, max_tokens=4 + i, seed=i, ignore_eos=True,
                 logprobs=True)
        for i in range(18)
    ]  # fmt: skip
    check(engine, exact, asked)
    mixed = engine.generate(
        tiny.prompts(4), [Sampling(max_tokens=3, seed=i, ignore_eos=True, logprobs=i % 2 == 0) for i in range(4)]
    )
    assert [answer.logprobs is not None for answer in mixed] == [True, False, True, False]


def test_logprobs_and_counters_end_with_the_response_where_a_stop_string_ends_it(tiny_verifier):
    """A round may bring tokens beyond the stop string: they are in neither the response nor its log-probabilities, and
    the response is the one that plain decoding gives. The verifier drafts for itself, so that rounds are long."""
    section = EngineSection(max_model_len=128, max_num_seqs=8, kv_cache_gib=1)
    asked = [[7 + i, 40, 41, 42, 40, 41] for i in range(8)]
    sampling = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=True)
    with Engine(tiny_verifier, recipe_engine=section, spec=SpecConfig("draft-lm", str(tiny_verifier), 4)) as engine:
        free = engine.generate(asked, sampling)
        characters = [chr(32 + i - 1) for g in free for i in g.response_ids[5:] if 1 < i < 96]
        stopped = replace(sampling, stop=(max(set(characters), key=characters.count),))
        with_drafts = engine.generate(asked, stopped)
        before = engine.counters()
        engine.set_k(0)
        without = engine.generate(asked, stopped)
    ended = [g for g in with_drafts if g.finish_reason == "stop"]
    assert ended and any(len(g.response_ids) < 1 + g.spec.num_drafts + g.spec.num_accepted for g in ended)  # cut
    assert before == sum((g.spec for g in [*free, *with_drafts]), SpecCounters())
    for a, b in zip(with_drafts, without, strict=True):
        assert a.response_ids == b.response_ids and a.finish_reason == b.finish_reason
        assert len(a.logprobs) == len(a.response_ids)
