"""`draftkit eval-acceptance --matrix RUN`: every drafter version of an RL run against every policy version of it.

    snapshots of the run -> one engine; policy i and drafter j are loaded into it in place -> the same prompts, sampled
    as in the run -> acceptance length of (i, j), with an interval over prompts

A drafter goes by the first snapshot that has it, and stays the newest one until another was trained.

From the matrix: staleness, the acceptance length that is left when the policy has moved on by so many steps; and when a
drafter that stayed behind would have been worth training: its rollouts take AL(newest drafter) / AL(this one) of the
time, so the seconds lost add up step by step until they exceed what a training took in the run. That takes the round
to cost the same whatever is accepted, and the newest drafter for the best there is. Every cell is a line of
metrics.jsonl. Left out: other lengths of drafts than the run's k.
"""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftkit import console
from draftkit.data.rollouts import read_batches
from draftkit.engine import Engine
from draftkit.errors import Interrupted, UserError
from draftkit.evals.acceptance import (
    bootstrap_acceptance_length,
    expanded_percentile_interval,
    pooled_acceptance_length,
    pooled_survival,
)
from draftkit.evals.bench import request_row
from draftkit.models import stored_tensors
from draftkit.recipe import Recipe
from draftkit.rl.snapshots import Snapshot, drafter_versions, read
from draftkit.run import Interrupt, RunDir, atomic_write, environment
from draftkit.types import Sampling, SpecConfig

SCHEMA = "draftkit.matrix/1"
PLOT = "matrix.png"
Row = dict[str, Any]
Lengths = dict[tuple[int, int], float]  # acceptance length of (policy, drafter)


def run(recipe: Recipe, run: RunDir, *, source: Path) -> dict[str, Any]:
    """Measure the cells that the run's metrics.jsonl lacks; write the report and results.json, and return the results.

    Raises UserError when the source has no snapshots, no drafter among them, or no rollouts to take prompts from.
    """
    snapshots = read(source)
    drafters = drafter_versions(snapshots)
    if not drafters:
        raise UserError(f"--matrix {source}: no snapshot has a drafter.", "Run `draftkit rl --spec eagle3`.")
    prompts = chosen_prompts(recipe, source)
    run.begin()
    done = {(row["policy"], row["drafter"]) for row in run.read_metrics()}
    todo = [(p, d) for p in snapshots for d in drafters if (p.step, d.step) not in done]
    if todo:
        measure_all(recipe, run, prompts, todo)
    results = results_from_rows(run.read_metrics(), costs(source), recipe) | {"env": environment()}
    show(results)
    atomic_write(run.path / PLOT, plot(results))
    atomic_write(run.path / "README.md", markdown(results, source))
    run.finish(results, headline(results))
    return results


def chosen_prompts(recipe: Recipe, source: Path) -> dict[str, list[int]]:
    """{id: token ids} of the first eval.prompts prompts of the run's last rollouts."""
    found: dict[str, list[int]] = {}
    for batch in read_batches(source, 10**6, recipe.eval.batch_prompts):
        for id, prompt in zip(batch.ids, batch.prompts, strict=True):
            found.setdefault(id, list(prompt))
    return dict(list(found.items())[: recipe.eval.prompts])


# --- measuring --------------------------------------------------------------------------------------------------


def measure_all(
    recipe: Recipe, run: RunDir, prompts: dict[str, list[int]], todo: Sequence[tuple[Snapshot, Snapshot]]
) -> None:
    """Policy by policy: a drafter is the smaller thing to load."""
    first_policy, first_drafter = todo[0]
    spec = SpecConfig(
        "eagle3", str(first_drafter.drafter), recipe.spec.k, draft_sample_method=recipe.spec.draft_sample_method
    )
    with (
        Interrupt() as interrupt,
        Engine(first_policy.policy, recipe_engine=recipe.engine, spec=spec, seed=recipe.eval.seed) as engine,
        console.progress("matrix", len(todo)) as bar,
    ):
        loaded = (first_policy.step, first_drafter.step)
        for policy, drafter in todo:
            if policy.step != loaded[0]:
                engine.load_verifier(stored_tensors(policy.policy))
            if drafter.step != loaded[1]:
                engine.load_drafter(stored_tensors(drafter.drafter))
            loaded = (policy.step, drafter.step)
            run.metrics(measure(recipe, engine, prompts, policy, drafter))
            bar.advance(1, f"policy of step {policy.step}, drafter of step {drafter.step}")
            if interrupt.requested:
                raise Interrupted(f"measured cells are saved in {run.path}")


def measure(recipe: Recipe, engine: Engine, prompts: dict[str, list[int]], policy: Snapshot, drafter: Snapshot) -> Row:
    own, ids = recipe.sampling, list(prompts)
    samplings = [
        Sampling(own.temperature, own.top_p, own.top_k, own.max_tokens, tuple(own.stop), seed=recipe.eval.seed + i)
        for i in range(len(ids))
    ]
    answers = engine.generate(list(prompts.values()), samplings)
    requests = [request_row(id, answer) for id, answer in zip(ids, answers, strict=True)]
    return {"policy": policy.step, "drafter": drafter.step, "requests": requests}


# --- results ----------------------------------------------------------------------------------------------------


def costs(source: Path) -> dict[str, float]:
    """From the run: mean seconds of a step's rollouts while speculating, and of a training of the drafter."""
    file = source / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    steps = [row for row in rows if row.get("step") and row.get("time_s")]
    drafted = [row["generate_s"] for row in steps if row["k"]]
    trained = [row["time_s"]["train_drafter"] for row in steps[1:] if row["drafter"]]
    mean = lambda values: statistics.fmean(values) if values else 0.0  # noqa: E731
    return {"generate_s": mean(drafted), "train_s": mean(trained)}


def results_from_rows(rows: Sequence[Row], costs: dict[str, float], recipe: Recipe) -> dict[str, Any]:
    """Pure. cells: acceptance length of each (policy, drafter), by the steps they are of."""
    cells = []
    for row in sorted(rows, key=lambda row: (row["policy"], row["drafter"])):
        draws = bootstrap_acceptance_length(row["requests"], (recipe.eval.seed, row["policy"], row["drafter"]))
        cells.append(
            {
                "policy": row["policy"],
                "drafter": row["drafter"],
                "acceptance_length": pooled_acceptance_length(row["requests"]),
                "acceptance_length_ci": expanded_percentile_interval(draws, len(row["requests"])),
                "survival": pooled_survival(row["requests"], recipe.spec.k),
            }
        )
    lengths = {(c["policy"], c["drafter"]): c["acceptance_length"] for c in cells}
    return {
        "schema": SCHEMA,
        "k": recipe.spec.k,
        "temperature": recipe.sampling.temperature,
        "cells": cells,
        "staleness": staleness(lengths),
        **costs,
        "retraining": retraining(lengths, **costs),
    }


def newest(lengths: Lengths) -> dict[int, int]:
    """{policy: the newest drafter that the run had at its step}; policies before the first drafter are left out."""
    drafters = sorted({drafter for _, drafter in lengths})
    had = {policy: [d for d in drafters if d <= policy] for policy, _ in lengths}
    return {policy: found[-1] for policy, found in sorted(had.items()) if found}


def staleness(lengths: Lengths) -> list[dict[str, float]]:
    """By steps of lag, of drafters that had a successor: mean of AL(policy, drafter) over AL(policy, newest drafter).
    Lag 0 is the newest drafter itself."""
    by_lag: dict[int, list[float]] = {}
    for policy, current in newest(lengths).items():
        for drafter in {d for p, d in lengths if p == policy and d <= current}:
            lag = 0 if drafter == current else policy - drafter
            by_lag.setdefault(lag, []).append(lengths[policy, drafter] / lengths[policy, current])
    return [{"lag": lag, "kept": statistics.fmean(kept), "pairs": len(kept)} for lag, kept in sorted(by_lag.items())]


def retraining(lengths: Lengths, generate_s: float, train_s: float) -> list[dict[str, Any]]:
    """For each drafter, kept from its step on: rollout seconds lost by the last snapshot, and the step at which they
    exceeded a training, None if they never did."""
    best = newest(lengths)
    rows = []
    for drafter in sorted({drafter for _, drafter in lengths}):
        lost, paid, last = 0.0, None, drafter
        for policy in (p for p in best if p > drafter):
            slower = lengths[policy, best[policy]] / lengths[policy, drafter] - 1
            lost += (policy - last) * generate_s * slower
            last = policy
            if paid is None and lost > train_s > 0:
                paid = policy
        rows.append({"drafter": drafter, "lost_s": lost, "pays_at": paid})
    return rows


def headline(results: dict[str, Any]) -> str:
    oldest = results["staleness"][-1] if results["staleness"] else None
    if oldest is None:
        return "no policy is as new as the first drafter"
    if not oldest["lag"]:
        return f"one drafter throughout, of step {results['cells'][0]['drafter']}: nothing to compare it with"
    return f"a drafter {oldest['lag']} steps behind keeps {100 * oldest['kept']:.1f} % of the acceptance length"


def _table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    drafters = sorted({c["drafter"] for c in results["cells"]})
    lengths = {(c["policy"], c["drafter"]): c["acceptance_length"] for c in results["cells"]}
    rows = [
        [str(policy), *(f"{lengths[policy, d]:.2f}" if (policy, d) in lengths else "" for d in drafters)]
        for policy in sorted({c["policy"] for c in results["cells"]})
    ]
    return ["policy of step", *(f"drafter {d}" for d in drafters)], rows


def show(results: dict[str, Any]) -> None:
    columns, rows = _table(results)
    console.table(f"acceptance length, k = {results['k']}, T = {results['temperature']:g}", columns, rows)
    console.closing(*retraining_text(results))


def retraining_text(results: dict[str, Any]) -> list[str]:
    if not results["train_s"]:
        return ["The run trained no drafter, so that there is nothing to weigh a training against."]
    lines = [f"A training took {results['train_s']:.2f} s, the rollouts of a step {results['generate_s']:.2f} s."]
    *replaced, last = results["retraining"]
    for row in replaced:
        paid = "would not have paid" if row["pays_at"] is None else f"would have paid by step {row['pays_at']}"
        lost = f"{row['lost_s']:.2f} s lost to its age by the end"
        lines.append(f"Drafter of step {row['drafter']}: {lost}; training it again {paid}.")
    return [*lines, f"Drafter of step {last['drafter']}: the newest to the end."]


def markdown(results: dict[str, Any], source: Path) -> str:
    columns, rows = _table(results)
    lines = [f"# Drafters against policies of {source}", "", headline(results), ""]
    lines += [f"| {' | '.join(columns)} |", "|" + "---:|" * len(columns), *(f"| {' | '.join(r)} |" for r in rows), ""]
    lines += [f"- {line}" for line in retraining_text(results)]
    return "\n".join([*lines, "", f"![Acceptance length and staleness]({PLOT})", ""])


def plot(results: dict[str, Any]) -> bytes:
    """PNG: the matrix as a heat map, and what is left of the acceptance length by lag."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    policies = sorted({c["policy"] for c in results["cells"]})
    drafters = sorted({c["drafter"] for c in results["cells"]})
    grid = np.full((len(policies), len(drafters)), np.nan)
    for cell in results["cells"]:
        grid[policies.index(cell["policy"]), drafters.index(cell["drafter"])] = cell["acceptance_length"]
    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    image = left.imshow(grid, origin="lower", cmap="cividis", aspect="auto")
    figure.colorbar(image, ax=left, label="acceptance length, tokens a round")
    left.set_xticks(range(len(drafters)), [str(d) for d in drafters])
    left.set_yticks(range(len(policies)), [str(p) for p in policies])
    left.set_xlabel("drafter of step")
    left.set_ylabel("policy of step")
    middle = np.nanmean(grid)
    for y, x in np.argwhere(~np.isnan(grid)):
        colour = "white" if grid[y, x] < middle else "black"
        left.text(x, y, f"{grid[y, x]:.2f}", ha="center", va="center", color=colour, fontsize=8)
    right.plot([s["lag"] for s in results["staleness"]], [s["kept"] for s in results["staleness"]], "o-")
    right.axhline(1, color="black", linewidth=1, linestyle="--")
    right.set_xlabel("steps that the policy is ahead of the drafter")
    right.set_ylabel("acceptance length kept")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
