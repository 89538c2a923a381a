"""Rollouts against a fake engine that records every request, and against a real one; templates; the prompt stream."""

import copy
import dataclasses
import random
import re
import shutil

import pytest
import tiny
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftkit.data.batch import slot_runs
from draftkit.data.data_recipe import load_data_recipe
from draftkit.data.prepare import choose_prompts
from draftkit.errors import UserError
from draftkit.models import load_tokenizer, render
from draftkit.recipe import Recipe
from draftkit.rl.prompts import PromptStream, open_prompts
from draftkit.rl.rollout import acceptance_by_turn, collect, document
from draftkit.rl.template import ChatTemplate, worked_document
from draftkit.types import Document, Generation, Prompt, SpecConfig, SpecCounters

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPTS = [
    Prompt(f"p{i}", ({"role": "user", "content": f"{i} + {i}"},), "sums", str(2 * i), {"verifier": "exact"})
    for i in range(3)
]


@pytest.fixture(scope="session")
def tokenizer(demo_model):
    return load_tokenizer(demo_model)


def with_template(tokenizer, template: str):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def recipe(**sections) -> Recipe:
    small = {
        "engine": {"max_model_len": 300},
        "sampling": {"n": 2, "max_tokens": 8},
        "rl": {"max_turns": 3},
        "spec": {"method": "none"},
    }
    return Recipe.model_validate(small | sections)


class FakeEngine:
    """Answers that follow from prompt and seed alone, with made-up log-probabilities and counters; ends turns by
    `<|im_end|>` with a chance of `p_stop` a token."""

    END = 2

    def __init__(self, p_stop: float = 0.3):
        self.p_stop = p_stop
        self.calls: list[list[tuple[list[int], object, Generation]]] = []

    def generate(self, prompts, sampling, *, progress=None):
        answers = [self._one(list(p), s) for p, s in zip(prompts, sampling, strict=True)]
        self.calls.append(list(zip([list(p) for p in prompts], sampling, answers, strict=True)))
        if progress is not None:
            progress(len(answers))
        return answers

    def _one(self, prompt, sampling):
        rng = random.Random(f"{prompt}/{sampling.seed}")
        response = []
        while len(response) < sampling.max_tokens and self.END not in response:
            response.append(self.END if rng.random() < self.p_stop else rng.randrange(300, 3000))
        reason = "stop" if response[-1] == self.END else "length"
        spec = SpecCounters(len(response), 3 * len(response), len(response) // 2, (len(response) // 2, 0, 0))
        return Generation(tuple(prompt), tuple(response), reason, spec, tuple(-rng.random() - 0.01 for _ in response))


def talk(num_replies: int):
    """Goes on for that many replies, then pays for the length of what was said last."""

    def environment(prompt, messages, last):
        num_said = sum(m["role"] == "assistant" for m in messages)
        if num_said <= num_replies and not last:
            return {"role": "tool", "content": f"result {num_said}"}
        return len(messages[-1]["content"]) + (1000.0 if last else 0.0)

    return environment


VERSIONS = {"policy_version": 4, "draft_version": 3, "k": 2}


def run(tokenizer, engine, environment, settings=None, prompts=PROMPTS, **how):
    how = {"seed": 0, "step": 5} | VERSIONS | how
    return collect(engine, prompts, environment, tokenizer, settings or recipe(), **how)


# ------------------------------------------------------------------------------------------- the record of a rollout


def test_records_are_the_engines_own_tokens(tokenizer):
    """Every trajectory rebuilt from the recorded requests alone."""
    engine = FakeEngine()
    collected = run(tokenizer, engine, talk(1), recipe(sampling={"n": 4, "max_tokens": 8}))
    assert len(collected.trajectories) == 12
    lengths = set()
    for t in collected.trajectories:
        # Walk forward: the request that begins as this trajectory does, then its answer, then what lies between.
        tokens = list(render(tokenizer, PROMPTS[t.group].messages))
        mask, logp = [False] * len(tokens), [0.0] * len(tokens)
        for number, turn in enumerate(t.turns):
            if number:
                joint = list(t.tokens[len(tokens) : turn.first])
                ended = tokens[-1] == FakeEngine.END
                text = f"\n<|im_start|>tool\nresult {number}<|im_end|>\n<|im_start|>assistant\n"
                assert ended and tokenizer.decode(joint) == text
                tokens, mask, logp = tokens + joint, mask + [False] * len(joint), logp + [0.0] * len(joint)
            # A call holds the conversations that have that turn, in the order of the trajectories.
            row = [u for u in collected.trajectories if len(u.turns) > number].index(t)
            prompt, _, answer = engine.calls[number][row]
            assert prompt == tokens and turn.first == len(tokens)
            assert (turn.finish_reason, turn.spec) == (answer.finish_reason, answer.spec)
            tokens = tokens + list(answer.response_ids)
            mask, logp = mask + [True] * len(answer.response_ids), logp + list(answer.logprobs)
            assert turn.last == len(tokens)
        assert (t.tokens, t.mask, t.engine_logp) == (tuple(tokens), tuple(mask), tuple(logp))
        assert (t.policy_version, t.draft_version, t.k, t.task) == (4, 3, 2, "sums")
        lengths.add(len(t.turns))
        said = tokenizer.decode(t.tokens[t.turns[-1].first : t.turns[-1].last], skip_special_tokens=True)
        assert t.truncated == (t.turns[-1].finish_reason == "length")
        assert t.reward == len(said) + 1000 * t.truncated
        assert document(t) == Document(t.tokens, t.mask)
    assert lengths == {1, 2}
    assert [(t.group, t.sample) for t in collected.trajectories] == [(g, s) for g in range(3) for s in range(4)]
    assert collected.generate_s > 0 and collected.reward_s > 0


def test_a_turn_of_all_conversations_is_one_call_of_single_requests(tokenizer):
    engine, finished = FakeEngine(p_stop=1.0), []
    run(tokenizer, engine, talk(5), recipe(rl={"max_turns": 3}), progress=finished.append)
    assert [len(call) for call in engine.calls] == [6, 6, 6] and finished == [6, 6, 6]
    sampling = [s for call in engine.calls for _, s, _ in call]
    assert len({s.seed for s in sampling}) == 18
    assert all(s.logprobs and s.max_tokens == 8 and s.temperature == 1.0 for s in sampling)


def test_only_those_that_go_on_are_asked_again(tokenizer):
    engine = FakeEngine(p_stop=1.0)

    def environment(prompt, messages, last):
        return 1.0 if prompt.id == "p1" else talk(1)(prompt, messages, last)

    collected = run(tokenizer, engine, environment)
    assert [len(call) for call in engine.calls] == [6, 4]
    assert [len(t.turns) for t in collected.trajectories] == [2, 2, 1, 1, 2, 2]


def test_the_same_seed_gives_the_same_rollouts_and_every_part_of_it_counts(tokenizer):
    def seeds(**how):
        engine = FakeEngine()
        collected = run(tokenizer, engine, talk(1), **how)
        return collected.trajectories, [s.seed for call in engine.calls for _, s, _ in call]

    first = seeds()
    assert seeds() == first
    for other in ({"seed": 1}, {"step": 6}, {"first_group": 3}):
        assert not set(seeds(**other)[1]) & set(first[1])
    twice = seeds(prompts=[PROMPTS[0], PROMPTS[0]])
    assert len(set(twice[1])) == len(twice[1])
    assert [t.group for t in seeds(first_group=7)[0]] == [7, 7, 8, 8, 9, 9]


def test_evaluation_settings_take_the_place_of_the_recipes(tokenizer):
    engine = FakeEngine()
    collected = run(tokenizer, engine, talk(0), num_samples=1, temperature=0.0)
    assert len(collected.trajectories) == 3
    assert {s.temperature for _, s, _ in engine.calls[0]} == {0.0}


# --------------------------------------------------------------------------------------------------- how it ends


def test_the_turn_limit_truncates_what_would_go_on(tokenizer):
    collected = run(tokenizer, FakeEngine(p_stop=1.0), talk(9), recipe(rl={"max_turns": 2}))
    assert {(len(t.turns), t.truncated, t.reward) for t in collected.trajectories} == {(2, True, 1000.0)}
    ended = run(tokenizer, FakeEngine(p_stop=1.0), talk(1), recipe(rl={"max_turns": 2}))
    assert {(len(t.turns), t.truncated, t.reward) for t in ended.trajectories} == {(2, False, 0.0)}


def test_a_turn_cut_by_its_length_is_the_last(tokenizer):
    engine = FakeEngine(p_stop=0.0)
    collected = run(tokenizer, engine, talk(9))
    assert len(engine.calls) == 1
    assert all(t.truncated and t.reward >= 1000 for t in collected.trajectories)


@pytest.mark.parametrize(("method", "look_ahead"), [("none", 0), ("ngram", 4)])
def test_a_full_context_truncates_before_the_engine_would_refuse(tokenizer, method, look_ahead):
    whole = run(tokenizer, FakeEngine(p_stop=1.0), talk(2), prompts=PROMPTS[:1]).trajectories[0]
    assert len(whole.turns) == 3
    asked = whole.turns[2].first  # tokens of the third request's prompt: it needs one more, and the look-ahead
    for max_model_len, num_turns in ((asked + 1 + look_ahead, 3), (asked + look_ahead, 2)):
        settings = recipe(engine={"max_model_len": max_model_len}, spec={"method": method, "k": 3})
        engine = FakeEngine(p_stop=1.0)
        t = run(tokenizer, engine, talk(2), settings, prompts=PROMPTS[:1]).trajectories[0]
        assert (len(t.turns), t.truncated) == (num_turns, num_turns == 2)
        assert t.mask[-1] and max(len(p) for call in engine.calls for p, _, _ in call) < max_model_len - look_ahead


def test_acceptance_by_turn(tokenizer):
    engine = FakeEngine()
    trajectories = run(tokenizer, engine, talk(2), recipe(sampling={"n": 5, "max_tokens": 8})).trajectories
    assert len({len(t.turns) for t in trajectories}) > 1
    by_turn = acceptance_by_turn(trajectories)
    assert by_turn == [sum((g.spec for _, _, g in call), SpecCounters()) for call in engine.calls]
    silent = [dataclasses.replace(t, turns=[dataclasses.replace(u, spec=None) for u in t.turns]) for t in trajectories]
    assert acceptance_by_turn(silent) == [SpecCounters()] * len(by_turn)
    assert acceptance_by_turn([]) == []


def test_drafter_supervision_stays_inside_turns(tokenizer):
    t = run(tokenizer, FakeEngine(p_stop=0.2), talk(1), recipe(sampling={"n": 16, "max_tokens": 8})).trajectories
    t = next(t for t in t if len(t.turns) == 2 and all(u.last - u.first > 2 for u in t.turns))
    assert slot_runs(document(t).mask) == [(u.first - 1, u.last - 2) for u in t.turns]


# -------------------------------------------------------------------------------------------------- chat templates


def strip_thinking(template: str) -> str:
    """As templates of reasoning models do: assistant turns before the newest user message lose their thinking."""
    return template.replace(
        "{{ m['content'] }}",
        "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1].lstrip() }}"
        "{% else %}{{ m['content'] }}{% endif %}",
    )


NO_TOOLS = "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
DROPS_TOOLS = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'tool' %}")


def test_the_demo_template_keeps_history_and_knows_tools(tokenizer):
    template = ChatTemplate(tokenizer)
    for role in ("tool", "user"):
        template.check(role)
    assert template.tool_role == "tool"
    assert tokenizer.decode(template.end_of_turn) == "<|im_end|>"
    messages = [*PROMPTS[0].messages, {"role": "assistant", "content": "hm"}, {"role": "tool", "content": "4"}]
    text = "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(template.between(messages, template.end_of_turn)) == text
    for last_token in (None, 400):  # a turn that a stop string ended: the template's own end of turn follows
        assert tokenizer.decode(template.between(messages, last_token)) == "<|im_end|>" + text


def test_a_conversation_that_was_sampled_as_rendered_is_what_the_template_renders(tokenizer):
    """Where the policy samples exactly the tokens of the text, the record equals the template's own rendering."""
    answer = [
        {"role": "assistant", "content": "<tool>12 * 7</tool>"},
        {"role": "tool", "content": "84"},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "<answer>84</answer>"},
    ]
    made = worked_document(ChatTemplate(tokenizer), PROMPTS[0].messages, answer)
    whole = tokenizer.apply_chat_template([*PROMPTS[0].messages, *answer], tokenize=True, return_dict=False)
    assert whole[-1:] == tokenizer("\n")["input_ids"]  # after the end of turn, which ends what is sampled
    assert list(made.tokens) == whole[:-1]
    supervised = [
        tokenizer.decode([t for t, m in zip(made.tokens[a:b], made.mask[a:b], strict=True) if m])
        for a, b in ((0, len(made.tokens) - 12), (len(made.tokens) - 12, len(made.tokens)))
    ]
    assert "".join(supervised) == "<tool>12 * 7</tool><|im_end|><answer>84</answer><|im_end|>"
    assert made.mask[: len(render(tokenizer, PROMPTS[0].messages))].count(True) == 0 and made.mask[-1]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (strip_thinking(CHATML), "the thinking of earlier turns"),
        (CHATML.replace("m['role'] }}", "m['role'] }}{% if loop.last %} (newest){% endif %}"), "the turns already"),
        (CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"), "the turns already taken"),
        (CHATML.replace("{% for", "({{ messages | length }} messages){% for", 1), "the turns already taken"),
    ],
)
def test_templates_that_rewrite_history_are_refused(tokenizer, template, words):
    rewriting = with_template(tokenizer, template)
    with pytest.raises(UserError, match=f"chat template rewrites history.*{words}"):
        ChatTemplate(rewriting).check()
    with pytest.raises(UserError, match="rewrites history"):
        run(rewriting, FakeEngine(p_stop=1.0), talk(1))
    run(rewriting, FakeEngine(p_stop=1.0), talk(0))  # one turn: there is no history


@pytest.mark.parametrize("template", [NO_TOOLS + CHATML, DROPS_TOOLS])
def test_a_template_without_tools_gets_their_results_from_the_user(tokenizer, template):
    plain = with_template(tokenizer, template)
    assert ChatTemplate(plain).tool_role == "user"
    t = run(plain, FakeEngine(p_stop=1.0), talk(1)).trajectories[0]
    between = plain.decode(t.tokens[t.turns[0].last : t.turns[1].first])
    assert between == "\n<|im_start|>user\nresult 1<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_counts_its_turns(tokenizer):
    """What lies between two turns may depend on how many there were."""
    number = "m['role'] ~ ('' if m['role'] == 'assistant' else ' ' ~ loop.index)"
    rounds = CHATML.replace("m['role']", number)
    t = run(with_template(tokenizer, rounds), FakeEngine(p_stop=1.0), talk(2)).trajectories[0]
    betweens = [tokenizer.decode(t.tokens[a.last : b.first]) for a, b in zip(t.turns, t.turns[1:], strict=False)]
    assert [re.search(r"tool (\d)", b).group(1) for b in betweens] == ["3", "5"]


# ------------------------------------------------------------------------------------------------- prompts, resumed


def test_the_stream_goes_on_from_its_position():
    prompts = [dataclasses.replace(PROMPTS[0], id=f"{i}") for i in range(7)]
    whole = [p.id for p in PromptStream(prompts, seed=3).take(40)]
    for cut in range(0, 40, 3):
        first = PromptStream(prompts, seed=3)
        for num in (cut // 2, cut - cut // 2):
            first.take(num)
        assert first.position == cut
        resumed = PromptStream(prompts, seed=3, position=first.position)
        assert [p.id for p in resumed.take(1)] + [p.id for p in resumed.take(39 - cut)] == whole[cut:]
    epochs = [whole[i : i + 7] for i in range(0, 35, 7)]
    assert all(sorted(epoch) == [p.id for p in prompts] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [p.id for p in PromptStream(prompts, seed=4).take(40)] != whole


def test_prompts_are_those_of_prepare(tokenizer, tmp_path, capsys):
    settings = recipe(
        engine={"max_model_len": 1024}, data={"heldout": 20, "limit": 30}, rl={"eval_prompts": 24, "seed": 9}
    )
    data_recipe = load_data_recipe("reasoning-gym-mini")
    stream, heldout = open_prompts(settings, data_recipe, tokenizer)
    split, _ = choose_prompts(settings, data_recipe, lambda p: len(render(tokenizer, p.messages)))
    assert (list(stream.prompts), heldout) == (split.train, split.heldout)
    assert {p.id for p in stream.take(30)} == {p.id for p in split.train} and stream.seed == 9
    assert "rl.eval_prompts asks for 24 prompts; 20 are held out" in capsys.readouterr().err
    fewer = settings.model_copy(update={"rl": settings.rl.model_copy(update={"eval_prompts": 5})})
    assert open_prompts(fewer, data_recipe, tokenizer)[1] == split.heldout[:5]


# ------------------------------------------------------------------------------------------------- on a real engine


CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 :;+-*/=()<>_.,!?"


@pytest.fixture(scope="module")
def talking_verifier(tmp_path_factory):
    """tiny.py's verifier, whose drafter is trained, with a tokenizer of single characters; token 0 ends a turn."""
    path = tmp_path_factory.mktemp("talk") / "verifier"
    shutil.copytree(tiny.verifier_dir(), path)
    known = {"<eos>": 0} | {c: i for i, c in enumerate(CHARACTERS, 1)}
    known |= {chr(0x4E00 + i): i for i in range(len(known), tiny.VOCAB)}  # none of which holds a stop string
    characters = Tokenizer(models.WordLevel(known, "?"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    chat = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>", chat_template=chat).save_pretrained(path)
    return path


@pytest.mark.engine
@pytest.mark.parametrize("method", ["none", "eagle3"])
def test_multi_turn_rollouts_of_a_real_engine(talking_verifier, method):
    """Tokens, mask and log-probabilities against a float32 forward over the whole record."""
    from draftkit.engine import Engine

    tokenizer, stops = load_tokenizer(talking_verifier), "aeiou0246"
    settings = recipe(
        engine={"max_model_len": 160, "max_num_seqs": 32, "kv_cache_gib": 1},
        sampling={"n": 8, "max_tokens": 24, "stop": list(stops)},
        spec={"method": method, "k": tiny.K},
    )
    spec = None if method == "none" else SpecConfig(method, str(tiny.drafter_dir()), tiny.K)
    with Engine(talking_verifier, recipe_engine=settings.engine, spec=spec) as engine:
        collected = run(tokenizer, engine, talk(2), settings)
        again = run(tokenizer, engine, talk(2), settings)

    exact = tiny.load_exact(talking_verifier)
    errors, errors_if_shifted = [], []
    for t in collected.trajectories:
        with torch.no_grad():
            logits = exact(torch.tensor([t.tokens])).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(t.tokens[1:]).unsqueeze(1)).squeeze(1)
        mask, logp = torch.tensor(t.mask[1:]), torch.tensor(t.engine_logp[1:])
        errors += (expected - logp)[mask].abs().tolist()
        errors_if_shifted += (expected.roll(1) - logp)[mask].abs().tolist()
        assert not t.mask[0] and logp[~mask].eq(0).all()
        assert [i for u in t.turns for i in range(u.first, u.last)] == [i for i, m in enumerate(t.mask) if m]
        for number, (turn, following) in enumerate(zip(t.turns, t.turns[1:], strict=False), 1):
            said = tokenizer.decode(t.tokens[turn.first : turn.last]).split()
            assert turn.finish_reason == "stop"
            assert said[-1] in {"<eos>", *stops} and not set(said[:-1]) & {"<eos>", *stops}
            between = tokenizer.decode(t.tokens[turn.last : following.first]).replace(" ", "")
            assert between == f";tool:result{number};assistant:"
    assert sum(errors) / len(errors) < 0.05 and sum(errors_if_shifted) / len(errors_if_shifted) > 0.5
    counts = {len(t.turns) for t in collected.trajectories}  # which ones: a random model's, by the rounding of its CPU
    assert len(counts) > 1 and max(counts) == 3
    by_turn = acceptance_by_turn(collected.trajectories)
    assert len(by_turn) == 3 and all((c.num_accepted > 0) == (method != "none") for c in by_turn)
    same = [a.tokens == b.tokens for a, b in zip(collected.trajectories, again.trajectories, strict=True)]
    assert sum(same) >= 0.8 * len(same)
