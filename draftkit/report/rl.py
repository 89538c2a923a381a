"""What `rl` runs show: rewards, where the time went, acceptance, speedup forecast and realised, losslessness.

One run in detail, or several beside each other. Everything comes from the rows of metrics.jsonl, so that a run that
was stopped is shown as far as it went.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from draftkit.report import charts
from draftkit.report.document import Block, Chart, Fact, Facts, Section, Table, Text, at, figure, mean, shown, spread
from draftkit.report.runs import Row, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EDGE = 5  # steps at either end whose means are compared, as in results.json
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
ATTRIBUTED = (
    ("draft", "drafting"),
    ("verify", "verifying, prompts"),
    ("sync", "publishing"),
    ("train_drafter", "drafter update"),
    ("rest", "the rest of the step"),
    ("total", "all"),
)
Z_LIMIT = 4  # drawn as a scale for the eye; the alarm's own limits grow with the looks taken (rl/lossless.py)


def sections(runs: Sequence[Run]) -> list[Section]:
    return [
        Section("Reward", tuple(_reward(runs))),
        Section("Where a step's time went", tuple(_time(runs))),
        Section("Acceptance over steps", tuple(_acceptance(runs))),
        Section("Predicted against realised speedup", tuple(_speedup(runs))),
        Section("Is it lossless, and is the engine what was trained?", tuple(_checks(runs))),
    ]


def facts(run: Run) -> Facts:
    """The figures that summarise a run, from its steps."""
    steps, drafted = run.steps, _drafted(run)
    first, last = (mean([row.get("reward_mean") for row in part]) for part in (steps[:EDGE], steps[-EDGE:]))
    found = [Fact("steps", f"{len(steps)}", f"of {run.of('rl', 'steps', otherwise='?')}")]
    if first is not None and last is not None:
        found.append(Fact("mean reward", f"{first:.2f} → {last:.2f}", f"first and last {min(EDGE, len(steps))} steps"))
    held = _held_out(run)
    if held:
        found.append(Fact("held-out reward, greedy", f"{held[0][1]:.2f} → {held[-1][1]:.2f}", f"step {held[-1][0]}"))
    if drafted:
        length = mean([row.get("acceptance_length") for row in drafted[-EDGE:]])
        found.append(Fact("acceptance length", shown(length), f"tokens a round, last {len(drafted[-EDGE:])} steps"))
    found.append(Fact("time a step", shown(mean(list(map(_step_s, steps))), ".1f", " s"), "evaluation left out"))
    realised = _realised(run)
    if realised is not None:
        ci = spread(realised.get("generation_ci"))
        found.append(
            Fact("rollouts, realised", shown(realised.get("generation"), unit="×"), f"95 % {ci}" if ci else "")
        )
    return Facts(tuple(found))


def alarms(run: Run) -> list[str]:
    """What the run itself raised: losslessness alarms and canary faults."""
    raised = {f"losslessness alarm: {alarm}" for row in run.steps for alarm in at(row, "lossless", "alarms") or []}
    causes = {at(row, "canary", "cause") for row in run.steps}
    return sorted(raised) + sorted(f"canary: {cause}" for cause in causes if cause)


def headline(run: Run) -> str:
    """The number that matters: what rollouts gained, else what was learned."""
    realised = _realised(run)
    if realised is not None and figure(realised.get("generation")) is not None:
        ci = spread(realised.get("generation_ci"))
        return f"rollouts {realised['generation']:.2f}x as fast as plain ones" + (f" (95 % {ci})" if ci else "")
    rewards = [row.get("reward_mean") for row in run.steps]
    first, last = mean(rewards[:EDGE]), mean(rewards[-EDGE:])
    if first is None or last is None:
        return "no step was finished"
    return f"mean reward {first:.3f} -> {last:.3f} in {len(run.steps)} steps"


# ---- reward --------------------------------------------------------------------------------------------------------


def _reward(runs: Sequence[Run]) -> Iterable[Block]:
    if not any(run.steps for run in runs):
        yield Text("No step was finished, so there is no reward to show.", "missing")
        return

    def rollouts(axes: Axes) -> None:
        for place, run in enumerate(runs):
            xs, ys = charts.points(run.steps, lambda r: r["step"], lambda r: r.get("reward_mean"))
            charts.line(axes, xs, ys, run.label if len(runs) > 1 else "rollouts", place)
            held = _held_out(run)
            if held and len(runs) == 1:
                style = {"linestyle": "none", "marker": "D", "markersize": 6}
                charts.line(axes, *zip(*held, strict=True), "held-out prompts, greedy", place + 1, **style)
        charts.whole_steps(axes)
        axes.set_ylabel("mean reward")

    yield Chart(
        "reward",
        "Mean reward",
        "Mean reward of each step's rollouts"
        + (", with greedy answers to held-out prompts as diamonds" if len(runs) == 1 else ", a line for each run")
        + "; higher is better, and single steps are noisy.",
        rollouts,
    )
    if len(runs) > 1 and any(map(_held_out, runs)):

        def held_out(axes: Axes) -> None:
            for place, run in enumerate(runs):
                if held := _held_out(run):
                    charts.line(axes, *zip(*held, strict=True), run.label, place)
            charts.whole_steps(axes)
            axes.set_ylabel("mean reward, greedy")

        caption = "One greedy answer to each held-out prompt, before training (step 0) and at evaluations."
        yield Chart("held-out", "Held-out reward", caption, held_out)
    if not any(map(_held_out, runs)):
        yield Text("No evaluation ran, so there is no held-out reward.", "missing")


def _held_out(run: Run) -> list[tuple[int, float]]:
    rows = {row.get("step"): figure(row.get("eval_reward")) for row in run.metrics}
    return sorted((step, value) for step, value in rows.items() if isinstance(step, int) and value is not None)


# ---- time ----------------------------------------------------------------------------------------------------------


def _time(runs: Sequence[Run]) -> Iterable[Block]:
    timed = [run for run in runs if any(_step_s(row) for row in run.steps)]
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
            total = mean(list(map(_step_s, run.steps)))
            row += [shown(seconds), shown(seconds / total, ".1%") if seconds is not None and total else ""]
        rows.append(tuple(row))
    rows.append(("whole step", *(t for run in timed for t in (shown(mean(list(map(_step_s, run.steps)))), "100%"))))
    yield Table(tuple(columns), tuple(rows), "Mean seconds of a step and their share of it; evaluations are left out.")
    yield from _plain_and_speculative(timed)


def _time_chart(run: Run, number: int, *, alone: bool) -> Chart:
    total = sum(_step_s(row) or 0.0 for row in run.steps)
    share = {name: sum(figure(at(r, "time_s", name)) or 0.0 for r in run.steps) / total for name, _, _ in PARTS}
    parts = [part for part in PARTS if share[part[0]] >= SHOWN_SHARE]

    def draw(axes: Axes) -> None:
        layers, xs = [], []
        for name, words, colour in parts:
            xs, heights = charts.points(run.steps, lambda r: r["step"], lambda r, n=name: at(r, "time_s", n) or 0.0)
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
            xs, ys = charts.points(run.steps, lambda r: r["step"], _step_s)
            charts.line(axes, xs, ys, run.label, place)
        charts.whole_steps(axes)
        charts.from_zero(axes)
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
                row += [shown(1000 * seconds / tokens, ".2f") if tokens else "", shown(mean(list(map(_step_s, steps))))]
                rows.append(tuple(row if len(runs) == 1 else [run.label, *row]))
    columns = ("steps", "number", "tokens a step", "rollouts, s", "ms a token", "step, s")
    columns = columns if len(runs) == 1 else ("run", *columns)
    note = "Rollouts with and without drafts; the first step, which pays for start-up, is left out."
    if rows:
        yield Table(columns, tuple(rows), note, left=1 if len(runs) == 1 else 2)


def _step_s(row: Row) -> float | None:
    total, evaluation = figure(at(row, "time_s", "total")), figure(at(row, "time_s", "eval"))
    return None if total is None else total - (evaluation or 0.0)


# ---- acceptance ----------------------------------------------------------------------------------------------------


def _acceptance(runs: Sequence[Run]) -> Iterable[Block]:
    speculating = [run for run in runs if _drafted(run)]
    for run in runs:
        if run not in speculating:
            yield Text(f"{_who(run, runs)}{_why_no_drafts(run)}", "missing")
    if not speculating:
        return

    def length(axes: Axes) -> None:
        for place, run in enumerate(speculating):
            xs, ys = charts.points(_drafted(run), lambda r: r["step"], lambda r: r.get("acceptance_length"))
            charts.line(axes, xs, ys, run.label, place)
        charts.whole_steps(axes)
        axes.set_ylim(bottom=1)
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

    def entropy(axes: Axes) -> None:
        for place, run in enumerate(runs):
            xs, ys = charts.points(run.steps, lambda r: r["step"], lambda r: r.get("entropy"))
            charts.line(axes, xs, ys, run.label, place)
        charts.whole_steps(axes)
        axes.set_ylabel("nats a token")

    yield Chart(
        "entropy",
        "Entropy of the policy",
        "Mean entropy of the policy where it sampled; a surer policy is easier to draft for, so read it beside "
        "acceptance.",
        entropy,
    )
    for run in speculating:
        yield from _cotraining(run, runs)


def _survival_chart(run: Run, number: int, *, alone: bool) -> Chart:
    rows = _drafted(run)
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
        yield Text(f"{_who(run, runs)}the drafter was not trained along in this run.", "missing")
        return
    trained = [row["step"] for row in run.steps if row.get("drafter") is not None]
    spent = sum(figure(at(row, "time_s", "train_drafter")) or 0.0 for row in run.steps)
    whole = sum(_step_s(row) or 0.0 for row in run.steps)
    share = f", {spent / whole:.1%} of the time" if whole else ""
    yield Text(
        f"{_who(run, runs)}the drafter was trained in {len(trained)} of {len(run.steps)} steps{share}. "
        f"The last decision: {at(decided[-1], 'cotrain', 'why') or 'no reason given'}."
    )


def _drafted(run: Run) -> list[Row]:
    return [row for row in run.steps if row.get("k") and figure(row.get("acceptance_length")) is not None]


def _why_no_drafts(run: Run) -> str:
    if run.of("spec", "method") == "none":
        return "this run does not speculate, so nothing was drafted."
    if not run.steps:
        return "no step was finished, so there is no acceptance to show."
    return "no step of it speculated: the drafter was not accepted by the canary, or every step was a plain probe."


def _who(run: Run, runs: Sequence[Run]) -> str:
    return f"{run.label}: " if len(runs) > 1 else ""


# ---- speedup -------------------------------------------------------------------------------------------------------


def _speedup(runs: Sequence[Run]) -> Iterable[Block]:
    compared = [run for run in runs if _realised(run) is not None or _predicted(run)]
    for run in runs:
        if run.of("spec", "method") == "none":
            yield Text(f"{_who(run, runs)}this run does not speculate, so there is no speedup to measure.", "missing")
            continue
        if _realised(run) is None:
            why = "no plain probe ran" if not _probes(run) else "probes and speculative steps are not both there yet"
            yield Text(f"{_who(run, runs)}{why}, so there is no realised speedup.", "missing")
        if not _predicted(run):
            why = "rollouts overlap training (rl.lag)" if run.of("rl", "lag") else "plain decoding was not seen yet"
            yield Text(f"{_who(run, runs)}{why}, so there is no forecast.", "missing")
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
            charts.line(axes, xs, ys, "predicted for this step", 1, linestyle="none" if len(xs) <= 40 else "-")
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
                    low[0], low[1], high[1], color=charts.SERIES[0], alpha=0.18, linewidth=0, label="95 %"
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
    realised = _realised(run) or {}
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


def _realised(run: Run) -> Row | None:
    return next((row["realised"] for row in reversed(run.steps) if isinstance(row.get("realised"), dict)), None)


def _predicted(run: Run) -> bool:
    return any(figure(row.get("predicted_generation_speedup")) is not None for row in run.steps)


def _probes(run: Run) -> int:
    """Plain steps among which speculative ones could be compared; the first is not counted by the run either."""
    return sum(row.get("k") == 0 and row["step"] > 1 for row in run.steps)


# ---- checks --------------------------------------------------------------------------------------------------------


def _checks(runs: Sequence[Run]) -> Iterable[Block]:
    for run in runs:
        raised = alarms(run)
        if raised:
            yield Text(f"{_who(run, runs)}{'; '.join(raised)}.", "warning")
        elif run.steps:
            yield Text(f"{_who(run, runs)}no losslessness alarm and no canary fault in {len(run.steps)} steps.")
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
        charts.from_zero(axes)
        axes.set_ylabel("nats a token")

    return Chart(
        "gap",
        "Engine against trainer",
        "Mean distance of the engine's log-probabilities from the trainer's, over all steps so far; drafts should "
        "not make it larger than it is for plain rollouts.",
        draw,
    )


def setting_rows(run: Run) -> list[tuple[str, str]]:
    """What was run, for the table of settings."""
    r: Any = run.of
    spec = r("spec", "method", otherwise="?")
    how = "none" if spec == "none" else f"{spec}, k = {r('spec', 'k')}, {r('spec', 'draft_sample_method')} drafts"
    return [
        ("policy", str(r("model", "path", otherwise="?"))),
        ("prompts", str(r("data", "recipe", otherwise="?"))),
        ("speculation", how),
        ("drafter", "" if spec == "none" else str(r("spec", "drafter", otherwise="grown in the run"))),
        ("co-training", "" if spec != "eagle3" else str(r("cotrain", "mode", otherwise="?"))),
        ("batch", f"{r('rl', 'prompts_per_step')} prompts × {r('sampling', 'n')} responses a step"),
        ("sampling", f"T = {r('sampling', 'temperature')}, at most {r('sampling', 'max_tokens')} tokens"),
        ("loss, learning rate", f"{r('rl', 'loss')}, {r('policy', 'lr')}"),
    ]
