"""Sections of `rl` runs that judge them: speedup forecast against realised, losslessness, canary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from draftkit.report import charts, rl_rows
from draftkit.report.document import Block, Chart, Table, Text, at, figure, mean, shown, spread
from draftkit.report.runs import Run, said

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ATTRIBUTED = (
    ("draft", "drafting"),
    ("verify", "verifying, prompts"),
    ("sync", "publishing"),
    ("train_drafter", "drafter update"),
    ("rest", "the rest of the step"),
    ("total", "all"),
)
Z_LIMIT = 4  # drawn as a scale for the eye; the alarm's own limits grow with the looks taken (rl/lossless.py)


# ---- speedup -------------------------------------------------------------------------------------------------------


def speedup(runs: Sequence[Run]) -> Iterable[Block]:
    compared = [run for run in runs if rl_rows.realised(run) is not None or rl_rows.has_forecast(run)]
    for run in runs:
        if run.of("spec", "method") == "none":
            yield Text(said(run, runs, "this run does not speculate, so there is no speedup to measure."), "missing")
            continue
        if rl_rows.realised(run) is None:
            why = (
                "no plain probe ran"
                if not rl_rows.num_probes(run)
                else "probes and speculative steps are not both there yet"
            )
            yield Text(said(run, runs, f"{why}, so there is no realised speedup."), "missing")
        if not rl_rows.has_forecast(run):
            why = "rollouts overlap training (rl.lag)" if run.of("rl", "lag") else "plain decoding was not seen yet"
            yield Text(said(run, runs, f"{why}, so there is no forecast."), "missing")
    if not compared:
        return
    for number, run in enumerate(compared):
        for key, words in (("generation", "Rollouts"), ("step", "Whole step")):
            yield _speedup_chart(run, key, words, f"speedup-{key}-{number}", alone=len(runs) == 1)
    rows = [row for run in compared for row in _speedup_rows(run, runs)]
    columns = ("", "predicted, ×", "realised, ×", "95 %", "speculative steps", "plain steps")
    columns = columns if len(runs) == 1 else ("run", *columns)
    yield Table(
        columns,
        tuple(rows),
        "Time of a plain step over that of a speculative one: of the rollouts per token, and of the whole step with "
        "what the drafter's training costs. Predicted: mean of the steps' forecasts, each made from earlier steps.",
        left=1 if len(runs) == 1 else 2,
    )
    yield from _attribution(compared, runs)


def _speedup_chart(run: Run, key: str, words: str, name: str, *, alone: bool) -> Chart:
    field = "predicted_generation_speedup" if key == "generation" else "predicted_speedup"

    def draw(axes: Axes) -> None:
        xs, ys = charts.points(run.steps, lambda r: r["step"], lambda r: r.get(field))
        if xs:
            charts.line(axes, xs, ys, "predicted for this step", 1, linestyle="none" if len(xs) <= charts.FEW else "-")
        xs, ys = charts.points(run.steps, lambda r: r["step"], lambda r: at(r, "realised", key))
        if xs:
            charts.line(axes, xs, ys, "realised so far", 0)
            ends = [r for r in run.steps if spread(at(r, "realised", f"{key}_ci"))]
            if ends:
                low, high = (
                    charts.points(ends, lambda r: r["step"], lambda r, i=i: at(r, "realised", f"{key}_ci")[i])
                    for i in (0, 1)
                )
                axes.fill_between(
                    low[0], low[1], high[1], color=charts.SERIES[0], alpha=0.18, linewidth=0, label="realised, 95 %"
                )
        charts.even(axes)
        charts.whole_steps(axes)
        axes.set_ylabel("speedup, ×")

    title = f"{words}: speedup" + ("" if alone else f", {run.label}")
    caption = (
        "Forecast of each step, made from earlier ones, against what all steps so far realised over the plain probes "
        "among them; above the dashed line speculation pays."
    )
    return Chart(name, title, caption, draw)


def _speedup_rows(run: Run, runs: Sequence[Run]) -> Iterable[tuple[str, ...]]:
    realised = rl_rows.realised(run) or {}
    for words, field, key in (
        ("rollouts", "predicted_generation_speedup", "generation"),
        ("whole step", "predicted_speedup", "step"),
    ):
        row = [words, shown(mean([r.get(field) for r in run.steps])), shown(realised.get(key))]
        row += [spread(realised.get(f"{key}_ci"))]
        row += [shown(realised.get(name), ".0f") for name in ("num_speculative", "num_plain")]
        yield tuple(row if len(runs) == 1 else [run.label, *row])


def _attribution(compared: Sequence[Run], runs: Sequence[Run]) -> Iterable[Block]:
    having = [run for run in compared if any(isinstance(row.get("attribution"), dict) for row in run.steps)]
    if not having:
        return
    rows = []
    for name, words in ATTRIBUTED:
        over = [mean([at(row, "attribution", name) for row in run.steps]) for run in having]
        rows.append((words, *(shown(value, "+.2f") for value in over)))
    columns = ("part", *("s a step over the forecast" if len(runs) == 1 else f"{run.label}, s" for run in having))
    yield Table(
        columns,
        tuple(rows),
        "What ate the difference: seconds by which each part exceeded its forecast, mean of steps.",
    )


# ---- checks --------------------------------------------------------------------------------------------------------


def checks(runs: Sequence[Run]) -> Iterable[Block]:
    for run in runs:
        raised = rl_rows.alarms(run)
        if raised:
            yield Text(said(run, runs, f"{'; '.join(raised)}."), "warning")
        elif run.steps:
            yield Text(said(run, runs, f"no losslessness alarm and no canary fault in {len(run.steps)} steps."))
    if any(figure(row.get("surprise_z")) is not None for run in runs for row in run.steps):
        yield _surprise_chart(runs)
        yield _gap_chart(runs)
    else:
        yield Text("No surprise statistic was logged, so there is nothing to judge losslessness by.", "missing")


def _arms(runs: Sequence[Run]) -> Iterable[tuple[str, Run, str]]:
    for run in runs:
        for arm, words in (("on", "with drafts"), ("off", "plain")):
            if any(figure(at(row, "lossless", f"{arm}.tokens")) for row in run.steps):
                yield arm, run, words if len(runs) == 1 else f"{run.label}, {words}"


def _surprise_chart(runs: Sequence[Run]) -> Chart:
    def draw(axes: Axes) -> None:
        for place, (arm, run, words) in enumerate(_arms(runs)):
            xs, ys = charts.points(
                run.steps, lambda r: r["step"], lambda r, a=arm: at(r, "lossless", f"{a}.surprise_z")
            )
            charts.line(axes, xs, ys, words, place)
        for limit in (-Z_LIMIT, Z_LIMIT):
            axes.axhline(limit, color=charts.INK, linewidth=1, linestyle=(0, (1, 3)))
        charts.whole_steps(axes)
        axes.set_ylabel("standard errors")

    return Chart(
        "surprise",
        "Surprise of the sampled tokens",
        "Whether tokens are as surprising as the trainer's own distribution says, over all steps so far: near 0 "
        f"where the engine samples from the policy; the dotted lines at ±{Z_LIMIT} are a scale, the alarm has limits "
        "of its own.",
        draw,
    )


def _gap_chart(runs: Sequence[Run]) -> Chart:
    def draw(axes: Axes) -> None:
        for place, (arm, run, words) in enumerate(_arms(runs)):
            xs, ys = charts.points(run.steps, lambda r: r["step"], lambda r, a=arm: at(r, "lossless", f"{a}.logp_gap"))
            charts.line(axes, xs, ys, words, place)
        charts.whole_steps(axes)
        charts.from_base(axes)
        axes.set_ylabel("nats a token")

    return Chart(
        "gap",
        "Engine against trainer",
        "Mean distance of the engine's log-probabilities from the trainer's, over all steps so far; drafts should "
        "not make it larger than it is for plain rollouts.",
        draw,
    )
