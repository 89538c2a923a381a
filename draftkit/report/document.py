"""The nouns of a report, whatever it is written as: sections of texts, figures, tables, facts and coloured drafts.

Texts are plain; whoever writes them out escapes them. Leaves out layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Text:
    """tone: "plain"; "heading"; "missing" for what a run does not hold; "warning" for what a reader must know
    first."""

    text: str
    tone: str = "plain"


@dataclass(frozen=True, slots=True)
class Code:
    text: str


@dataclass(frozen=True, slots=True)
class Fact:
    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """The first `left` columns are words; units stand in the head."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    left: int = 1


@dataclass(frozen=True, slots=True)
class Chart:
    """draw(axes) puts it on one matplotlib axes. name: of its file, unique in a report. caption: what it shows and how
    to read it, in one sentence."""

    name: str
    title: str
    caption: str
    draw: Callable[[Axes], None]


@dataclass(frozen=True, slots=True)
class Drafts:
    """A row of `samples.jsonl`, with a title that says where it is from."""

    title: str
    row: dict[str, Any]


Block = Text | Code | Facts | Table | Chart | Drafts


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Report:
    title: str
    headline: str
    notes: tuple[Text, ...]  # about the runs as a whole: unfinished, damaged, alarms
    sections: tuple[Section, ...]

    @property
    def charts(self) -> list[Chart]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Chart)]


# ---- figures in words ----------------------------------------------------------------------------------------------


def figure(value: Any) -> float | None:
    """The number that `value` is; None for what is no finite number (a null, a NaN, a damaged field)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def shown(value: Any, how: str = ".2f", unit: str = "") -> str:
    number = figure(value)
    return "" if number is None else f"{number:{how}}{unit}"


def spread(interval: Any, how: str = ".2f") -> str:
    """`1.15-1.67`; empty for no interval."""
    if not isinstance(interval, Sequence) or isinstance(interval, str) or len(interval) != 2:
        return ""
    low, high = map(figure, interval)
    return "" if low is None or high is None else f"{low:{how}}-{high:{how}}"


def mean(values: Sequence[Any]) -> float | None:
    """Of those that are numbers."""
    numbers = [number for value in values if (number := figure(value)) is not None]
    return sum(numbers) / len(numbers) if numbers else None


def at(row: Any, *path: str) -> Any:
    """row["a"]["b"], None where a part of the way is missing."""
    for name in path:
        row = row.get(name) if isinstance(row, dict) else None
    return row
