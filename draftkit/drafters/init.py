"""Where an EAGLE-3 drafter starts: from the verifier, or from an existing drafter directory.

From the verifier: `fc` passes the highest auxiliary state through, the layer is the verifier's last one (its
projections act on the hidden half, the embedding half starts small), norm and head are the verifier's own. A random
head over a random layer begins far above the uniform loss ln D; this start is an early exit of the verifier that has
only to learn what the next token's embedding changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from draftkit.drafters.eagle3 import Eagle3, Eagle3Config
from draftkit.errors import UserError

EMBED_STD = 0.02
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"  # of a verifier


def from_verifier(drafter: Eagle3, verifier: torch.nn.Module, seed: int) -> None:
    """Fill the drafter's parameters from a transformers Llama/Qwen-type verifier (`model.layers`, `lm_head`)."""
    weights = dict(verifier.named_parameters(remove_duplicate=False))
    from_weights(drafter, weights, last_layer(verifier.config.num_hidden_layers), seed)


def last_layer(num_layers: int) -> str:
    """Beginning of the checkpoint names of the verifier's last layer."""
    return f"model.layers.{num_layers - 1}."


@torch.no_grad()
def from_weights(drafter: Eagle3, weights: Mapping[str, torch.Tensor], layer: str, seed: int) -> None:
    """Fill the drafter's parameters from a verifier's checkpoint tensors; needed are those of `layer`, the final norm,
    and the LM head or, where it is tied, the embedding.

    Parts whose shapes differ (another hidden or MLP size) keep a normal(0, 0.02) start.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, EMBED_STD, generator=generator)
    c, mid = drafter.config, drafter.midlayer
    hidden = c.hidden_size
    head = weights[HEAD if HEAD in weights else EMBEDDING][drafter.draft_to_target_D]
    if head.shape == drafter.lm_head.weight.shape:
        drafter.lm_head.weight.copy_(head)
        drafter.norm.weight.copy_(weights[NORM])
    if hidden == c.target_hidden_size:
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
        mid.hidden_norm.weight.copy_(weights[f"{layer}input_layernorm.weight"])
        mid.post_attention_layernorm.weight.copy_(weights[f"{layer}post_attention_layernorm.weight"])
    for name in ("q_proj", "k_proj", "v_proj"):
        ours, theirs = getattr(mid.self_attn, name).weight, weights[f"{layer}self_attn.{name}.weight"]
        if ours[:, hidden:].shape == theirs.shape:
            ours[:, hidden:].copy_(theirs)
    for ours, name in (
        (mid.self_attn.o_proj, "self_attn.o_proj"),
        *((getattr(mid.mlp, name), f"mlp.{name}") for name in ("gate_proj", "up_proj", "down_proj")),
    ):
        theirs = weights[f"{layer}{name}.weight"]
        if ours.weight.shape == theirs.shape:
            ours.weight.copy_(theirs)


def config_of(directory: Path) -> Eagle3Config:
    """The configuration of a drafter directory in the plain layout. Raises UserError when it is not one."""
    file = directory / "config.json"
    if not file.exists():
        raise UserError(
            f"{directory} holds no config.json, so it is no drafter.", "Give a directory that train-drafter wrote."
        )
    raw = json.loads(file.read_text())
    if not any("Eagle3" in a for a in raw.get("architectures", [])):
        raise UserError(f"{file}: architectures is {raw.get('architectures')}, not an EAGLE-3 drafter.")
    return Eagle3Config(
        hidden_size=raw["hidden_size"],
        target_hidden_size=raw.get("target_hidden_size", raw["hidden_size"]),
        intermediate_size=raw["intermediate_size"],
        num_attention_heads=raw["num_attention_heads"],
        num_key_value_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        vocab_size=raw["vocab_size"],
        draft_vocab_size=raw["draft_vocab_size"],
        aux_layers=tuple(raw["eagle_aux_hidden_state_layer_ids"]),
        rms_norm_eps=raw["rms_norm_eps"],
        rope_parameters=raw["rope_parameters"],
        max_position_embeddings=raw["max_position_embeddings"],
        norm_before_residual=raw.get("norm_before_residual", False),
    )


def verifier_of(directory: Path) -> dict[str, str] | None:
    """Fingerprint of the verifier that the drafter was made for; None for a drafter that draftkit did not write."""
    file = directory / "draftkit.json"
    return json.loads(file.read_text())["verifier"] if file.exists() else None


def from_drafter(directory: Path, embed_VH: torch.Tensor) -> Eagle3:
    """An existing drafter, with its own draft vocabulary: recomputing that would scramble its head silently."""
    config = config_of(directory)
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
        if name not in ("t2d", "embed_tokens.weight")
    }
    offsets = tensors.pop("d2t")
    drafter = Eagle3(config, embed_VH, offsets + torch.arange(len(offsets)))
    missing, unexpected = drafter.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=False)
    missing = [name for name in missing if name != "d2t"]
    if missing or unexpected:
        raise UserError(
            f"{directory}: missing tensors {missing}, unexpected tensors {unexpected}.",
            "It is not a plain EAGLE-3 drafter.",
        )
    return drafter
