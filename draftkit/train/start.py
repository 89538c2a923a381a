"""The drafter that a run begins with, of each kind: from the verifier, or an existing drafter's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from draftkit.console import say_once
from draftkit.data.capture import Verifier
from draftkit.drafters import draft_lm, mtp, mtp_native
from draftkit.drafters.base import Drafter
from draftkit.drafters.eagle3 import Eagle3, Eagle3Config, default_aux_layers
from draftkit.drafters.init import from_verifier, verifier_of
from draftkit.drafters.layouts import AuxIds, config_of, from_drafter
from draftkit.drafters.mtp import Mtp, MtpConfig, layout_for
from draftkit.drafters.mtp_families import Family, family_of
from draftkit.drafters.mtp_native import NativeMtp, native_config
from draftkit.drafters.vocab import choose_vocab
from draftkit.errors import UserError
from draftkit.models import ModelFacts
from draftkit.recipe import Recipe
from draftkit.types import Document

RMS_DOCUMENTS = 4
MIMO = "mimo"  # the family whose layer is also trained from nothing, by `mtp`
OF_EAGLE3 = (
    *("aux_layers", "draft_vocab_size", "intermediate_size", "norm_before_residual"),
    *("norm_before_fc", "fc_norm", "norm_output", "qk_norm", "attention_bias"),
)


def aux_layers(recipe: Recipe, facts: ModelFacts) -> tuple[int, ...]:
    """Verifier layers to capture for this kind."""
    section = recipe.drafter
    if section.kind == "draft-lm":
        return ()
    if section.kind == "mtp":
        if (own := native_mtp(facts.path)) is not None:
            return mtp_native.aux_layers(own, facts.num_layers)
        return (facts.num_layers,) if layout_for(facts.model_type) == "mimo" else ()
    if section.init is not None:
        return config_of(Path(section.init), section.aux_ids, facts.num_layers).aux_layers
    return tuple(sorted(section.aux_layers or default_aux_layers(facts.num_layers)))


def check_start(recipe: Recipe, facts: ModelFacts, prints: dict[str, str]) -> None:
    """Refuse settings that this kind of drafter does not have, before anything is captured."""
    section = recipe.drafter
    if section.kind != "eagle3":
        foreign = [name for name in OF_EAGLE3 if getattr(section, name)]
        foreign += ["num_layers"] if section.kind == "mtp" and section.num_layers else []
        if foreign:
            raise UserError(
                f"drafter.{foreign[0]} ({getattr(section, foreign[0])}) means nothing to a drafter of kind "
                f"{section.kind}.",
                "Leave it out, or train an EAGLE-3 drafter.",
            )
    if section.kind == "draft-lm" and section.init is None and recipe.train.server is not None:
        raise UserError(
            "train.server: a draft-lm is made of the verifier's layers, which a server does not give.",
            "Leave train.server out, or name a small model in drafter.init.",
        )
    if section.kind == "mtp":
        own = native_mtp(facts.path)
        if own is None and layout_for(facts.model_type) == "eagle":
            say_once(
                f"mtp: stock vLLM has no MTP module for {facts.model_type} verifiers; this trains the nearest thing "
                "that it serves, an EAGLE-1 head (one layer over the last state, without norms)."
            )
        if own is not None and own.name != MIMO:
            native_config(facts.path, own)
    if section.kind == "eagle3" and section.init is not None:
        check_init(Path(section.init), facts, prints, section.aux_ids)


def check_init(
    directory: Path,
    facts: ModelFacts,
    prints: dict[str, str],
    aux_ids: AuxIds | None = None,
    field: str = "drafter.init",
) -> None:
    """Refuse a warm start from a drafter whose sizes or tokens are not this verifier's. Other weights are what a warm
    start is for, when the policy has moved on, so they are only said. field: of the recipe, which named it."""
    config = config_of(directory, aux_ids, facts.num_layers)
    how = f"Use a drafter of this verifier, or leave {field} out."
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
    recipe: Recipe,
    facts: ModelFacts,
    verifier: Verifier,
    counts: Counter[int],
    special: list[int],
    documents: Sequence[Document] = (),
) -> Drafter:
    """counts: supervised tokens of the corpus; special: tokens that a draft vocabulary always holds; documents: some of
    the corpus, from which an MTP layer learns the size of the verifier's states."""
    init = None if recipe.drafter.init is None else Path(recipe.drafter.init)
    if recipe.drafter.kind == "draft-lm":
        if init is not None:
            return draft_lm.from_model(init, facts.path, facts.vocab_size)
        return draft_lm.student(verifier.model, recipe.drafter.num_layers)
    if recipe.drafter.kind == "mtp":
        own = native_mtp(facts.path)
        if own is not None and own.name != MIMO:
            native = NativeMtp(native_config(facts.path, own), verifier.embed_VH, verifier.head_VH)
            mtp_native.load(native, init or facts.path)
            return native
        drafter = Mtp(mtp_config(facts), verifier.embed_VH, verifier.head_VH)
        if init is not None or own is not None:
            mtp.load_init(drafter, init or facts.path)
        else:
            mtp.from_verifier(drafter, verifier.model.state_dict(), last_rms(verifier, documents))
        return drafter
    if init is not None:
        return from_drafter(init, verifier.embed_VH, recipe.drafter.aux_ids, facts.num_layers)
    section = recipe.drafter
    ids = choose_vocab(counts, special, facts.vocab_size, section.draft_vocab_size, section.vocab_coverage)
    drafter = Eagle3(drafter_config(recipe, facts, verifier.aux_layers, len(ids)), verifier.embed_VH, ids)
    from_verifier(drafter, verifier.model, recipe.train.seed)
    return drafter


def native_mtp(verifier: Path) -> Family | None:
    """The family of the MTP layers that the verifier's checkpoint carries already; they are then fine-tuned."""
    return family_of(json.loads((verifier / "config.json").read_text()))


def last_rms(verifier: Verifier, documents: Sequence[Document]) -> float:
    """Root mean square of what the last block puts out, over a few documents."""
    squares: list[torch.Tensor] = []
    hook = verifier.model.model.norm.register_forward_pre_hook(
        lambda _, inputs: squares.append(inputs[0].float().square().mean())
    )
    verifier.states(documents[:RMS_DOCUMENTS])
    hook.remove()
    return float(torch.stack(squares).mean().sqrt())


def mtp_config(facts: ModelFacts) -> MtpConfig:
    return MtpConfig(
        layout=layout_for(facts.model_type),
        num_verifier_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        intermediate_size=facts.intermediate_size,
        num_attention_heads=facts.num_heads,
        num_key_value_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        vocab_size=facts.vocab_size,
        rms_norm_eps=facts.rms_norm_eps,
        rope_parameters=facts.rope_parameters,
        max_position_embeddings=facts.max_position_embeddings,
    )


def drafter_config(
    recipe: Recipe, facts: ModelFacts, aux_layers: tuple[int, ...], draft_vocab_size: int
) -> Eagle3Config:
    """Sizes of a drafter that begins from this verifier's layers."""
    section = recipe.drafter
    return Eagle3Config(
        hidden_size=facts.hidden_size,
        target_hidden_size=facts.hidden_size,
        intermediate_size=section.intermediate_size or facts.intermediate_size,
        num_attention_heads=facts.num_heads,
        num_key_value_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        vocab_size=facts.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layers=aux_layers,
        rms_norm_eps=facts.rms_norm_eps,
        rope_parameters=facts.rope_parameters,
        max_position_embeddings=facts.max_position_embeddings,
        norm_before_residual=section.norm_before_residual,
        norm_before_fc=section.norm_before_fc,
        fc_norm=section.fc_norm,
        norm_output=section.norm_output,
        num_hidden_layers=section.num_layers or 1,
        qk_norm=section.qk_norm,
        attention_bias=section.attention_bias,
    )
