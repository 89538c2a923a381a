"""Samples of drafts: which of a run's `samples.jsonl` are shown, and one as a run of marked pieces of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from draftkit.report.document import Block, Drafts, Section, Text
from draftkit.report.runs import Row, Run, said

SHOWN = 12  # responses of a report
LONGEST_PIECE = 80  # characters of one token
LONGEST_PROMPT = 700  # characters; of a longer one its end, where the question stands
LONGEST_RESPONSE = 220  # rounds
KINDS = ("first", "accepted", "rejected", "own")
LEGEND = (
    "Accepted drafts are underlined on a tint, rejected ones struck through on a hatched ground, and plain text is the "
    "verifier's own: its first token, its correction after a rejection, its bonus after a round that was accepted "
    "whole. What is struck through is not part of the answer."
)


def section(runs: Sequence[Run]) -> Section:
    blocks: list[Block] = []
    having = [run for run in runs if _rows(run)]
    if having:
        blocks.append(Text(LEGEND))
    for run in having:
        who = f"{run.label}: " if len(runs) > 1 else ""
        rows = _rows(run)[: max(2, SHOWN // len(having))]
        blocks += [Drafts(who + _title(row), row) for row in rows]
    for run in runs:
        if run not in having:
            blocks.append(Text(said(run, runs, _why(run)), "missing"))
    return Section("Drafts, token by token", tuple(blocks))


def _why(run: Run) -> str:
    if run.verb == "rl" and run.of("spec", "method") == "none":
        return "this run does not speculate, so it has no drafts to show."
    return "it recorded no samples of drafts (rl takes them at its evaluations, eval-acceptance at its end)."


def _rows(run: Run) -> list[Row]:
    """Those that are whole. The file holds the first and the last evaluation of an rl run."""
    return [row for row in run.samples if isinstance(row.get("rounds"), list) and all(map(_is_round, row["rounds"]))]


def _is_round(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("drafted"), list):
        return False
    accepted = found.get("accepted")
    return isinstance(accepted, int) and 0 <= accepted <= len(found["drafted"]) and "own" in found


def _title(row: Row) -> str:
    step = row.get("step")
    parts = [] if step is None else ["before the first step" if step == 0 else f"step {step}"]
    temperature = row.get("temperature")
    parts += [f"T = {temperature:g}"] if isinstance(temperature, int | float) else []
    parts += [f"k = {row.get('k', '?')}"]
    rounds, accepted = len(row["rounds"]), sum(r["accepted"] for r in row["rounds"])
    if rounds:
        parts.append(f"{1 + accepted / rounds:.2f} tokens a round in {rounds} rounds")
    return ", ".join(parts)


def pieces(row: Row) -> Iterator[tuple[str, str]]:
    """(kind of KINDS, text) in the order of the answer; the verifier's token stands after the rejected drafts."""
    if row.get("first") is not None:
        yield "first", short(row["first"])
    for found in row["rounds"][:LONGEST_RESPONSE]:
        judged = found["drafted"] if found["own"] is not None else found["drafted"][: found["accepted"]]
        for i, draft in enumerate(judged):  # what the end of the answer cut off was neither accepted nor rejected
            yield ("accepted" if i < found["accepted"] else "rejected"), short(draft)
        if found["own"] is not None:
            yield "own", short(found["own"])
    left = len(row["rounds"]) - LONGEST_RESPONSE
    if left > 0:
        yield "own", f" … {left} more rounds"


def prompt(row: Row) -> str:
    text = row.get("prompt")
    text = text if isinstance(text, str) else ""
    return text if len(text) <= LONGEST_PROMPT else "… " + text[-LONGEST_PROMPT:]


def short(text: Any) -> str:
    """A token's text, one that is very long cut."""
    text = str(text)
    return text if len(text) <= LONGEST_PIECE else f"{text[:LONGEST_PIECE]}…"


def merged(found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours of a kind as one: for a form of text that cannot mark every token."""
    runs: list[tuple[str, str]] = []
    for kind, text in found:
        kind = "own" if kind == "first" else kind
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + text)
        else:
            runs.append((kind, text))
    return runs
