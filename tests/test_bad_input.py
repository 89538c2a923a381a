"""Bad input through the real commands: exit code 2, one sentence that names the culprit, no traceback, and no trace
left behind, neither a new directory nor a change in an existing run. What each room refuses is tested beside it."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from draftkit.cli import app
from draftkit.data.capture import Verifier
from draftkit.data.shards import SHARDS
from draftkit.drafters import layouts
from draftkit.drafters.eagle3 import Eagle3
from draftkit.models import fingerprint, model_facts
from draftkit.recipe import load_recipe
from draftkit.run import RunDir
from draftkit.train.start import drafter_config

OUT = Path("outputs")
Refuse = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """`refused(*words)` runs a command in an empty working directory, asserts all that is common to bad input, and
    returns its sentence."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object, leaves: bool = False) -> str:
        before = snapshot()
        result = CliRunner().invoke(app, [*map(str, words), "--json"])
        assert result.exit_code == 2, result.output
        document = json.loads(result.stdout)
        message = document["error"]
        assert "Traceback" not in result.stderr and f"error: {message}" in result.stderr
        assert "\n" not in message and message.endswith(".") and len(message) < 400
        assert leaves or snapshot() == before
        return message

    return run


def snapshot() -> dict[str, bytes]:
    """Every file and directory under outputs/ but those that say who was here last."""
    found = (path for path in OUT.rglob("*") if path.name not in {".lock", "command.txt", "log.txt"})
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in found if path.parent != OUT}


def has(message: str, *parts: object) -> None:
    for part in parts:
        assert str(part) in message, f"{part} is not in: {message}"


# --- verifiers --------------------------------------------------------------------------------------------------


@pytest.fixture
def verifier(tiny_verifier: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_verifier, tmp_path / "verifier"))


@pytest.fixture
def words(tiny_corpus: Path) -> dict[str, list[str]]:
    """A command line of each verb that lacks nothing but a verifier."""
    return {
        "prepare": ["prepare"],
        "train-drafter": ["train-drafter", "--corpus", str(tiny_corpus)],
        "eval-acceptance": ["eval-acceptance", "--corpus", str(tiny_corpus), "--drafter", "ngram"],
    }


VERBS = pytest.mark.parametrize("verb", ["prepare", "train-drafter", "eval-acceptance"])


@VERBS
def test_a_missing_model(refused: Refuse, words, verb: str) -> None:
    has(refused(*words[verb], "--model", "./absent"), "model directory ./absent does not exist")


@VERBS
def test_not_a_causal_lm(refused: Refuse, words, verifier: Path, verb: str) -> None:
    config = json.loads((verifier / "config.json").read_text())
    (verifier / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    message = refused(*words[verb], "--model", verifier)
    has(message, verifier / "config.json", "architectures", "BertModel", "not a causal language model")


@VERBS
def test_a_tokenizer_without_a_chat_template(refused: Refuse, words, verifier: Path, verb: str) -> None:
    (verifier / "chat_template.jinja").unlink()
    if verb != "prepare":  # a corpus of this very verifier, or its fingerprint would be refused first
        corpus = corpus_of_another(words[verb][2], chat_template=fingerprint(verifier)["chat_template"])
        words[verb][2] = str(corpus)
    has(refused(*words[verb], "--model", verifier), f"tokenizer in {verifier} has no chat template")


# --- prompts ----------------------------------------------------------------------------------------------------

ROWS = [json.dumps({"id": f"p{i}", "q": f"what is {i} {chr(97 + i) * 5}"}) for i in range(6)]


@pytest.fixture
def prepare(tiny_verifier: Path, tmp_path: Path) -> Callable[[list[str]], list[str]]:
    """`prepare(lines)` writes them as prompts.jsonl and returns the command line that reads it."""
    keys = {"name": "mine", "licence": "CC0", "source": "jsonl", "path": "prompts.jsonl"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(keys | {"columns": {"prompt": "q", "id": "id"}}))

    def write(lines: list[str]) -> list[str]:
        (tmp_path / "prompts.jsonl").write_text("".join(line + "\n" for line in lines))
        sizes = ["data.heldout=2", "engine.max_model_len=64", "sampling.max_tokens=16", "data.shard_size=2"]
        return ["prepare", "--model", str(tiny_verifier), "--data", "mine.yaml", *sizes]

    return write


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (["", *ROWS[:2], '{"id": "p9", "q": '], ["prompts.jsonl line 4", "not valid JSON"]),
        ([*ROWS, "[1, 2]"], ["prompts.jsonl line 7", "list, not an object"]),
        ([], ["prompts.jsonl", "is empty"]),
        (["", ""], ["prompts.jsonl", "is empty"]),
        ([*ROWS, '{"id": "p9", "question": "hm"}'], ["prompts.jsonl line 7", "no column 'q'"]),
        ([*ROWS, '{"id": "p9", "q": null}'], ["prompts.jsonl line 7", "column 'q' is None, not text"]),
        ([*ROWS, '{"id": "p9", "q": "hm \\ud800"}'], ["prompts.jsonl line 7", "half a surrogate pair"]),
        ([*ROWS, ROWS[1]], ["id 'p1' occurs twice", "prompts.jsonl line 2", "prompts.jsonl line 7"]),
        ([*ROWS, json.dumps({"id": "p9", "q": "z" * 70})], ["Prompt 'p9'", "71 tokens", "engine.max_model_len=64"]),
        (ROWS[:2], ["No prompts left for training"]),
    ],
    ids=["broken", "no-object", "empty", "blank", "no-column", "null", "surrogate", "twice", "too-long", "too-few"],
)
def test_prompts(refused: Refuse, prepare, lines: list[str], named: list[str]) -> None:
    has(refused(*prepare(lines)), *named)


def test_a_missing_prompts_file_and_a_missing_data_recipe(refused: Refuse, prepare, tmp_path: Path) -> None:
    command = prepare(ROWS)
    (tmp_path / "prompts.jsonl").unlink()
    has(refused(*command), "prompts.jsonl does not exist")
    has(refused("prepare", "--data", "./absent.yaml"), "absent.yaml does not exist")


# --- recipes and flags ------------------------------------------------------------------------------------------


@VERBS
def test_an_unknown_recipe_key(refused: Refuse, words, tmp_path: Path, verb: str) -> None:
    has(refused(*words[verb], "train.learning_rate=1"), "train.learning_rate", "override")
    (tmp_path / "own.yaml").write_text("train:\n  lrr: 1\n")
    has(refused(*words[verb], "-r", "own.yaml"), "own.yaml", "train.lrr")


@VERBS
def test_a_name_that_leaves_the_output_directory(refused: Refuse, words, verb: str) -> None:
    has(refused(*words[verb], "name=../elsewhere"), "name", "../elsewhere")


def test_an_unknown_data_recipe_key(refused: Refuse, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("name: x\nlicence: CC0\nsource: jsonl\npath: q\ncolums: {prompt: q}\n")
    has(refused("prepare", "--data", "own.yaml"), "own.yaml", "unknown key 'colums'", "columns")


@pytest.mark.parametrize(("k", "complaint"), [("0", "k = 0 alone"), ("3,-1", "negative draft length -1")])
def test_draft_lengths(refused: Refuse, words, k: str, complaint: str) -> None:
    has(refused(*words["eval-acceptance"], "--k", k), "eval.k", complaint)
    has(refused(*words["eval-acceptance"], f"eval.k=[{k}]"), "eval.k", complaint)


# --- drafters and corpora ---------------------------------------------------------------------------------------


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """As much of an export for a verifier of the tiny one's sizes as is looked at before it is refused."""
    path = tmp_path / "drafter"
    path.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"head_dim": 16, "vocab_size": 300, "draft_vocab_size": 64, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    rest = {"rms_norm_eps": 1e-6, "rope_parameters": {}, "max_position_embeddings": 256}
    config = {"architectures": ["LlamaForCausalLMEagle3"]} | sizes | more | rest
    (path / "config.json").write_text(json.dumps(config))
    made_for = {"weights": "0" * 16, "tokenizer": "0" * 16, "chat_template": "0" * 16}
    (path / "draftkit.json").write_text(json.dumps({"verifier": made_for}))
    return path


def test_a_drafter_for_another_verifier(refused: Refuse, words, tiny_verifier: Path, drafter: Path) -> None:
    command = [*words["eval-acceptance"][:-1], drafter, "--model", tiny_verifier]
    has(refused(*command), f"drafter {drafter} was trained for another verifier", "tokenizer")
    command = [*words["train-drafter"], "--model", tiny_verifier, "--init", drafter]
    has(refused(*command), "drafter.init", drafter, "another tokenizer")


def test_a_drafter_of_other_sizes(refused: Refuse, words, tiny_verifier: Path, drafter: Path) -> None:
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    command = [*words["eval-acceptance"][:-1], drafter, "--model", tiny_verifier]
    has(refused(*command), drafter, "another verifier", "hidden size is 128", "64")
    command = [*words["train-drafter"], "--model", tiny_verifier, "--init", drafter]
    has(refused(*command), "drafter.init", drafter, "another verifier", "128", "64")


def test_a_drafter_that_is_none(refused: Refuse, words, tiny_verifier: Path) -> None:
    command = [*words["eval-acceptance"][:-1], "absent", "--model", tiny_verifier]
    has(refused(*command), "drafter absent", "config.json")
    has(refused(*words["train-drafter"], "--model", tiny_verifier, "--init", "absent"), "absent", "config.json")


def corpus_of_another(corpus: str | Path, **fingerprint: str) -> Path:
    """A copy in the working directory, whose manifest names a verifier that differs in these parts."""
    copy = Path(shutil.copytree(corpus, "corpus"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["verifier"] |= fingerprint
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


@pytest.mark.parametrize("part", ["tokenizer", "weights", "chat_template"])
def test_a_corpus_of_another_verifier(refused: Refuse, words, tiny_verifier: Path, part: str) -> None:
    corpus = corpus_of_another(words["train-drafter"][2], **{part: "0" * 16})
    for verb in ("train-drafter", "eval-acceptance"):
        words[verb][2] = str(corpus)
        message = refused(*words[verb], "--model", tiny_verifier)
        has(message, f"Corpus {corpus} was made by another verifier", part.replace("_", " "))


def test_a_corpus_of_another_temperature(refused: Refuse, words, tiny_verifier: Path) -> None:
    message = refused(*words["train-drafter"], "--model", tiny_verifier, "sampling.temperature=0.7")
    has(message, "sampling.temperature", "no answers at temperatures [0.7], only at [0.0, 1.0]")


@pytest.mark.parametrize("damage", ["cut", "changed", "lost"])
def test_a_truncated_shard(refused: Refuse, words, tiny_verifier: Path, damage: str) -> None:
    corpus = Path(shutil.copytree(words["train-drafter"][2], "corpus"))
    shard = corpus / SHARDS / "train-00000.parquet"
    data = shard.read_bytes()
    shard.unlink()
    if damage != "lost":
        shard.write_bytes(data[: len(data) // 2] if damage == "cut" else data[:-9] + bytes(9))
    named = {"cut": "truncated", "changed": "SHA-256", "lost": "missing"}[damage]
    for verb in ("train-drafter", "eval-acceptance"):
        words[verb][2] = str(corpus)
        has(refused(*words[verb], "--model", tiny_verifier), shard, named)


# --- the disk ---------------------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def test_no_space_for_the_corpus(refused: Refuse, prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, 0))
    message = refused(*prepare(ROWS), leaves=True)
    has(message, "No space left for the corpus", "GiB needed", "0.00 GiB free")


def test_no_space_for_the_states(refused: Refuse, words, tiny_verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, 0))
    message = refused(*words["train-drafter"], "--model", tiny_verifier, leaves=True)
    has(message, "No space left for the verifier's hidden states", "GiB needed", "0.00 GiB free")
    assert not list(OUT.rglob("*.safetensors"))


@VERBS
def test_a_disk_that_fills_up_on_the_way(refused: Refuse, words, prepare, tiny_verifier, tmp_path, verb: str) -> None:
    """/dev/full is a real full disk: every write to it ends in ENOSPC. Here the log is the first to meet it."""
    prepare(ROWS)
    recipe = {"name": "own", "model": {"path": str(tiny_verifier)}, "data": {"recipe": "mine.yaml", "heldout": 2}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe))
    inputs = dict(zip(("corpus", "drafter"), words[verb][2::2], strict=False))
    run = RunDir.open(OUT / "run", verb=verb, recipe=load_recipe("own.yaml")[0], inputs=inputs)
    run.close()
    (run.path / "log.txt").unlink()
    (run.path / "log.txt").symlink_to("/dev/full")
    message = refused(*words[verb], "-r", "own.yaml", "--out", run.path, "--resume", leaves=True)
    has(message, "No space left on the disk", "No space left on device")


# --- run directories --------------------------------------------------------------------------------------------


@pytest.fixture
def old_run(refused: Refuse, words) -> Iterator[Callable[[str], RunDir]]:
    """`old_run(verb)`: a run of that verb, still open, with something to lose in it."""
    made: list[RunDir] = []

    def make(verb: str) -> RunDir:
        inputs = {"corpus": words[verb][2]} if verb != "prepare" else {}
        inputs |= {"drafter": "ngram"} if verb == "eval-acceptance" else {}
        made.append(RunDir.open(OUT / verb / "quickstart", verb=verb, recipe=load_recipe()[0], inputs=inputs))
        made[-1].metrics({"step": 1})
        (made[-1].path / "checkpoints").mkdir()
        (made[-1].path / "checkpoints" / "precious").write_text("hours of work")
        return made[-1]

    yield make
    for run in made:
        run.close()


@VERBS
@pytest.mark.parametrize("how", ["--resume", "--overwrite"])
def test_an_output_directory_in_use(refused: Refuse, words, old_run, verb: str, how: str) -> None:
    run = old_run(verb)
    has(refused(*words[verb], how), f"{run.path} is in use by another process (pid {os.getpid()})")


@VERBS
def test_an_output_that_exists_or_is_not_a_run(refused: Refuse, words, old_run, verb: str) -> None:
    run = old_run(verb)
    has(refused(*words[verb]), f"{run.path} already exists")
    Path("outputs/thesis").mkdir()
    Path("outputs/thesis/chapter.tex").write_text("x")
    has(refused(*words[verb], "--out", "outputs/thesis", "--overwrite"), "outputs/thesis", "not a draftkit run")
    has(refused(*words[verb], "--out", "outputs/thesis/chapter.tex"), "chapter.tex is a file")


@VERBS
def test_overwrite_with_bad_input_loses_nothing(refused: Refuse, words, old_run, prepare, verb: str, tiny_verifier):
    old_run(verb).close()
    refused(*words[verb], "--model", "./absent", "--overwrite")
    if verb == "prepare":
        has(refused(*prepare([*ROWS, "{"]), "--overwrite"), "line 7")
    else:
        words[verb][2] = str(corpus_of_another(words[verb][2], tokenizer="0" * 16))
        has(refused(*words[verb], "--model", tiny_verifier, "--overwrite"), "another verifier")
    assert (OUT / verb / "quickstart" / "checkpoints" / "precious").read_text() == "hours of work"


@VERBS
@pytest.mark.parametrize("file", ["config.json", "results.json"])
@pytest.mark.parametrize("content", ['{"schema": ', "[]"])
def test_a_damaged_file_of_a_run(refused: Refuse, words, old_run, verb: str, file: str, content: str) -> None:
    run = old_run(verb)
    run.close()
    (run.path / file).write_text(content)
    has(refused(*words[verb], "--resume"), run.path / file, "is damaged")


def test_a_dry_run_looks_into_its_inputs(refused: Refuse, words, prepare, tiny_verifier: Path, tmp_path: Path) -> None:
    has(refused(*prepare(['{"id": "p9"}']), "--dry-run"), "prompts.jsonl line 1", "no column 'q'")
    (tmp_path / "drafter").mkdir()
    command = [*words["eval-acceptance"][:3], "--drafter", "drafter", "--model", tiny_verifier, "--dry-run"]
    has(refused(*command), "The drafter drafter is not a directory with a config.json")


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        (["--spec", "mtp"], "spec.method=mtp needs a drafter"),
        (["--drafter", "absent"], "drafter absent is not a directory"),
        (["rl.reward=nowhere:score"], "rl.reward: there is no module 'nowhere'"),
        (["rl.environment=chess"], "rl.environment: there is no environment 'chess'"),
        (["spec.rejection_sample_method=synthetic"], "'synthetic' is refused"),
        (["sampling.temperature=0"], "sampling.temperature"),
        (["sampling.n=1"], "sampling.n (1)"),
    ],
)
def test_a_dry_run_of_rl_refuses_what_the_run_would(refused: Refuse, tiny_verifier: Path, setting, complaint) -> None:
    has(refused("rl", "--model", tiny_verifier, *setting, "--dry-run"), complaint)


def test_a_dry_run_of_rl_takes_the_drafter_that_the_run_takes(tiny_verifier: Path, tmp_path: Path) -> None:
    """One made for other weights of this policy, as after a warm-up: a warm start is for that."""
    verifier = Verifier(tiny_verifier, (1, 2, 3), 1.0)
    facts = model_facts(tiny_verifier)
    recipe = load_recipe("quickstart")[0]
    drafter = Eagle3(drafter_config(recipe, facts, (1, 2, 3), 64), verifier.embed_VH, torch.arange(64))
    prints = fingerprint(tiny_verifier) | {"weights": "of another step"}
    layouts.write(layouts.head_of(drafter), tmp_path / "drafter", "vllm", prints)
    words = ["rl", "--model", str(tiny_verifier), "--drafter", str(tmp_path / "drafter"), "--dry-run"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output


def test_a_damaged_shard_of_an_unfinished_corpus(refused: Refuse, prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare --resume` neither trusts it nor answers over it in silence."""
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, 0))
        refused(*prepare(ROWS), leaves=True)  # ends after the prompts are chosen
    shard = OUT / "prepare" / "quickstart" / SHARDS / "heldout-00000.parquet"
    shard.write_bytes(b"PAR1 half of a shard")
    has(refused(*prepare(ROWS), "--resume"), shard, "truncated or damaged")
