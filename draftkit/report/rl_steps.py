"""Sections of `rl` runs over their steps: reward, where the seconds went, acceptance and survival."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from draftkit.report import charts, rl_rows
from draftkit.report.document import Block, Chart, Table, Text, at, figure, mean, shown
from draftkit.report.runs import Run, said

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# (name in time_s, in words, colour), in the order in which they are stacked
PARTS = (
    ("generate", "rollouts", "blue"),
    ("logprob", "log-probabilities", "sky"),
    ("train_policy", "policy update", "orange"),
    ("train_drafter", "drafter update", "vermillion"),
    ("publish", "publishing, canary", "purple"),
    ("sync", "hand-over of memory", "green"),
    ("reward", "rewards", "brown"),
    ("data", "prompts", "slate"),
    ("idle", "waiting for rollouts", "pale"),
    ("other", "other", "grey"),
)
SHOWN_SHARE = 0.002  # of the time; smaller parts are in the table only

# ---- reward --------------------------------------------------------------------------------------------------------


def reward(runs: Sequence[Run]) -> Iterable[Block]:
    if not any(run.steps for run in runs):
        yield Text("No step was finished, so there is no reward to show.", "missing")
        return

    def rollouts(axes: Axes) -> None:
        for place, run in enumerate(runs):
            xs, ys = charts.points(run.steps, lambda r: r["step"], lambda r: r.get("reward_mean"))
            charts.line(axes, xs, ys, run.label if len(runs) > 1 else "rollouts", place)
            held = rl_rows.held_out(run)
            if held and len(runs) == 1:
                xs, ys = charts.points(held, lambda pair: pair[0], lambda pair: pair[1])
                style = {"linestyle": "none", "marker": "D", "markersize": 6} if len(xs) <= charts.FEW else {}
                charts.line(axes, xs, ys, "held-out prompts, greedy", place + 1, **style)
        charts.whole_steps(axes)
        axes.set_ylabel("mean reward")

    yield Chart(
        "reward",
        "Mean reward",
        "Mean reward of each step's rollouts"
        + (", and of greedy answers to held-out prompts" if len(runs) == 1 else ", a line for each run")
        + "; higher is better, and single steps are noisy.",
        rollouts,
    )
    if len(runs) > 1 and any(map(rl_rows.held_out, runs)):

        def held_out(axes: Axes) -> None:
            for place, run in enumerate(runs):
                if held := rl_rows.held_out(run):
                    charts.line(axes, *zip(*held, strict=True), run.label, place)
            charts.whole_steps(axes)
            axes.set_ylabel("mean reward, greedy")

        caption = "One greedy answer to each held-out prompt, before training (step 0) and at evaluations."
        yield Chart("held-out", "Held-out reward", caption, held_out)
    if any(figure(row.get("entropy")) is not None for run in runs for row in run.steps):
        yield _entropy_chart(runs)
    if not any(map(rl_rows.held_out, runs)):
        yield Text("No evaluation ran, so there is no held-out reward.", "missing")


def _entropy_chart(runs: Sequence[Run]) -> Chart:
    def draw(axes: Axes) -> None:
        for place, run in enumerate(runs):
            xs, ys = charts.points(run.steps, lambda r: r["step"], lambda r: r.get("entropy"))
            charts.line(axes, xs, ys, run.label, place)
        charts.whole_steps(axes)
        axes.set_ylabel("nats a token")

    return Chart(
        "entropy",
        "Entropy of the policy",
        "Mean entropy of the policy where it sampled; a surer policy is easier to draft for, so read it beside "
        "acceptance.",
        draw,
    )


# ---- time ----------------------------------------------------------------------------------------------------------


def time(runs: Sequence[Run]) -> Iterable[Block]:
    timed = [run for run in runs if any(rl_rows.step_seconds(row) for row in run.steps)]
    if not timed:
        yield Text("No step was finished, so there is nothing to time.", "missing")
        return
    for number, run in enumerate(timed):
        yield _time_chart(run, number, alone=len(runs) == 1)
    if len(timed) > 1:
        yield _step_chart(timed)
    columns = ["part"]
    for run in timed:
        columns += ["s a step", "share"] if len(timed) == 1 else [f"{run.label}, s a step", "share"]
    rows = []
    for name, words, _ in PARTS:
        row = [words]
        for run in timed:
            seconds = mean([at(r, "time_s", name) for r in run.steps])
            total = mean(list(map(rl_rows.step_seconds, run.steps)))
            row += [shown(seconds), shown(seconds / total, ".1%") if seconds is not None and total else ""]
        if any(cell not in ("", "0.00", "0.0%") for cell in row[1:]):
            rows.append(tuple(row))
    rows.append(
        ("whole step", *(t for run in timed for t in (shown(mean(list(map(rl_rows.step_seconds, run.steps)))), "100%")))
    )
    yield Table(
        tuple(columns),
        tuple(rows),
        "Mean seconds of a step and their share of it; evaluations, and parts without any time, are left out.",
    )
    yield from _plain_and_speculative(timed)


def _time_chart(run: Run, number: int, *, alone: bool) -> Chart:
    total = sum(rl_rows.step_seconds(row) or 0.0 for row in run.steps)
    share = {name: sum(figure(at(r, "time_s", name)) or 0.0 for r in run.steps) / total for name, _, _ in PARTS}
    parts = [part for part in PARTS if share[part[0]] >= SHOWN_SHARE]

    def draw(axes: Axes) -> None:
        layers, xs = [], []
        for name, words, colour in parts:
            xs, heights = charts.points(
                run.steps, lambda r: r["step"], lambda r, n=name: figure(at(r, "time_s", n)) or 0.0
            )
            layers.append((words, charts.PALETTE[colour], heights))
        charts.stacked_area(axes, xs, layers)
        charts.whole_steps(axes)
        axes.set_ylabel("seconds")

    title = "Seconds of each step by part" + ("" if alone else f": {run.label}")
    order = "in the order of the legend, from the bottom"
    caption = f"Where the seconds of each step went, stacked {order}; evaluations are left out."
    return Chart(f"time-{number}", title, caption, draw)


def _step_chart(runs: Sequence[Run]) -> Chart:
    def draw(axes: Axes) -> None:
        for place, run in enumerate(runs):
            xs, ys = charts.points(run.steps, lambda r: r["step"], rl_rows.step_seconds)
            charts.line(axes, xs, ys, run.label, place)
        charts.whole_steps(axes)
        charts.from_base(axes)
        axes.set_ylabel("seconds a step")

    return Chart("step-time", "Seconds a step", "Time of each step, evaluations left out; lower is better.", draw)


def _plain_and_speculative(runs: Sequence[Run]) -> Iterable[Block]:
    rows = []
    for run in runs:
        for words, of in (("plain", lambda k: k == 0), ("speculative", lambda k: k > 0)):
            steps = [r for r in run.steps if figure(r.get("k")) is not None and of(r["k"]) and r["step"] > 1]
            if steps:
                tokens, seconds = (
                    sum(figure(r.get(n)) or 0.0 for r in steps) for n in ("response_tokens", "generate_s")
                )
                row = [words, str(len(steps)), shown(tokens / len(steps), ".0f"), shown(seconds / len(steps))]
                row += [
                    shown(1000 * seconds / tokens, ".2f") if tokens else "",
                    shown(mean(list(map(rl_rows.step_seconds, steps)))),
                ]
                rows.append(tuple(row if len(runs) == 1 else [run.label, *row]))
    columns = ("steps", "number", "tokens a step", "rollouts, s", "ms a token", "step, s")
    columns = columns if len(runs) == 1 else ("run", *columns)
    note = "Rollouts with and without drafts; the first step, which pays for start-up, is left out."
    if rows:
        yield Table(columns, tuple(rows), note, left=1 if len(runs) == 1 else 2)


# ---- acceptance ----------------------------------------------------------------------------------------------------


def acceptance(runs: Sequence[Run]) -> Iterable[Block]:
    speculating = [run for run in runs if rl_rows.drafted(run)]
    for run in runs:
        if run not in speculating:
            yield Text(said(run, runs, _why_no_drafts(run)), "missing")
    if not speculating:
        return

    def length(axes: Axes) -> None:
        for place, run in enumerate(speculating):
            xs, ys = charts.points(rl_rows.drafted(run), lambda r: r["step"], lambda r: r.get("acceptance_length"))
            charts.line(axes, xs, ys, run.label, place)
        charts.whole_steps(axes)
        charts.from_base(axes, 1)
        axes.set_ylabel("tokens a round")

    yield Chart(
        "acceptance",
        "Acceptance length",
        "Tokens that a verify round gave, the verifier's own one included (1 would be plain decoding); a fall means "
        "that the drafter no longer follows the policy, or that the policy is less sure.",
        length,
    )
    for number, run in enumerate(speculating):
        yield _survival_chart(run, number, alone=len(runs) == 1)

    for run in speculating:
        yield from _cotraining(run, runs)


def _survival_chart(run: Run, number: int, *, alone: bool) -> Chart:
    rows = rl_rows.drafted(run)
    k = max((len(row["survival"]) for row in rows if isinstance(row.get("survival"), list)), default=0)

    def draw(axes: Axes) -> None:
        for i in range(k):
            here = lambda r, i=i: r["survival"][i] if i < len(r.get("survival") or []) else None  # noqa: E731
            xs, ys = charts.points(rows, lambda r: r["step"], here)
            charts.line(axes, xs, ys, f"first {i + 1}" if i else "first", i)
        charts.whole_steps(axes)
        axes.set_ylim(0, 1)
        axes.set_ylabel("share of rounds")

    title = "Survival of drafts" + ("" if alone else f": {run.label}")
    caption = "Share of rounds in which the first draft, the first two, and so on were all accepted."
    return Chart(f"survival-{number}", title, caption, draw)


def _cotraining(run: Run, runs: Sequence[Run]) -> Iterable[Block]:
    decided = [row for row in run.steps if isinstance(row.get("cotrain"), dict)]
    if not decided:
        yield Text(said(run, runs, "the drafter was not trained along in this run."), "missing")
        return
    trained = [row["step"] for row in run.steps if row.get("drafter") is not None]
    spent = sum(figure(at(row, "time_s", "train_drafter")) or 0.0 for row in run.steps)
    whole = sum(rl_rows.step_seconds(row) or 0.0 for row in run.steps)
    share = f", {spent / whole:.1%} of the time" if whole else ""
    text = f"the drafter was trained in {len(trained)} of {len(run.steps)} steps{share}. "
    text += f"The last decision: {at(decided[-1], 'cotrain', 'why') or 'no reason given'}."
    yield Text(said(run, runs, text))


def _why_no_drafts(run: Run) -> str:
    if run.of("spec", "method") == "none":
        return "this run does not speculate, so nothing was drafted."
    if not run.steps:
        return "no step was finished, so there is no acceptance to show."
    return "no step of it speculated: the drafter was not accepted by the canary, or every step was a plain probe."
