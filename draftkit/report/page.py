"""A report as one HTML page: no script, no address, nothing that is loaded. Every text of a run is escaped.

Styles stand in `page.css` beside this file and are written into the page.
"""

from __future__ import annotations

import html as escaping
from collections.abc import Iterable
from functools import singledispatch
from importlib import resources
from typing import Any

from draftkit import __version__
from draftkit.report import charts, drafts
from draftkit.report.document import Block, Chart, Code, Drafts, Facts, Report, Table, Text

TURNING = "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))  # the reading order
MANY_COLUMNS = 8  # a table with more is set closer
MARKS = {"accepted": "accepted draft", "rejected": "rejected draft", "own": "verifier's own", "first": "verifier's own"}


def html(report: Report) -> str:
    style = resources.files("draftkit.report").joinpath("page.css").read_text(encoding="utf-8")
    contents = "".join(
        f'<li><a href="#s{i}">{esc(section.title)}</a></li>' for i, section in enumerate(report.sections)
    )
    notes = "".join(map(_block, report.notes))
    sections = "\n".join(
        f'<section id="s{i}">\n<h2>{esc(section.title)}</h2>\n{_blocks(section.blocks)}\n</section>'
        for i, section in enumerate(report.sections)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="generator" content="draftkit {esc(__version__)}">
<link rel="icon" href="data:,">
<title>{esc(report.title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{esc(report.title)}</h1>
<p class="headline">{esc(report.headline)}</p>
{notes}
<nav aria-label="Contents"><ul>{contents}</ul></nav>
</header>
<main>
{sections}
</main>
<footer><p>Made by draftkit {esc(__version__)} from the files of the runs alone.</p></footer>
</body>
</html>
"""


def esc(value: str) -> str:
    return escaping.escape(_visible(value), quote=True)


def _visible(value: str) -> str:
    """Without characters that no page may hold (controls, lone surrogates), nor those that turn the reading order."""
    shown = "".join("\N{REPLACEMENT CHARACTER}" if _hidden(c) else c for c in value)
    return shown.encode("utf-8", "replace").decode()


def _hidden(c: str) -> bool:
    return (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or c in TURNING


def _blocks(blocks: Iterable[Block]) -> str:
    """Charts that follow each other stand side by side where there is room, as samples of drafts do; a narrow table
    fills the place beside the last of an odd number of charts."""
    parts: list[str] = []
    waiting, held = list(blocks), 0
    while waiting:
        kind = type(waiting[0])
        size = next((i for i, block in enumerate(waiting) if type(block) is not kind), len(waiting))
        if kind is Chart and size % 2 and size < len(waiting) and _narrow(waiting[size]):
            held = 1
        inner = "\n".join(map(_block, waiting[: size + held]))
        name = {Chart: "charts", Drafts: "samples"}.get(kind)
        parts.append(f'<div class="{name}">\n{inner}\n</div>' if name else inner)
        del waiting[: size + held]
        held = 0
    return "\n".join(parts)


def _narrow(block: Block) -> bool:
    return isinstance(block, Table) and len(block.columns) <= 4


@singledispatch
def _block(block: Any) -> str:
    raise TypeError(block)


@_block.register
def _(block: Text) -> str:
    if block.tone == "heading":
        return f"<h3>{esc(block.text)}</h3>"
    return f'<p class="{block.tone}">{esc(block.text)}</p>'


@_block.register
def _(block: Code) -> str:
    return f'<pre tabindex="0">{esc(block.text)}</pre>'


@_block.register
def _(block: Facts) -> str:
    rows = "".join(
        f'<div><dt>{esc(f.label)}</dt><dd><span class="value">{esc(f.value) or "–"}</span>'
        f'<span class="detail">{esc(f.detail)}</span></dd></div>'
        for f in block.facts
    )
    return f'<dl class="facts">{rows}</dl>'


@_block.register
def _(block: Table) -> str:
    def cells(row: tuple[str, ...], tag: str) -> str:
        scope, number = ' scope="col"' if tag == "th" else "", ' class="n"'
        return "".join(
            f"<{tag}{scope}{'' if i < block.left else number}>{esc(cell)}</{tag}>" for i, cell in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in block.rows)
    caption = f'<p class="caption">{esc(block.caption)}</p>' if block.caption else ""
    wide = ' class="wide"' if len(block.columns) > MANY_COLUMNS else ""
    return (
        f'<div class="table"><div class="scroll" tabindex="0" role="region" aria-label="table"><table{wide}>\n'
        f"<thead><tr>{cells(block.columns, 'th')}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>{caption}</div>"
    )


@_block.register
def _(block: Chart) -> str:
    label = esc(f"{block.title}. {block.caption}")
    return (
        f'<figure><h3>{esc(block.title)}</h3>\n<div role="img" aria-label="{label}">{charts.svg(block)}</div>\n'
        f"<figcaption>{esc(block.caption)}</figcaption></figure>"
    )


@_block.register
def _(block: Drafts) -> str:
    tags = {"accepted": "ins", "rejected": "del", "own": "span", "first": "span"}
    text = "".join(
        f'<{tags[kind]} class="{kind}" title="{MARKS[kind]}">{_token(kind, piece)}</{tags[kind]}>'
        for kind, piece in drafts.pieces(block.row)
    )
    asked = drafts.prompt(block.row)
    question = f'<p class="prompt">{esc(asked)}</p>' if asked else ""
    return f'<article class="drafts"><h3>{esc(block.title)}</h3>{question}<p class="answer">{text}</p></article>'


def _token(kind: str, piece: str) -> str:
    """A line break is shown as a sign too; a rejected one is no more than that."""
    after = "" if kind == "rejected" else "\n"
    return esc(piece).replace("\n", f'<span class="br">⏎</span>{after}')
