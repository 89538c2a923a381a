"""Does the live losslessness alarm of `draftkit rl` go off when the engine's sampler is biased a little?

    python scripts/check_bias.py --model DIR --drafter DIR [--tv 0.02] [--steps 8] [--out DIR] [a.b=value ...]

Two real runs from the same policy and drafter (directories of an earlier run), one with vLLM's sampler as it is, one
biased: the uniform numbers that decide about drafts are scaled by 1 - c, so that drafts are accepted too often and
tokens lie too near to the drafter. The total variation that this makes at a slot, the mean over slots of
sum_v min(q, p / (1 - c)) - min(q, p), is computed from the trainer's p and the drafter's q, and c is set anew after
every step so that it comes to --tv. Policy and drafter learn at rates of 1e-12, so both runs see the same law.

A drafter that is nearly the policy cannot be biased by 2 %, even if every draft is accepted: take a weaker one (the
table shows the TV that was reached), and as many steps as the excess over the monitor's tolerance needs to show.

Exits with 1 unless the biased run raises an alarm and the other does not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from draftkit.console import table

STILL = ("policy.lr=1e-12", "cotrain.lr=1e-12", "cotrain.mode=every-n")  # co-training captures what the tests need


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--tv", type=float, default=0.02)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("outputs/check-bias"))
    parser.add_argument("--in-process", type=float, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    if asked.in_process is not None:
        return run_biased(asked, asked.in_process)
    rows, first = [], {}
    for name, tv in (("faithful", 0.0), ("biased", asked.tv)):
        out = asked.out / name
        command = [sys.executable, __file__, *sys.argv[1:], "--in-process", str(tv)]
        subprocess.run(command, check=True)
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in steps if row.get("step")]
        told = json.loads((out / "bias.json").read_text())
        alarms = [row["step"] for row in steps if row["lossless"]["alarms"]]
        first[name] = alarms[0] if alarms else None
        last = steps[-1]["lossless"]
        rows.append(
            [
                name,
                f"{told['tv'] / max(1, told['slots']):.4f}",
                f"{last.get('on.tokens', 0):.0f}",
                *(f"{last[f'on.{key}_z']:+.1f}" for key in ("surprise", "favourite", "overlap")),
                f"{last['on.pit_distance']:.4f}",
                first[name] or "none",
                ", ".join(sorted({alarm for row in steps for alarm in row["lossless"]["alarms"]})),
            ]
        )
    table(
        "live losslessness tests",
        ["sampler", "mean TV", "tokens", "surprise z", "favourite z", "overlap z", "PIT D", "first alarm, step", "of"],
        rows,
        caption="speculative rollouts; z without tolerance, at the last step",
    )
    return int(first["faithful"] is not None or first["biased"] is None)


def run_biased(asked: argparse.Namespace, tv: float) -> int:
    """`draftkit rl` in this process, its engine's acceptance scaled."""
    from vllm.v1.sample import rejection_sampler

    from draftkit.cli import main as cli
    from draftkit.rl import directions, loop

    out = asked.out / ("biased" if tv else "faithful")
    state = {"c": 0.05 if tv else 0.0, "tv": 0.0, "slots": 0, "step_tv": 0.0, "step_slots": 0}
    uniform, slot_sums, step = rejection_sampler.generate_uniform_probs, directions.slot_sums, loop.Loop.step

    def scaled(*arguments: Any, **named: Any) -> torch.Tensor:
        return uniform(*arguments, **named) * (1 - state["c"])

    def watched(teacher: Any, state_RH: torch.Tensor, head_DH: torch.Tensor, token_R: torch.Tensor) -> Any:
        head, parts = teacher.head_DH, (teacher.hidden_RH, teacher.lse_R, state_RH)
        for hidden, lse, own in zip(*(part.split(64) for part in parts), strict=True):
            p = ((hidden.to(head.dtype) @ head.T).float() / teacher.temperature - lse.float().unsqueeze(1)).exp()
            q = ((own @ head_DH.to(own.dtype).T).float() / teacher.temperature).softmax(-1)
            excess = torch.minimum(q, p / (1 - state["c"])) - torch.minimum(q, p)
            state["step_tv"] += float(excess.sum())
            state["step_slots"] += len(q)
        return slot_sums(teacher, state_RH, head_DH, token_R)

    def stepped(self: Any, number: int) -> dict[str, Any]:
        state["step_tv"], state["step_slots"] = 0.0, 0
        row = step(self, number)
        if row["k"]:
            state["tv"] += state["step_tv"]
            state["slots"] += state["step_slots"]
        if tv and state["step_tv"]:
            state["c"] = min(0.9, state["c"] * tv * state["step_slots"] / state["step_tv"])
        (out / "bias.json").write_text(json.dumps(state))
        return row

    rejection_sampler.generate_uniform_probs = scaled
    directions.slot_sums, loop.Loop.step = watched, stepped
    sys.argv = ["draftkit", "rl", "--overwrite", "--out", str(out), "--model", asked.model, "--drafter", asked.drafter]
    sys.argv += ["--steps", str(asked.steps), "warmup.steps=0", *STILL, *asked.overrides]
    cli()
    return 0


if __name__ == "__main__":
    sys.exit(main())
