"""`train-drafter --compare eagle3,mtp,draft-lm`: kinds trained on the same corpus for the same passes, and measured.

    <out>/<kind>/          the training run of each kind          <out>/<kind>-eval/    its bench
    <out>/ngram-eval/      prompt lookup, which needs no training

Every part is a run of its own that resumes where it was, so a comparison that was stopped goes on. All kinds train
first and are measured afterwards, each against its own k = 0 arm in the same process. Left out: choosing each kind's
learning rate; the recipe's is used for all unless `drafter.*` says otherwise per run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftkit import console
from draftkit.evals import bench
from draftkit.evals.drafter import NGRAM
from draftkit.evals.report import interval, number
from draftkit.recipe import Recipe
from draftkit.run import RunDir, atomic_write
from draftkit.train import loop

COLUMNS = ("T", "c", "k", "drafter", "AL", "AL 95 %", "round", "speedup", "95 %", "verdict")


def run(recipe: Recipe, run: RunDir, corpus: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """Train and measure each of `kinds`, and n-gram; write the table to README.md and results.json."""
    run.begin()
    recipes = {kind: _of_kind(recipe, kind) for kind in kinds}
    trained = {kind: _train(recipes[kind], run.path / kind, corpus) for kind in kinds}
    measured = {
        kind: _measure(recipes[kind], run.path / f"{kind}-eval", corpus, str(run.path / kind / "drafter"))
        for kind in kinds
    }
    measured[NGRAM] = _measure(_of_kind(recipe, None), run.path / "ngram-eval", corpus, NGRAM)
    results = {
        "schema": "draftkit.compare/1",
        "verifier": recipe.model.path,
        "corpus": str(corpus),
        "drafters": [_drafter(kind, trained.get(kind), measured[kind], run.path / kind) for kind in measured],
    }
    show(results)
    atomic_write(run.path / "README.md", markdown(results))
    run.finish(results, headline(results))
    return results


def _of_kind(recipe: Recipe, kind: str | None) -> Recipe:
    name = f"{recipe.name}-{kind or NGRAM}"
    own_sizes = {} if kind == "eagle3" else {"aux_layers": None, "draft_vocab_size": None, "intermediate_size": None}
    drafter = recipe.drafter.model_copy(update=own_sizes | ({"kind": kind} if kind else {}))
    return recipe.model_copy(update={"name": name, "drafter": drafter})


def _train(recipe: Recipe, out: Path, corpus: Path) -> dict[str, Any]:
    part = RunDir.open(out, verb="train-drafter", recipe=recipe, resume=True, inputs={"corpus": str(corpus)})
    try:
        console.say(f"compare: training {recipe.drafter.kind}")
        return part.results() if part.finished else loop.run(recipe, part, corpus)
    finally:
        part.close()


def _measure(recipe: Recipe, out: Path, corpus: Path, drafter: str) -> dict[str, Any]:
    inputs = {"corpus": str(corpus), "drafter": drafter}
    part = RunDir.open(out, verb="eval-acceptance", recipe=recipe, resume=True, inputs=inputs)
    try:
        console.say(f"compare: measuring {recipe.name}")
        return part.results() if part.finished else bench.run(recipe, part, corpus=corpus, drafter=drafter)
    finally:
        part.close()


def _drafter(kind: str, trained: dict[str, Any] | None, measured: dict[str, Any], directory: Path) -> dict[str, Any]:
    """One line of the comparison: what it cost to train, how large it is, what it does."""
    row: dict[str, Any] = {"kind": kind, "method": measured["method"], "cells": measured["cells"]}
    if trained is None:
        return row | {"trained_parameters": 0, "train_s": 0.0, "heldout_acceptance_length": None}
    return row | {
        "trained_parameters": trained["trained_parameters"],
        "train_s": trained["tokens"] / trained["tokens_per_s"],
        "heldout_acceptance_length": trained["heldout"]["walk_acceptance_length"],
        "directory": str(directory / "drafter"),
    }


def table_rows(results: dict[str, Any]) -> list[list[str]]:
    """One line a cell, the drafters of a cell side by side."""
    rows = []
    for drafter in results["drafters"]:
        for cell in drafter["cells"]:
            if cell["k"] == 0:
                continue
            rows.append(
                [
                    f"{cell['temperature']:g}",
                    str(cell["concurrency"]),
                    str(cell["k"]),
                    drafter["kind"],
                    number(cell["acceptance_length"]),
                    interval(cell["acceptance_length_ci"]),
                    number(cell["round_cost"]),
                    number(cell["speedup"]),
                    interval(cell["speedup_ci"]),
                    cell["verdict"],
                ]
            )
    order = [d["kind"] for d in results["drafters"]]
    return sorted(rows, key=lambda r: (float(r[0]), int(r[1]), int(r[2]), order.index(r[3])))


def sizes(results: dict[str, Any]) -> list[list[str]]:
    return [
        [
            drafter["kind"],
            drafter["method"],
            f"{drafter['trained_parameters'] / 1e6:.1f}",
            f"{drafter['train_s']:.0f}",
            number(drafter["heldout_acceptance_length"]),
        ]
        for drafter in results["drafters"]
    ]


SIZE_COLUMNS = ("drafter", "method", "trained, M", "training s", "held-out AL")


def show(results: dict[str, Any]) -> None:
    console.table("drafters", SIZE_COLUMNS, sizes(results))
    console.table(f"compared on {results['verifier']}", COLUMNS, table_rows(results))


def markdown(results: dict[str, Any]) -> str:
    lines = [f"# Drafters compared on {results['verifier']}", ""]
    for columns, rows in ((SIZE_COLUMNS, sizes(results)), (COLUMNS, table_rows(results))):
        lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
    note = (
        "AL: tokens a verify round, bonus token included. Round: its time in plain steps. Training s: optimizer steps."
    )
    return "\n".join([*lines, note, "", f"corpus: {json.dumps(results['corpus'])}", ""])


def headline(results: dict[str, Any]) -> str:
    """The fastest drafter at the fewest requests, which is where speculation pays first."""
    cells = [(d, c) for d in results["drafters"] for c in d["cells"] if c["k"] and c["speedup"] is not None]
    if not cells:
        return "no speedup measured"
    drafter, cell = max(cells, key=lambda pair: pair[1]["speedup"])
    return (
        f"fastest: {drafter['kind']}, {cell['speedup']:.2f}x at k = {cell['k']}, concurrency {cell['concurrency']}, "
        f"T = {cell['temperature']:g} ({cell['verdict']}), acceptance length {cell['acceptance_length']:.2f}"
    )
