"""`draftkit rl` as a real command on a tiny model: what a run leaves, resumes to, refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from draftkit.recipe import load_recipe

Command = Callable[..., subprocess.CompletedProcess[str]]
REWARD = '''"""The share of lower-case letters: a random model's answers differ in it, so that every group teaches."""


def score(prompt, text):
    return sum("a" <= c <= "z" for c in text) / max(1, len(text))
'''
SMALL = [
    "engine.max_model_len=128",
    "engine.kv_cache_gib=1",
    "engine.max_num_seqs=8",
    "sampling.n=4",
    "sampling.max_tokens=12",
    "data.heldout=2",
    "rl.prompts_per_step=2",
    "rl.eval_prompts=2",
    "rl.eval_every=2",
    "rl.save_every=2",
    "rl.probe_every=3",
    "rl.reward=my_reward:score",
    "policy.lr=1e-3",
    "cotrain.mode=every-n",
    "cotrain.grow_batches=4",
    "canary.prompts=2",
    "canary.max_tokens=8",
    "canary.min_acceptance=1.0",
    "warmup.steps=0",
]


@pytest.fixture
def words(tmp_path: Path, tiny_verifier: Path) -> list[str]:
    """A complete small command line; its files lie in the working directory of the `draftkit` fixture."""
    (tmp_path / "my_reward.py").write_text(REWARD)
    rows = [{"q": f"say {chr(97 + i) * 4} {chr(98 + i) * 5} {i}"} for i in range(16)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"name": "mine", "licence": "CC0", "source": "jsonl", "path": "prompts.jsonl", "columns": {"prompt": "q"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(data))
    return ["rl", "--model", str(tiny_verifier), "--data", "mine.yaml", *SMALL]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what the clock has a hand in."""
    timed = {
        *("time_s", "share", "generate_s", "tokens_per_s", "generation_share", "predicted_speedup", "attribution"),
        *("predicted_generation_speedup", "plain_generation_share", "realised_speedup", "realised", "cotrain"),
    }
    left = {key: value for key, value in row.items() if key not in timed}
    for part in ("canary", "drafter"):
        if left.get(part):
            left[part] = {key: value for key, value in left[part].items() if key != "seconds"}
    return left


@pytest.mark.engine
def test_a_run_speculates_learns_and_leaves_what_others_read(
    draftkit: Command, words: list[str], tmp_path: Path
) -> None:
    done = draftkit(*words, "--steps", "4", "--k", "2", "--json")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "outputs/rl/rl-quickstart"
    before, *rows = rows_of(run)
    assert before["step"] == 0 and before["canary"]["ok"], before
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["policy_version"] for row in rows] == [0, 1, 2, 3]
    assert [row["k"] for row in rows] == [0, 2, 2, 0]  # probes at steps 1 and 4
    for row in rows:
        assert row["canary"]["ok"], row["canary"]
        assert row["time_s"]["total"] == pytest.approx(sum(v for k, v in row["time_s"].items() if k != "total"))
        assert 0 < row["reward_mean"] < 1 and row["entropy"] > 0
        assert abs(row["surprise_z"]) < 6 and row["engine_trainer_logp_gap"] < 0.05
        assert row["lossless"]["alarms"] == []
    assert rows[1]["acceptance_length"] >= 1 and len(rows[1]["survival"]) == 2
    assert rows[3]["realised_speedup"] is not None
    results = json.loads((run / "results.json").read_text())
    assert results == json.loads(done.stdout) | {} or results["headline"] == json.loads(done.stdout)["headline"]
    assert results["canary_faults"] == [] and results["lossless_alarms"] == []
    start, end = load_file(Path(words[2]) / "model.safetensors"), load_file(run / "policy" / "model.safetensors")
    assert start.keys() == end.keys() and any((start[name] != end[name]).any() for name in start)
    assert (run / "drafter" / "config.json").exists() and (run / "curves.png").stat().st_size > 10_000
    shown = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in shown} == {2} and len(shown) == 2  # held-out prompts; step 4 is a probe
    assert all(len(r["drafted"]) == row["k"] == 2 for row in shown for r in row["rounds"])
    reported = draftkit("report", str(run))
    assert reported.returncode == 0, reported.stderr
    page = (run / "report" / "index.html").read_text()
    assert ('class="accepted"' in page or 'class="rejected"' in page) and "Predicted against realised" in page


@pytest.mark.engine
def test_a_run_finds_its_schedule_and_is_replayed_and_measured_by_version(
    draftkit: Command, words: list[str], tmp_path: Path
) -> None:
    more = ["spec.adapt=true", "spec.explore=1.0", "rl.snapshot_every=2", "rl.probe_every=0", "rl.keep_rollouts=2"]
    words = [word for word in words if not word.startswith("rl.probe_every=")]
    done = draftkit(*words, *more, "--steps", "6", "--k", "2", "--out", "run")
    assert done.returncode == 0, done.stderr
    _, *rows = rows_of(tmp_path / "run")
    assert rows[0]["k"] == 0 and rows[0]["tuning"]["why"] == "to learn what drafts cost and how many are accepted"
    assert rows[0]["tuning"]["schedule"] == rows[1]["schedule"] == [[1, 1, 2], [2, 8, 0]]
    assert all(row["tuning"]["why"] for row in rows) and rows[-1]["tuning"]["allowance_s"] > 0
    assert rows[-1]["tuning"]["survival"][0] is not None

    replay = ["eval-acceptance", "--replay", "run", "--repeats", "2", "--k", "0,2", "eval.batches=2"]
    done = draftkit(*replay, "--out", "replay")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "replay" / "results.json").read_text())
    kept = [row for row in rows if row["step"] in (5, 6)]
    assert [b["tokens"] for b in found["batches"]] == [row["response_tokens"] for row in kept]
    assert found["draft_sample_method"] == "probabilistic", "not as the run drafted"
    assert [arm["arm"] for arm in found["arms"]] == ["k=0", "k=2", "schedule"]
    assert all(arm["rollout_s"] > 0 and arm["predicted_s"] > 0 for arm in found["arms"])
    measured = [r for r in rows_of(tmp_path / "replay") if r["event"] == "measured"]
    lengths = {(r["batch"], tuple(q["tokens"] for q in r["requests"])) for r in measured}
    assert len(lengths) == 2  # every arm wrote the recorded lengths

    done = draftkit("eval-acceptance", "--matrix", "run", "--out", "matrix", "eval.prompts=2")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "matrix" / "results.json").read_text())
    assert [(c["policy"], c["drafter"]) for c in found["cells"]] == [(p, d) for p in (2, 4, 6) for d in (2, 4, 6)]
    assert all(c["acceptance_length"] >= 1 for c in found["cells"])
    assert [s["lag"] for s in found["staleness"]] == [0, 2, 4] and found["staleness"][0]["kept"] == 1
    assert (tmp_path / "matrix" / "matrix.png").stat().st_size > 10_000


@pytest.mark.engine
def test_an_interrupted_run_resumes_to_the_same_policy_and_drafter(
    draftkit: Command, words: list[str], tmp_path: Path
) -> None:
    whole = draftkit(*words, "--steps", "4", "--k", "2", "--out", "whole")
    assert whole.returncode == 0, whole.stderr
    command = [sys.executable, "-m", "draftkit", *words, "--steps", "4", "--k", "2", "--out", "cut"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    cut = tmp_path / "cut"
    while process.poll() is None and not ((cut / "metrics.jsonl").exists() and len(rows_of(cut)) > 1):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert 1 < len(rows_of(cut)) < 5, "interrupted too late to show anything"
    resumed = draftkit(*words, "--steps", "4", "--k", "2", "--out", "cut", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    for part in ("policy", "drafter"):
        a, b = (load_file(tmp_path / run / part / "model.safetensors") for run in ("whole", "cut"))
        assert all((a[name] == b[name]).all() for name in a)
    assert list(map(untimed, rows_of(tmp_path / "whole"))) == list(map(untimed, rows_of(cut)))


@pytest.mark.engine
def test_without_speculation_and_one_version_behind(draftkit: Command, words: list[str], tmp_path: Path) -> None:
    done = draftkit(*words, "--steps", "3", "--spec", "none", "rl.lag=1", "rl.loss=dapo")
    assert done.returncode == 0, done.stderr
    _, *rows = rows_of(tmp_path / "outputs/rl/rl-quickstart")
    assert [row["policy_version"] for row in rows] == [0, 0, 1]
    assert all(row["acceptance_length"] is None and row["drafter"] is None for row in rows)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--spec", "mtp"], "spec.method=mtp needs a drafter"),
        (["--spec", "none", "--drafter", "x"], "spec.method=none uses no drafter"),
        (["sampling.n=1"], "sampling.n (1)"),
        (["--spec", "eagle9"], "spec.method"),
        (["rl.reward=my_reward:scor"], "module my_reward has no 'scor'"),
        (["rl.environment=chess"], "rl.environment: there is no environment 'chess'"),
        (["spec.schedule=[[1, 8, 9]]"], "spec.schedule asks for more drafts than spec.k (3)"),
    ],
)
def test_bad_input(draftkit: Command, words: list[str], tmp_path: Path, given: list[str], named: str) -> None:
    kept = [word for word in words if not any(word.split("=")[0] == g.split("=")[0] for g in given)]
    done = draftkit(*kept, *given)
    assert done.returncode == 2 and named in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "outputs/rl/rl-quickstart").exists()


def test_the_default_recipe_is_the_rl_quickstart() -> None:
    recipe, _ = load_recipe("rl-quickstart")
    assert recipe.spec.method == "eagle3" and recipe.warmup.steps > 0


@pytest.mark.engine
def test_two_processes_train_one_policy_with_an_engine_each(
    draftkit: Command, words: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29533"]
    options = ["--steps", "2", "--k", "2", "policy.zero_stage=3", "--out", "two"]
    done = subprocess.run(
        [*command, "-m", "draftkit", *words, *options], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    _, *rows = rows_of(tmp_path / "two")
    assert [row["policy_version"] for row in rows] == [0, 1]
    assert all(row["canary"]["ok"] for row in rows), [row["canary"]["cause"] for row in rows]
    assert all(row["response_tokens"] > 4 * 12 for row in rows), "only one rank's rollouts were counted"
    assert (tmp_path / "two" / "policy" / "model.safetensors").exists()
