"""The prompts of an RL run: the ones to train on, in seeded epochs, and the held-out ones to evaluate on.

They are those of `draftkit prepare` with the same recipe, by the same rules, so a run never trains on a prompt that a
drafter's corpus holds out, nor on one that its own evaluation uses. The order is a pure function of (seed, position):
the number of prompts drawn so far is all that a resumed run needs to know, however many each step asked for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftkit import console
from draftkit.data.data_recipe import DataRecipe
from draftkit.data.prepare import choose_prompts
from draftkit.models import render
from draftkit.recipe import Recipe
from draftkit.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class PromptStream:
    """Every prompt once an epoch, each epoch in an order of its own. position: prompts drawn so far."""

    prompts: Sequence[Prompt]
    seed: int
    position: int = 0

    def take(self, num: int) -> list[Prompt]:
        drawn: list[Prompt] = []
        while len(drawn) < num:
            epoch, place = divmod(self.position, len(self.prompts))
            order = list(range(len(self.prompts)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            fresh = [self.prompts[i] for i in order[place : place + num - len(drawn)]]
            drawn += fresh
            self.position += len(fresh)
        return drawn


def open_prompts(
    recipe: Recipe, data_recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase
) -> tuple[PromptStream, list[Prompt]]:
    """The training stream at its beginning, and the `rl.eval_prompts` held-out prompts (at most data.heldout)."""
    split, _ = choose_prompts(
        recipe, data_recipe, lambda p: len(render(tokenizer, p.messages, recipe.sampling.thinking))
    )
    if len(split.heldout) < recipe.rl.eval_prompts:
        console.say_once(
            f"rl.eval_prompts asks for {recipe.rl.eval_prompts} prompts; {len(split.heldout)} are held out"
        )
    return PromptStream(split.train, recipe.rl.seed), split.heldout[: recipe.rl.eval_prompts]
