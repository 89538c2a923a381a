"""A finished replay as people read it: table, Markdown, plot, headline. Made from the results dict alone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.markup import escape

from draftkit import console
from draftkit.evals.report import interval, number
from draftkit.run import atomic_write

PLOT = "replay.png"
COLUMNS = ("arm", "rollouts, s", "predicted, s", "error", "AL", "speedup", "95 %", "verdict")
LEGEND = (
    "Seconds of the replayed batches, mean of the repeats that did not choose. Predicted: from the first repeat alone. "
    "Speedup: time of k = 0 over the arm's, side by side."
)


def table_rows(results: dict[str, Any]) -> list[list[str]]:
    return [
        [
            arm["arm"] + (f" (= {arm['same_as']})" if arm["same_as"] else ""),
            number(arm["rollout_s"]),
            number(arm["predicted_s"]),
            f"{100 * arm['error']:+.1f} %",
            number(arm["acceptance_length"]),
            number(arm["speedup"]),
            interval(arm["speedup_ci"]),
            "baseline" if arm["arm"] == "k=0" else arm["verdict"],
        ]
        for arm in results["arms"]
    ]


def schedule_text(schedule: list[list[int]]) -> str:
    """1-4: k = 3, 5-16: no speculation"""
    return ", ".join(
        f"{low}-{high}: {f'k = {k}' if k else 'no speculation'}" if low < high else f"{low}: k = {k}"
        for low, high, k in schedule
    )


def recommendation(results: dict[str, Any]) -> str:
    pays = any(k for _, _, k in results["schedule"])
    if not pays:
        return "No draft length is predicted to pay on these batches: generate without speculation."
    return (
        f"Schedule by running requests, for vLLM's num_speculative_tokens_per_batch_size or spec.schedule: "
        f"{json.dumps(results['schedule'])} ({schedule_text(results['schedule'])})."
    )


def headline(results: dict[str, Any]) -> str:
    chosen = next(arm for arm in results["arms"] if arm["arm"] == "schedule")
    fixed = min((a for a in results["arms"] if a["arm"] != "schedule"), key=lambda a: a["rollout_s"])
    return (
        f"rollouts with the schedule: {chosen['rollout_s']:.1f} s, {chosen['speedup']:.2f}x of k = 0 "
        f"(95 % {interval(chosen['speedup_ci'])}); best fixed: {fixed['arm']}, {fixed['rollout_s']:.1f} s"
    )


def show(results: dict[str, Any]) -> None:
    requests = sum(batch["requests"] for batch in results["batches"])
    title = escape(f"{results['method']} on {results['verifier']}: {requests} rollouts of {results['source']}")
    console.table(title, COLUMNS, table_rows(results))
    console.closing(LEGEND, escape(recommendation(results)))


def markdown(results: dict[str, Any]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---:|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row)} |" for row in table_rows(results)]
    lines += ["", LEGEND, "", recommendation(results), ""]
    for name, rows in (("answer length", results["by_length"]), ("task", results["by_task"])):
        if rows:
            lines += [f"| {name} | acceptance length | rounds |", "|---|---:|---:|"]
            lines += [f"| {_bucket(r)} | {r['acceptance_length']:.2f} | {r['rounds']} |" for r in rows] + [""]
    errors = sorted(abs(row["error"]) for row in results["leave_one_out"])
    if errors:
        lines += [
            f"Step times predicted for a draft length and batch size left out of the fit ({len(errors)} of them): "
            f"median error {100 * errors[len(errors) // 2]:.1f} %, largest {100 * errors[-1]:.1f} %.",
            "",
        ]
    return "\n".join(lines)


def _bucket(row: dict[str, Any]) -> str:
    return f"{row['tokens'][0]}-{row['tokens'][1]} tokens" if "tokens" in row else str(row["task"])


def write(results: dict[str, Any], folder: Path) -> None:
    atomic_write(folder / PLOT, plot(results))
    atomic_write(
        folder / "README.md",
        f"# Replayed rollouts: {results['method']} on {results['verifier']}\n\n{headline(results)}\n\n"
        f"Rollouts of {results['source']}.\n\n{markdown(results)}\n![Rollout time and round cost]({PLOT})\n",
    )


def plot(results: dict[str, Any]) -> bytes:
    """PNG: measured and predicted seconds of each arm; round cost by running requests with the line it has to beat."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    arms = results["arms"]
    left.bar([a["arm"] for a in arms], [a["rollout_s"] for a in arms], color="#4477aa", label="measured")
    left.plot([a["arm"] for a in arms], [a["predicted_s"] for a in arms], "D", color="#cc6677", label="predicted")
    left.set_ylabel("seconds of the replayed batches")
    left.legend()
    tau = 1.0
    for k, s in enumerate(results["survival"], 1):
        tau += s
        line = [c for c in results["round_cost"] if c["k"] == k]
        if line:
            right.plot([c["running"] for c in line], [tau / c["cost"] for c in line], marker="o", label=f"k = {k}")
    right.axhline(1, color="black", linewidth=1, linestyle="--", label="break-even")
    right.set_xscale("log", base=2)
    right.set_xlabel("requests running")
    right.set_ylabel("predicted speedup of a round")
    right.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
