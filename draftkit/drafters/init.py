"""Where an EAGLE-3 drafter starts that is made from its verifier (others: `layouts`).

`fc` passes the highest auxiliary state through, the layers are the verifier's last ones (the first one's projections
act on the hidden half, the embedding half starts small), norm and head are the verifier's own. A random head over a
random layer begins far above the uniform loss ln D; this start is an early exit of the verifier that has only to learn
what the next token's embedding changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from draftkit.drafters.eagle3 import Eagle3

EMBED_STD = 0.02
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"  # of a verifier


def from_verifier(drafter: Eagle3, verifier: torch.nn.Module, seed: int) -> None:
    """Fill the drafter's parameters from a transformers Llama/Qwen-type verifier (`model.layers`, `lm_head`)."""
    weights = dict(verifier.named_parameters(remove_duplicate=False))
    from_weights(drafter, weights, verifier.config.num_hidden_layers, seed)


def last_layer(num_layers: int) -> str:
    """Beginning of the checkpoint names of the verifier's last layer."""
    return f"model.layers.{num_layers - 1}."


@torch.no_grad()
def from_weights(drafter: Eagle3, weights: Mapping[str, torch.Tensor], num_layers: int, seed: int) -> None:
    """Fill the drafter's parameters from a verifier's checkpoint tensors; needed are those of its last layers, as many
    as the drafter has, the final norm, and the LM head or, where it is tied, the embedding.

    Parts whose shapes differ (another hidden or MLP size) keep a normal(0, 0.02) start.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, EMBED_STD, generator=generator)
    c = drafter.config
    hidden, count = c.hidden_size, c.num_hidden_layers
    head = weights[HEAD if HEAD in weights else EMBEDDING][drafter.draft_to_target_D]
    if head.shape == drafter.lm_head.weight.shape:
        drafter.lm_head.weight.copy_(head)
        drafter.norm.weight.copy_(weights[NORM])
    if hidden == c.target_hidden_size:
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
    for i, layer in enumerate([drafter.midlayer, *drafter.layers.values()]):
        _layer_from(layer, weights, f"model.layers.{num_layers - count + i}.", first=i == 0)


def _layer_from(layer: torch.nn.Module, weights: Mapping[str, torch.Tensor], theirs: str, first: bool) -> None:
    """One layer of the drafter from the verifier's `theirs`. The first one's queries, keys and values act on
    [embedding, hidden]: theirs go to the hidden half."""

    def copy(ours: torch.Tensor, name: str) -> None:
        their = weights.get(f"{theirs}{name}.weight")
        if their is not None and ours.shape == their.shape:
            ours.copy_(their)

    def copy_bias(ours: torch.nn.Linear, name: str) -> None:
        """Theirs, or none at all to begin with."""
        if ours.bias is not None:
            their = weights.get(f"{theirs}{name}.bias")
            ours.bias.copy_(their) if their is not None and ours.bias.shape == their.shape else ours.bias.zero_()

    attention, mlp = layer.self_attn, layer.mlp
    copy(layer.hidden_norm.weight if first else layer.input_layernorm.weight, "input_layernorm")
    copy(layer.post_attention_layernorm.weight, "post_attention_layernorm")
    for name in ("q_proj", "k_proj", "v_proj"):
        ours = getattr(attention, name).weight
        copy(ours[:, ours.shape[1] // 2 :] if first else ours, f"self_attn.{name}")
        copy_bias(getattr(attention, name), f"self_attn.{name}")
    copy(attention.o_proj.weight, "self_attn.o_proj")
    copy_bias(attention.o_proj, "self_attn.o_proj")
    for name in ("q_norm", "k_norm"):
        if getattr(attention, name) is not None:
            copy(getattr(attention, name).weight, f"self_attn.{name}")
    for name in ("gate_proj", "up_proj", "down_proj"):
        copy(getattr(mlp, name).weight, f"mlp.{name}")


def verifier_of(directory: Path) -> dict[str, str] | None:
    """Fingerprint of the verifier that the drafter was made for; None for a drafter that draftkit did not write."""
    file = directory / "draftkit.json"
    return json.loads(file.read_text())["verifier"] if file.exists() else None
