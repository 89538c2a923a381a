"""A run directory as a reader finds it: whole, unfinished, copied without its neighbours, or damaged.

Nothing is locked, written or looked up elsewhere. What cannot be read is named in `problems` and left out; only a
directory that is no run at all is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from draftkit.errors import UserError
from draftkit.evals.acceptance import results_from_rows
from draftkit.evals.samples import FILE as SAMPLES
from draftkit.run import SCHEMA

Row = dict[str, Any]
REPORTED = ("rl", "eval-acceptance", "train-drafter", "prepare")


@dataclass(frozen=True)
class Run:
    """label: short and unique among the runs of a report. steps: metrics rows by what is in them. results: None while
    unfinished, but for the table of an eval-acceptance, which what was measured so far gives. parts: of a
    `--compare`, the runs inside it."""

    path: Path
    verb: str
    label: str
    recipe: Row
    env: Row
    command: str
    metrics: tuple[Row, ...]
    results: Row | None
    samples: tuple[Row, ...]
    problems: tuple[str, ...]
    finished: bool
    parts: tuple[Run, ...] = ()

    @cached_property
    def steps(self) -> list[Row]:
        """Rows of a step, by step; of one that was logged twice (a run killed and resumed) the later line."""
        rows = {row["step"]: row for row in self.metrics if _counts(row.get("step")) and "heldout" not in row}
        return [rows[step] for step in sorted(rows)]

    @property
    def is_comparison(self) -> bool:
        return bool(self.parts) or (self.results or {}).get("schema") == "draftkit.compare/1"

    def of(self, *path: str, otherwise: Any = None) -> Any:
        """A setting of the recipe."""
        value: Any = self.recipe
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return otherwise if value is None else value


def _counts(step: Any) -> bool:
    return isinstance(step, int) and not isinstance(step, bool) and step > 0


def said(run: Run, runs: Sequence[Run], text: str) -> str:
    """A sentence about one of the runs: of several it says which."""
    return f"{run.label}: {text}" if len(runs) > 1 else text[0].upper() + text[1:]


def read_all(paths: Sequence[Path]) -> list[Run]:
    """Each run once, in the order given, with labels that tell them apart."""
    seen: dict[Path, Path] = {}
    for path in paths:
        seen.setdefault(path.resolve(), path)
    return labelled([read(path) for path in seen.values()])


def labelled(runs: Sequence[Run]) -> list[Run]:
    """The last part of each path, as many as it takes."""
    for depth in range(1, 8):
        labels = ["/".join(run.path.resolve().parts[-depth:]) for run in runs]
        if max(Counter(labels).values(), default=1) == 1:
            break
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def read(path: Path) -> Run:
    config = _config(path)
    problems: list[str] = []
    verb = config["verb"]
    results = _object(path / "results.json", json.loads, problems)
    metrics = _lines(path / "metrics.jsonl", problems)
    again = sum(n - 1 for n in Counter(row["step"] for row in metrics if _counts(row.get("step"))).values() if n > 1)
    if again and verb == "rl":
        problems.append(f"{again} steps were logged more than once (a resumed run): the later line counts.")
    compared = isinstance(config.get("inputs"), dict) and config["inputs"].get("compare") is not None
    parts = _parts(path) if compared else ()
    finished = results is not None
    if not finished:
        problems.append(_unfinished(verb, metrics))
        results = _partial(metrics, problems) if verb == "eval-acceptance" else None
    return Run(
        path=path,
        verb=verb,
        label=path.name,
        recipe=_object(path / "recipe.yaml", yaml.safe_load, problems) or {},
        env=_object(path / "env.json", json.loads, problems) or {},
        command=_text(path / "command.txt"),
        metrics=tuple(metrics),
        results=results,
        samples=tuple(_lines(path / SAMPLES, problems)),
        problems=tuple(problems),
        finished=finished,
        parts=parts,
    )


def _config(path: Path) -> Row:
    """config.json, which says that this is a run and of what; UserError otherwise."""
    if not path.exists():
        raise UserError(f"There is no run at {path}.", "Give the directory that a command named as its `run:`.")
    if not path.is_dir():
        raise UserError(f"{path} is a file, not a run directory.", "Give the directory that holds it.")
    file = path / "config.json"
    if not file.exists():
        inside = sorted(part.name for part in path.iterdir() if (part / "config.json").exists())
        hint = f"It holds runs: name them, for example {path / inside[0]}." if inside else ""
        raise UserError(
            f"{path} is no run: it has no config.json.",
            hint or "Give the directory that a command named as its `run:`.",
        )
    problems: list[str] = []
    config = _object(file, json.loads, problems)
    if config is None or config.get("schema") != SCHEMA:
        why = problems[0] if problems else f"{file} is not of a draftkit run."
        raise UserError(f"{path} is no run that can be read: {why}", "Give another directory, or run it again.")
    if config.get("verb") not in REPORTED:
        raise UserError(
            f"{path} is a run of {config.get('verb')!r}, which has no report.", f"Give one of {', '.join(REPORTED)}."
        )
    return config


def _parts(path: Path) -> tuple[Run, ...]:
    found = [read(part) for part in sorted(path.iterdir()) if (part / "config.json").exists()]
    return tuple(replace(run, label=run.path.name.removesuffix("-eval")) for run in found)


def _partial(metrics: Sequence[Row], problems: list[str]) -> Row | None:
    """The table of an eval-acceptance that has measured some of its cells."""
    if not any(row.get("event") == "measured" for row in metrics):
        return None
    try:
        return results_from_rows(list(metrics))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError):
        problems.append("Its measurements are damaged: no table can be made of them.")
        return None


def _unfinished(verb: str, metrics: Sequence[Row]) -> str:
    steps = [row["step"] for row in metrics if _counts(row.get("step"))]
    far = f"it goes to step {max(steps)}" if steps else "nothing of it was logged yet"
    if verb == "eval-acceptance":
        far = f"{sum(row.get('event') == 'measured' for row in metrics)} measurements are in"
    elif verb == "prepare":
        far = f"{len(metrics)} shards are in"
    return f"Not finished: {far}; go on with --resume."


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""


def _object(file: Path, parse: Callable[[str], Any], problems: list[str]) -> Row | None:
    if not file.is_file():
        return None
    try:
        found = parse(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError):
        found = None
    if not isinstance(found, dict):
        problems.append(f"The file {file.name} is damaged and was left out.")
        return None
    return found


def _lines(file: Path, problems: list[str]) -> list[Row]:
    """JSON objects, one a line. The last line of a killed run may be torn: that is no damage."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    torn, rows, damaged = lines.pop(), [], 0
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            damaged += bool(line.strip())
    if torn.strip():
        problems.append(f"The last line of {file.name} is torn and was left out.")
    if damaged:
        problems.append(f"{damaged} lines of {file.name} are damaged and were left out.")
    return rows
