from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from draftkit.cli import app
from draftkit.recipe import load_recipe
from draftkit.run import RunDir

VERBS = ["prepare", "train-drafter", "eval-acceptance"]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a command in this process, in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, list(words))

    return run


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['draftkit', '--help']\n"
        "from draftkit.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'vllm', 'transformers', 'datasets', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in VERBS)
    assert time.monotonic() - start < 3  # about 0.4 s on an idle machine


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_its_configuration(invoke, verb: str) -> None:
    shown = invoke(verb, "train.lr=3e-4", "--print-config", "--json")
    assert shown.exit_code == 0
    document = json.loads(shown.stdout)
    assert document["train.lr"] == {"value": 3e-4, "source": "override"}
    assert document["train.grad_clip"]["source"] == "default"
    assert document["model.path"]["source"] == "recipe quickstart"


def test_named_flags_reach_their_recipe_keys(invoke) -> None:
    flags = {
        ("prepare",): {"--model": "m", "--data": "d", "--n": 3, "--temperature": 0.5, "--max-tokens": 7, "--limit": 9},
        ("train-drafter",): {
            "--model": "m", "--ttt-steps": 2, "--lr": 0.5, "--epochs": 3.0, "--init": "i"},
        ("eval-acceptance",): {"--model": "m", "--repeats": 2},
    }  # fmt: skip
    keys = {
        "--model": "model.path", "--data": "data.recipe", "--n": "sampling.n", "--temperature": "sampling.temperature",
        "--max-tokens": "sampling.max_tokens", "--limit": "data.limit", "--ttt-steps": "train.ttt_steps",
        "--lr": "train.lr", "--epochs": "train.epochs", "--init": "drafter.init",
        "--repeats": "eval.repeats",
    }  # fmt: skip
    for verb, given in flags.items():
        words = [str(word) for pair in given.items() for word in pair]
        document = json.loads(invoke(*verb, *words, "--print-config", "--json").stdout)
        for flag, value in given.items():
            assert document[keys[flag]] == {"value": value, "source": "flag"}, flag


def test_lists_of_numbers(invoke) -> None:
    words = ["--k", "3,1", "--concurrency", "1,8", "--temperature", "0,0.7", "--print-config", "--json"]
    document = json.loads(invoke("eval-acceptance", *words).stdout)
    assert document["eval.k"]["value"] == [0, 1, 3]
    assert document["eval.concurrency"]["value"] == [1, 8]
    assert document["eval.temperatures"]["value"] == [0.0, 0.7]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eval-acceptance", "--k", "0"], "eval.k (flag) asks for k = 0 alone"),
        (["eval-acceptance", "--k", "-1"], "eval.k (flag) holds the negative draft length -1"),
        (["eval-acceptance", "--k", "one"], "--k wants whole numbers separated by commas, not 'one'"),
        (["eval-acceptance"], "drafter"),
        (["eval-acceptance", "--drafter", "ngram"], "Corpus outputs/prepare/quickstart does not exist"),
        (["train-drafter"], "Corpus outputs/prepare/quickstart does not exist"),
        (["prepare", "--model", "./absent"], "The model directory ./absent does not exist"),
        (["prepare", "--data", "absent"], "No data recipe is called 'absent'"),
        (["prepare", "-r", "absent"], "No recipe is called 'absent'"),
        (["prepare", "sampling.m=1"], "there is no recipe key 'sampling.m'"),
        (["train-drafter", "--lr", "1", "train.lr=2"], "train.lr is set both by a named flag"),
        (["prepare", "--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(invoke, words: list[str], sentence: str) -> None:
    refused = invoke(*words, "--dry-run")
    assert refused.exit_code == 2
    assert sentence in refused.stderr and "Traceback" not in refused.stderr
    assert not Path("outputs").exists()
    as_json = json.loads(invoke(*words, "--dry-run", "--json").stdout)
    assert sentence in as_json["error"] and as_json["exit_code"] == 2


def test_a_wrong_option_is_exit_code_2(invoke) -> None:
    assert invoke("prepare", "--frobnicate").exit_code == 2
    assert invoke("conquer").exit_code == 2


def test_dry_run_says_what_would_be_done_and_writes_nothing(invoke) -> None:
    shown = invoke("prepare", "--dry-run")
    assert shown.exit_code == 0, shown.stderr
    assert "would run prepare" in shown.stdout and "out: outputs/prepare/quickstart" in shown.stdout
    assert not Path("outputs").exists()


def test_debug_shows_the_traceback(invoke) -> None:
    assert "Traceback" in invoke("prepare", "-r", "absent", "--debug").stderr


def finished_prepare(out: Path) -> None:
    run = RunDir.open(out, verb="prepare", recipe=load_recipe("quickstart")[0], inputs={})
    run.finish({"tokens": 5}, "5 tokens")
    run.close()


def test_resume_of_a_finished_run_reports_it_and_what_comes_next(invoke) -> None:
    finished_prepare(Path("outputs/prepare/quickstart"))
    again = invoke("prepare", "--resume")
    assert again.exit_code == 0, again.stderr
    assert again.stdout.splitlines() == ["run:  outputs/prepare/quickstart", "5 tokens", "next: draftkit train-drafter"]
    document = json.loads(invoke("prepare", "--resume", "--json").stdout)
    assert document == {"run": "outputs/prepare/quickstart", "tokens": 5, "headline": "5 tokens"}


def test_the_next_command_carries_paths_that_are_not_the_default(invoke) -> None:
    finished_prepare(Path("elsewhere"))
    again = invoke("prepare", "--resume", "--out", "elsewhere")
    assert again.stdout.splitlines()[-1] == "next: draftkit train-drafter --corpus elsewhere"


def test_an_existing_run_is_refused(invoke) -> None:
    finished_prepare(Path("outputs/prepare/quickstart"))
    refused = invoke("prepare")
    assert refused.exit_code == 2 and "already exists" in refused.stderr and "--overwrite" in refused.stderr


def test_the_name_of_a_path_is_not_read_as_markup(invoke) -> None:
    refused = invoke("prepare", "--model", "./[bold]x", "--dry-run")
    assert "./[bold]x" in refused.stderr


def test_an_interrupt_is_exit_code_130(invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftkit.cli.load_recipe", interrupted)
    assert invoke("prepare").exit_code == 130


def test_recipes_lists_and_prints(invoke) -> None:
    listed = json.loads(invoke("recipes", "--json").stdout)
    assert "quickstart" in listed["recipes"] and "reasoning-gym-mini" in listed["data_recipes"]
    assert "# Hardware:" in invoke("recipes", "quickstart").stdout


def test_python_dash_m_is_the_same_command(draftkit) -> None:
    assert draftkit("--version").stdout.startswith("draftkit ")


@pytest.mark.engine
def test_doctor_finds_no_uncured_fault(draftkit) -> None:
    done = draftkit("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"], done.stderr
    named = {check["name"]: check for check in report["checks"]}
    assert "eagle3" in named["speculative methods"]["detail"]
