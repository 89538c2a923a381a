"""A report as Markdown, with its charts as PNG files beside it. Accepted drafts are `<ins>`, rejected ones `<del>`,
which Markdown's own marks cannot be in the middle of a word; whatever a run holds is escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from functools import singledispatch
from typing import Any

from draftkit.report import charts, drafts
from draftkit.report.document import Chart, Code, Drafts, Facts, Report, Table, Text

FIGURES = "figures"


def text(report: Report) -> str:
    lines = [f"# {plain(report.title)}", "", f"**{plain(report.headline)}**", ""]
    lines += [f"> **Note.** {plain(note.text)}\n" for note in report.notes]
    for section in report.sections:
        lines += [f"## {plain(section.title)}", ""]
        lines += [f"{_block(block)}\n" for block in section.blocks]
    return "\n".join(lines).rstrip() + "\n"


def images(report: Report) -> Iterator[tuple[str, bytes]]:
    """(path beside the Markdown file, PNG)"""
    for chart in report.charts:
        yield f"{FIGURES}/{chart.name}.png", charts.png(chart)


def plain(value: str) -> str:
    """Text that Markdown reads as nothing but text; dots, dashes and brackets only where they could mean something."""
    escaped = html.escape(value, quote=False).replace("\n", " ")
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", escaped)


@singledispatch
def _block(block: Any) -> str:
    raise TypeError(block)


@_block.register
def _(block: Text) -> str:
    if block.tone == "heading":
        return f"### {plain(block.text)}"
    return f"*{plain(block.text)}*" if block.tone == "missing" else plain(block.text)


@_block.register
def _(block: Code) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", block.text)), default=0))
    return f"{fence}\n{block.text}\n{fence}"


@_block.register
def _(block: Facts) -> str:
    return "\n".join(
        f"- {plain(f.label)}: **{plain(f.value)}**" + (f" ({plain(f.detail)})" if f.detail else "") for f in block.facts
    )


@_block.register
def _(block: Table) -> str:
    left = "|".join("---" if i < block.left else "---:" for i in range(len(block.columns)))
    lines = [f"| {' | '.join(map(plain, block.columns))} |", f"|{left}|"]
    lines += [f"| {' | '.join(map(plain, row))} |" for row in block.rows]
    return "\n".join([*lines, *(["", plain(block.caption)] if block.caption else [])])


@_block.register
def _(block: Chart) -> str:
    return f"**{plain(block.title)}**\n\n![{plain(block.title)}]({FIGURES}/{block.name}.png)\n\n{plain(block.caption)}"


@_block.register
def _(block: Drafts) -> str:
    marks = {"accepted": "ins", "rejected": "del"}
    marked = []
    for kind, run in drafts.merged(drafts.pieces(block.row)):
        mark, run = marks.get(kind), run.replace("\n", " ⏎ ")
        marked.append(f"<{mark}>{plain(run)}</{mark}>" if mark else plain(run))
    asked = plain(drafts.prompt(block.row).strip())
    return f"**{plain(block.title)}**\n\n> {asked}\n\n{''.join(marked).strip()}"
