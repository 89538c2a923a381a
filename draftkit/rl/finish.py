"""The end of an RL run: policy and drafter as plain directories, curves, the figures that summarise the run.

policy/     for serving, and for `prepare`, `train-drafter` and `eval-acceptance` with --model
drafter/    as last published, in the layout that vLLM serves
curves.png  reward, acceptance length, where the time went
results.json, README.md
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftkit.console import table
from draftkit.recipe import Recipe
from draftkit.rl.account import Account
from draftkit.rl.snapshots import save_models
from draftkit.rl.start import Actors
from draftkit.rl.world import World
from draftkit.run import RunDir, atomic_write

SCHEMA = "draftkit.rl/1"
EDGE = 5  # steps at either end whose means are compared
PARTS = ("generate", "reward", "logprob", "train_policy", "train_drafter", "publish", "idle", "data", "other")


def finish(recipe: Recipe, run: RunDir, world: World, actors: Actors, account: Account, model: Path) -> dict[str, Any]:
    save_models(run.path, recipe, world, actors)
    if not world.is_main:
        return {}
    rows = [row for row in run.read_metrics() if row.get("step")]
    first = next((row["eval_reward"] for row in run.read_metrics() if row.get("step") == 0), None)
    results = summary(recipe, rows, first)
    atomic_write(run.path / "curves.png", curves(rows))
    atomic_write(run.path / "README.md", readme_of(recipe, results, run))
    show(results)
    run.finish(results, headline(results))
    return results


def summary(recipe: Recipe, rows: Sequence[dict[str, Any]], eval_before: float | None) -> dict[str, Any]:
    """rows: the steps of metrics.jsonl, from 1."""
    drafted = _drafted(rows)
    evals = [row["eval_reward"] for row in rows if row.get("eval_reward") is not None]
    total = sum(row["time_s"]["total"] - row["time_s"]["eval"] for row in rows)
    alarms = sorted({alarm for row in rows for alarm in row["lossless"]["alarms"]})
    return {
        "schema": SCHEMA,
        "spec": recipe.spec.method,
        "steps": len(rows),
        "reward_first": _mean(row["reward_mean"] for row in rows[:EDGE]),
        "reward_last": _mean(row["reward_mean"] for row in rows[-EDGE:]),
        "eval_reward_before": eval_before,
        "eval_reward_after": evals[-1] if evals else None,
        "acceptance_length_first": _mean(row["acceptance_length"] for row in drafted[:EDGE]),
        "acceptance_length_last": _mean(row["acceptance_length"] for row in drafted[-EDGE:]),
        "steps_without_speculation": len(rows) - len(drafted),
        "seconds": total,
        "seconds_per_step": total / max(1, len(rows)),
        "share": {part: sum(row["time_s"][part] for row in rows) / max(total, 1e-9) for part in PARTS},
        "generation_share": _mean(row["generation_share"] for row in rows),
        "predicted_speedup": _mean(row["predicted_speedup"] for row in rows if row["predicted_speedup"] is not None),
        "predicted_generation_speedup": _mean(
            row["predicted_generation_speedup"] for row in rows if row["predicted_generation_speedup"] is not None
        ),
        "realised": rows[-1]["realised"] if rows else None,
        "lossless_alarms": alarms,
        "canary_faults": sorted({row["canary"]["cause"] for row in rows if row["canary"] and row["canary"]["cause"]}),
    }


def _drafted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with a draft: a schedule whose k is 0 at the sizes that a step had drafts nothing in it."""
    return [row for row in rows if row["k"] and row["acceptance_length"] is not None]


def _mean(values: Any) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None


def headline(results: dict[str, Any]) -> str:
    text = f"mean reward {results['reward_first']:.3f} -> {results['reward_last']:.3f} in {results['steps']} steps"
    if results["acceptance_length_last"] is not None:
        text += f", acceptance length {results['acceptance_length_last']:.2f}"
    if results["realised"] is not None:
        text += f", rollouts {results['realised']['generation']:.2f}x as fast as without speculation"
    return text


def show(results: dict[str, Any]) -> None:
    shares = results["share"]
    table(
        "where the time went",
        ["part", "share"],
        [[part, f"{shares[part]:.1%}"] for part in PARTS if shares[part] >= 0.0005],
        caption=f"{results['seconds_per_step']:.1f} s a step, evaluation left out",
    )
    realised, rows = results["realised"], []
    for what, predicted, key in (
        ("rollouts", results["predicted_generation_speedup"], "generation"),
        ("whole step", results["predicted_speedup"], "step"),
    ):
        if realised is not None:
            shown = f"{realised[key]:.2f}x"
            if realised[f"{key}_ci"] is not None:
                low, high = realised[f"{key}_ci"]
                shown += f" ({low:.2f}-{high:.2f})"
            rows.append([what, "" if predicted is None else f"{predicted:.2f}x", shown])
    if rows:
        counts = f"{realised['num_speculative']} speculative steps against {realised['num_plain']} plain ones"
        table("speedup by speculation", ["", "predicted", "realised (95 %)"], rows, caption=counts)


def readme_of(recipe: Recipe, results: dict[str, Any], run: RunDir) -> str:
    commands = (run.path / "command.txt").read_text().rstrip()
    share = "\n".join(f"| {part} | {results['share'][part]:.1%} |" for part in PARTS)
    faults = "; ".join([*results["lossless_alarms"], *results["canary_faults"]]) or "none"
    return f"""# draftkit rl: {recipe.name}

{headline(results)}

![reward, acceptance length, time](curves.png)

| part | share of {results["seconds_per_step"]:.1f} s a step |
|---|---:|
{share}

Losslessness alarms and canary faults: {faults}.

```
{commands}
```
"""


def curves(rows: Sequence[dict[str, Any]]) -> bytes:
    """A PNG of three panels over steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), layout="constrained")
    FigureCanvasAgg(figure)
    reward, acceptance, seconds = figure.subplots(3, 1, sharex=True)
    steps = [row["step"] for row in rows]
    reward.plot(steps, [row["reward_mean"] for row in rows], label="rollouts, mean reward")
    held = [(row["step"], row["eval_reward"]) for row in rows if row.get("eval_reward") is not None]
    reward.plot(*zip(*held, strict=True), "o", label="held-out prompts, greedy") if held else None
    reward.legend()
    drafted = _drafted(rows)
    acceptance.plot([r["step"] for r in drafted], [r["acceptance_length"] for r in drafted], ".-")
    acceptance.set_ylabel("acceptance length")
    bottom = [0.0] * len(rows)
    for part in PARTS:
        values = [row["time_s"][part] for row in rows]
        seconds.bar(steps, values, bottom=bottom, width=0.9, label=part)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    seconds.set_ylabel("seconds")
    seconds.set_xlabel("step")
    seconds.legend(ncols=3, fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()
