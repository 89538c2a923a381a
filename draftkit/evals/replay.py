"""`draftkit eval-acceptance --replay RUN`: how long the rollouts of a real run take with each draft length.

The batches that RUN kept are sent again, all requests at once, and drain as they did: every request reads its recorded
prompt and writes as many tokens as were recorded (an answer that would end sooner goes on, a longer one is cut), so
that all arms do the same work and one long answer does not decide between them.

    repeat 0      k = 0 and each fixed k take turns; what an engine step costs is fitted to their steps (`step_cost`),
                  and from that and the survival follows a schedule: k by the number of running requests (`drain`)
    repeats 1 ..  the same arms and the schedule take turns; only these are compared, and only they judge predictions

So the schedule is not judged by the measurements that chose it. Every measurement is a line of metrics.jsonl, and the
results are a pure function of those lines. Left out: arrival over time; how much the prefix cache helps the samples of
one prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from draftkit.console import Progress, progress, say
from draftkit.data.rollouts import Batch, read_batches
from draftkit.engine import Engine
from draftkit.errors import UserError
from draftkit.evals import replay_report
from draftkit.evals.acceptance import (
    Row,
    bootstrap_acceptance_length,
    num_rounds,
    pooled_acceptance_length,
    speed,
)
from draftkit.evals.bench import build_engines, raise_when, request_row
from draftkit.evals.drafter import resolve_drafter
from draftkit.evals.drain import Requests, Schedule, best_schedule, constant, drained
from draftkit.evals.step_cost import StepCell, StepCost, cells_of, leave_one_out, round_costs, to_rows
from draftkit.models import fingerprint, model_facts, resolve_model
from draftkit.recipe import Recipe
from draftkit.run import Interrupt, RunDir, environment
from draftkit.types import Sampling

SCHEMA = "draftkit.replay/1"
SCHEDULE = "schedule"
FEWEST_REPEATS = 2  # the first one chooses


def run(recipe: Recipe, run: RunDir, *, source: Path, drafter: str | None) -> dict[str, Any]:
    """Measure what the run's metrics.jsonl lacks; write the report and results.json, and return the results.

    Raises UserError before an engine is built when the source has no rollouts, when they do not fit into the context
    or when drafter and verifier do not belong together; Interrupted after the measurement in which a signal came.
    """
    verifier = resolve_model(recipe.model.path, recipe.model.revision)
    facts = model_facts(verifier, recipe.model.trust_remote_code)
    spec = resolve_drafter(drafter, facts, fingerprint(verifier), max(recipe.eval.k))
    spec = replace(spec, draft_sample_method=recipe.eval.draft_sample_method)
    batches = read_batches(source, recipe.eval.batches, recipe.eval.batch_prompts)
    check(recipe, source, batches, spec.k)
    run.begin()
    if not run.read_metrics():
        run.metrics(plan_row(recipe, source, spec.method, drafter, batches))
    with Interrupt() as interrupt, ExitStack() as stack:
        stop = raise_when(interrupt, run)
        build = lambda: build_engines(recipe, verifier, spec, stack, stop)  # noqa: E731
        measure_all(recipe, run, batches, build, stop, stack)
    results = results_from_rows(run.read_metrics()) | {"env": environment()}
    replay_report.show(results)
    replay_report.write(results, run.path)
    run.finish(results, replay_report.headline(results))
    return results


def check(recipe: Recipe, source: Path, batches: Sequence[Batch], k: int) -> None:
    if recipe.eval.repeats < FEWEST_REPEATS:
        raise UserError(
            f"eval.repeats ({recipe.eval.repeats}): a replay chooses by the first repeat and judges by the others.",
            f"Give {FEWEST_REPEATS} or more.",
        )
    if not any(batch.lengths for batch in batches):
        raise UserError(f"--replay {source}: its batches hold no answers.", "Give a run that has rollouts.")
    for batch in batches:
        for id, prompt, length in zip(batch.ids, batch.prompts, batch.lengths, strict=True):
            need = len(prompt) + length + k + 1
            if need > recipe.engine.max_model_len:
                raise UserError(
                    f"--replay {source}, {batch.name}: prompt '{id}' with its answer and k needs {need} tokens, more "
                    f"than engine.max_model_len ({recipe.engine.max_model_len}).",
                    f"Set engine.max_model_len={need} or more.",
                )


def plan_row(recipe: Recipe, source: Path, method: str, drafter: str | None, batches: Sequence[Batch]) -> Row:
    return {
        "event": "plan",
        "verifier": recipe.model.path,
        "drafter": drafter,
        "method": method,
        "source": str(source),
        "temperature": recipe.sampling.temperature,
        "draft_sample_method": recipe.eval.draft_sample_method,
        "k": recipe.eval.k,
        "slots": recipe.engine.max_num_seqs,
        "margin": recipe.eval.margin,
        "seed": recipe.eval.seed,
        "batches": [
            {"name": b.name, "prompts": [len(p) for p in b.prompts], "lengths": list(b.lengths), "tasks": list(b.tasks)}
            for b in batches
        ],
    }


# --- measuring --------------------------------------------------------------------------------------------------


def arm_name(k: int) -> str:
    return f"k={k}"


def measure_all(
    recipe: Recipe,
    run: RunDir,
    batches: Sequence[Batch],
    build: Callable[[], tuple[Engine, Engine]],
    stop: Callable[[], None],
    stack: ExitStack,
) -> None:
    """Whole (repeat, batch) groups: one cut short is measured again by all arms, or its pairs would span processes."""
    slots = recipe.engine.max_num_seqs
    arms = {arm_name(k): constant(k, slots) for k in recipe.eval.k}
    engines: tuple[Engine, Engine] | None = None
    total = recipe.eval.repeats * len(batches)
    bar = stack.enter_context(progress("replay", total))
    for repeat in range(recipe.eval.repeats):
        rows = run.read_metrics()
        if repeat == 1:
            chosen = next((row for row in rows if row["event"] == "chosen"), None)
            if chosen is None:
                chosen = choose(rows, slots, recipe.eval.margin)
                run.metrics(chosen)
                say(f"schedule by running requests: {replay_report.schedule_text(chosen['schedule'])}")
            if not is_constant(chosen["schedule"]):
                arms = arms | {SCHEDULE: chosen["schedule"]}
        done = {(row["repeat"], row["batch"], row["arm"]) for row in rows if row["event"] == "measured"}
        for number, batch in enumerate(batches):
            turn = repeat * len(batches) + number
            if not done.issuperset((repeat, number, arm) for arm in arms):
                if engines is None:
                    engines = build()
                    warm_up(recipe, engines, batch, arms)
                for arm in in_turn(list(arms), turn):
                    row = {"event": "measured", "repeat": repeat, "batch": number, "arm": arm}
                    run.metrics(row | measure(recipe, engine_of(engines, arms[arm]), batch))
                    stop()
            _advance(bar, repeat, batch)


def _advance(bar: Progress, repeat: int, batch: Batch) -> None:
    bar.advance(1, f"repeat {repeat}, {batch.name}")


def in_turn(arms: list[str], turn: int) -> list[str]:
    """Rotated, every other time turned round, so that no arm always comes last."""
    order = arms[turn % len(arms) :] + arms[: turn % len(arms)]
    return order[::-1] if turn % 2 else order


def is_constant(schedule: Schedule) -> bool:
    return len({k for _, _, k in schedule}) == 1


def engine_of(engines: tuple[Engine, Engine], schedule: Schedule) -> Engine:
    plain, speculative = engines
    if not any(k for _, _, k in schedule):
        return plain
    if is_constant(schedule):
        speculative.set_k(schedule[0][2])
    else:
        speculative.set_schedule(schedule)
    return speculative


def warm_up(recipe: Recipe, engines: tuple[Engine, Engine], batch: Batch, arms: Mapping[str, Schedule]) -> None:
    """The first steps of a new shape allocate and compile."""
    if recipe.eval.warmup_tokens:
        sampling = Sampling(recipe.sampling.temperature, max_tokens=recipe.eval.warmup_tokens, ignore_eos=True)
        for schedule in arms.values():
            engine_of(engines, schedule).generate([list(prompt) for prompt in batch.prompts], sampling)


def measure(recipe: Recipe, engine: Engine, batch: Batch, slots: int | None = None) -> Row:
    """The batch answered by one arm, to its recorded lengths; slots: most requests at once, by default the engine's."""
    own = recipe.sampling
    samplings = [
        Sampling(own.temperature, own.top_p, own.top_k, max_tokens=length, min_tokens=length)
        for length in batch.lengths
    ]
    engine.step_log()
    start = time.perf_counter()
    answers = engine.generate([list(prompt) for prompt in batch.prompts], samplings, max_concurrency=slots)
    wall_s, steps = time.perf_counter() - start, engine.step_log()
    return {
        "wall_s": wall_s,
        "step_s": sum(s.seconds for s in steps),
        "requests": [request_row(id, answer) for id, answer in zip(batch.ids, answers, strict=True)],
        "steps": to_rows(cells_of(steps)),
    }


# --- choosing and predicting ------------------------------------------------------------------------------------


def step_cells(rows: Sequence[Row]) -> list[StepCell]:
    return [StepCell(*cell) for row in rows for cell in row["steps"]]


def prefix_survival(rows: Sequence[Row], most: int) -> list[float]:
    """[s_1 .. s_most] of fixed draft lengths together: s_i over the rounds of all arms with k >= i."""
    survival = []
    for i in range(most):
        mine = [r for row in rows if int(row["arm"].removeprefix("k=")) > i for r in row["requests"]]
        rounds = sum(map(num_rounds, mine))
        survival.append(sum(r["per_pos"][i] for r in mine if i < len(r["per_pos"])) / rounds if rounds else 0.0)
    return survival


def outside_s(rows: Sequence[Row]) -> float:
    """Seconds of a request that no engine step has."""
    return sum(row["wall_s"] - row["step_s"] for row in rows) / sum(len(row["requests"]) for row in rows)


def choose(rows: Sequence[Row], slots: int, margin: float) -> Row:
    """The schedule that the first repeat recommends, and the seconds of each batch that it predicts for every arm."""
    plan, first = rows[0], [row for row in rows if row["event"] == "measured" and row["repeat"] == 0]
    cost, survival = StepCost.fit(step_cells(first)), prefix_survival(first, max(plan["k"]))
    assert cost is not None
    waiting = outside_s(first)
    batches = [Requests(tuple(b["prompts"]), tuple(b["lengths"]), slots) for b in plan["batches"]]

    def seconds(schedule: Schedule) -> list[float]:
        return [
            float(drained(b, survival, cost, schedule, request_s=waiting, seed=plan["seed"]).seconds.mean())
            for b in batches
        ]

    context = np.mean([p + n / 2 for b in batches for p, n in zip(b.prompts, b.lengths, strict=True)])
    busiest = min(slots, max(len(b.lengths) for b in batches))
    schedule = best_schedule(
        cost, survival, busiest, context=float(context), margin=margin, seconds=lambda s: sum(seconds(s))
    )
    schedule[-1][1] = slots  # vLLM wants every batch size covered
    arms = {arm_name(k): constant(k, slots) for k in plan["k"]} | {SCHEDULE: schedule}
    return {
        "event": "chosen",
        "schedule": schedule,
        "survival": survival,
        "outside_s": waiting,
        "predicted_s": {arm: seconds(schedule) for arm, schedule in arms.items()},
    }


# --- results ----------------------------------------------------------------------------------------------------


def results_from_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """The lines of metrics.jsonl -> everything in results.json but `env`. Pure."""
    plan, chosen = rows[0], next(row for row in rows if row["event"] == "chosen")
    measured = {(r["arm"], r["repeat"], r["batch"]): r for r in rows if r["event"] == "measured"}
    judged = {key: row for key, row in measured.items() if key[1] > 0}
    names = [arm_name(k) for k in plan["k"]]
    arms = [_arm(name, judged, chosen, plan["seed"]) for name in names]
    if is_constant(chosen["schedule"]):
        same_as = arm_name(chosen["schedule"][0][2])
        arms.append(next(a for a in arms if a["arm"] == same_as) | {"arm": SCHEDULE, "same_as": same_as})
    else:
        arms.append(_arm(SCHEDULE, judged, chosen, plan["seed"]))
    fixed = [row for key, row in measured.items() if key[0] != SCHEDULE]
    return {
        "schema": SCHEMA,
        **{name: plan[name] for name in ("verifier", "drafter", "method", "draft_sample_method", "temperature")},
        "source": plan["source"],
        "batches": [
            {
                "name": b["name"],
                "requests": len(b["lengths"]),
                "tokens": sum(b["lengths"]),
                "longest": max(b["lengths"]),
            }
            for b in plan["batches"]
        ],
        "slots": plan["slots"],
        "schedule": chosen["schedule"],
        "survival": chosen["survival"],
        "arms": arms,
        "round_cost": round_costs([step_cells([row]) for row in fixed], max(plan["k"]), plan["seed"]),
        "by_length": by_length(judged),
        "by_task": by_task(judged, plan),
        "leave_one_out": leave_one_out(_by_size(step_cells(fixed))),
    }


def _arm(name: str, judged: Mapping[tuple, Row], chosen: Row, seed: int) -> Row:
    mine = [row for key, row in sorted(judged.items()) if key[0] == name]
    pairs = [(row, judged[arm_name(0), *key[1:]]) for key, row in sorted(judged.items()) if key[0] == name]
    requests = [request for row in mine for request in row["requests"]]
    draws = bootstrap_acceptance_length(requests, (seed, len(requests)))
    num_prompts = len({request["prompt"] for request in requests})
    acceptance = pooled_acceptance_length(requests)
    batches = sorted({key[2] for key in judged})
    measured = [float(np.mean([row["wall_s"] for row in mine if row["batch"] == b])) for b in batches]
    predicted = [chosen["predicted_s"][name][b] for b in batches]
    compared = speed(pairs, acceptance, np.log(draws), num_prompts, baseline=name == arm_name(0))
    return {
        "arm": name,
        "same_as": None,
        "rollout_s": sum(measured),
        "rollout_s_batches": measured,
        "predicted_s": sum(predicted),
        "predicted_s_batches": predicted,
        "error": sum(predicted) / sum(measured) - 1,
        "acceptance_length": acceptance,
        **{name: compared[name] for name in ("speedup", "speedup_ci", "verdict", "num_pairs")},
    }


def by_length(judged: Mapping[tuple, Row]) -> list[Row]:
    """Acceptance length by quarter of answer length, of all arms that draft."""
    requests = [r for row in judged.values() for r in row["requests"] if r["drafts"]]
    if not requests:
        return []
    borders = sorted({int(x) for x in np.quantile([r["tokens"] for r in requests], [0.25, 0.5, 0.75, 1.0])})
    rows, low = [], 1
    for high in borders:
        rows.append({"tokens": [low, high]} | _accepted([r for r in requests if low <= r["tokens"] <= high]))
        low = high + 1
    return rows


def by_task(judged: Mapping[tuple, Row], plan: Row) -> list[Row]:
    found: dict[str, list[Row]] = {}
    for key, row in judged.items():
        for task, request in zip(plan["batches"][key[2]]["tasks"], row["requests"], strict=True):
            if request["drafts"]:
                found.setdefault(task, []).append(request)
    return [{"task": task} | _accepted(requests) for task, requests in sorted(found.items())]


def _accepted(requests: Sequence[Row]) -> Row:
    return {"acceptance_length": pooled_acceptance_length(requests), "rounds": sum(map(num_rounds, requests))}


def _by_size(cells: Sequence[StepCell]) -> dict[tuple[int, int], list[StepCell]]:
    """Steps by draft length and by running requests, to a power of two."""
    found: dict[tuple[int, int], list[StepCell]] = {}
    for cell in cells:
        found.setdefault((cell.k, 1 << (cell.running - 1).bit_length()), []).append(cell)
    return found
