"""A projection as people read it: assumptions, table, heat map, headline; and the validation table.

Everything is made from the results document alone. Every cell is shown, slower ones too.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from draftkit import console
from draftkit.evals.speed_model import implied_generation_share
from draftkit.project import calibration, validate
from draftkit.project.hardware import Engine
from draftkit.project.scenario import Scenario, cluster_of, engine_of, survival_for
from draftkit.project.sweep import SCHEDULE, axes_of, best, sweep
from draftkit.run import atomic_json, atomic_write

SCHEMA = "draftkit.project/1"
HEAT_MAP = "speedup.png"
COLUMNS = ("GPUs", "lag", "requests", "accept", "k", "AL", "TP", "at once", "rollout", "step", "rollout s", "step s")
LEGEND = (
    "accept: of a draft whose predecessors were accepted. AL: tokens a verify round. at once: requests that a replica "
    "begins with. rollout, step: speedup over no speculation (with lag: rollouts on the GPUs that generate without it, "
    "the step at each arm's best split); then seconds. schedule: at each number running the k that pays most."
)


def project(scenario: Scenario) -> dict[str, Any]:
    """The results document: cells, the best of them, and what was assumed."""
    cells = sweep(scenario)
    top = best(cells)
    return {
        "schema": SCHEMA,
        "scenario": scenario.model_dump(mode="json"),
        "assumptions": assumptions(scenario),
        "cells": cells,
        "best": top,
        "headline": headline(scenario, top),
    }


def assumptions(scenario: Scenario) -> list[str]:
    engine, rollout, trainer = engine_of(scenario.engine), scenario.rollout, scenario.trainer
    cluster = cluster_of(scenario, scenario.gpus[0], 0, rollout.requests[0])
    server = cluster.rollouts.server
    survival = survival_for(scenario.drafter, scenario.drafter.acceptance[0])
    model, hardware = server.model, server.hardware
    experts = f", {model.num_experts} experts of which {model.top_k} a token" if model.num_experts else ""
    lengths = cluster.rollouts.lengths
    answers = (
        f"measured, mean {lengths.mean:.0f}, longest {lengths.longest}"
        if lengths.sample
        else (f"log-normal, mean {lengths.mean:g}, sigma {lengths.sigma:g}, cut at {lengths.longest}")
    )
    overlong = len(scenario.drafter.survival or survival) < max(scenario.drafter.k)
    return [
        f"model {model.name}: {model.total_params / 1e9:.1f} B parameters, {model.active_params / 1e9:.1f} B active"
        f"{experts}; rollouts in {rollout.precision}, KV in {rollout.kv_precision}",
        f"hardware {hardware.name}: {hardware.flops(rollout.precision) / 1e12:.0f} TFLOP/s, "
        f"{hardware.hbm_bytes_s / 1e12:.2f} TB/s, {hardware.hbm_bytes / 1e9:.0f} GB; an engine reaches "
        f"{engine.hbm_share:.0%} of the bandwidth and {engine.flops_share:.0%} of the FLOPs",
        f"engine {engine.name}: {calibration.ABOUT[engine.name]}; {host_time(engine)}",
        f"answers: {answers}; all of a step start at once; the slowest replica holds the longest",
        f"drafter {scenario.drafter.method}, survival {' '.join(f'{s:.2f}' for s in survival)}, the same all along an "
        "answer" + ("; beyond what was measured the last ratio goes on" if overlong else ""),
        f"trainer: {trainer.train_share:.1%} of the bf16 peak in training, {trainer.logprob_share:.1%} in "
        f"log-probabilities, {'padded to the longest' if trainer.padded else 'unpadded'}, {trainer.other_s:g} s beside",
        "with lag n, n batches are generated at once beside training, each arm at its best split of the GPUs",
        "experts are woken independently and evenly; prefill, rewards and environments cost nothing",
    ]


def host_time(engine: Engine) -> str:
    if not (engine.step_s or engine.draft_s or engine.eager_s):
        return "host time 0"
    return (
        f"host time {engine.step_s * 1e3:.1f} ms a pass, {engine.draft_s * 1e3:.1f} ms a pass of the drafter, "
        f"{engine.eager_s * 1e3:.2f} ms a layer of passes above {engine.graph_tokens} tokens"
    )


def headline(scenario: Scenario, top: dict[str, Any]) -> str:
    lag = f", lag {top['lag']}" if top["lag"] else ""
    verdict = "" if top["step_speedup"] > 1 else ": no draft length asked for pays; generate without speculation"
    return (
        f"projected {top['rollout_speedup']:.2f}x rollout, {top['step_speedup']:.2f}x step: k = {top['k']}, "
        f"{scenario.model} on {top['gpus']} {scenario.hardware}{lag}, {top['requests']} requests{verdict}"
    )


def table_rows(cells: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for cell in cells:
        accept = "measured" if cell["acceptance"] is None else f"{cell['acceptance']:.2f}"
        tau = "" if cell["acceptance_length"] is None else f"{cell['acceptance_length']:.2f}"
        where = [str(cell["gpus"]), str(cell["lag"]), str(cell["requests"]), accept, str(cell["k"]), tau]
        speed = [f"{cell['rollout_speedup']:.2f}", f"{cell['step_speedup']:.2f}"]
        seconds = [f"{cell['rollout_s']:.1f}", f"{cell['step_s']:.1f}"]
        rows.append([*where, str(cell["tp"]), str(cell["requests_per_replica"]), *speed, *seconds])
    return rows


def show(results: dict[str, Any]) -> None:
    console.closing("assumed:", *(escape(f"  - {line}") for line in results["assumptions"]))
    console.table(escape(results["scenario"]["name"]), COLUMNS, table_rows(results["cells"]), left=0)
    console.closing(LEGEND)


def write(results: dict[str, Any], folder: Path) -> None:
    """Heat map and README, then results.json, whose presence says that the rest is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / HEAT_MAP, heat_map(results))
    assumed = "\n".join(f"- {line}" for line in results["assumptions"])
    rule = "|".join(["---:"] * len(COLUMNS))
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{rule}|"]
    lines += [f"| {' | '.join(row)} |" for row in table_rows(results["cells"])]
    text = (
        f"# Projection: {results['scenario']['name']}\n\n{results['headline']}\n\n"
        f"Nothing here was measured. Assumed:\n\n{assumed}\n\n"
        + "\n".join(lines)
        + f"\n\n{LEGEND}\n\n![Speedup of rollout and step]({HEAT_MAP})\n"
    )
    atomic_write(folder / "README.md", text)
    atomic_json(folder / "results.json", results)


def is_projection(folder: Path) -> bool:
    """Whether the directory holds what `write` writes, and so may be replaced."""
    file = folder / "results.json"
    return file.is_file() and SCHEMA in file.read_text(encoding="utf-8")


def heat_map(results: dict[str, Any]) -> bytes:
    """PNG: rollout left, step right; k across, every combination of the other axes down."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [cell for cell in results["cells"] if cell["k"] != SCHEDULE]
    others = axes_of(cells)[:-1] or ["gpus"]
    ks = sorted({cell["k"] for cell in cells})
    places = list(dict.fromkeys(tuple(cell[axis] for axis in others) for cell in cells))
    figure = Figure(figsize=(5 + 1.2 * len(ks), 2.2 + 0.35 * len(places)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, what in ((left, "rollout"), (right, "step")):
        grid = np.full((len(places), len(ks)), np.nan)
        for cell in cells:
            grid[places.index(tuple(cell[name] for name in others)), ks.index(cell["k"])] = cell[f"{what}_speedup"]
        shade = np.log2(grid)
        span = max(0.05, float(np.nanmax(np.abs(shade))))
        axis.imshow(shade, cmap="RdBu", vmin=-span, vmax=span, aspect="auto")
        for (row, column), value in np.ndenumerate(grid):
            color = "white" if abs(shade[row, column]) > 0.6 * span else "black"
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
        axis.set_xticks(range(len(ks)), [str(k) for k in ks])
        axis.set_xlabel("draft tokens a round, k")
        axis.set_title(f"{what} speedup")
    left.set_yticks(range(len(places)), [", ".join(f"{value:g}" for value in place) for place in places])
    left.set_ylabel(", ".join(others))
    figure.suptitle(f"{results['scenario']['name']} (projected)")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


# --- validation -----------------------------------------------------------------------------------------------------


def validation() -> dict[str, Any]:
    points = validate.validate()
    return {
        "schema": f"{SCHEMA}-validation",
        "constants": constants(),
        "blocked": blocked(),
        "points": [
            {
                "set": p.group, "point": p.name, "source": p.source, "known": p.known, "said": p.predicted,
                "error": p.error, "error_left_out": None if p.left_out is None else p.left_out / p.known - 1,
                "target": p.target, "met": p.met,
            }
            for p in points
        ],
        "setups": [
            {"setup": name, "largest_error": error, **{n: getattr(engine, n) for n in calibration.CALIBRATED}}
            for name, engine, error in _setups()
        ],
        "headline": _score(points),
        "rows": validate.rows(points),
    }  # fmt: skip


def _setups() -> list[tuple[str, Any, float]]:
    return [
        (f"{s.requests} rollouts of at most {s.longest} tokens, TP {s.tp}", engine, error)
        for s, engine, error in validate.setup_sensitivity()
    ]


def constants() -> list[str]:
    engine, trainer = calibration.VLLM, calibration.TRAINER
    return [
        f"fitted on the 6 points of the set fitted: {host_time(engine)} (vLLM's largest CUDA graph)",
        f"set: {engine.hbm_share:.0%} of the bandwidth, {engine.flops_share:.0%} of the FLOPs",
        f"from plain stage times: {trainer.train_share:.1%} and {trainer.logprob_share:.1%} of the bf16 peak in "
        f"training and log-probabilities, {trainer.other_s} s beside; mean answers from plain rollouts",
        "assumed, unpublished: 2,048 rollouts of at most 8,192 tokens, TP 2 (8B); mean 4,000 of 8,192 tokens (235B)",
        "projections: the paper's simulator is compared with both engines; its own host times are not published",
    ]


def blocked() -> list[str]:
    """What keeps the points that are not met from being met; round costs are acceptance length over speedup."""
    simulated = [tau / rollout for _, _, _, tau, rollout, _ in validate.PROJECTED[:2]]
    needed = 3 * calibration.VLLM.draft_s / (simulated[0] - 1)
    batch = validate.cluster_235b(calibration.VLLM, *validate.PROJECTED[0][:2]).rollouts
    plain = float(batch.server.plain(256, validate.BIG["longest"]).total)
    measured = [p.tau / p.speedup for p in (calibration.FITTED[0], calibration.FITTED[2])]
    gpus, lag, _, _, rollout, step = validate.PROJECTED[2]
    theirs = implied_generation_share(step, rollout)
    ours = validate.cluster_235b(calibration.ROOFLINE, gpus, lag).plain().generation_share
    return [
        f"235B with vllm: the paper's projections mean rounds of {simulated[0]:.2f} plain steps at k = 3 and "
        f"{simulated[1]:.2f} at k = 7; its own 8B runs had {measured[0]:.2f} and {measured[1]:.2f}. With the host "
        f"times of those, {simulated[0]:.2f} would take plain steps of {needed * 1e3:.0f} ms or more; ours take "
        f"{plain * 1e3:.0f} ms or less. And at TP 32 a replica has 256 requests, so that verifications are above the "
        "CUDA graph limit (engine.graph_tokens=4096 shows it without that)",
        f"235B at lag 2, step: {rollout} and {step} together mean that {theirs:.0%} of the plain step waits for "
        f"generation; ours overlaps it with training, at the best split, and waits {ours:.0%}",
        "n-gram on RL-Think: its host search through long answers is not priced, and its k is not in our notes",
        "OLMoE on A100: host times of an RL step on GB200 are not those of a serving benchmark on another host",
        "own cells at T = 1: sampling costs more with drafts than without on that CPU build, which no term here has",
    ]


def _score(points: Sequence[validate.Point]) -> str:
    def of(*groups: str) -> str:
        aimed = [p for p in points if p.group in groups and p.met is not None]
        return f"{sum(bool(p.met) for p in aimed)} of {len(aimed)}"

    def worst(group: str) -> float:
        return max(abs(p.error) for p in points if p.group == group)

    return (
        f"within the target: 8B {of('fitted', 'held out')} (15 %), 235B with the engine roofline "
        f"{of('235B roofline')}, with vllm {of('235B vllm')} (20 %); own CPU cells: "
        f"largest error {worst('own'):.0%}"
    )


def show_validation(document: dict[str, Any]) -> None:
    console.closing("constants:", *(escape(f"  - {line}") for line in document["constants"]))
    console.table("validation", validate.COLUMNS, [[escape(cell) for cell in row] for row in document["rows"]], left=3)
    rows = [
        [escape(s["setup"]), f"{s['largest_error']:.0%}", *(f"{s[n] * 1e3:.2f}" for n in calibration.CALIBRATED)]
        for s in document["setups"]
    ]
    columns = ("set-up of the 8B runs, refitted", "largest error", *(f"{n}, ms" for n in calibration.CALIBRATED))
    console.table("what the assumed set-up decides", columns, rows)
    console.closing("what stands in the way of the rest:", *(escape(f"  - {line}") for line in document["blocked"]))
    note = (
        "[2nd]: second-hand, numbers of arXiv 2604.26779 as public notes repeat them, not seen in the paper; of the "
        "one at lag 1 sources disagree. [public]: a published sweep of an open-instruct fork. [own]: README. left out: "
        "error of a fit without the point."
    )
    console.closing(escape(note))
