"""Predicted against measured rollout time where nothing was measured: other draft lengths, batch sizes and lengths.

    python scripts/bench_replay.py --corpus outputs/demo/prepare --drafter outputs/demo/train-drafter/drafter

Fit: k 0 1 3 5 at 1, 4 and 16 requests, answers of 32 to 64 tokens. Held out: k 2 and 4 at 2 and 8 requests, k 0 and 3
at 24, each with three other distributions of answer lengths. One process, two engines, cells in turns; the fit never
sees a held-out cell. Prints every cell with its error and the median; --json keeps them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftkit import console
from draftkit.data.rollouts import Batch
from draftkit.evals.bench import build_engines, heldout_prompts
from draftkit.evals.drafter import resolve_drafter
from draftkit.evals.drain import Requests, constant, drained
from draftkit.evals.replay import arm_name, engine_of, measure, outside_s, prefix_survival, step_cells
from draftkit.evals.step_cost import StepCost
from draftkit.models import fingerprint, model_facts, resolve_model
from draftkit.recipe import load_recipe

FIT = [(k, slots) for k in (0, 1, 3, 5) for slots in (1, 4, 16)]
HELD_OUT = [(k, slots) for k in (2, 4) for slots in (2, 8)] + [(0, 24), (3, 24)]
LENGTHS = {
    "short": lambda rng: rng.randrange(8, 17),
    "long tail": lambda rng: min(160, max(8, round(rng.lognormvariate(3.4, 0.8)))),
    "two kinds": lambda rng: rng.choice((rng.randrange(8, 17), rng.randrange(96, 129))),
}
COLUMNS = ("k", "requests", "lengths", "tokens", "predicted, s", "measured, s", "error")


def batch_of(name: str, prompts: dict[str, list[int]], lengths: list[int]) -> Batch:
    ids = [list(prompts)[i % len(prompts)] for i in range(len(lengths))]
    return Batch(name, tuple(ids), ("",) * len(ids), tuple(tuple(prompts[i]) for i in ids), tuple(lengths))


def requests_for(slots: int) -> int:
    return max(6, 2 * slots) if slots < 16 else slots + slots // 2


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--recipe", default="quickstart")
    arguments.add_argument("--corpus", type=Path, required=True)
    arguments.add_argument("--drafter", required=True)
    arguments.add_argument("--model")
    arguments.add_argument("--repeats", type=int, default=2)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()

    recipe, _ = load_recipe(given.recipe, [f"model.path={given.model}"] if given.model else None)
    verifier = resolve_model(recipe.model.path)
    spec = resolve_drafter(given.drafter, model_facts(verifier), fingerprint(verifier), max(k for k, _ in FIT))
    spec = replace(spec, draft_sample_method=recipe.eval.draft_sample_method)
    prompts = heldout_prompts(recipe, given.corpus, verifier, spec.k)
    rng = random.Random(given.seed)
    even = lambda: rng.randrange(32, 65)  # noqa: E731
    fit = {(k, s): batch_of("fit", prompts, [even() for _ in range(requests_for(s))]) for k, s in FIT}
    held = {
        (k, s, name): batch_of(name, prompts, [draw(rng) for _ in range(requests_for(s))])
        for name, draw in LENGTHS.items()
        for k, s in HELD_OUT
    }
    with ExitStack() as stack:
        engines = build_engines(recipe, verifier, spec, stack, lambda: None)
        fitted, judged = measured(recipe, engines, fit, held, given.repeats, rng)
    rows = compared(fitted, judged, held)
    show(rows)
    if given.json:
        raw = {"fit": fitted, "held_out": [row | {"cell": key} for key, found in judged.items() for row in found]}
        given.json.write_text(json.dumps({"rows": rows, "measured": raw}) + "\n")


def measured(
    recipe, engines, fit, held, repeats: int, rng: random.Random
) -> tuple[list[dict], dict[tuple, list[dict]]]:
    """(rows of the fit, rows of every held-out cell), all cells in a new random order every repeat."""
    run = lambda key, batch: measure(  # noqa: E731
        recipe, engine_of(engines, constant(key[0], recipe.engine.max_num_seqs)), batch, key[1]
    )
    for key, batch in (*fit.items(), *held.items()):  # not counted: first steps of a shape allocate
        run(key, replace(batch, lengths=tuple(min(6, n) for n in batch.lengths)))
    fitted: list[dict[str, Any]] = []
    judged: dict[tuple, list[dict[str, Any]]] = {key: [] for key in held}
    with console.progress("cells", repeats * (len(fit) + len(held))) as bar:
        for _ in range(repeats):
            order = [*fit, *held]
            rng.shuffle(order)
            for key in order:
                if key in held:
                    judged[key].append(run(key, held[key]))
                else:
                    fitted.append(run(key, fit[key]) | {"arm": arm_name(key[0])})
                bar.advance(1, f"k = {key[0]}, {key[1]} requests")
    return fitted, judged


def compared(fitted: list[dict], judged: dict[tuple, list[dict]], held: dict[tuple, Batch]) -> list[dict[str, Any]]:
    cost, survival, waiting = StepCost.fit(step_cells(fitted)), prefix_survival(fitted, 5), outside_s(fitted)
    rows = []
    for (k, slots, name), batch in held.items():
        queue = Requests(tuple(map(len, batch.prompts)), batch.lengths, slots)
        predicted = float(drained(queue, survival, cost, constant(k, slots), request_s=waiting).seconds.mean())
        took = statistics.fmean(row["wall_s"] for row in judged[k, slots, name])
        row = {"k": k, "requests": slots, "lengths": name, "tokens": sum(batch.lengths)}
        rows.append(row | {"predicted_s": predicted, "measured_s": took, "error": predicted / took - 1})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    cells = [
        [
            str(r["k"]),
            str(r["requests"]),
            r["lengths"],
            str(r["tokens"]),
            f"{r['predicted_s']:.2f}",
            f"{r['measured_s']:.2f}",
            f"{100 * r['error']:+.1f} %",
        ]
        for r in rows
    ]
    console.table("held-out rollouts", COLUMNS, cells)
    errors = sorted(abs(r["error"]) for r in rows)
    console.closing(f"median error {100 * statistics.median(errors):.1f} %, largest {100 * errors[-1]:.1f} %")


if __name__ == "__main__":
    main()
