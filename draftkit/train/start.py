"""The drafter that a run begins with: sizes from the verifier and the corpus, or an existing drafter's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from draftkit.console import say_once
from draftkit.data.capture import Verifier
from draftkit.drafters.eagle3 import Eagle3, Eagle3Config, default_aux_layers
from draftkit.drafters.init import config_of, from_drafter, from_verifier, verifier_of
from draftkit.drafters.vocab import choose_vocab
from draftkit.errors import UserError
from draftkit.models import ModelFacts
from draftkit.recipe import Recipe


def aux_layers(recipe: Recipe, facts: ModelFacts) -> tuple[int, ...]:
    if recipe.drafter.init is not None:
        return config_of(Path(recipe.drafter.init)).aux_layers
    return tuple(sorted(recipe.drafter.aux_layers or default_aux_layers(facts.num_layers)))


def check_init(directory: Path, facts: ModelFacts, prints: dict[str, str], field: str = "drafter.init") -> None:
    """Refuse a warm start from a drafter whose sizes or tokens are not this verifier's. Other weights are what a warm
    start is for, when the policy has moved on, so they are only said. field: of the recipe, which named it."""
    config, how = config_of(directory), f"Use a drafter of this verifier, or leave {field} out."
    theirs, ours = (config.target_hidden_size, config.vocab_size), (facts.hidden_size, facts.vocab_size)
    if theirs != ours:
        raise UserError(
            f"{field}: {directory} was made for another verifier: hidden size and vocabulary are {theirs}, "
            f"this one's are {ours}.",
            how,
        )
    made_for = verifier_of(directory)
    if made_for is None:
        say_once(f"{field}: {directory} does not say which verifier it was made for; only sizes were compared.")
    elif made_for["tokenizer"] != prints["tokenizer"]:
        raise UserError(f"{field}: {directory} was made for a verifier with another tokenizer.", how)
    elif made_for["weights"] != prints["weights"]:
        say_once(f"{field}: {directory} was made for other weights of this verifier.")


def build_drafter(
    recipe: Recipe, facts: ModelFacts, verifier: Verifier, counts: Counter[int], special: list[int]
) -> Eagle3:
    if recipe.drafter.init is not None:
        return from_drafter(Path(recipe.drafter.init), verifier.embed_VH)
    ids = choose_vocab(
        counts, special, facts.vocab_size, recipe.drafter.draft_vocab_size, recipe.drafter.vocab_coverage
    )
    drafter = Eagle3(drafter_config(recipe, facts, verifier.aux_layers, len(ids)), verifier.embed_VH, ids)
    from_verifier(drafter, verifier.model, recipe.train.seed)
    return drafter


def drafter_config(
    recipe: Recipe, facts: ModelFacts, aux_layers: tuple[int, ...], draft_vocab_size: int
) -> Eagle3Config:
    """Sizes of a drafter that begins from this verifier's layers."""
    return Eagle3Config(
        hidden_size=facts.hidden_size,
        target_hidden_size=facts.hidden_size,
        intermediate_size=recipe.drafter.intermediate_size or facts.intermediate_size,
        num_attention_heads=facts.num_heads,
        num_key_value_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        vocab_size=facts.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layers=aux_layers,
        rms_norm_eps=facts.rms_norm_eps,
        rope_parameters=facts.rope_parameters,
        max_position_embeddings=facts.max_position_embeddings,
        norm_before_residual=recipe.drafter.norm_before_residual,
    )
