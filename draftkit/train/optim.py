"""AdamW with linear warm-up and cosine decay; decay of weights on matrices only."""

from __future__ import annotations

import math

import torch

from draftkit.drafters.base import trainable
from draftkit.recipe import TrainSection


def build(model: torch.nn.Module, recipe: TrainSection) -> torch.optim.AdamW:
    trained = trainable(model)
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=True)


def lr_at(step: int, total: int, recipe: TrainSection) -> float:
    """Learning rate of step 1 <= step <= total: a pure function, so a resumed run needs no scheduler state."""
    warmup = max(1, round(recipe.warmup_ratio * total))
    if step <= warmup:
        return recipe.lr * step / warmup
    progress = (step - warmup) / max(1, total - warmup)
    floor = recipe.lr_min_ratio
    return recipe.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
