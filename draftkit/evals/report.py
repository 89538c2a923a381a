"""A finished bench as people read it: table, Markdown, plot, headline, and the schedule to paste into vLLM.

Everything is made from the results dict alone, so a report can be drawn again from results.json. Every cell is shown,
slower ones too. Intervals are 95 %; how they are made stands in `acceptance.py`.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.markup import escape

from draftkit import console
from draftkit.run import atomic_write

PLOT = "acceptance.png"
COLUMNS = ("c", "k", "tok/s", "AL", "AL 95 %", "survival", "round", "draft + verify", "speedup", "95 %", "verdict")
WIDE_ONLY = ("survival", "draft + verify")
WIDE = 120  # characters of a terminal that shows every column; the run's README always does
LEGEND = (
    "c: concurrency, most requests running at once. AL: tokens a verify round, bonus token included; its interval is "
    "over prompts. Round: its time in plain steps, which is also the AL at which the cell breaks even. Speedup: time "
    "per token against k = 0."
)


def cells_at(results: dict[str, Any], temperature: float) -> list[dict[str, Any]]:
    return [cell for cell in results["cells"] if cell["temperature"] == temperature]


def temperatures(results: dict[str, Any]) -> list[float]:
    return list(dict.fromkeys(cell["temperature"] for cell in results["cells"]))


def table_rows(cells: list[dict[str, Any]]) -> list[list[str]]:
    return [_table_row(cell) for cell in cells]


def _table_row(cell: dict[str, Any]) -> list[str]:
    row = [str(cell["concurrency"]), str(cell["k"]), f"{cell['tokens_per_s']:.1f}"]
    if cell["k"] == 0:
        return [*row, "1", "", "", "1", "", "1", "", "baseline"]
    survival = " ".join(f"{share:.2f}".removeprefix("0") for share in cell["survival"])
    parts = "" if cell["draft_cost"] is None else f"{cell['draft_cost']:.2f} + {cell['verify_cost']:.2f}"
    acceptance = [f"{cell['acceptance_length']:.2f}", interval(cell["acceptance_length_ci"]), survival]
    cost = [number(cell["round_cost"]), parts]
    return [*row, *acceptance, *cost, number(cell["speedup"]), interval(cell["speedup_ci"]), cell["verdict"]]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def interval(interval: list[float] | None) -> str:
    return "unknown" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def show(results: dict[str, Any]) -> None:
    """On a narrow terminal without the columns that would wrap every cell into letters."""
    wide = console.out.width >= WIDE
    shown = [place for place, column in enumerate(COLUMNS) if wide or column not in WIDE_ONLY]
    for temperature in temperatures(results):
        title = escape(f"{results['method']} on {results['verifier']}, T = {temperature:g}")
        rows = [[row[place] for place in shown] for row in table_rows(cells_at(results, temperature))]
        console.table(title, [COLUMNS[place] for place in shown], rows)
    more = "" if wide else f" Also in README.md: {', '.join(WIDE_ONLY)}."
    console.closing(LEGEND + more, escape(schedule_text(results)))
    if limits := limits_text(results):
        console.closing(escape(limits))


def markdown(results: dict[str, Any]) -> str:
    """The tables as Markdown, for the run's README and for model cards."""
    lines = []
    for temperature in temperatures(results):
        lines += [f"**T = {temperature:g}**", "", f"| {' | '.join(COLUMNS)} |", f"|{'---:|' * len(COLUMNS)}"]
        lines += [f"| {' | '.join(row)} |" for row in table_rows(cells_at(results, temperature))]
        lines.append("")
    return "\n".join([*lines, LEGEND, ""])


def serving_config(results: dict[str, Any]) -> dict[str, Any] | None:
    """vLLM's speculative_config with the schedule that was measured to pay at the rollout temperature, and the draft
    sampling it was measured with; None when nothing paid."""
    largest = max(k for _, _, k in results["schedule"])
    if largest == 0:
        return None
    config = {"method": results["method"], "num_speculative_tokens": largest}
    if results["drafter"] is not None:
        config["draft_sample_method"] = results["draft_sample_method"]
        if results.get("own_vocab"):
            config["use_heterogeneous_vocab"] = True
        if results["method"] != "mtp":  # it sits in the served model's own directory
            config["model"] = results["drafter"]
    return config | {"num_speculative_tokens_per_batch_size": results["schedule"]}


def schedule_text(results: dict[str, Any]) -> str:
    """The recommendation for the rollout temperature, ready to paste."""
    config, tested = serving_config(results), max(cell["concurrency"] for cell in results["cells"])
    if config is None:
        return f"At T = {results['temperature']:g} no tested k was shown to pay: generate without speculation."
    note = f" Batches above {tested} were not measured." if results["schedule"][-1][1] > tested else ""
    served = f" (serve {results['drafter']})" if results["method"] == "mtp" else ""
    shown = json.dumps(config)
    return f"Recommended for vLLM{served} at T = {results['temperature']:g}: speculative_config={shown}{note}"


def limits_text(results: dict[str, Any]) -> str:
    """Why slower cells of the rollout temperature are slower: no drafter could help, or this one does not fit enough.
    Empty where none is slower."""
    slower = [c for c in cells_at(results, results["temperature"]) if c["k"] and c["verdict"] == "slower"]
    shown = lambda cells: ", ".join(f"k = {c['k']} at {c['concurrency']}" for c in cells)  # noqa: E731
    hopeless = [c for c in slower if c.get("limit") == "k"]
    weak = [c for c in slower if c.get("limit") == "drafter"]
    lines = []
    if hopeless:
        lines.append(f"k too large, even for a drafter that is always accepted: {shown(hopeless)}.")
    if weak:
        best = max(weak, key=lambda c: c["perfect_speedup"])
        lines.append(
            f"Drafter too weak: {shown(weak)}; always accepted, it would reach {best['perfect_speedup']:.2f}x "
            f"(k = {best['k']} at {best['concurrency']})."
        )
    return " ".join(lines)


def costs_markdown(results: dict[str, Any]) -> str:
    """Fitted round costs at the rollout temperature with the error of the fit; empty without them."""
    found = next((c for c in results.get("costs", ()) if c["temperature"] == results["temperature"]), None)
    if not found or not found["round_cost"]:
        return ""
    sizes = sorted({c["running"] for c in found["round_cost"]})
    cost = {(c["k"], c["running"]): c for c in found["round_cost"]}
    lines = ["Round cost by requests running, fitted to engine steps (95 %); * where no such step was measured:", ""]
    lines += [f"| k | {' | '.join(map(str, sizes))} |", "|" + "---:|" * (len(sizes) + 1)]
    for k in sorted({k for k, _ in cost}):
        row = [cost[k, n] for n in sizes]
        shown = [f"{c['cost']:.2f} ({interval(c['cost_ci'])}){'' if c['measured'] else ' *'}" for c in row]
        lines.append(f"| {k} | {' | '.join(shown)} |")
    errors = sorted(abs(row["error"]) for row in found["leave_one_out"])
    if errors:
        lines += [
            "",
            f"Step time of a cell predicted from the other cells, {len(errors)} times: median error "
            f"{100 * errors[len(errors) // 2]:.1f} %, largest {100 * errors[-1]:.1f} %.",
        ]
    return "\n".join(lines)


def headline(results: dict[str, Any]) -> str:
    """The number that matters: the fastest cell at the rollout temperature, with its interval."""
    measured = [c for c in cells_at(results, results["temperature"]) if c["k"] and c["speedup"] is not None]
    if not measured:
        return "no speedup measured yet"
    best = max(measured, key=lambda cell: cell["speedup"])
    return (
        f"speedup {best['speedup']:.2f}x (95 % {interval(best['speedup_ci'])}), acceptance length "
        f"{best['acceptance_length']:.2f}: k = {best['k']}, concurrency {best['concurrency']}, "
        f"T = {best['temperature']:g}, {best['verdict']}"
    )


# --- files ------------------------------------------------------------------------------------------------------


def write(results: dict[str, Any], folder: Path) -> None:
    """Plot and README; results.json is the run's own, written last."""
    atomic_write(folder / PLOT, plot(results))
    parts = [f"# Acceptance and speed: {results['method']} on {results['verifier']}", headline(results)]
    parts += [markdown(results).rstrip(), schedule_text(results), limits_text(results)]
    parts.append(costs_markdown(results))
    parts.append(f"![Acceptance length and speedup against k]({PLOT})")
    atomic_write(folder / "README.md", "\n\n".join(part for part in parts if part) + "\n")


def plot(results: dict[str, Any]) -> bytes:
    """PNG: one column a temperature; acceptance length above, speedup below, one line a concurrency."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = temperatures(results)
    figure = Figure(figsize=(5.5 * len(columns), 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(columns), squeeze=False, sharex=True, sharey="row")
    for column, temperature in enumerate(columns):
        above, below = axes[0][column], axes[1][column]
        above.set_title(f"T = {temperature:g}")
        _lines(above, cells_at(results, temperature), "acceptance_length")
        _lines(below, cells_at(results, temperature), "speedup")
        below.axhline(1, color="black", linewidth=1, linestyle="--", label="break-even")
        below.set_xlabel("draft tokens a round, k")
        below.legend()
    axes[0][0].set_ylabel("acceptance length, tokens a round")
    axes[1][0].set_ylabel("speedup over k = 0")
    figure.suptitle(f"{results['method']} on {results['verifier']} (bars: 95 % intervals)")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _lines(axis: Any, cells: list[dict[str, Any]], field: str) -> None:
    """Concurrencies are set side by side, so that bars at the same k do not hide each other."""
    levels = sorted({cell["concurrency"] for cell in cells})
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    for place, concurrency in enumerate(levels):
        line = [c for c in cells if c["concurrency"] == concurrency and c[field] is not None]
        shift = 0.06 * (place - (len(levels) - 1) / 2)
        bars = [c[f"{field}_ci"] or [c[field], c[field]] for c in line]
        low = [max(0.0, c[field] - bar[0]) for c, bar in zip(line, bars, strict=True)]
        high = [max(0.0, bar[1] - c[field]) for c, bar in zip(line, bars, strict=True)]
        places = [c["k"] + shift for c in line]
        heights = [c[field] for c in line]
        axis.errorbar(places, heights, [low, high], marker="o", capsize=3, label=f"concurrency {concurrency}")
