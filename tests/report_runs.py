"""Run directories in the formats that the stages write, made small: by `RunDir` itself, with rows written here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from draftkit.recipe import Recipe
from draftkit.run import RunDir

EVIL = "</pre><script>alert(1)</script> & \"quotes\" 'single' \u202e \x00 | `tick` [link](http://x.y)"
PARTS = ("data", "sync", "generate", "reward", "logprob", "train_policy", "train_drafter", "publish", "idle", "other")


def rl_row(step: int, *, k: int = 3, probe_every: int = 4, realised: bool = True, **fields: Any) -> dict[str, Any]:
    """One step as rl/loop.py and rl/account.py log it. Every probe_every-th is plain; k = 0: none speculates."""
    realised = realised and k > 0
    k = 0 if not k or (probe_every and step % probe_every == 1 % probe_every) else k
    seconds = {part: 0.1 * (i + 1) + 0.01 * math.sin(step) for i, part in enumerate(PARTS)}
    seconds |= {"eval": 2.0 if step % 4 == 0 else 0.0}
    seconds["total"] = sum(seconds.values())
    both = {"generation": 1.3, "generation_ci": [1.1, 1.6], "step": 1.1, "step_ci": [1.0, 1.3]}
    have = realised and step > probe_every + 1 if probe_every else False
    survival = [0.6, 0.4, 0.2][:k]
    return {
        "step": step, "policy_version": step - 1, "draft_version": step - 1, "k": k,
        "reward_mean": 0.3 + 0.01 * step, "reward_std": 0.4, "response_tokens": 900, "response_length": 30.0,
        "truncated": 0.1, "entropy": 0.8, "acceptance_length": 1 + sum(survival) if k else None,
        "survival": survival or None, "acceptance_by_turn": [], "time_s": seconds, "share": {},
        "generate_s": seconds["generate"], "tokens_per_s": 3000.0, "generation_share": 0.4,
        "predicted_speedup": 1.05 if k else None, "predicted_generation_speedup": 1.2 if k else None,
        "attribution": {"draft": 0.1, "verify": 0.2, "sync": 0.0, "train_drafter": 0.0, "rest": -0.1, "total": 0.2}
        if k else None,
        "realised_speedup": 1.1 if have else None,
        "realised": both | {"num_plain": 2, "num_speculative": step - 3} if have else None,
        "dropped_groups": 0, "policy": {"loss": 0.1}, "drafter": {"loss": 1.0} if k else None,
        "cotrain": {"train": True, "why": "acceptance rises"} if k else None,
        "engine_trainer_logp_gap": 0.02, "surprise_z": 0.5,
        "lossless": {"on.surprise_z": 0.5, "on.logp_gap": 0.02, "on.tokens": 900.0 if k else 0.0,
                     "off.surprise_z": 0.1, "off.logp_gap": 0.02, "off.tokens": 900.0, "alarms": []},
        "canary": {"ok": True, "cause": None, "policy_intact": True, "speculate": True},
    } | ({"eval_reward": 0.3 + 0.05 * step} if step % 4 == 0 else {}) | fields  # fmt: skip


def sample_row(step: int | None = 8, prompt: str = "What is 1 + 1?") -> dict[str, Any]:
    rounds = [
        {"drafted": [" is", " three", "!"], "accepted": 1, "own": " two"},
        {"drafted": [".", "\n"], "accepted": 2, "own": "<|end|>"},
        {"drafted": ["<b>", "unjudged"], "accepted": 1, "own": None},
    ]
    return {"step": step, "temperature": 1.0, "k": 3, "prompt": prompt, "finish": "stop", "tokens": 8, "first": "It",
            "rounds": rounds}  # fmt: skip


def run_dir(
    path: Path, verb: str, rows: list[dict], results: dict | None, samples: list[dict] = (), **recipe: Any
) -> Path:
    inputs = recipe.pop("inputs", None)
    run = RunDir.open(path, verb=verb, recipe=Recipe.model_validate({"name": path.name} | recipe), inputs=inputs)
    try:
        for row in rows:
            run.metrics(row)
        if samples:
            (path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
        if results is not None:
            run.finish(results, "a headline")
    finally:
        run.close()
    return path


def rl_run(path: Path, steps: int = 12, *, finished: bool = True, method: str = "eagle3", **fields: Any) -> Path:
    rows = [{"step": 0, "eval_reward": 0.31, "canary": None}]
    k = 0 if method == "none" else 3
    rows += [rl_row(step, k=k, **fields) for step in range(1, steps + 1)]
    results = {"schema": "draftkit.rl/1", "spec": method, "steps": steps} if finished else None
    samples = [sample_row(4), sample_row(8)] if k else []
    return run_dir(path, "rl", rows, results, samples, spec={"method": method}, rl={"steps": max(steps, 1)})


def measured(k: int, concurrency: int, temperature: float, repeat: int, block: int) -> dict[str, Any]:
    """As `bench.measure` writes it: 4 prompts of 12 tokens, drafts half accepted."""
    drafts = 8 if k else 0
    per_pos = [4 - min(i, 3) for i in range(k)]
    one = {"tokens": 12, "finish": "length", "drafts": drafts, "draft_tokens": drafts * k, "accepted": sum(per_pos),
           "per_pos": per_pos}  # fmt: skip
    wall = (1.0 if k == 0 else 0.7 + 0.05 * k * concurrency) * (1 + 0.02 * repeat + 0.01 * block)
    return {
        "event": "measured", "repeat": repeat, "temperature": temperature, "concurrency": concurrency, "block": block,
        "k": k, "wall_s": wall, "parts_s": {"draft_s": 0.1 * k, "step_s": 0.98 * wall},
        "requests": [{"prompt": f"p{block}-{i}"} | one for i in range(4)],
    }  # fmt: skip


def eval_rows(repeats: int = 2) -> list[dict[str, Any]]:
    plan = {
        "event": "plan", "verifier": "demo", "verifier_fingerprint": {}, "drafter": "runs/drafter", "method": "eagle3",
        "draft_sample_method": "probabilistic", "temperature": 1.0, "max_num_seqs": 64, "prompts": ["p"], "seed": 0,
    }  # fmt: skip
    where = [(r, t, c, b) for r in range(repeats) for t in (1.0, 0.0) for c in (1, 4) for b in (0, 1)]
    return [plan, *(measured(k, c, t, r, b) for r, t, c, b in where for k in (0, 1, 3))]


def eval_run(path: Path, *, finished: bool = True, rows: list[dict] | None = None, samples: bool = True) -> Path:
    from draftkit.evals.acceptance import results_from_rows

    rows = eval_rows() if rows is None else rows
    results = results_from_rows(rows) if finished else None
    return run_dir(path, "eval-acceptance", rows, results, [sample_row(None)] if samples else [])


HELD = {
    "loss": 1.2, "vocab_ceiling": 0.95, "simulated_acceptance_length": 1.9, "walk_acceptance_length": 1.5,
    "walk_survival": [0.4, 0.1], "verifier_max_p": 0.5,
}  # fmt: skip


def train_run(path: Path, steps: int = 30, *, finished: bool = True, parity: bool = True) -> Path:
    def row(step: int) -> dict[str, Any]:
        return {"step": step, "tokens": 800, "loss": 8 / step, "kl": [1.0], "cond_acc": [0.5],
                "expected_acceptance_greedy": [0.3, 0.2], "expected_acceptance_sampled": [0.5, 0.4],
                "vocab_ceiling": 0.97, "tokens_per_s": 900.0, "lr": 1e-3}  # fmt: skip

    rows = [row(step) for step in range(1, steps + 1)] + [{"step": 10, "heldout": HELD}]
    checked = {
        "first_proposal_agreement": 0.99, "greedy_acceptance_length": {"predicted": 2.1, "served": 2.12},
        "sampled_first_acceptance": {"predicted": 0.4, "served": 0.41, "z": 0.7},
    }  # fmt: skip
    results = {"schema": "draftkit.train-drafter/1", "kind": "eagle3", "tokens": 24000, "tokens_per_s": 900.0,
               "trained_parameters": 7_000_000, "heldout": HELD, "heldout_greedy": HELD}  # fmt: skip
    results |= {"parity": checked} if parity else {}
    return run_dir(path, "train-drafter", rows, results if finished else None)


def compare_run(path: Path) -> Path:
    from draftkit.evals.acceptance import results_from_rows

    cells = results_from_rows(eval_rows())["cells"]
    drafters = [
        {"kind": kind, "method": kind, "cells": cells, "trained_parameters": n, "train_s": 60.0,
         "heldout_acceptance_length": 1.7 if n else None}
        for kind, n in (("eagle3", 7_000_000), ("ngram", 0))
    ]  # fmt: skip
    results = {"schema": "draftkit.compare/1", "verifier": "demo", "corpus": "c", "drafters": drafters}
    run_dir(path, "train-drafter", [], results, inputs={"corpus": "c", "compare": "eagle3"})
    train_run(path / "eagle3")
    eval_run(path / "eagle3-eval")
    eval_run(path / "ngram-eval", samples=False)
    return path


def prepare_run(path: Path) -> Path:
    results = {
        "schema": "draftkit.prepare/1", "prompts": {"read": 20, "train": 15, "heldout": 5},
        "response_tokens": {"heldout": 100, "train": 400}, "prompt_tokens": 300,
        "lengths": {"prompt": {"p5": 3, "max": 9}, "response": {"p5": 4, "max": 32}},
        "finish_reasons": {"length": 3, "stop": 7}, "reward_mean": {"sums": 0.25},
    }  # fmt: skip
    return run_dir(path, "prepare", [{"shard": "shards/x", "rollouts": 4, "response_tokens": 9}], results)
