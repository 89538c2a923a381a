"""What `rl` runs show: rewards, where the time went, acceptance, speedup forecast and realised, losslessness.

One run in detail, or several beside each other. Everything comes from the rows of metrics.jsonl, so that a run that
was stopped is shown as far as it went.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftkit.report import rl_rows, rl_speed, rl_steps
from draftkit.report.document import Fact, Facts, Section, figure, mean, shown, spread
from draftkit.report.runs import Run

EDGE = 5  # steps at either end whose means are compared, as in results.json


def sections(runs: Sequence[Run]) -> list[Section]:
    return [
        Section("Reward and entropy", tuple(rl_steps.reward(runs))),
        Section("Where a step's time went", tuple(rl_steps.time(runs))),
        Section("Acceptance over steps", tuple(rl_steps.acceptance(runs))),
        Section("Predicted against realised speedup", tuple(rl_speed.speedup(runs))),
        Section("Is it lossless, and is the engine what was trained?", tuple(rl_speed.checks(runs))),
    ]


def facts(run: Run) -> Facts:
    """The figures that summarise a run, from its steps."""
    steps, drafted = run.steps, rl_rows.drafted(run)
    first, last = (mean([row.get("reward_mean") for row in part]) for part in (steps[:EDGE], steps[-EDGE:]))
    found = [Fact("steps", f"{len(steps)}", f"of {run.of('rl', 'steps', otherwise='?')}")]
    if first is not None and last is not None:
        found.append(Fact("mean reward", f"{first:.2f} → {last:.2f}", f"first and last {min(EDGE, len(steps))} steps"))
    held = rl_rows.held_out(run)
    if held:
        found.append(Fact("held-out reward, greedy", f"{held[0][1]:.2f} → {held[-1][1]:.2f}", f"step {held[-1][0]}"))
    if drafted:
        length = mean([row.get("acceptance_length") for row in drafted[-EDGE:]])
        found.append(Fact("acceptance length", shown(length), f"tokens a round, last {len(drafted[-EDGE:])} steps"))
    found.append(
        Fact("time a step", shown(mean(list(map(rl_rows.step_seconds, steps))), ".1f", " s"), "evaluation left out")
    )
    realised = rl_rows.realised(run)
    if realised is not None:
        ci = spread(realised.get("generation_ci"))
        found.append(
            Fact("rollouts, realised", shown(realised.get("generation"), unit="×"), f"95 % {ci}" if ci else "")
        )
    return Facts(tuple(found))


def headline(run: Run) -> str:
    """The number that matters: what rollouts gained, else what was learned."""
    realised = rl_rows.realised(run)
    if realised is not None and figure(realised.get("generation")) is not None:
        ci = spread(realised.get("generation_ci"))
        return f"rollouts {realised['generation']:.2f}x as fast as plain ones" + (f" (95 % {ci})" if ci else "")
    rewards = [row.get("reward_mean") for row in run.steps]
    first, last = mean(rewards[:EDGE]), mean(rewards[-EDGE:])
    if first is None or last is None:
        return "no step was finished"
    return f"mean reward {first:.3f} -> {last:.3f} in {len(run.steps)} steps"


def setting_rows(run: Run) -> list[tuple[str, str]]:
    """What was run, for the table of settings."""
    r: Any = run.of
    spec = r("spec", "method", otherwise="?")
    how = "none" if spec == "none" else f"{spec}, k = {r('spec', 'k')}, {r('spec', 'draft_sample_method')} drafts"
    return [
        ("policy", str(r("model", "path", otherwise="?"))),
        ("prompts", str(r("data", "recipe", otherwise="?"))),
        ("speculation", how),
        ("drafter", "" if spec == "none" else str(r("spec", "drafter", otherwise="grown in the run"))),
        ("co-training", "" if spec != "eagle3" else str(r("cotrain", "mode", otherwise="?"))),
        ("batch", f"{r('rl', 'prompts_per_step')} prompts × {r('sampling', 'n')} responses a step"),
        ("sampling", f"T = {r('sampling', 'temperature')}, at most {r('sampling', 'max_tokens')} tokens"),
        ("loss, learning rate", f"{r('rl', 'loss')}, {r('policy', 'lr')}"),
    ]
