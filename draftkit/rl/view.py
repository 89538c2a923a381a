"""What a person sees of a running `rl`: on a terminal a live panel, elsewhere one line a step.

The panel: the last steps as a table, and under it where the newest step's time went, as a bar of shares.
"""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from draftkit.console import console, say

SHOWN = 10  # steps
BAR = 60  # characters
COLOURS = {
    "generate": "green",
    "reward": "white",
    "logprob": "cyan",
    "train_policy": "blue",
    "train_drafter": "magenta",
    "publish": "yellow",
    "eval": "bright_black",
    "idle": "red",
    "data": "white",
    "other": "white",
}


class View:
    """`with View(total, done) as view:` and `view.step(row)` after every step."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self.first = total, done, done
        self._rows: deque[dict[str, Any]] = deque(maxlen=SHOWN)
        self._start = time.monotonic()
        live = console.is_terminal and not console.quiet
        self._live = Live(console=console, refresh_per_second=2, transient=False) if live else None

    def __enter__(self) -> View:
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._live:
            self._live.__exit__(kind, error, trace)

    def step(self, row: dict[str, Any]) -> None:
        self.done += 1
        self._rows.append(row)
        if self._live:
            self._live.update(Group(table(self._rows), bar(row["time_s"]), Text(self._left())))
        else:
            say(f"step {self.done}/{self.total} {note(row)}, {self._left()}")

    def _left(self) -> str:
        spent = time.monotonic() - self._start
        left = spent / (self.done - self.first) * (self.total - self.done)
        return f"{left / 60:.0f} min left"


def note(row: dict[str, Any]) -> str:
    """One step in one line."""
    return (
        f"reward {row['reward_mean']:.3f}, {_speculation(row)}, entropy {row['entropy']:.2f}, "
        f"{row['time_s']['total']:.1f} s ({row['generation_share']:.0%} generation)"
    )


def _speculation(row: dict[str, Any]) -> str:
    if not row["k"]:
        return "plain"
    length = row["acceptance_length"]
    return f"k {row['k']} AL {length:.2f}" if length is not None else f"k {row['k']}, nothing drafted"


def table(rows: Any) -> Table:
    drawn = Table(box=None, pad_edge=False)
    for name in (
        "step",
        "reward",
        "held-out",
        "tokens",
        "entropy",
        "speculation",
        "gap",
        "z",
        "s",
        "predicted",
        "realised",
    ):
        drawn.add_column(name, justify="right")
    for row in rows:
        held = row.get("eval_reward")
        drawn.add_row(
            str(row["step"]),
            f"{row['reward_mean']:.3f}",
            "" if held is None else f"{held:.3f}",
            str(row["response_tokens"]),
            f"{row['entropy']:.2f}",
            _speculation(row),
            _figure(row["engine_trainer_logp_gap"], ".4f"),
            _figure(row["surprise_z"], "+.1f"),
            f"{row['time_s']['total']:.1f}",
            _figure(row["predicted_speedup"], ".2f"),
            _figure(row["realised_speedup"], ".2f"),
        )
    return drawn


def _figure(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def bar(seconds: dict[str, float]) -> Text:
    text = Text()
    for part, colour in COLOURS.items():
        share = seconds[part] / max(seconds["total"], 1e-9)
        width = round(share * BAR)
        if width:
            text.append("█" * width, style=colour)
            text.append(f" {part} {share:.0%} ", style=colour)
    return text
