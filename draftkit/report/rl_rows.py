"""What the rows of an `rl` run's metrics.jsonl say, one figure a function; the sections are built of them."""

from __future__ import annotations

from draftkit.report.document import at, figure
from draftkit.report.runs import Row, Run


def step_seconds(row: Row) -> float | None:
    total, evaluation = figure(at(row, "time_s", "total")), figure(at(row, "time_s", "eval"))
    return None if total is None else total - (evaluation or 0.0)


def held_out(run: Run) -> list[tuple[int, float]]:
    rows = {row.get("step"): figure(row.get("eval_reward")) for row in run.metrics}
    return sorted((step, value) for step, value in rows.items() if isinstance(step, int) and value is not None)


def drafted(run: Run) -> list[Row]:
    return [row for row in run.steps if row.get("k") and figure(row.get("acceptance_length")) is not None]


def realised(run: Run) -> Row | None:
    return next((row["realised"] for row in reversed(run.steps) if isinstance(row.get("realised"), dict)), None)


def has_forecast(run: Run) -> bool:
    return any(figure(row.get("predicted_generation_speedup")) is not None for row in run.steps)


def num_probes(run: Run) -> int:
    """Plain steps among which speculative ones could be compared; the first is not counted by the run either."""
    return sum(row.get("k") == 0 and row["step"] > 1 for row in run.steps)


def alarms(run: Run) -> list[str]:
    """What the run itself raised: losslessness alarms and canary faults."""
    raised = {f"Losslessness alarm: {alarm}" for row in run.steps for alarm in at(row, "lossless", "alarms") or []}
    causes = {at(row, "canary", "cause") for row in run.steps}
    return sorted(raised) + sorted(f"Canary: {cause}" for cause in causes if cause)
