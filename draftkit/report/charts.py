"""Drawing: a `Chart` as SVG for the page and as PNG for Markdown, and the few forms that the charts of a report have.

The SVG takes its colours from the page's variables, so that it follows light and dark; its texts stay texts. Both are
byte for byte the same for the same files. The palette is Okabe and Ito's, which the colour-blind tell apart; series
differ in marker or dash as well.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftkit.report.document import Chart, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 5.6, 3.3  # inches; one panel is as wide as a phone shows legibly
LEGEND_LETTERS = 84  # in one row
LONGEST_LABEL = 44  # characters
FEW = 40  # points that are each marked
MOST_POINTS = 240  # of a line; more steps than that are averaged in groups
INK, RULE = "#0a0b0c", "#d0d3d7"
PALETTE = {
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "vermillion": "#d55e00",
    "purple": "#cc79a7",
    "sky": "#56b4e9",
    "brown": "#8c6d31",
    "grey": "#8a9099",
    "slate": "#5b6470",
    "pale": "#b9bfc6",
}
SERIES = tuple(PALETTE[name] for name in ("blue", "orange", "green", "vermillion", "purple", "sky", "brown", "slate"))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", ":", "-.")
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a label is a name that somebody chose
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "grid.alpha": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "path.simplify": True,
}

# ---- rendering -----------------------------------------------------------------------------------------------------


def svg(chart: Chart) -> str:
    """For inline use: no ids but those it refers to, which are its own; no metadata, no address."""
    text = _render(chart, "svg", {"Date": None, "Creator": None, "Format": None, "Type": None}).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"font-family:[^;\"]*;?|font: [\d.]+px [^;\"]*", _font, text)
    used = set(re.findall(r'(?:xlink:href="|url\()#([\w-]+)', text))
    own = hashlib.sha256(chart.name.encode()).hexdigest()[:6]
    text = re.sub(r' id="([\w.-]+)"', lambda m: f' id="{own}{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(xlink:href="|url\()#([\w-]+)', rf"\1#{own}\2", text)
    for name, colour in (*PALETTE.items(), ("ink", INK), ("rule", RULE)):
        text = text.replace(colour, f"var(--{name})")
    return text.replace("<svg", '<svg class="chart" aria-hidden="true" focusable="false"', 1).strip()


def _font(match: re.Match[str]) -> str:
    """The page's own font, at the size drawn."""
    size = re.match(r"font: ([\d.]+px)", match[0])
    return f"font-size: {size[1]}" if size else ""


def png(chart: Chart) -> bytes:
    return _render(chart, "png", {"Software": None}, dpi=150, facecolor="white")


def _render(chart: Chart, form: str, metadata: dict[str, Any], **options: Any) -> bytes:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"svg.hashsalt": chart.name}):
        drawn = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        FigureCanvasAgg(drawn)
        axes = drawn.subplots()
        chart.draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            columns = LEGEND_LETTERS // (max(map(len, labels)) + 6)
            drawn.legend(handles, labels, loc="outside lower center", ncols=max(1, min(len(labels), columns)))
        image = io.BytesIO()
        drawn.savefig(image, format=form, metadata=metadata, transparent=form == "svg", **options)
        return image.getvalue()


# ---- forms ---------------------------------------------------------------------------------------------------------


def points(rows: Sequence[Any], x: Any, y: Any) -> tuple[list[float], list[float]]:
    """(x(row), y(row)) of the rows where both are numbers, averaged in groups where there are very many."""
    pairs = [(a, b) for row in rows if (a := figure(x(row))) is not None and (b := figure(y(row))) is not None]
    size = -(-len(pairs) // MOST_POINTS) if pairs else 1
    groups = [pairs[i : i + size] for i in range(0, len(pairs), size)]
    return tuple([sum(p[i] for p in group) / len(group) for group in groups] for i in (0, 1))  # type: ignore[return-value]


def line(axes: Axes, xs: Sequence[float], ys: Sequence[float], label: str, place: int, **options: Any) -> None:
    """One series; markers where they do not run together."""
    few = len(xs) <= FEW
    style = {"marker": MARKERS[place % len(MARKERS)] if few else None, "color": SERIES[place % len(SERIES)]}
    axes.plot(xs, ys, **(style | {"linestyle": DASHES[place // len(SERIES) % 4]} | options), label=short(label))


def short(label: str) -> str:
    """For a legend, which leaves out what begins with an underscore; of a long name the end."""
    label = label if len(label) <= LONGEST_LABEL else f"…{label[1 - LONGEST_LABEL :]}"
    return f" {label}" if label.startswith("_") else label


def even(axes: Axes, label: str = "break-even") -> None:
    axes.axhline(1, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), label=label)


def from_base(axes: Axes, base: float = 0.0) -> None:
    """The vertical axis from where nothing is, with room above the highest point."""
    axes.set_ylim(base, base + 1.08 * max(axes.dataLim.y1 - base, 1e-9))


def whole_steps(axes: Axes, label: str = "step") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.set_xlabel(label)


def with_bars(
    axes: Axes,
    xs: Sequence[float],
    ys: Sequence[float],
    intervals: Sequence[Any],
    label: str,
    place: int,
    **options: Any,
) -> None:
    """Points with 95 % bars; no bar where there is no interval."""
    low, high = [], []
    for y, interval in zip(ys, intervals, strict=True):
        ends = [figure(end) for end in interval] if isinstance(interval, Sequence) and len(interval) == 2 else [None]
        lower, upper = (y, y) if None in ends else ends
        low.append(max(0.0, y - lower))
        high.append(max(0.0, upper - y))
    colour, marker = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
    style = {"marker": marker, "color": colour, "capsize": 3, "elinewidth": 1.1}
    axes.errorbar(xs, ys, [low, high], **(style | options), label=short(label))


def stacked_area(axes: Axes, xs: Sequence[float], layers: Sequence[tuple[str, str, Sequence[float]]]) -> None:
    """layers: (label, colour, heights) from the bottom. Bars where steps are few, else an area."""
    bottom = [0.0] * len(xs)
    for label, colour, heights in layers:
        top = [b + h for b, h in zip(bottom, heights, strict=True)]
        if len(xs) <= FEW:
            axes.bar(xs, heights, bottom=bottom, width=0.86, color=colour, label=label, edgecolor="none")
        else:
            axes.fill_between(xs, bottom, top, color=colour, label=label, linewidth=0)
        bottom = top
    axes.margins(x=0.02)
    axes.set_ylim(0, 1.04 * max([1e-9, *bottom]))
