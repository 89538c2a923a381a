"""`prepare` end to end on a tiny Llama that samples for real: resume, kill -9, refusals; and once on vLLM."""

import json
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftkit.data import prepare
from draftkit.data.shards import Corpus
from draftkit.errors import Interrupted, UserError
from draftkit.models import fingerprint, load_tokenizer, render
from draftkit.recipe import Recipe
from draftkit.run import RunDir
from draftkit.types import Generation

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 :?"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """Two layers and a tokenizer of single characters; token 0 ends an answer."""
    path = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0} | {c: i + 1 for i, c in enumerate(ALPHABET)}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=TEMPLATE)
    fast.save_pretrained(path)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=40, eos_token_id=0, bos_token_id=None, **shape)).save_pretrained(path)
    return path


class TinyEngine:
    """`Engine`'s interface over a transformers model: every request sampled alone, from its own seed."""

    num_answers = 0
    pause_s = 0.0

    def __init__(self, model, *, recipe_engine, seed):
        self.model = LlamaForCausalLM.from_pretrained(model)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def generate(self, prompts, sampling, *, progress):
        generations = []
        for prompt, settings in zip(prompts, sampling, strict=True):
            generations.append(self._one(list(prompt), settings))
            TinyEngine.num_answers += 1
            time.sleep(self.pause_s)
            progress(1)
        return generations

    @torch.no_grad()
    def _one(self, prompt, settings):
        draw = torch.Generator().manual_seed(settings.seed)
        tokens = list(prompt)
        for _ in range(settings.max_tokens):
            logits = self.model(torch.tensor([tokens])).logits[0, -1]
            greedy = settings.temperature == 0
            probs = logits if greedy else (logits / settings.temperature).softmax(-1)
            tokens.append(int(probs.argmax() if greedy else torch.multinomial(probs, 1, generator=draw)))
            if tokens[-1] == 0:
                break
        stopped = "stop" if tokens[-1] == 0 else "length"
        return Generation(tuple(prompt), tuple(tokens[len(prompt) :]), stopped)


@pytest.fixture
def tiny_engine(monkeypatch):
    monkeypatch.setattr("draftkit.engine.Engine", TinyEngine)
    monkeypatch.setattr(TinyEngine, "num_answers", 0)
    return TinyEngine


@pytest.fixture
def recipe(tiny_model, tmp_path) -> Recipe:
    """14 prompts, 2 of them held out, two samples and a greedy answer each, shards of 3 prompts: 5 shards."""
    lines = [json.dumps({"q": f"what is {i} {chr(97 + i) * 5}", "a": "4"}) for i in range(14)]
    (tmp_path / "q.jsonl").write_text("".join(line + "\n" for line in lines))
    keys = {"name": "sums", "licence": "CC0", "source": "jsonl", "path": "q.jsonl", "verifier": "exact"}
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(keys | {"columns": {"prompt": "q", "answer": "a"}}))
    return Recipe.model_validate(
        {
            "model": {"path": str(tiny_model)},
            "engine": {"max_model_len": 64},
            "sampling": {"n": 2, "greedy_n": 1, "max_tokens": 6},
            "data": {"recipe": str(tmp_path / "sums.yaml"), "heldout": 2, "shard_size": 3},
        }
    )


def run_prepare(recipe: Recipe, out, **how) -> dict:
    run = RunDir.open(out, verb="prepare", recipe=recipe, resume=out.exists(), overwrite=False, **how)
    try:
        return prepare.run(recipe, run)
    finally:
        run.close()


def test_a_whole_corpus(recipe, tiny_model, tiny_engine, tmp_path, capsys):
    results = run_prepare(recipe, tmp_path / "out")

    corpus = Corpus.open(tmp_path / "out")
    corpus.check_verifier(fingerprint(tiny_model))
    tokenizer = load_tokenizer(tiny_model)
    assert [s["prompts"] for s in corpus.manifest["shards"]] == [2, 3, 3, 3, 3]
    for name, num_prompts in (("heldout", 2), ("train", 12)):
        prompts, rollouts = corpus.prompts(name), list(corpus.rollouts(name))
        assert [(r.prompt_id, r.sample) for r in rollouts] == [(p.id, s) for p in prompts for s in range(3)]
        assert len(prompts) == num_prompts
        by_id = {p.id: p for p in prompts}
        for r in rollouts:
            assert list(r.prompt_ids) == render(tokenizer, by_id[r.prompt_id].messages)
            assert 1 <= len(r.response_ids) <= 6
            assert r.temperature == (0.0 if r.sample == 2 else 1.0)
            assert (r.finish_reason == "stop") == (r.response_ids[-1] == 0)
    first, second = list(corpus.rollouts("train"))[:2]
    assert first.response_ids != second.response_ids
    assert results["prompts"] == {
        **{"read": 14, "too_long": 0, "exact_duplicates": 0, "near_duplicates": 0, "contaminated": 0},
        **{"heldout": 2, "train": 12, "unused": 0},
    }
    assert json.loads((tmp_path / "out" / "results.json").read_text())["response_tokens"] == results["response_tokens"]
    shown = capsys.readouterr()
    assert "how answers ended" in shown.out
    assert "supervised in green" in shown.err


def test_interrupted_and_resumed_is_the_same_corpus(recipe, tiny_engine, tmp_path, monkeypatch):
    run_prepare(recipe, tmp_path / "whole")

    in_second_shard = 6 + 4  # two held-out prompts with three answers each, then four more
    monkeypatch.setattr(tiny_engine, "num_answers", 0)
    once = tiny_engine._one

    def signal_then_answer(self, *args):
        if tiny_engine.num_answers == in_second_shard:
            os.kill(os.getpid(), signal.SIGTERM)
        return once(self, *args)

    monkeypatch.setattr(tiny_engine, "_one", signal_then_answer)
    with pytest.raises(Interrupted):
        run_prepare(recipe, tmp_path / "broken")
    with pytest.raises(UserError, match="not finished"):
        Corpus.open(tmp_path / "broken")

    monkeypatch.setattr(tiny_engine, "_one", once)
    monkeypatch.setattr(tiny_engine, "num_answers", 0)
    run_prepare(recipe, tmp_path / "broken")
    assert tiny_engine.num_answers == 12 * 3  # the complete first shard was not asked for again
    assert Corpus.open(tmp_path / "broken").manifest == Corpus.open(tmp_path / "whole").manifest


def _child(recipe: Recipe, out) -> None:
    torch.set_num_threads(1)
    os.setpgid(0, 0)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    run_prepare(recipe, out)


def test_kill_9_at_random_moments_then_resume_is_the_same_corpus(recipe, tiny_engine, tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked child must not wait for threads that it does not have
    run_prepare(recipe, tmp_path / "whole")
    monkeypatch.setattr(tiny_engine, "pause_s", 0.01)

    fork, draw = multiprocessing.get_context("fork"), random.Random(0)
    num_killed = 0
    for life in range(10):
        child = fork.Process(target=_child, args=(recipe, tmp_path / "killed"))
        child.start()
        if life == 4:  # however slow the machine is, one kill lands after a shard was completed
            deadline = time.monotonic() + 60
            while not list((tmp_path / "killed").glob("shards/*.parquet")) and time.monotonic() < deadline:
                time.sleep(0.005)
        else:
            child.join(timeout=draw.uniform(0, 0.3))  # a shard takes about 0.15 s
        num_killed += child.is_alive()
        child.kill()
        child.join()
    (tmp_path / "killed" / "shards" / ".train-00000.parquet.tmp-1").write_bytes(b"PAR1 half")
    complete = len(list((tmp_path / "killed" / "shards").glob("*.parquet")))
    monkeypatch.setattr(tiny_engine, "num_answers", 0)
    run_prepare(recipe, tmp_path / "killed")
    torch.set_num_threads(threads)
    assert num_killed == 10
    assert complete > 0
    assert tiny_engine.num_answers < 14 * 3
    assert Corpus.open(tmp_path / "killed").manifest == Corpus.open(tmp_path / "whole").manifest
    assert not list((tmp_path / "killed").rglob(".*.tmp-*")), "half-written files are left"


def test_a_finished_corpus_is_not_answered_again_and_a_lost_shard_alone_is(recipe, tiny_engine, tmp_path, monkeypatch):
    first = run_prepare(recipe, tmp_path / "out")
    manifest = Corpus.open(tmp_path / "out").manifest
    (tmp_path / "out" / "shards" / "train-00002.parquet").unlink()
    monkeypatch.setattr(tiny_engine, "num_answers", 0)
    assert run_prepare(recipe, tmp_path / "out") == first
    assert run_prepare(recipe, tmp_path / "out") == first
    assert tiny_engine.num_answers == 9
    assert Corpus.open(tmp_path / "out").manifest == manifest


def test_resume_with_another_verifier_or_data_recipe_is_refused(recipe, tiny_model, tiny_engine, tmp_path):
    run_prepare(recipe, tmp_path / "out")
    data_recipe = tmp_path / "sums.yaml"
    data_recipe.write_text(data_recipe.read_text() + "system: Be brief.\n")
    with pytest.raises(UserError, match="begun with another data_recipe"):
        run_prepare(recipe, tmp_path / "out")


def test_a_prompt_longer_than_the_context_is_named_or_dropped_on_request(recipe, tiny_engine, tmp_path):
    with (tmp_path / "q.jsonl").open("a") as lines:
        lines.write(json.dumps({"q": "z" * 70, "a": "4"}) + "\n")
    with pytest.raises(UserError, match=r"Prompt '\w{16}' has 71 tokens .* engine.max_model_len=64"):
        run_prepare(recipe, tmp_path / "out")
    data_recipe = tmp_path / "sums.yaml"
    data_recipe.write_text(data_recipe.read_text() + "max_prompt_tokens: 60\n")
    assert run_prepare(recipe, tmp_path / "out")["prompts"]["too_long"] == 1


def test_an_answer_of_no_tokens_is_an_error(recipe, tiny_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_engine, "_one", lambda self, prompt, settings: Generation(tuple(prompt), (), "stop"))
    with pytest.raises(UserError, match="nothing of it could be supervised"):
        run_prepare(recipe, tmp_path / "out")


def test_a_corpus_that_does_not_fit_is_refused_before_an_answer(recipe, tiny_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "BYTES_PER_TOKEN", 2**50)
    with pytest.raises(UserError, match="No space left for the corpus"):
        run_prepare(recipe, tmp_path / "out")
    assert tiny_engine.num_answers == 0


@pytest.mark.engine
def test_vllm_answers_four_prompts_of_the_demo_model(demo_model, tmp_path):
    settings = {
        "model": {"path": str(demo_model)},
        "engine": {"max_num_seqs": 8, "kv_cache_gib": 1},
        "sampling": {"n": 2, "max_tokens": 24},
        "data": {"limit": 3, "heldout": 1},
    }
    results = run_prepare(Recipe.model_validate(settings), tmp_path / "out")
    rollouts = list(Corpus.open(tmp_path / "out").rollouts("train"))
    assert len(rollouts) == 6
    assert rollouts[0].response_ids != rollouts[1].response_ids
    assert results["finish_reasons"].keys() <= {"stop", "length"}
    text = load_tokenizer(demo_model).decode(rollouts[0].prompt_ids)
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
