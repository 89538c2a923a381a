"""`draftkit rl` side by side with TRL's GRPOTrainer: seconds a step, tokens/s.

    python scripts/bench_rl.py --model DIR [--drafter DIR] [--steps 6] [--repeats 3] [--arms NAME,NAME] [--out DIR]
                               [a.b=value ...]

All arms start from the same policy (--model, for example the `warmup` of an earlier run) and take the same prompts in
the same order, with the recipe's number of samples, longest answer, temperature, reward, learning rate, AdamW, clip and
GRPO loss, without KL, one update a step. Arms: TRL with each of its ways to generate, `draftkit rl` with `--spec none`
and with `--spec eagle3`, which grows a drafter in its first step unless --drafter names one. A run is a process of its
own; arms take turns, and each repeat begins with another one. The first step of every run is left out as warm-up:
kernels and memory are made once. Evaluations do not count either, nor does saving. TRL recomputes no activations
(`gradient_checkpointing`), as draftkit does not.

What TRL cannot do on this machine is tried once and its error printed. By the source of TRL 1.16 with the CPU build of
vLLM 0.32 (a trial did not get so far): `vllm_mode="colocate"` should fail at its first weight update, which calls
`load_weights` on layers that vLLM's CPU kernels have packed (`dispatch_cpu_unquantized_gemm` leaves an empty tensor);
`"server"` asks for CUDA, to send weights by NCCL. Where `trl-vllm` finishes, check that its engine follows the policy.

TRL is an extra: `pip install -e '.[bench]'`. Further arguments override the recipe rl-quickstart for all arms.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape

from draftkit.console import closing, say, table
from draftkit.errors import RunFailed, UserError, explain
from draftkit.recipe import RL_QUICKSTART, Recipe, load_recipe
from draftkit.rl.ledger import step_seconds

TRL = ("trl-vllm", "trl-paged", "trl-generate")
ARMS = (*TRL, "draftkit-none", "draftkit-eagle3")
MICRO_BATCH = 32  # most sequences of one forward in TRL
PAGE = 256  # tokens in a page of transformers' continuous batching
ALL_ARMS = {"warmup.steps": 0, "rl.probe_every": 0}  # no probe steps: a draftkit arm is one kind of step throughout
ERROR = re.compile(r"(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)")  # torch.distributed names its rank

NOTES = {  # beginning of an arm's name -> what is not equal where such an arm ran
    "": "answers are sampled, so arms write different numbers of tokens: compare tokens/s, or read both ratios",
    "draftkit": "draftkit computes a prompt once for its group and leaves groups of equal rewards out of the update; "
    "TRL does neither, and without Triton its LM head covers prompts and padding too",
    "draftkit-": "draftkit scores the rollouts before the update and has a canary look at the engine after each "
    "publish; TRL does the first with vLLM only and not the second",
    "draftkit-eagle3": "draftkit-eagle3 also trains the drafter when its trigger says so, and publishes it",
    "trl-": "weights in bfloat16 runs: draftkit trains bfloat16 ones with float32 masters, and its engine holds the "
    "former",
    "trl-vllm": "trl-vllm: float32 weights under autocast, copied to the engine in every step",
    "trl-generate": "trl-generate: float32 weights under autocast, cast anew for every token",
    "trl-paged": "trl-paged: continuous batching casts the trained weights to bfloat16 for good, without masters",
}


def main() -> int:
    args = arguments()
    try:
        if args.child:
            run_trl(read_recipe(args), args.child, args.steps, args.out)
        else:
            bench(args)
    except (UserError, RunFailed) as error:
        code, message, hint = explain(error)
        say(escape(f"{message} {hint}".strip()))
        return code
    return 0


def bench(args: argparse.Namespace) -> None:
    names = args.arms.split(",")
    if unknown := [name for name in names if name not in ARMS]:
        raise UserError(f"--arms: there is no arm {unknown[0]!r}.", f"Arms: {', '.join(ARMS)}.")
    if args.steps < 2:
        raise UserError(f"--steps ({args.steps}): the first step is left out.", "Two or more.")
    check(read_recipe(args))
    if any(name in TRL for name in names) and importlib.util.find_spec("trl") is None:
        raise UserError(
            "TRL is not installed.", "pip install -e '.[bench]', or leave it out with --arms draftkit-none,..."
        )
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for repeat in range(args.repeats):
        turn = names[repeat % len(names) :] + names[: repeat % len(names)]
        for name in [name for name in turn if name not in failed]:
            try:
                steps = one_run(args, name, repeat)[1:]
            except RunFailed as error:
                if name not in TRL:
                    raise
                failed[name] = str(error)
                say(escape(f"{name} does not run here: {error}"))
                continue
            found[name] += steps
            seconds = spread([step["seconds"] for step in steps], 1)
            say(f"repeat {repeat + 1} of {args.repeats}, {name}: {seconds} s a step")
    (args.out / "steps.json").write_text(json.dumps({"steps": found, "failed": failed}, indent=2))
    report(found, failed, args)


def read_recipe(args: argparse.Namespace) -> Recipe:
    return load_recipe(RL_QUICKSTART, overrides(args), {"model.path": args.model, "rl.steps": args.steps})[0]


def overrides(args: argparse.Namespace) -> list[str]:
    """The user's, and of ours what the user did not set."""
    theirs = {text.partition("=")[0] for text in args.overrides}
    return [*args.overrides, *(f"{key}={value}" for key, value in ALL_ARMS.items() if key not in theirs)]


def check(recipe: Recipe) -> None:
    """Refuse what TRL would do otherwise."""
    rl, wanted = recipe.rl, {"loss": "grpo", "kl_coef": 0.0, "updates": 1, "environment": "single-turn", "lag": 0}
    for name, value in (wanted | {"overlong_buffer": 0}).items():
        if getattr(rl, name) != value:
            raise UserError(f"rl.{name} is {getattr(rl, name)}; this comparison needs {value}.")


# ---- runs -----------------------------------------------------------------------------------------------------------


def one_run(args: argparse.Namespace, name: str, repeat: int) -> list[dict[str, Any]]:
    """Every step of one run, in a process of its own. RunFailed with its last error."""
    out, log = args.out / f"{name}-{repeat}", args.out / f"{name}-{repeat}.log"
    common = ["--model", args.model, "--steps", str(args.steps), *overrides(args)]
    if name in TRL:
        out = out.with_suffix(".json")
        command = [sys.executable, __file__, "--child", name, "--out", str(out), *common]
    else:
        method = name.removeprefix("draftkit-")
        drafter = ["--drafter", args.drafter] if args.drafter and method == "eagle3" else []
        command = [sys.executable, "-m", "draftkit", "rl", "--spec", method, *drafter, "--overwrite", *common]
        command += ["--out", str(out)]
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        raise RunFailed(f"{reason(log.read_text(), code)} (all of it: {log})")
    return json.loads(out.read_text()) if name in TRL else draftkit_steps((out / "metrics.jsonl").read_text())


def reason(log: str, code: int) -> str:
    """The last exception that a log names."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [found[1] for found in map(ERROR.match, lines) if found]
    return (named or lines or [f"exit code {code}"])[-1][:300]


def draftkit_steps(metrics: str) -> list[dict[str, Any]]:
    """From a run's metrics.jsonl; evaluations left out."""
    rows = [json.loads(line) for line in metrics.splitlines()]
    return [
        {
            "seconds": step_seconds(row["time_s"]),
            "generate": row["generate_s"],
            "tokens": row["response_tokens"],
            "reward": row["reward_mean"],
            "acceptance": row["acceptance_length"],
        }
        for row in rows
        if "time_s" in row
    ]


def micro_batch(num: int) -> int:
    """The largest divisor of the step's sequences that one forward may hold."""
    return max(n for n in range(1, min(num, MICRO_BATCH) + 1) if num % n == 0)


def run_trl(recipe: Recipe, arm: str, steps: int, out: Path) -> None:
    """`steps` GRPO steps of TRL in this process; what each took, as JSON."""
    import os

    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from draftkit.data.data_recipe import load_data_recipe
    from draftkit.models import load_tokenizer
    from draftkit.rl.envs import load_reward
    from draftkit.rl.grpo import resolve_settings
    from draftkit.rl.policy import lr_at
    from draftkit.rl.prompts import open_prompts
    from draftkit.rl.template import ChatTemplate
    from draftkit.rl.zero import compute_dtype

    data_recipe, tokenizer = load_data_recipe(recipe.data.recipe), load_tokenizer(Path(recipe.model.path), False)
    stream, _ = open_prompts(recipe, data_recipe, tokenizer)
    prompts = stream.take(steps * recipe.rl.prompts_per_step)
    verify, sampling, policy = load_reward(recipe, data_recipe), recipe.sampling, recipe.policy
    loss, num = resolve_settings(recipe), recipe.rl.prompts_per_step * sampling.n
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(recipe.engine.kv_cache_gib))))
    rows: list[dict[str, Any]] = [{} for _ in range(steps)]
    began: list[float] = []

    def reward(completions: Any, completion_ids: Any, number: Any, **_: Any) -> list[float]:
        earned = [verify(prompts[i], said[-1]["content"]) for i, said in zip(number, completions, strict=True)]
        rows[len(began) - 1] |= {"tokens": sum(map(len, completion_ids)), "reward": statistics.fmean(earned)}
        return earned

    settings = GRPOConfig(
        output_dir=str(out.with_suffix("")),
        use_cpu=not torch.cuda.is_available(),
        bf16=compute_dtype(policy) == torch.bfloat16,
        per_device_train_batch_size=micro_batch(num),
        gradient_accumulation_steps=num // micro_batch(num),
        num_generations=sampling.n,
        max_completion_length=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        chat_template_kwargs={} if sampling.thinking is None else {"enable_thinking": sampling.thinking},
        max_steps=steps,
        learning_rate=policy.lr,
        lr_scheduler_type="constant",
        adam_beta1=policy.betas[0],
        adam_beta2=policy.betas[1],
        weight_decay=policy.weight_decay,
        max_grad_norm=policy.grad_clip,
        optim="adamw_torch_fused",
        loss_type="grpo",
        epsilon=loss.clip_low,
        epsilon_high=loss.clip_high,
        beta=0.0,
        num_iterations=1,
        gradient_checkpointing=policy.gradient_checkpointing,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        seed=recipe.rl.seed,
        use_vllm=arm == "trl-vllm",
        vllm_mode="colocate",
        vllm_max_model_length=recipe.engine.max_model_len,
        vllm_importance_sampling_correction=loss.tis_clip is not None,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=loss.tis_clip,
        use_transformers_continuous_batching=arm == "trl-paged",
        # Sized for the step: TRL's own choice is half of the free memory, which on a CPU is the machine's.
        transformers_continuous_batching_config={
            "page_size": PAGE,
            "num_blocks": num * math.ceil(recipe.engine.max_model_len / PAGE),
            "max_batch_tokens": policy.tokens_per_batch,
        },
    )

    class Clock(TrainerCallback):
        """A step begins before its rollouts and ends with its update, which is made at draftkit's learning rate."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began.append(time.perf_counter())

        def on_pre_optimizer_step(self, *_: Any, optimizer: torch.optim.Optimizer, **__: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = lr_at(len(began), policy)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            rows[len(began) - 1]["seconds"] = time.perf_counter() - began[-1]

    dataset = Dataset.from_list([{"prompt": list(p.messages), "number": i} for i, p in enumerate(prompts)])
    trainer = GRPOTrainer(recipe.model.path, reward, settings, train_dataset=dataset, callbacks=[Clock()])
    generate = trainer._generate
    template = ChatTemplate(tokenizer, sampling.thinking)

    def timed(asked: Any) -> Any:
        start = time.perf_counter()
        answered = generate(asked)
        rows[len(began) - 1]["generate"] = time.perf_counter() - start
        assert len(asked) == num, "all rollouts of a step at once"
        assert list(map(list, answered[0])) == [template.prompt(p) for p in asked], "the tokens draftkit asks with"
        return answered

    trainer._generate = timed
    trainer.train()
    out.write_text(json.dumps(rows))


# ---- the table ------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int = 0) -> str:
    """`median (least-most)`."""
    middle, least, most = (f"{x:,.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least}-{most})"


MEASURES: dict[str, tuple[Callable[[dict[str, Any]], float | None], int]] = {  # of a step, and digits to show
    "s a step": (lambda step: step["seconds"], 1),
    "  of which rollouts": (lambda step: step["generate"], 1),
    "tokens a step": (lambda step: step["tokens"], 0),
    "tokens/s": (lambda step: step["tokens"] / step["seconds"], 0),
    "  in rollouts": (lambda step: step["tokens"] / step["generate"], 0),
    "acceptance length": (lambda step: step.get("acceptance"), 2),
    "mean reward": (lambda step: step["reward"], 2),
}


def lines(found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Rows of the table: a title, then a cell an arm. Ratios of medians, to the TRL arm with the most tokens/s."""
    middle = lambda name, key: statistics.median(MEASURES[key][0](step) for step in found[name])  # noqa: E731
    made = [["steps", *(str(len(steps)) for steps in found.values())]]
    for title, (value, digits) in MEASURES.items():
        cells = [[v for v in map(value, steps) if v is not None] for steps in found.values()]
        made.append([title, *(spread(cell, digits) if cell else "" for cell in cells)])
    if rivals := [name for name in found if name in TRL]:
        base = max(rivals, key=lambda name: middle(name, "tokens/s"))
        ratio = lambda key, power: [f"{(middle(n, key) / middle(base, key)) ** power:.2f}" for n in found]  # noqa: E731
        made.append([f"steps/s, {base} = 1", *ratio("s a step", -1)])
        made.append([f"tokens/s, {base} = 1", *ratio("tokens/s", 1)])
    return made


def report(found: dict[str, list[dict[str, Any]]], failed: dict[str, str], args: argparse.Namespace) -> None:
    ran = {name: steps for name, steps in found.items() if steps}
    if not ran:
        raise RunFailed("No arm ran.", f"Logs: {args.out}.")
    table(
        f"GRPO, {args.repeats} repeats of {args.steps} steps, the first of each left out: median (least-most)",
        ["", *ran],
        lines(ran),
        caption="Tokens: sampled ones. Rollouts: in the engine, for TRL with rendering and publishing. Evaluations and "
        "checkpoints are left out.",
    )
    notes = [f"- {note}" for arm, note in NOTES.items() if any(name.startswith(arm) for name in ran)]
    missing = [f"- {name} does not run here: {escape(why)}" for name, why in failed.items()]
    closing("Not equal:", *notes, *missing)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="recipe overrides")
    parser.add_argument("--model", required=True, help="directory of the policy that every arm starts from")
    parser.add_argument("--drafter", help="of draftkit-eagle3; default: one is grown")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"default: {', '.join(ARMS)}")
    parser.add_argument("--steps", type=int, default=6, help="of every run, the first one included")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench-rl"))
    parser.add_argument("--child", choices=TRL, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    sys.exit(main())
