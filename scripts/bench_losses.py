"""What each loss, and each form of the hidden-state cache, does to acceptance: EAGLE-3 arms on one corpus.

    python scripts/bench_losses.py --corpus outputs/prepare/quickstart --epochs 3 --out /tmp/losses

Every arm is a training run of the same recipe, seed and batches; only `train.loss` or `train.cache_form` differs. The
exported drafters are then measured alike: on held-out answers at the rollout temperature and on greedy ones, from exact
states. Acceptance by formula 8 of measures.md, per drafted token: greedy p(argmax q), sampled sum min(p, q); lengths
are 1 + the sum of the products along the chain, and for greedy drafts also the walk over the text. Arms that ran before
are read again. Seeds: --seeds 0,1 trains each arm as often and shows the spread.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from draftkit.data.capture import StreamedStates, Verifier, state_dtype
from draftkit.data.shards import Corpus
from draftkit.drafters.layouts import config_of, from_drafter
from draftkit.models import resolve_model
from draftkit.recipe import Recipe, load_recipe
from draftkit.run import RunDir
from draftkit.train import loop
from draftkit.train.documents import documents
from draftkit.train.evaluate import TeacherView, chain_length, evaluate

LOSSES = ("kl", "ce", "tv", "lk-alpha", "lk-hybrid", "tv-chain")


def arms(losses: list[str], forms: list[str], seeds: list[int]) -> dict[str, list[str]]:
    """Name -> overrides."""
    found = {}
    for seed in seeds:
        for loss in losses:
            found[f"{loss.replace(':', '_')}-s{seed}"] = [f"train.loss={_loss(loss)}", f"train.seed={seed}"]
        for form in forms:
            found[f"form-{form}-s{seed}"] = [f"train.cache_form={form}", f"train.seed={seed}"]
    return found


def _loss(text: str) -> str:
    """`kl` or `kl:0.5+tv:1` -> YAML."""
    parts = [part.partition(":") for part in text.split("+")]
    return json.dumps({name: float(weight or 1) for name, _, weight in parts})


def train(recipe: Recipe, out: Path, corpus: Path, states: Path) -> dict[str, Any]:
    """One arm; its exact states are those of the first arm, linked."""
    run = RunDir.open(out, verb="train-drafter", recipe=recipe, resume=True, inputs={"corpus": str(corpus)})
    try:
        if run.finished:
            return run.results()
        if recipe.train.cache_form == "exact":
            states.mkdir(parents=True, exist_ok=True)
            if not (out / "states").exists():
                os.symlink(states, out / "states")
        return loop.run(recipe, run, corpus)
    finally:
        run.close()


def measure(recipe: Recipe, out: Path, corpus: Path) -> dict[str, Any]:
    path = resolve_model(recipe.model.path)
    source, t = Corpus.open(corpus), recipe.sampling.temperature
    verifier = Verifier(path, config_of(out / "drafter").aux_layers, t, state_dtype("cpu"))
    drafter = from_drafter(out / "drafter", verifier.embed_VH)
    teacher = TeacherView(drafter, verifier)
    found = {}
    for name, temperature in (("sampled", t), ("greedy", 0.0)):
        docs = documents(source, "heldout", recipe.train.seq_len, {temperature})
        found[name] = evaluate(drafter, teacher, StreamedStates(verifier, docs), recipe)
    return found


def rows(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    made = []
    for name, result in found.items():
        hot, cold = result["sampled"], result["greedy"]
        made.append(
            [
                name,
                " ".join(f"{x:.3f}" for x in hot["kl"]),
                " ".join(f"{x:.3f}" for x in hot["expected_acceptance_greedy"]),
                f"{hot['walk_acceptance_length']:.3f}",
                " ".join(f"{x:.3f}" for x in hot["expected_acceptance_sampled"]),
                f"{chain_length(hot['expected_acceptance_sampled']):.3f}",
                f"{cold['walk_acceptance_length']:.3f}",
            ]
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--losses", default=",".join(LOSSES))
    parser.add_argument("--forms", default="int8", help="beside the exact one; empty for none")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", type=float, default=3.0)
    options = parser.parse_args()
    losses, forms = ([part for part in text.split(",") if part] for text in (options.losses, options.forms))
    found: dict[str, dict[str, Any]] = {}
    for name, overrides in arms(losses, forms, [int(seed) for seed in options.seeds.split(",")]).items():
        flags = {"model.path": options.model, "train.epochs": options.epochs}
        recipe, _ = load_recipe(options.recipe, [*overrides, "train.parity=false"], flags)
        out, file = options.out / name, options.out / name / "measured.json"
        train(recipe, out, options.corpus, options.out / "states")
        if not file.exists():
            file.write_text(json.dumps(measure(recipe, out, options.corpus)))
        found[name] = json.loads(file.read_text())
        show(found)


def show(found: dict[str, dict[str, Any]]) -> None:
    columns = ("arm", "KL", "greedy drafts", "AL (walk)", "sampled drafts", "AL (chain)", "AL at T = 0 (walk)")
    table = Table(title="held-out prompts, by TTT step, at the rollout temperature")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows(found):
        table.add_row(*row)
    Console(width=170).print(table)


if __name__ == "__main__":
    torch.set_num_threads(max(1, os.cpu_count() or 1))
    main()
