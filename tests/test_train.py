"""The training loop on a tiny verifier: it learns, resumes to the same bits, and refuses what does not belong to it."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from conftest import write_tiny_corpus, write_tiny_verifier
from safetensors.torch import load_file

from draftkit.errors import Interrupted, RunFailed, UserError
from draftkit.recipe import Recipe, TrainSection
from draftkit.run import RunDir
from draftkit.train import checkpoint, loop, optim

STEPS = 12


def small_recipe(verifier: Path, **train: object) -> Recipe:
    """12 steps: two passes over six batches of the tiny corpus' 48 documents."""
    wanted = {"epochs": 2.0, "tokens_per_batch": 280, "ttt_steps": 2, "lr": 3e-3, "parity": False, "save_every": 4}
    return Recipe.model_validate(
        {
            "model": {"path": str(verifier)},
            "sampling": {"greedy_n": 1, "max_tokens": 40},
            "train": wanted | {"eval_every": 5, "keep": 3} | train,
        }
    )


@pytest.fixture
def recipe(tiny_verifier: Path) -> Recipe:
    return small_recipe(tiny_verifier)


class StoppedAt(RunDir):
    """A run directory whose process gets Ctrl-C while step `stop_at` is being logged."""

    stop_at = 0

    def metrics(self, values: dict) -> None:
        super().metrics(values)
        if values.get("step") == self.stop_at and "lr" in values:
            os.kill(os.getpid(), signal.SIGINT)


def train(recipe: Recipe, out: Path, corpus: Path, stop_at: int = 0) -> dict:
    run = StoppedAt.open(out, verb="train-drafter", recipe=recipe, resume=out.exists())
    run.stop_at = stop_at
    try:
        return loop.run(recipe, run, corpus)
    finally:
        run.close()


def weights(out: Path) -> dict[str, torch.Tensor]:
    """Float32 masters of the last checkpoint: finer than the bfloat16 export."""
    return load_file(checkpoint.found(out / "checkpoints")[-1] / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tiny_verifier: Path, tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed. Read-only."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(small_recipe(tiny_verifier), out, tiny_corpus)
    return out


# --- learning and logging ---------------------------------------------------------------------------------------


def test_the_loss_falls_and_the_heldout_prompts_agree(whole: Path) -> None:
    steps = [row for row in rows(whole) if "lr" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    held = [row["heldout"] for row in rows(whole) if "heldout" in row]
    final = json.loads((whole / "results.json").read_text())["heldout"]
    assert len(held) == 2 and final["loss"] < held[0]["loss"]


def test_every_documented_field_is_logged_each_step(whole: Path) -> None:
    documented = {
        *("step", "tokens", "loss", "cond_acc", "expected_acceptance_greedy", "expected_acceptance_sampled"),
        *("vocab_ceiling", "simulated_acceptance_length", "tokens_per_s", "lr"),
    }
    for row in (row for row in rows(whole) if "heldout" not in row):
        assert documented <= row.keys()
        per_step = [row[name] for name in ("cond_acc", "expected_acceptance_greedy", "expected_acceptance_sampled")]
        assert all(len(values) == 2 and all(0 <= value <= 1 for value in values) for values in per_step)
        assert all(row["vocab_ceiling"] >= values[0] for values in per_step[1:])
        first, second = row["cond_acc"]
        assert row["simulated_acceptance_length"] == pytest.approx(1 + first + first * second)
        assert row["tokens"] > 0 and row["tokens_per_s"] > 0
    for row in (row["heldout"] for row in rows(whole) if "heldout" in row):
        assert documented - {"step", "tokens", "tokens_per_s", "lr"} <= row.keys()


def test_the_run_ends_with_an_export_and_a_headline(whole: Path, tiny_verifier: Path) -> None:
    results = json.loads((whole / "results.json").read_text())
    assert results["steps"] == STEPS and "held-out acceptance length" in results["headline"]
    assert results["tokens"] == sum(row["tokens"] for row in rows(whole) if "lr" in row)
    assert set(results["heldout_greedy"]) == set(results["heldout"])
    exported = load_file(whole / "drafter" / "model.safetensors")
    for name, master in weights(whole).items():
        assert torch.equal(exported[name], master.to(exported[name].dtype)), name
    assert (whole / "drafter-speculators" / "config.json").is_file()


def test_only_the_newest_checkpoints_are_kept(whole: Path) -> None:
    assert [c.name for c in checkpoint.found(whole / "checkpoints")] == ["step-000004", "step-000008", "step-000012"]


def test_keep_counts_checkpoints(tmp_path: Path) -> None:
    for step in range(1, 6):
        with checkpoint.whole(tmp_path, step, keep=2) as aside:
            (aside / "state").write_text(str(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000005"]
    assert checkpoint.step_of(checkpoint.found(tmp_path)[-1]) == 5


def test_the_learning_rate_warms_up_and_decays_along_a_cosine() -> None:
    section = TrainSection(lr=1.0, warmup_ratio=0.1, lr_min_ratio=0.2)
    rates = [optim.lr_at(step, 100, section) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[54] == pytest.approx(0.6)  # half-way between the peak at step 10 and the end
    assert rates[32] == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 23 / 90)) / 2)
    assert rates[-1] == pytest.approx(0.2)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert optim.lr_at(1, 1, section) == 1.0


def test_only_matrices_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    matrices, vectors = optim.build(model, TrainSection(lr=1e-3, weight_decay=0.1)).param_groups
    assert [p.dim() for p in matrices["params"]] == [2] and matrices["weight_decay"] == 0.1
    assert [p.dim() for p in vectors["params"]] == [1, 1, 1] and vectors["weight_decay"] == 0


# --- the same weights, whatever happened ------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [(6,), (1, 2, 11)])
def test_an_interrupted_run_ends_with_the_same_bits(recipe, tiny_corpus, whole, tmp_path, stops) -> None:
    for stop in stops:
        with pytest.raises(Interrupted):
            train(recipe, tmp_path / "run", tiny_corpus, stop_at=stop)
        assert not (tmp_path / "run" / "results.json").exists()
    train(recipe, tmp_path / "run", tiny_corpus)
    assert same(weights(tmp_path / "run"), weights(whole))
    assert_same_log(tmp_path / "run", whole)


def test_a_lost_checkpoint_costs_time_but_no_bits(recipe, tiny_corpus, whole, tmp_path) -> None:
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "run", tiny_corpus, stop_at=10)
    lost = checkpoint.found(tmp_path / "run" / "checkpoints")[-1]
    assert lost.name == "step-000010"
    shutil.rmtree(lost)
    train(recipe, tmp_path / "run", tiny_corpus)
    assert same(weights(tmp_path / "run"), weights(whole))
    assert_same_log(tmp_path / "run", whole)


def test_a_signal_in_the_last_step_still_finishes(recipe, tiny_corpus, whole, tmp_path) -> None:
    train(recipe, tmp_path / "run", tiny_corpus, stop_at=STEPS)
    assert same(weights(tmp_path / "run"), weights(whole))


def assert_same_log(out: Path, whole: Path) -> None:
    """Same rows and results, but for what a clock measured."""
    drop = ("tokens_per_s",)
    strip = lambda row: {name: value for name, value in row.items() if name not in drop}  # noqa: E731
    assert [strip(row) for row in rows(out)] == [strip(row) for row in rows(whole)]
    mine, other = (json.loads((path / "results.json").read_text()) for path in (out, whole))
    assert strip(mine) == strip(other)


def test_streamed_and_cached_states_train_the_same_weights(tiny_verifier, tiny_corpus, whole, tmp_path) -> None:
    train(small_recipe(tiny_verifier, capture="stream"), tmp_path / "run", tiny_corpus)
    assert not (tmp_path / "run" / "states").exists() and (whole / "states").is_dir()
    assert same(weights(tmp_path / "run"), weights(whole))


def test_accumulated_batches_weigh_as_one(tiny_verifier, tmp_path) -> None:
    """Documents of equal length, so that two batches of four hold what one batch of eight holds."""
    corpus = write_tiny_corpus(tmp_path / "corpus", tiny_verifier, {"heldout": [14] * 2, "train": [14] * 12})
    for name, train_section in (
        ("one", {"tokens_per_batch": 8 * 24}),
        ("two", {"tokens_per_batch": 4 * 24, "grad_accum": 2}),
    ):
        train(small_recipe(tiny_verifier, **train_section), tmp_path / name, corpus)
    assert_close(tmp_path / "two", tmp_path / "one")


def assert_close(mine: Path, other: Path) -> None:
    """Sums in another order move the last bits of a gradient, and Adam's early steps know little but its sign: a few
    parameters of tiny gradient may differ by a step of 3e-3, the others by nothing to speak of."""
    for ours, theirs in zip(rows(mine), rows(other), strict=True):
        assert ours["step"] == theirs["step"] and ours.get("tokens") == theirs.get("tokens")
        if "lr" in ours:
            assert (ours["loss"], ours["grad_norm"]) == pytest.approx((theirs["loss"], theirs["grad_norm"]), rel=1e-2)
    for name, tensor in weights(mine).items():
        assert float((tensor.float() - weights(other)[name].float()).abs().mean()) < 2e-4, name


KINDS = ("eagle3", "mtp", "draft-lm")


def of_kind(recipe: Recipe, kind: str) -> Recipe:
    recipe.drafter.kind = kind
    return recipe


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_the_weights_of_one(tiny_verifier, tiny_corpus, tmp_path, one_thread, kind) -> None:
    """Two processes over gloo, against one that accumulates two batches. torchrun and not `accelerate launch --cpu`,
    which runs a single process unless it finds MPI."""
    train(of_kind(small_recipe(tiny_verifier, grad_accum=2), kind), tmp_path / "one", tiny_corpus)
    done = subprocess.run(
        two_processes(of_kind(small_recipe(tiny_verifier), kind), tmp_path, tiny_corpus),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert_close(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("kind", ["eagle3", "draft-lm"])
def test_shards_of_two_processes_train_the_weights_of_one(
    tiny_verifier, tiny_corpus, tmp_path, one_thread, kind
) -> None:
    """FSDP2, stopped half-way and resumed; then the checkpoint of the shards goes on in one process."""
    one = of_kind(small_recipe(tiny_verifier, grad_accum=2), kind)
    results = train(one, tmp_path / "one", tiny_corpus)
    sharded = of_kind(small_recipe(tiny_verifier, shard=True), kind)
    command = two_processes(sharded, tmp_path, tiny_corpus)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert_close(tmp_path / "two", tmp_path / "one")
    found = json.loads((tmp_path / "two" / "results.json").read_text())
    assert found["heldout"]["kl"] == pytest.approx(results["heldout"]["kl"], rel=1e-2)
    newest = checkpoint.found(tmp_path / "two" / "checkpoints")[-1]
    shutil.rmtree(newest)
    (tmp_path / "two" / "results.json").unlink()
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "resumed after step" in again.stderr, again.stderr
    assert_close(tmp_path / "two", tmp_path / "one")


def two_processes(recipe: Recipe, folder: Path, corpus: Path) -> list[str]:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "draftkit"]
    return [*launch, "train-drafter", "-r", "recipe.yaml", "--corpus", str(corpus), "--out", "two", "--resume"]


def test_a_killed_worker_ends_the_run_and_resuming_it_leaves_the_same_weights(
    tiny_verifier, tiny_corpus, tmp_path, one_thread
) -> None:
    train(small_recipe(tiny_verifier, grad_accum=2), tmp_path / "one", tiny_corpus)
    command = two_processes(small_recipe(tiny_verifier, save_every=1), tmp_path, tiny_corpus)
    metrics = tmp_path / "two" / "metrics.jsonl"
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while first.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < 2):
        time.sleep(0.02)
    workers = [int(pid) for pid in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    assert first.wait(timeout=120) != 0
    assert not (tmp_path / "two" / "results.json").exists()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert_close(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_every_kind_learns_and_resumes_to_the_same_bits(tiny_verifier, tiny_corpus, tmp_path, kind) -> None:
    recipe = of_kind(small_recipe(tiny_verifier), kind)
    results = train(recipe, tmp_path / "whole", tiny_corpus)
    steps = [row for row in rows(tmp_path / "whole") if "lr" in row]
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"] and results["kind"] == kind
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "cut", tiny_corpus, stop_at=5)
    train(recipe, tmp_path / "cut", tiny_corpus)
    assert same(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


@pytest.mark.parametrize("loss", [{"lk-hybrid": 1.0}, {"tv": 1.0, "ce": 0.1}])
def test_a_run_minimises_the_loss_that_its_recipe_names(tiny_verifier, tiny_corpus, tmp_path, loss) -> None:
    train(small_recipe(tiny_verifier, loss=loss), tmp_path / "run", tiny_corpus)
    steps = [row for row in rows(tmp_path / "run") if "lr" in row]
    assert sum(row["objective"] for row in steps[-3:]) < 0.98 * sum(row["objective"] for row in steps[:3])
    assert any(abs(row["objective"] - row["loss"]) > 0.1 for row in steps)  # and not the KL beside it


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As torchrun gives each of its processes: the number of threads moves bfloat16 sums too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- warm start -------------------------------------------------------------------------------------------------


def test_a_warm_start_keeps_the_vocabulary_and_begins_at_its_loss(tiny_verifier, tiny_corpus, whole, tmp_path) -> None:
    recipe = small_recipe(tiny_verifier, lr=1e-9, epochs=0.1)
    recipe.drafter.init = str(whole / "drafter")
    recipe.drafter.draft_vocab_size = 32
    results = train(recipe, tmp_path / "run", tiny_corpus)
    assert torch.equal(weights(tmp_path / "run")["d2t"], weights(whole)["d2t"])
    before = json.loads((whole / "results.json").read_text())["heldout"]
    assert results["heldout"]["loss"] == pytest.approx(before["loss"], rel=0.02)  # the export is bfloat16


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"hidden_size": 32},
            r"drafter\.init: .* hidden size and vocabulary are \(64, 300\), this one's are \(32, 300\)",
        ),
        ({"seed": 1}, None),
    ],
    ids=["other sizes", "other weights"],
)
def test_a_warm_start_from_another_verifier(whole, tmp_path, change, complaint, capsys) -> None:
    """Other sizes cannot work. Other weights are what a warm start is for, when the policy has moved on."""
    other = write_tiny_verifier(tmp_path / "other", **change)
    corpus = write_tiny_corpus(tmp_path / "corpus", other, {"heldout": [14] * 2, "train": [14] * 12})
    recipe = small_recipe(other, epochs=0.1)
    recipe.drafter.init = str(whole / "drafter")
    if complaint is None:
        train(recipe, tmp_path / "run", corpus)
        assert "other weights" in capsys.readouterr().err
    else:
        with pytest.raises(UserError, match=complaint):
            train(recipe, tmp_path / "run", corpus)


def test_a_warm_start_with_another_tokenizer_is_refused(tiny_verifier, whole, tmp_path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_verifier, other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a": 66', '"é": 66'))
    corpus = write_tiny_corpus(tmp_path / "corpus", other, {"heldout": [14] * 2, "train": [14] * 12})
    recipe = small_recipe(other)
    recipe.drafter.init = str(whole / "drafter")
    with pytest.raises(UserError, match=r"drafter\.init: .* another tokenizer"):
        train(recipe, tmp_path / "run", corpus)


def test_a_loss_that_diverges_fails_the_run_and_names_the_cure(tiny_verifier, tiny_corpus, tmp_path) -> None:
    with pytest.raises(RunFailed, match=r"diverged at step \d+ .* Lower train.lr"):
        train(small_recipe(tiny_verifier, lr=1e38, warmup_ratio=0), tmp_path / "run", tiny_corpus)
