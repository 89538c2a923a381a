"""What `train-drafter`, `--compare` and `prepare` runs show: the loss, acceptance as training forecasts it, parity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from draftkit.report import charts
from draftkit.report.acceptance import named_cells
from draftkit.report.document import Block, Chart, Fact, Facts, Section, Table, Text, at, figure, shown, spread
from draftkit.report.runs import Row, Run, said

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# ---- train-drafter -------------------------------------------------------------------------------------------------


def sections(runs: Sequence[Run]) -> list[Section]:
    return [
        Section("Training the drafter", tuple(_curves(runs))),
        Section("Held-out figures, and what vLLM served", tuple(_held_out(runs))),
    ]


def facts(run: Run) -> Facts:
    results, steps = run.results or {}, run.steps
    tokens = results.get("tokens") or sum(figure(row.get("tokens")) or 0 for row in steps)
    found = [Fact("steps", str(len(steps)), f"{tokens:,.0f} tokens")]
    if steps:
        found.append(Fact("loss, last step", shown(steps[-1].get("loss")), "nats"))
    for key, words in (("heldout", "rollout temperature"), ("heldout_greedy", "T = 0")):
        length = figure(at(results, key, "walk_acceptance_length"))
        if length is not None:
            found.append(Fact("held-out acceptance length", shown(length), f"{words}, greedy drafts"))
    speed = results.get("tokens_per_s")
    if figure(speed) is not None:
        found.append(Fact("training speed", shown(speed, ",.0f"), "tokens/s"))
    return Facts(tuple(found))


def headline(run: Run) -> str:
    length = figure(at(run.results, "heldout", "walk_acceptance_length"))
    if length is not None:
        return f"held-out acceptance length {length:.2f} (greedy drafts, rollout temperature)"
    return (
        f"loss {shown(run.steps[-1].get('loss'))} after {len(run.steps)} steps" if run.steps else "no step was finished"
    )


def _curves(runs: Sequence[Run]) -> Iterable[Block]:
    if not any(run.steps for run in runs):
        yield Text("No step was finished, so there is no curve.", "missing")
        return

    def loss(axes: Axes) -> None:
        for place, run in enumerate(runs):
            xs, ys = charts.points(run.steps, lambda r: r["step"], lambda r: r.get("loss"))
            charts.line(axes, xs, ys, run.label if len(runs) > 1 else "training", place)
            held = [row for row in run.metrics if isinstance(row.get("heldout"), dict)]
            xs, ys = charts.points(held, lambda r: r.get("step"), lambda r: at(r, "heldout", "loss"))
            if xs:
                style = {"linestyle": "none", "marker": "D", "markersize": 6}
                place = place if len(runs) > 1 else 1
                charts.line(axes, xs, ys, f"{run.label}, held out" if len(runs) > 1 else "held out", place, **style)
        charts.whole_steps(axes)
        axes.set_ylabel("loss")

    grouped = (
        "; long runs are averaged in groups of steps" if any(len(r.steps) > charts.MOST_POINTS for r in runs) else ""
    )
    yield Chart(
        "loss",
        "Loss",
        f"Loss of the first draft token, held-out evaluations as diamonds; lower is better{grouped}.",
        loss,
    )
    for number, run in enumerate(runs):
        if any(isinstance(row.get("expected_acceptance_sampled"), list) for row in run.steps):
            yield _acceptance_chart(run, number, alone=len(runs) == 1)
        else:
            yield Text(said(run, runs, "no acceptance was logged."), "missing")


def _acceptance_chart(run: Run, number: int, *, alone: bool) -> Chart:
    field = "expected_acceptance_sampled"
    depth = max(len(row.get(field) or []) for row in run.steps)

    def draw(axes: Axes) -> None:
        for i in range(depth):
            here = lambda r, i=i: r[field][i] if i < len(r.get(field) or []) else None  # noqa: E731
            xs, ys = charts.points(run.steps, lambda r: r["step"], here)
            charts.line(axes, xs, ys, f"draft {i + 1}", i)
        xs, ys = charts.points(run.steps, lambda r: r["step"], lambda r: r.get("vocab_ceiling"))
        if xs:
            axes.plot(
                xs, ys, color=charts.INK, linewidth=1, linestyle=(0, (4, 3)), label="ceiling of the draft vocabulary"
            )
        charts.whole_steps(axes)
        axes.set_ylim(0, 1)
        axes.set_ylabel("expected acceptance")

    title = "Expected acceptance of sampled drafts" + ("" if alone else f": {run.label}")
    caption = (
        "Chance that a sampled draft is accepted, given that those before it were; no drafter passes the dashed line."
    )
    return Chart(f"expected-{number}", title, caption, draw)


HELD_OUT = (
    ("loss", "loss, nats"),
    ("simulated_acceptance_length", "acceptance length, sampled drafts"),
    ("walk_acceptance_length", "acceptance length, greedy drafts"),
    ("vocab_ceiling", "ceiling of the draft vocabulary"),
    ("verifier_max_p", "verifier's mean highest probability"),
)


def _held_out(runs: Sequence[Run]) -> Iterable[Block]:
    having = [run for run in runs if isinstance(at(run.results, "heldout"), dict)]
    for run in runs:
        if run not in having:
            yield Text(said(run, runs, "training is not finished, so there are no final held-out figures."), "missing")
    if having:
        columns = ["held out"]
        for run in having:
            who = f"{run.label}, " if len(runs) > 1 else ""
            columns += [f"{who}rollout temperature", f"{who}T = 0"]
        rows = [
            (
                words,
                *(
                    shown(at(run.results, part, name), ".3f")
                    for run in having
                    for part in ("heldout", "heldout_greedy")
                ),
            )
            for name, words in HELD_OUT
        ]
        yield Table(
            tuple(columns),
            tuple(rows),
            "On held-out answers, sampled and greedy ones. Acceptance length: tokens a round.",
        )
    checked = [run for run in having if isinstance(at(run.results, "parity"), dict)]
    if not checked:
        yield Text("No parity check with vLLM is in these runs.", "missing")
        return
    rows = [_parity_row(run) for run in checked]
    columns = (
        *("run", "first proposals that agree", "length at T = 0, predicted", "served"),
        *("first draft accepted, predicted", "served", "z"),
    )
    yield Table(
        columns, tuple(rows), "The drafter as PyTorch trained it against the one that vLLM serves. z: standard errors."
    )


def _parity_row(run: Run) -> tuple[str, ...]:
    parity: Any = at(run.results, "parity")
    row = [run.label, shown(parity.get("first_proposal_agreement"), ".1%")]
    for name in ("greedy_acceptance_length", "sampled_first_acceptance"):
        row += [shown(at(parity, name, side), ".3f") for side in ("predicted", "served")]
    return (*row, shown(at(parity, "sampled_first_acceptance", "z"), "+.1f"))


def setting_rows(run: Run) -> list[tuple[str, str]]:
    r: Any = run.of
    trained = figure((run.results or {}).get("trained_parameters"))
    loss = r("train", "loss", otherwise={})
    return [
        ("verifier", str(r("model", "path", otherwise="?"))),
        ("kind", str(r("drafter", "kind", otherwise="?"))),
        ("trained parameters", "" if trained is None else f"{trained / 1e6:.1f} M"),
        ("loss", ", ".join(f"{n} {w:g}" for n, w in loss.items()) if isinstance(loss, dict) else str(loss)),
        ("test-time-training steps", str(r("train", "ttt_steps", otherwise="?"))),
        ("passes", str(r("train", "epochs", otherwise="?"))),
    ]


# ---- --compare -----------------------------------------------------------------------------------------------------


def comparison(run: Run) -> Section:
    drafters = (run.results or {}).get("drafters")
    if not isinstance(drafters, list):
        return Section(
            "Drafters compared",
            (Text("The comparison is not finished; its parts follow as far as they went.", "missing"),),
        )
    drafters = [d for d in drafters if isinstance(d, dict) and isinstance(d.get("cells"), list)]
    rows = [
        (
            str(d.get("kind", "?")), str(d.get("method", "?")),
            shown((figure(d.get("trained_parameters")) or 0) / 1e6, ".1f"), shown(d.get("train_s"), ".0f"),
            shown(d.get("heldout_acceptance_length")),
        )
        for d in drafters
    ]  # fmt: skip
    note = "What each drafter cost to train, and its acceptance length on held-out answers (greedy drafts)."
    table = Table(("drafter", "method", "trained, M", "training, s", "held-out length"), tuple(rows), note, left=2)
    cells = tuple(map(_cell_row, _side_by_side(drafters)))
    columns = (
        "T",
        "requests",
        "k",
        "drafter",
        "tokens a round",
        "95 %",
        "round, plain steps",
        "speedup, ×",
        "95 %",
        "verdict",
    )
    return Section(
        "Drafters compared", (table, Table(columns, cells, "The same cell of each drafter side by side.", left=0))
    )


def _cell_row(pair: tuple[Row, Row]) -> tuple[str, ...]:
    cell, drafter = pair
    where = (f"{cell['temperature']:g}", str(cell["concurrency"]), str(cell["k"]), str(drafter.get("kind", "?")))
    length, ci = cell.get("acceptance_length"), cell.get("acceptance_length_ci")
    gain, gain_ci = cell.get("speedup"), cell.get("speedup_ci")
    row = (shown(length), spread(ci), shown(cell.get("round_cost")), shown(gain), spread(gain_ci))
    return (*where, *row, str(cell.get("verdict", "")))


def _side_by_side(drafters: Sequence[Row]) -> list[tuple[Row, Row]]:
    pairs = [(cell, drafter) for drafter in drafters for cell in named_cells(drafter["cells"]) if cell["k"]]
    return sorted(pairs, key=lambda pair: (pair[0]["temperature"], pair[0]["concurrency"], pair[0]["k"]))


def comparison_headline(run: Run) -> str:
    """The fastest drafter in any cell, as the comparison itself says it."""
    return str((run.results or {}).get("headline") or "the comparison is not finished")


# ---- prepare -------------------------------------------------------------------------------------------------------


def corpus_section(run: Run) -> Section:
    results = run.results or {}
    if not results:
        return Section("Corpus", (Text("The corpus is not finished, so it has no summary.", "missing"),))
    rows = [
        *((f"prompts, {name.replace('_', ' ')}", shown(n, ",.0f")) for name, n in _items(results, "prompts")),
        *((f"response tokens, {name}", shown(n, ",.0f")) for name, n in _items(results, "response_tokens")),
        ("prompt tokens", shown(results.get("prompt_tokens"), ",.0f")),
        *((f"answers that ended by {name}", shown(n, ",.0f")) for name, n in _items(results, "finish_reasons")),
        *((f"mean reward, {name}", shown(n, ".3f")) for name, n in _items(results, "reward_mean")),
    ]
    lengths = results.get("lengths")
    blocks: list[Block] = [Table(("", "number"), tuple(rows), "What the corpus holds.")]
    if isinstance(lengths, dict):
        names = list(dict.fromkeys(name for of in lengths.values() if isinstance(of, dict) for name in of))
        of = tuple((str(part), *(shown(at(lengths, part, n), ".0f") for n in names)) for part in lengths)
        blocks.append(Table(("tokens", *names), of, "Lengths in tokens: percentiles over prompts and over answers."))
    return Section("Corpus", tuple(blocks))


def _items(results: Row, name: str) -> list[tuple[str, Any]]:
    found = results.get(name)
    return [(str(key), value) for key, value in found.items()] if isinstance(found, dict) else []


def corpus_headline(run: Run) -> str:
    tokens = sum(figure(n) or 0 for _, n in _items(run.results or {}, "response_tokens"))
    return f"{tokens:,.0f} response tokens" if run.results else "the corpus is not finished"
