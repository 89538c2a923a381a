from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftkit.errors import EXIT_INTERRUPTED, EXIT_USER, UserError, explain
from draftkit.recipe import Recipe
from draftkit.run import Interrupt, RunDir, atomic_json, atomic_write, no_space


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outputs" / "run"


@pytest.fixture
def begun(path: Path) -> Iterator[RunDir]:
    run = RunDir.open(path, verb="prepare", recipe=Recipe(), inputs={"corpus": "a"})
    yield run
    run.close()


def reopen(path: Path, **changes: object) -> RunDir:
    return RunDir.open(path, **({"verb": "prepare", "recipe": Recipe(), "inputs": {"corpus": "a"}} | changes))


def test_a_new_run_holds_its_provenance(begun: RunDir) -> None:
    names = {file.name for file in begun.path.iterdir()}
    assert {"recipe.yaml", "config.json", "command.txt", "env.json", "log.txt"} <= names
    environment = json.loads((begun.path / "env.json").read_text())
    assert environment["packages"]["torch"] and environment["cores"] >= 1
    assert not begun.finished


def test_an_existing_run_is_refused_with_three_ways_out(begun: RunDir) -> None:
    begun.close()
    with pytest.raises(UserError) as caught:
        reopen(begun.path)
    assert all(way in caught.value.hint for way in ("--resume", "--overwrite", "--out"))


def test_a_run_in_use_is_refused(begun: RunDir) -> None:
    for mode in ("resume", "overwrite"):
        with pytest.raises(UserError, match=f"in use by another process .pid {os.getpid()}"):
            reopen(begun.path, **{mode: True})
    assert (begun.path / "config.json").exists()  # the refused --overwrite has not deleted anything


def test_the_lock_of_a_killed_process_does_not_hold(path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from draftkit.run import RunDir; from draftkit.recipe import"
        " Recipe; run = RunDir.open(Path(sys.argv[1]), verb='prepare', recipe=Recipe(), inputs={'corpus': 'a'});"
        " run.metrics({'step': 1}); open(run.path / 'metrics.jsonl', 'a').write('{\"st');"
        " os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path)])
    assert killed.returncode == -signal.SIGKILL
    run = reopen(path, resume=True)
    assert run.read_metrics() == [{"step": 1}]
    run.close()


def test_resume_with_other_settings_names_the_fields(begun: RunDir) -> None:
    begun.close()
    other = Recipe()
    other.train.lr = 3.0
    with pytest.raises(UserError, match="train.lr was None, is 3.0"):
        reopen(begun.path, resume=True, recipe=other)
    with pytest.raises(UserError, match="corpus was 'a', is 'b'"):
        reopen(begun.path, resume=True, inputs={"corpus": "b"})
    with pytest.raises(UserError, match="a run of `prepare`, not of `train-drafter`"):
        reopen(begun.path, resume=True, verb="train-drafter")


def test_resume_starts_a_run_that_does_not_exist(path: Path) -> None:
    run = reopen(path, resume=True)
    assert not run.finished and run.path.is_dir()
    run.close()


def test_resume_starts_over_when_the_provenance_was_cut_short(begun: RunDir) -> None:
    begun.close()
    (begun.path / "config.json").unlink()
    reopen(begun.path).close()
    assert (begun.path / "config.json").exists()


def test_overwrite_empties_only_a_run(begun: RunDir, tmp_path: Path) -> None:
    begun.metrics({"step": 1})
    (begun.path / "checkpoints").mkdir()
    begun.close()
    run = reopen(begun.path, overwrite=True)
    assert run.read_metrics() == [] and not (run.path / "checkpoints").exists()
    run.close()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="not a draftkit run"):
        reopen(precious, overwrite=True)
    assert (precious / "thesis.tex").exists()


def test_a_provisional_run_that_never_begins_leaves_everything_as_it_was(begun: RunDir, path: Path) -> None:
    begun.metrics({"step": 1})
    begun.close()
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".lock"}
    for how in ({"overwrite": True}, {"resume": True}):
        run = reopen(path, provisional=True, **how)
        assert run.fresh == ("overwrite" in how)
        with pytest.raises(UserError, match="in use"):
            reopen(path, provisional=True, **how)
        run.close()
        assert {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".lock"} == before
    run = reopen(path, provisional=True, overwrite=True)
    run.begin()
    assert run.read_metrics() == []
    run.close()
    new = path.with_name("new")
    reopen(new, provisional=True).close()
    assert not new.exists()


def test_a_finished_run_says_so(begun: RunDir) -> None:
    begun.finish({"x": 1}, "x is 1")
    begun.close()
    run = reopen(begun.path, resume=True)
    assert run.finished and run.results() == {"x": 1, "headline": "x is 1"}
    assert "x is 1" in (run.path / "README.md").read_text()
    run.close()


def test_metrics_rewind_and_stay_json(begun: RunDir) -> None:
    for step in range(4):
        begun.metrics({"step": step, "loss": float("nan")})
    begun.rewind_metrics(1)
    assert begun.read_metrics() == [{"step": 0, "loss": None}, {"step": 1, "loss": None}]


def test_other_ranks_write_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    run = reopen(path)
    run.metrics({"step": 0})
    run.finish({}, "")
    assert not path.exists()


def test_a_failed_write_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "state.json"
    atomic_json(file, {"a": 1})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        atomic_write(file, "half")
    assert json.loads(file.read_text()) == {"a": 1} and [f.name for f in tmp_path.iterdir()] == ["state.json"]
    code, message, _ = explain(caught.value)
    assert code == EXIT_USER and "No space left" in message


def test_what_does_not_fit_is_refused_before_it_is_written(path: Path) -> None:
    with pytest.raises(UserError, match="No space left for the cache"):
        no_space(path, 1e18, "the cache")
    no_space(path, 1, "a byte")


def test_secrets_do_not_reach_command_txt(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["draftkit", "prepare", "--x", "hf_abcDEF123", "hub.token=abc"])
    run = reopen(path)
    run.close()
    text = (path / "command.txt").read_text()
    assert "abc" not in text and "***" in text


def test_the_first_signal_is_a_request_and_the_second_stops() -> None:
    with Interrupt() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    code = (
        "import os, signal; from draftkit.run import Interrupt\n"
        "with Interrupt():\n    os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)\nprint('on')"
    )
    stopped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert stopped.returncode == EXIT_INTERRUPTED and stopped.stdout == ""


def test_a_run_never_overwrites_its_own_input(path: Path) -> None:
    corpus = path / "prepare"
    corpus.mkdir(parents=True)
    (corpus / "manifest.json").write_text("{}")
    for out in (corpus, path):
        with pytest.raises(UserError, match="own input, the corpus"):
            RunDir.open(out, verb="train-drafter", recipe=Recipe(), overwrite=True, inputs={"corpus": str(corpus)})
    assert (corpus / "manifest.json").exists()
