"""Arms of `draftkit rl` on the same prompts, one after the other, in one table and one plot.

    python scripts/bench_arms.py curves  --model DIR [--drafter DIR] [--seeds 0,1,2] [--steps 30] [--out DIR]
    python scripts/bench_arms.py cotrain --model DIR --good DIR --weak DIR [--steps 15] [--out DIR]

`curves`: does speculation leave the learning curve alone, and what does it cost or save? `--spec eagle3` and
`--spec none` take turns, seed by seed; a seed fixes the prompts of every step, so arms differ by sampling noise alone.
`cotrain`: a good in-domain drafter and a weak general one, each with co-training and without, on the same prompts:
acceptance length over the steps.

Every arm is a real run through the command line, in a process of its own and from the same policy (--model, a
directory, for example the `warmup` of an earlier run). An arm that has finished is not run again; an interrupted one
goes on. Further arguments are recipe overrides for all arms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftkit.console import table
from draftkit.rl.finish import EDGE

Rows = list[dict[str, Any]]  # of metrics.jsonl, the steps from 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, steps in (("curves", 30), ("cotrain", 15)):
        one = kinds.add_parser(kind)
        one.add_argument("--model", required=True)
        one.add_argument("--steps", type=int, default=steps)
        one.add_argument("--out", type=Path, default=Path("outputs/bench-arms") / kind)
        one.add_argument("--arms", help="only these, by name, separated by commas")
        one.add_argument("overrides", nargs="*")
        if kind == "curves":
            one.add_argument("--drafter")
            one.add_argument("--seeds", default="0,1,2")
        else:
            one.add_argument("--good", required=True)
            one.add_argument("--weak", required=True)
    asked = parser.parse_args()
    arms = curve_arms(asked) if asked.kind == "curves" else cotrain_arms(asked)
    arms = {name: arms[name] for name in (asked.arms.split(",") if asked.arms else arms)}
    common = ["--model", asked.model, "--steps", str(asked.steps), "warmup.steps=0", *asked.overrides]
    rows = {name: run(asked.out / name, [*arguments, *common]) for name, arguments in arms.items()}
    (show_curves if asked.kind == "curves" else show_cotrain)(rows, asked.out)


def curve_arms(asked: argparse.Namespace) -> dict[str, list[str]]:
    arms = {}
    for seed in asked.seeds.split(","):
        drafter = ["--drafter", asked.drafter] if asked.drafter else []
        arms[f"none-{seed}"] = ["--spec", "none", "--seed", seed]
        arms[f"eagle3-{seed}"] = ["--spec", "eagle3", "--seed", seed, *drafter]
    return arms


def cotrain_arms(asked: argparse.Namespace) -> dict[str, list[str]]:
    starts, modes = {"good": asked.good, "weak": asked.weak}, {"off": "off", "on": "every-n"}
    return {
        f"{start}-{shown}": ["--spec", "eagle3", "--drafter", drafter, "--cotrain", mode]
        for start, drafter in starts.items()
        for shown, mode in modes.items()
    }


def run(out: Path, arguments: Sequence[str]) -> Rows:
    if not (out / "results.json").exists():
        command = [sys.executable, "-m", "draftkit", "rl", "--resume", "--out", str(out), *arguments]
        subprocess.run(command, check=True)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row.get("step")]


# ---- what came out --------------------------------------------------------------------------------------------------


def show_curves(rows: dict[str, Rows], out: Path) -> None:
    table(
        "learning curves",
        [
            "arm",
            f"reward, steps 1-{EDGE}",
            f"last {EDGE}",
            "held-out, last",
            "s a step",
            "rollout, s",
            "tokens/s",
            "AL",
        ],
        [
            [
                name,
                f"{mean(r, 'reward_mean', slice(EDGE)):.3f}",
                f"{mean(r, 'reward_mean', slice(-EDGE, None)):.3f}",
                next((f"{row['eval_reward']:.3f}" for row in reversed(r) if row.get("eval_reward") is not None), ""),
                middle(step_seconds(r)),
                middle([row["generate_s"] for row in r]),
                middle([row["tokens_per_s"] for row in r]),
                shown(mean(drafted(r), "acceptance_length")),
            ]
            for name, r in rows.items()
        ],
        caption="median (lowest-highest); evaluation left out; AL: acceptance length of the steps that speculated",
    )
    for method in ("eagle3", "none"):
        own = [rewards(r) for name, r in rows.items() if name.startswith(method)]
        print(f"{method}: mean reward over the run, by seed: {', '.join(f'{statistics.mean(x):.3f}' for x in own)}")
    pairs = [
        statistics.mean(rewards(rows[f"eagle3-{seed}"])) - statistics.mean(rewards(rows[f"none-{seed}"]))
        for seed in [name.partition("-")[2] for name in rows if name.startswith("none")]
        if f"eagle3-{seed}" in rows
    ]
    print(f"eagle3 - none on the same prompts: {', '.join(f'{d:+.3f}' for d in pairs)}")
    print("plain steps inside the eagle3 arms against its speculative ones, and the forecast:")
    for name in rows:
        if name.startswith("eagle3"):
            print(f"  {name}: {speedups(out / name)}")
    plot(rows, out, "reward_mean", "mean reward")


def speedups(directory: Path) -> str:
    results = json.loads((directory / "results.json").read_text())
    found, text = results["realised"], []
    for what, key, predicted in (
        ("rollouts", "generation", results["predicted_generation_speedup"]),
        ("step", "step", results["predicted_speedup"]),
    ):
        if found is None or predicted is None:
            return "too few plain steps to say"
        low, high = found[f"{key}_ci"] or (float("nan"), float("nan"))
        text.append(f"{what} {found[key]:.2f}x ({low:.2f}-{high:.2f}), predicted {predicted:.2f}x")
    return "; ".join(text)


def show_cotrain(rows: dict[str, Rows], out: Path) -> None:
    table(
        "acceptance length by start and co-training",
        ["arm", f"first {EDGE}", f"last {EDGE}", "slope a step", "drafter, share of time", "reward"],
        [
            [
                name,
                shown(mean(drafted(r), "acceptance_length", slice(EDGE))),
                shown(mean(drafted(r), "acceptance_length", slice(-EDGE, None))),
                f"{slope(drafted(r)):+.4f}",
                f"{sum(row['time_s']['train_drafter'] for row in r) / sum(step_seconds(r)):.1%}",
                f"{mean(r, 'reward_mean'):.3f}",
            ]
            for name, r in rows.items()
        ],
        caption="steps that speculated; good: trained on this policy's answers, weak: on other tasks' answers",
    )
    plot({name: drafted(r) for name, r in rows.items()}, out, "acceptance_length", "acceptance length")


def drafted(rows: Rows) -> Rows:
    return [row for row in rows if row["k"]]


def rewards(rows: Rows) -> list[float]:
    return [row["reward_mean"] for row in rows]


def step_seconds(rows: Rows) -> list[float]:
    return [row["time_s"]["total"] - row["time_s"]["eval"] for row in rows]


def mean(rows: Rows, key: str, part: slice = slice(None)) -> float | None:
    values = [row[key] for row in rows[part]]
    return statistics.mean(values) if values else None


def middle(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def slope(rows: Rows) -> float:
    """Of the least-squares line of acceptance length over steps."""
    if len(rows) < 2:
        return 0.0
    return statistics.linear_regression([r["step"] for r in rows], [r["acceptance_length"] for r in rows]).slope


def plot(rows: dict[str, Rows], out: Path, key: str, label: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, r in rows.items():
        axes.plot([row["step"] for row in r], [row[key] for row in r], "--" if "none" in name else ".-", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.legend()
    figure.savefig(out / f"{key}.png", dpi=110)
    print(f"plot: {out / f'{key}.png'}")


if __name__ == "__main__":
    main()
