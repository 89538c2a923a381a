"""scripts/bench_rl.py without its runs: what it reads, what it divides by, what it passes on."""

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from draftkit.errors import UserError
from draftkit.recipe import Recipe

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_rl.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_rl", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step(seconds, generate, tokens, **more):
    return {"seconds": seconds, "generate": generate, "tokens": tokens, "reward": 0.5} | more


def test_steps_are_read_without_warm_up_rows_and_evaluation(bench):
    made = {"generate_s": 4.0, "response_tokens": 300, "reward_mean": 0.25, "acceptance_length": 2.5}
    rows = [
        {"warmup_step": 1, "loss": 0.1},
        {"step": 0, "eval_reward": 0.1},
        {"step": 1, "time_s": {"total": 12.0, "eval": 2.0}} | made,
    ]
    (only,) = bench.draftkit_steps("\n".join(map(json.dumps, rows)))
    assert only == {"seconds": 10.0, "generate": 4.0, "tokens": 300, "reward": 0.25, "acceptance": 2.5}


def test_the_best_trl_arm_is_what_the_others_are_divided_by(bench):
    found = {
        "trl-paged": [step(8.0, 6.0, 200)],
        "trl-generate": [step(10.0, 8.0, 100), step(10.0, 8.0, 200), step(20.0, 8.0, 300)],
        "draftkit-eagle3": [step(4.0, 2.0, 200, acceptance=2.5), step(4.0, 2.0, 200, acceptance=None)],
    }
    table = {row[0].strip(): row[1:] for row in bench.lines(found)}
    assert table["s a step"] == ["8.0 (8.0-8.0)", "10.0 (10.0-20.0)", "4.0 (4.0-4.0)"]
    assert table["in rollouts"] == ["33 (33-33)", "25 (12-38)", "100 (100-100)"]
    assert table["acceptance length"] == ["", "", "2.50 (2.50-2.50)"]
    assert table["steps/s, trl-paged = 1"] == ["1.00", "0.80", "2.00"]
    assert table["tokens/s, trl-paged = 1"] == ["1.00", "0.60", "2.00"]


def test_without_trl_there_is_no_ratio(bench):
    assert not any("= 1" in row[0] for row in bench.lines({"draftkit-none": [step(4.0, 2.0, 200)]}))


@pytest.mark.parametrize(("num", "most"), [(64, 32), (32, 32), (24, 24), (36, 18), (40, 20), (4, 4), (37, 1)])
def test_micro_batches_are_of_one_size(bench, num, most):
    assert bench.micro_batch(num) == most


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ("Traceback ...\nValueError: first\n  raise\nRuntimeError: then\nbye\n", "RuntimeError: then"),
        ("[rank0]: torch.OutOfMemoryError: too much\n", "torch.OutOfMemoryError: too much"),
        ("an Error in a sentence\nlast words\n", "last words"),
        ("", "exit code -9"),
    ],
)
def test_the_last_exception_is_the_reason(bench, log, found):
    assert bench.reason(log, -9) == found


def test_what_the_user_sets_stays(bench):
    args = argparse.Namespace(overrides=["rl.probe_every=5", "sampling.n=4"])
    assert bench.overrides(args) == ["rl.probe_every=5", "sampling.n=4", "warmup.steps=0"]


def test_what_trl_would_do_otherwise_is_refused(bench):
    bench.check(Recipe())
    with pytest.raises(UserError, match=r"rl\.updates is 2"):
        bench.check(Recipe.model_validate({"rl": {"updates": 2}}))
