"""What a person sees: results on stdout, progress and notices on stderr, plain lines where there is no terminal.

`--json` keeps stdout for one JSON document (`emit_json`) and sends everything else to stderr; `--quiet` leaves the
closing lines and errors. Every notice and table also goes to the run's `log.txt` once `log_to` was called. It leaves
out logging levels and colours as settings: rich honours NO_COLOR and terminal width by itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

from rich import progress as rich_progress
from rich.console import Console
from rich.table import Table

PLAIN_INTERVAL_S = 15.0  # between progress lines where there is no terminal

console = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False, soft_wrap=True)
_log: Console | None = None
_json = False
_stdout: TextIO | None = None  # the real one while `own_stdout` holds it
_said: set[str] = set()


def set_mode(*, json: bool = False, quiet: bool = False) -> None:
    """`json`: people read stderr, stdout is for `emit_json`. `quiet`: only `closing` lines and errors."""
    global _json
    _json = json
    console.quiet = quiet


@contextmanager
def own_stdout() -> Iterator[None]:
    """Keep stdout for results: what libraries print there while they load or run goes to stderr."""
    global _stdout
    _stdout = sys.stdout
    out.file = sys.stderr if _json else _stdout
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _stdout, out.file = None, None  # rich: None means whatever sys.stdout is at the time


def log_to(path: Path | None) -> None:
    """Copy what is said from now on to the file as well; None stops it."""
    global _log
    before = _log
    _log = None if path is None else Console(file=path.open("a", encoding="utf-8"), width=160, highlight=False)
    if before is not None:
        before.file.close()


def _show(target: Console, *objects: Any) -> None:
    target.print(*objects)
    if _log is not None:
        _log.print(*objects)
        _log.file.flush()


def say(message: str) -> None:
    """A notice, on stderr. Rich markup is honoured: escape text that came from a user."""
    _show(console, message)


def say_once(message: str) -> None:
    """For a setting that is ignored or a fast path that is not available: said the first time only."""
    if message not in _said:
        _said.add(message)
        say(f"[yellow]note:[/yellow] {message}")


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str | None = None, left: int = 1
) -> None:
    """A result table on stdout; the first `left` columns (words) to the left, the others (numbers) to the right."""
    drawn = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="left" if index < left else "right")
    for row in rows:
        drawn.add_row(*("" if cell is None else str(cell) for cell in row))
    if not console.quiet:
        _show(out, drawn)


def closing(*lines: str) -> None:
    """The last lines of a command: where the run is, the number that matters, what to type next."""
    for line in lines:
        _show(out, line)


def error(message: str, hint: str = "") -> None:
    """What went wrong, on stderr in every mode, as plain text (it quotes what a user typed)."""
    screen = Console(stderr=True, highlight=False, soft_wrap=True)
    with suppress(OSError):  # of the log: a full disk must not hide that the disk is full
        for target in [screen, *([_log] if _log else [])]:
            target.print("error:", style="bold red", end=" ")
            target.print(message, markup=False)
            if hint:
                target.print(f"  {hint}", markup=False)


def emit_json(document: Any) -> None:
    """The one JSON document of `--json`, on stdout; does nothing in the other modes."""
    if _json:
        print(json.dumps(document, indent=2, default=str), file=_stdout, flush=True)


class Progress:
    """Counts work done. `advance(n, note)` may be called thousands of times a second."""

    def __init__(self, description: str, total: float | None, bar: rich_progress.Progress | None) -> None:
        self.description, self.total, self.done, self.note = description, total, 0.0, ""
        self._bar, self._start, self._last = bar, time.monotonic(), time.monotonic()
        self._task = bar.add_task(description, total=total, note="") if bar else None

    def advance(self, n: float = 1, note: str | None = None) -> None:
        self.done += n
        self.note = self.note if note is None else note
        if self._bar is not None:
            self._bar.update(self._task, advance=n, note=self.note)
        elif time.monotonic() - self._last >= PLAIN_INTERVAL_S:
            self.line()

    def line(self) -> None:
        """One plain line: `description 120/400 (30%) 0:45 < 1:45 note`."""
        self._last = time.monotonic()
        spent = self._last - self._start
        share = f"/{self.total:g} ({self.done / self.total:.0%})" if self.total else ""
        left = f" < {_clock(spent * (self.total - self.done) / self.done)}" if self.total and self.done else ""
        say(f"{self.description} {self.done:g}{share} {_clock(spent)}{left} {self.note}".rstrip())


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    return f"{minutes}:{rest:02d}"


@contextmanager
def progress(description: str, total: float | None = None) -> Iterator[Progress]:
    """A bar on a terminal; elsewhere a plain line now and then, and one at the end."""
    if console.quiet or not console.is_terminal:
        counter = Progress(description, total, None)
        yield counter
        counter.line()
        return
    bar = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.fields[note]}"),
        console=console,
    )
    with bar:
        yield Progress(description, total, bar)
