"""A GRPO step by draftkit and by TRL, side by side: seconds a step, tokens/s.

    python scripts/bench_rl.py --model DIR [--drafter DIR] [--steps 4] [--repeats 2] [--out DIR] [a.b=value ...]

Same policy (--model, a directory, for example the `warmup` of an earlier run), prompts in the same order, reward
function, number of samples, longest answer, temperature, optimizer, learning rate, clip and loss; one update a step.
Arms: TRL without speculation, draftkit with `--spec none`, draftkit with `--spec eagle3` (a grown drafter without
--drafter). Each runs in a process of its own, one after the other, in turns (`--repeats`); of every run the first step
is left out as warm-up. Further arguments are recipe overrides for all.

TRL has three ways to generate: vLLM (`vllm_mode="colocate"`), transformers' continuous batching and its `generate`.
Each that runs is an arm, of the others the error is printed; "times as fast" is against the fastest. What is not equal
stands under the table.
TRL comes into the virtual environment with `pip install trl`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftkit.console import table
from draftkit.recipe import RL_QUICKSTART, Recipe, load_recipe

MODES = ("vllm", "continuous batching", "generate")  # of TRL's generation
MICRO_BATCH = 16  # sequences of one forward in TRL
NOTES = """Not equal:
- draftkit also looks after every publish whether the engine holds the policy (canary) and, with a drafter, trains it.
- draftkit makes a log-probability forward with statistics before the update; TRL needs none for one update.
- Weights: bfloat16 with float32 masters (DeepSpeed ZeRO-2) in draftkit, float32 under bfloat16 autocast in TRL.
- draftkit computes a prompt once for its group and skips groups of equal rewards in the update; TRL does neither.
- TRL's `gradient_checkpointing` is switched off, as draftkit's is by default: recomputing would cost it time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench-rl"))
    parser.add_argument("--trl-mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    asked = parser.parse_args()
    recipe, _ = load_recipe(RL_QUICKSTART, [*asked.overrides, "warmup.steps=0"], {"model.path": asked.model})
    if asked.trl_mode:
        run_trl(recipe, asked.trl_mode, asked.steps, asked.out)
        return
    asked.out.mkdir(parents=True, exist_ok=True)

    drafter = ["--drafter", asked.drafter] if asked.drafter else []
    found: dict[str, list[dict[str, float]]] = {}
    errors: dict[str, str] = {}
    for repeat in range(asked.repeats):
        for mode in (m for m in MODES if m not in errors):
            steps, error = trl_arm(asked, mode, asked.out / f"trl-{MODES.index(mode)}-{repeat}.json")
            if steps is None:
                errors[mode] = error
            else:
                found.setdefault(f"TRL, {mode}", []).extend(steps)
        for name, flags in (("none", ["--spec", "none"]), ("eagle3", ["--spec", "eagle3", *drafter])):
            out = asked.out / f"{name}-{repeat}"
            found.setdefault(f"draftkit, {name}", []).extend(draftkit_arm(asked, out, flags))
    show(found)
    print(NOTES, *(f"- TRL with {mode} does not run here: {error}" for mode, error in errors.items()), sep="\n")


def show(found: dict[str, list[dict[str, float]]]) -> None:
    middle = {arm: statistics.median(step["seconds"] for step in steps) for arm, steps in found.items()}
    base = min(seconds for arm, seconds in middle.items() if arm.startswith("TRL"))
    rows = []
    for arm, steps in found.items():
        seconds = [step["seconds"] for step in steps]
        rows.append(
            [
                arm,
                str(len(steps)),
                shown(seconds),
                shown([step["generate"] for step in steps]),
                shown([step["tokens"] / step["seconds"] for step in steps], 0),
                shown([step["tokens"] / step["generate"] for step in steps], 0),
                f"{base / middle[arm]:.2f}",
            ]
        )
    columns = ["arm", "steps", "s a step", "of which rollouts, s", "tokens/s", "in rollouts", "times as fast"]
    table("GRPO steps", columns, rows, caption="median (lowest-highest); tokens: sampled ones")


def shown(values: Sequence[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


# ---- arms -----------------------------------------------------------------------------------------------------------


def draftkit_arm(asked: argparse.Namespace, out: Path, flags: Sequence[str]) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "draftkit", "rl", "--overwrite", "--out", str(out), *flags]
    command += ["--model", asked.model, "--steps", str(asked.steps), "warmup.steps=0", "rl.eval_every=1000000"]
    command += ["rl.probe_every=0", "rl.eval_prompts=2", *asked.overrides]
    subprocess.run(command, check=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            "seconds": row["time_s"]["total"] - row["time_s"]["eval"],
            "generate": row["generate_s"],
            "tokens": row["response_tokens"],
        }
        for row in rows
        if row.get("step", 0) > 1
    ]


def trl_arm(asked: argparse.Namespace, mode: str, out: Path) -> tuple[list[dict[str, float]] | None, str]:
    """(steps, why there are none)."""
    command = [sys.executable, __file__, "--model", asked.model, "--steps", str(asked.steps), "--out", str(out)]
    done = subprocess.run([*command, "--trl-mode", mode, *asked.overrides], stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return json.loads(out.read_text())[1:], ""
    if mode == MODES[-1]:  # the one that needs nothing
        sys.exit(done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return None, next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no message")


def run_trl(recipe: Recipe, mode: str, steps: int, out: Path) -> None:
    """`steps` GRPO steps of TRL in this process; seconds, rollout seconds and tokens of each into `out`."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from draftkit.data.data_recipe import load_data_recipe
    from draftkit.models import load_tokenizer
    from draftkit.rl.envs import load_reward
    from draftkit.rl.prompts import open_prompts

    data_recipe = load_data_recipe(recipe.data.recipe)
    stream, _ = open_prompts(recipe, data_recipe, load_tokenizer(Path(recipe.model.path), False))
    prompts = stream.take(steps * recipe.rl.prompts_per_step)
    verify, tokens = load_reward(recipe, data_recipe), []
    num, policy = recipe.rl.prompts_per_step * recipe.sampling.n, recipe.policy

    def reward(completions: Any, completion_ids: Any, number: Any, **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [verify(prompts[i], c[0]["content"]) for i, c in zip(number, completions, strict=True)]

    settings = GRPOConfig(
        output_dir=str(out.with_suffix("")),
        use_cpu=not _on_gpu(),
        bf16=policy.dtype == "bfloat16",
        per_device_train_batch_size=min(MICRO_BATCH, num),
        gradient_accumulation_steps=max(1, num // MICRO_BATCH),
        num_generations=recipe.sampling.n,
        max_completion_length=recipe.sampling.max_tokens,
        temperature=recipe.sampling.temperature,
        max_steps=steps,
        learning_rate=policy.lr,
        lr_scheduler_type="constant",
        warmup_steps=policy.lr_warmup_steps,
        adam_beta1=policy.betas[0],
        adam_beta2=policy.betas[1],
        weight_decay=policy.weight_decay,
        max_grad_norm=policy.grad_clip,
        optim="adamw_torch_fused",
        loss_type="grpo",
        beta=0.0,
        num_iterations=1,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        seed=recipe.rl.seed,
        use_vllm=mode == "vllm",
        vllm_mode="colocate",
        vllm_max_model_length=recipe.engine.max_model_len,
        use_transformers_continuous_batching=mode == "continuous batching",
    )
    dataset = Dataset.from_list([{"prompt": list(p.messages), "number": i} for i, p in enumerate(prompts)])
    times: list[float] = []
    generated: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    trainer = GRPOTrainer(recipe.model.path, reward, settings, train_dataset=dataset, callbacks=[Clock()])
    generate = trainer._generate

    def timed(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = generate(*arguments, **named)
        generated.append(time.perf_counter() - start)
        return result

    trainer._generate = timed
    trainer.train()
    assert len(generated) == len(tokens) == steps, "one batch of rollouts a step"
    seconds = [b - a for a, b in zip(times, times[1:], strict=False)]
    rows = zip(seconds, generated, tokens, strict=True)
    out.write_text(json.dumps([{"seconds": s, "generate": g, "tokens": t} for s, g, t in rows]))


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
