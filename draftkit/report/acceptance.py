"""What `eval-acceptance` runs show: acceptance and speedup against k with intervals, survival, what a round costs.

One run: a line for each concurrency. Several (drafters compared): a line for each run, a chart for each concurrency.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from draftkit.evals import report as bench_report
from draftkit.report import charts
from draftkit.report.document import Block, Chart, Code, Fact, Facts, Section, Table, Text, figure, shown, spread
from draftkit.report.runs import Row, Run, said

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CELLS = (
    "Requests: most that ran at once. Tokens a round: the verifier's own one included; its interval is over prompts. "
    "Survival: share of rounds in which the first draft, the first two, and so on were accepted. Round: its time in "
    "steps of plain decoding, and so the tokens that it must give to be even. Speedup: time per token against k = 0."
)
Line = tuple[str, list[Row]]  # (label, cells by k)


def sections(runs: Sequence[Run]) -> list[Section]:
    measured = [run for run in runs if cells(run)]
    missing = tuple(
        Text(said(run, runs, "no cell was measured yet, so there is no curve."), "missing")
        for run in runs
        if run not in measured
    )
    if not measured:
        return [Section("Which draft length pays", missing)]
    return [
        Section("Which draft length pays", (*missing, *_curves(measured), *_advice(measured))),
        Section("Where drafts end", tuple(_survival(measured))),
        Section("What a round costs", tuple(_costs(measured))),
        Section("Every cell", tuple(_table(run, measured) for run in measured)),
    ]


def cells(run: Run) -> list[Row]:
    return named_cells((run.results or {}).get("cells"))


def named_cells(found: Any) -> list[Row]:
    """Cells with the three figures that name them; whatever else is missing in one is left empty."""
    named = ("temperature", "concurrency", "k")
    whole = lambda cell: isinstance(cell, dict) and all(figure(cell.get(name)) is not None for name in named)  # noqa: E731
    return list(filter(whole, found)) if isinstance(found, list) else []


def best(run: Run) -> Row | None:
    """The fastest cell at the rollout temperature."""
    rollout = (run.results or {}).get("temperature")
    drafted = [c for c in cells(run) if c["k"] and c["temperature"] == rollout and figure(c.get("speedup")) is not None]
    return max(drafted, key=lambda cell: cell["speedup"], default=None)


def headline(run: Run) -> str:
    cell = best(run)
    if cell is None:
        return "no speedup measured yet"
    ci = spread(cell.get("speedup_ci"))
    return f"speedup {cell['speedup']:.2f}x{f' (95 % {ci})' if ci else ''} at {_where(cell)}"


def _where(cell: Row) -> str:
    return f"k = {cell['k']}, concurrency {cell['concurrency']}, T = {cell['temperature']:g}"


def facts(run: Run) -> Facts:
    found, cell = [Fact("cells", str(len(cells(run))), "temperature × concurrency × k")], best(run)
    if cell is not None:
        ci = spread(cell.get("speedup_ci"))
        found += [
            Fact(
                "fastest at rollout temperature",
                shown(cell["speedup"], unit="×"),
                f"95 % {ci}" if ci else "no interval",
            ),
            Fact("there", f"k = {cell['k']}", f"{_requests(cell['concurrency'])}, {cell.get('verdict', '')}"),
            Fact(
                "acceptance length",
                shown(cell.get("acceptance_length")),
                f"tokens a round; even at {shown(cell.get('break_even'))}",
            ),
        ]
    return Facts(tuple(found))


def _requests(concurrency: int) -> str:
    return "1 request at a time" if concurrency == 1 else f"{concurrency} requests at a time"


# ---- curves --------------------------------------------------------------------------------------------------------


def _values(runs: Sequence[Run], name: str) -> list[Any]:
    """Temperatures in the order measured (the rollout's first), or concurrencies from small to large."""
    found = list(dict.fromkeys(cell[name] for run in runs for cell in cells(run)))
    return found if name == "temperature" else sorted(found)


def _panels(runs: Sequence[Run]) -> Iterable[tuple[str, str, list[Line]]]:
    """(name, title, lines) of what one chart holds: of one run a temperature, of several also one concurrency."""
    pick = lambda run, t, c: sorted(  # noqa: E731
        (x for x in cells(run) if x["temperature"] == t and x["concurrency"] == c), key=lambda x: x["k"]
    )
    for t in _values(runs, "temperature"):
        levels = _values(runs, "concurrency")
        if len(runs) == 1:
            lines = [(f"{c} at a time", pick(runs[0], t, c)) for c in levels]
            yield f"t{t:g}", f"T = {t:g}", [line for line in lines if line[1]]
            continue
        for c in levels:
            lines = [(run.label, pick(run, t, c)) for run in runs]
            lines = [line for line in lines if line[1]]
            if lines:
                yield f"t{t:g}-c{c}", f"T = {t:g}, {c} at a time", lines


def _curves(runs: Sequence[Run]) -> Iterable[Block]:
    for name, title, lines in _panels(runs):
        if not any(figure(cell.get("speedup")) is not None for _, of in lines for cell in of if cell["k"]):
            yield Text(f"{title}: no pair with k = 0 was measured, so there is no speedup.", "missing")
        else:
            yield _curve(f"speedup-{name}", f"Speedup, {title}", "speedup", lines)
        yield _curve(f"length-{name}", f"Acceptance length, {title}", "acceptance_length", lines)


def _curve(name: str, title: str, field: str, lines: Sequence[Line]) -> Chart:
    def draw(axes: Axes) -> None:
        for place, (label, of) in enumerate(lines):
            shift = 0.07 * (place - (len(lines) - 1) / 2)  # so that bars at the same k do not hide each other
            having = [cell for cell in of if figure(cell.get(field)) is not None]
            xs, ys = [cell["k"] + shift for cell in having], [cell[field] for cell in having]
            charts.with_bars(axes, xs, ys, [cell.get(f"{field}_ci") for cell in having], label, place)
            if field == "acceptance_length":
                even = [cell for cell in having if figure(cell.get("break_even")) is not None]
                colour = charts.SERIES[place % len(charts.SERIES)]
                xs, ys = [cell["k"] + shift for cell in even], [cell["break_even"] for cell in even]
                axes.plot(xs, ys, color=colour, linewidth=1.1, linestyle=(0, (4, 3)))
        if field == "speedup":
            _limit(axes, lines)
            charts.even(axes)
            axes.set_ylabel("speedup, ×")
        else:
            axes.plot([], [], color=charts.INK, linewidth=1.1, linestyle=(0, (4, 3)), label="break-even")
            axes.set_ylabel("tokens a round")
        charts.whole_steps(axes, "draft tokens a round, k")

    captions = {
        "speedup": "Time per token at k = 0 over that at k, bars are 95 % intervals; above the dashed line "
        "speculation pays, and a bar that crosses it decides nothing. The longest bars leave the chart.",
        "acceptance_length": "Tokens that a verify round gave (bars: 95 % over prompts); where a line lies above the "
        "dashed one of its colour, a round brings more than it costs.",
    }
    return Chart(name, title, captions[field], draw)


def _limit(axes: Axes, lines: Sequence[Line]) -> None:
    """An interval that decides nothing must not press the points together: at most twice the highest point is shown."""
    speedups = [cell["speedup"] for _, of in lines for cell in of if figure(cell.get("speedup")) is not None]
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, low), min(high, 2 * max([1.0, *speedups])))


def _advice(runs: Sequence[Run]) -> Iterable[Block]:
    for run in runs:
        try:
            yield Code((f"# {run.label}\n" if len(runs) > 1 else "") + bench_report.schedule_text(run.results or {}))
        except (KeyError, TypeError, ValueError):
            yield Text(said(run, runs, "its schedule is damaged, so nothing is recommended."), "missing")


# ---- survival ------------------------------------------------------------------------------------------------------


def _survival(runs: Sequence[Run]) -> Iterable[Block]:
    lines: list[tuple[str, list[float]]] = []
    for run in runs:
        for temperature in _values([run], "temperature"):
            longest = max(
                (c for c in cells(run) if c["temperature"] == temperature), key=lambda c: (c["k"], -c["concurrency"])
            )
            survival = [s for value in longest.get("survival") or [] if (s := figure(value)) is not None]
            if survival:
                label = f"T = {temperature:g}" if len(runs) == 1 else f"{run.label}, T = {temperature:g}"
                lines.append((label, survival))
    if not lines:
        yield Text("Nothing was drafted, so there is no survival to show.", "missing")
        return

    def draw(axes: Axes) -> None:
        for place, (label, survival) in enumerate(lines):
            charts.line(axes, list(range(1, len(survival) + 1)), survival, label, place)
        charts.whole_steps(axes, "draft token of the round")
        axes.set_ylim(0, 1)
        axes.set_ylabel("share of rounds")

    yield Chart(
        "survival",
        "Survival of drafts",
        "Share of rounds in which the drafts up to this one were all accepted, at the largest k and the fewest "
        "requests; the area under a line is what drafts add to the acceptance length.",
        draw,
    )


# ---- cost ----------------------------------------------------------------------------------------------------------


def _costs(runs: Sequence[Run]) -> Iterable[Block]:
    for number, run in enumerate(runs):
        t = _values([run], "temperature")[0]
        levels = _values([run], "concurrency")
        for c in dict.fromkeys((levels[0], levels[-1])):
            of = [x for x in cells(run) if x["temperature"] == t and x["concurrency"] == c]
            of = sorted((x for x in of if figure(x.get("round_cost")) is not None), key=lambda x: x["k"])
            who = f"{run.label}, " if len(runs) > 1 else ""
            if of:
                yield _cost_chart(f"cost-{number}-c{c}", f"A round in plain steps, {who}T = {t:g}, {c} at a time", of)
            else:
                yield Text(f"{who}T = {t:g}, {c} at a time: no pair with k = 0, so no cost is known.", "missing")


def _cost_chart(name: str, title: str, of: Sequence[Row]) -> Chart:
    timed = all(figure(cell.get("draft_cost")) is not None for cell in of)

    def draw(axes: Axes) -> None:
        xs = list(range(len(of)))
        draft = [figure(cell.get("draft_cost")) or 0.0 for cell in of]
        verify = [figure(cell.get("verify_cost")) or 0.0 for cell in of]
        rest = [max(0.0, cell["round_cost"] - d - v) for cell, d, v in zip(of, draft, verify, strict=True)]
        layers = [("verifying", charts.PALETTE["blue"], verify), ("drafting", charts.PALETTE["orange"], draft)]
        if not timed:
            layers = []
        words = "between steps" if timed else "round"
        layers.append((words, charts.PALETTE["pale"], rest))
        charts.stacked_area(axes, xs, layers)
        lengths = [figure(cell.get("acceptance_length")) for cell in of]
        style = {"linestyle": "none", "marker": "D", "color": charts.INK, "markersize": 5}
        axes.plot(xs, [float("nan") if y is None else y for y in lengths], label="tokens it gives", **style)
        charts.from_base(axes)
        axes.set_xticks(xs, [str(cell["k"]) for cell in of])
        axes.set_xlabel("draft tokens a round, k")
        axes.set_ylabel("plain steps")

    return Chart(
        name,
        title,
        "What one round takes, in steps of plain decoding, and the tokens it gives as diamonds: a diamond above its "
        "bar pays, one inside it does not.",
        draw,
    )


# ---- table ---------------------------------------------------------------------------------------------------------


def _table(run: Run, runs: Sequence[Run]) -> Table:
    columns = (
        *("T", "requests", "k", "tokens/s", "tokens a round", "95 %", "survival"),
        *("round, plain steps", "drafting", "verifying", "speedup, ×", "95 %", "verdict"),
    )
    rows = []
    for cell in cells(run):
        plain = cell["k"] == 0
        survival = " ".join(shown(s).removeprefix("0") for s in cell.get("survival") or [])
        rows.append(
            (
                f"{cell['temperature']:g}",
                str(cell["concurrency"]),
                str(cell["k"]),
                shown(cell.get("tokens_per_s"), ".1f"),
                shown(cell.get("acceptance_length")),
                "" if plain else spread(cell.get("acceptance_length_ci")) or "unknown",
                survival,
                shown(cell.get("round_cost")),
                "" if plain else shown(cell.get("draft_cost")),
                "" if plain else shown(cell.get("verify_cost")),
                shown(cell.get("speedup")),
                "" if plain else spread(cell.get("speedup_ci")) or "unknown",
                "baseline" if plain else str(cell.get("verdict", "")),
            )
        )
    who = f"{run.label}. " if len(runs) > 1 else ""
    return Table(columns, tuple(rows), f"{who}{CELLS}", left=0)


def setting_rows(run: Run) -> list[tuple[str, str]]:
    r, results = run.of, run.results or {}
    return [
        ("verifier", str(results.get("verifier") or r("model", "path", otherwise="?"))),
        ("drafter", str(results.get("drafter") or results.get("method") or "?")),
        ("method", f"{results.get('method', '?')}, {results.get('draft_sample_method', '?')} drafts"),
        ("prompts", f"{r('eval', 'prompts')} held-out prompts, at most {r('eval', 'max_tokens')} tokens each"),
        ("repeats", str(r("eval", "repeats", otherwise="?"))),
    ]
