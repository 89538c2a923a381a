"""A short supervised start: some steps on worked examples, for a policy that earns no reward as it is.

The result is an ordinary model directory, `<run>/warmup`, written whole, from which the RL run begins and against which
its drafter and its KL reference are measured. It depends on the recipe alone, so a resumed run finds it, and other
runs can start from it (`--model <run>/warmup warmup.steps=0`).
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from draftkit.console import progress, say
from draftkit.data.worked import worked_examples
from draftkit.errors import Interrupted
from draftkit.recipe import Recipe
from draftkit.rl.grpo import TokenBatch
from draftkit.rl.policy import Policy, Sample
from draftkit.rl.template import ChatTemplate, worked_document
from draftkit.rl.world import World
from draftkit.run import Interrupt, RunDir
from draftkit.types import Document, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def warm_up(
    recipe: Recipe,
    run: RunDir,
    world: World,
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
) -> Path:
    """The directory of the policy to begin with: `model` itself without warm-up steps."""
    final = run.path / "warmup"
    if recipe.warmup.steps == 0:
        return model
    if final.exists():
        say(f"warm-up: found in {final}")
        return final
    template = ChatTemplate(tokenizer, recipe.sampling.thinking)
    tool = recipe.rl.environment == "calculator"
    documents = [worked_document(template, p.messages, a) for p, a in worked_examples(prompts, tool)]
    longest = recipe.engine.max_model_len
    documents = [d for d in documents if len(d.tokens) <= longest]
    say(f"warm-up: {recipe.warmup.steps} supervised steps on {len(documents)} worked examples")
    policy = Policy(model, _settings(recipe))
    run.rewind_metrics(-1)  # of a warm-up that was interrupted
    _train(recipe, run, world, policy, documents)
    aside = final.with_name(".warmup.tmp")
    if world.is_main:
        shutil.rmtree(aside, ignore_errors=True)
    world.barrier()
    policy.save(aside)
    policy.close()
    if world.is_main:
        aside.rename(final)
    world.barrier()
    return final


def _settings(recipe: Recipe) -> Recipe:
    """The policy's own settings at the warm-up's learning rate, without a reference."""
    policy = recipe.policy.model_copy(
        update={"lr": recipe.warmup.lr, "lr_warmup_steps": max(1, recipe.warmup.steps // 10)}
    )
    return recipe.model_copy(update={"policy": policy, "rl": recipe.rl.model_copy(update={"kl_coef": 0.0})})


def _train(recipe: Recipe, run: RunDir, world: World, policy: Policy, documents: Sequence[Document]) -> None:
    section = recipe.warmup
    order = random.Random(f"warmup/{recipe.rl.seed}")
    with Interrupt() as stop, progress("warm-up", section.steps) as bar:
        for step in range(1, section.steps + 1):
            chosen = [documents[i] for i in order.choices(range(len(documents)), k=section.examples_per_step)]
            tokens = sum(sum(d.mask) for d in chosen)
            loss = policy.update([Sample(d.tokens, d.mask) for d in world.share(chosen)], _nll(tokens)).loss
            run.metrics({"warmup_step": step, "loss": loss, "tokens": tokens})
            bar.advance(1, f"loss {loss:.3f}")
            if world.any(stop.requested):
                raise Interrupted("the warm-up begins again")


def _nll(denominator: int):
    def loss(logp_N: torch.Tensor, batch: TokenBatch):
        return -logp_N.sum() / denominator, {}

    return loss
