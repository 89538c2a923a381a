"""Multi-token prediction: one ordinary decoder layer over the verifier's last state and the next token's embedding.

    input     proj([hidden, embedding of x[p+1+i]])     hidden: the verifier's at slot p; at i >= 1 its own output
    predicts  x[p+2+i] with the verifier's LM head      rope position p + i

Stock vLLM serves one made from scratch in two layouts, and which one follows from the verifier's type:

    mimo    Qwen2-type verifiers, as MiMo's own MTP layer (`method: mtp`): norms on both inputs, hidden first, a Qwen2
            block with biases, a final norm whose output is proposed from and fed back. Reads the last block's output
            before the final norm. Its tensors live in the verifier's checkpoint (`stitch`), whose config then says
            MiMoForCausalLM.
    eagle   others (Llama, Qwen3), as EAGLE-1 (`method: eagle`, arXiv 2401.15077): the same module without its norms:
            embedding first, no input norm, no final norm. Reads the final-normed state and answers in its space. Its
            tensors are a directory of their own.

Alignment, masks and steps are those of `recurrent`. A verifier that carries a layer in MiMo's layout already has it
fine-tuned; the layers that other families carry are `mtp_native`'s. Left out: several MTP layers, which vLLM re-runs
as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from draftkit.drafters.base import write_directory
from draftkit.drafters.layers import Attention, Mlp, Norm, Rope, layer_config, linear
from draftkit.drafters.mtp_families import FAMILIES
from draftkit.drafters.recurrent import Recurrent
from draftkit.errors import UserError
from draftkit.models import stored_tensors
from draftkit.types import DraftBatch

MIMO_TYPES = {"qwen2", "mimo"}  # verifiers (model_type) that vLLM also runs as MiMoForCausalLM
PREFIX = FAMILIES["mimo"].block.format(i=0)  # of the layer's own tensors, too


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """Sizes are the verifier's own: the LM head is shared, and vLLM builds the block from the verifier's config."""

    layout: Literal["mimo", "eagle"]
    num_verifier_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int


class Mtp(Recurrent):
    """embed_VH and head_VH are the verifier's, frozen, and no parameters."""

    def __init__(self, config: MtpConfig, embed_VH: torch.Tensor, head_VH: torch.Tensor) -> None:
        super().__init__()
        c, mimo = config, config.layout == "mimo"
        self.config, self.method = config, "mtp" if mimo else "eagle"
        self.aux_layers = (c.num_verifier_layers,) if mimo else ()
        if mimo:
            self.token_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
            self.hidden_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
            self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
            self.final_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.input_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.self_attn = Attention(c.hidden_size, c, bias=mimo)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size)
        self.rope = Rope(c)
        self.register_buffer("embed_VH", embed_VH, persistent=False)
        self.register_buffer("head_VH", head_VH, persistent=False)
        self.register_buffer("draft_to_target_D", torch.arange(c.vocab_size), persistent=False)

    @property
    def head_DH(self) -> torch.Tensor:
        return self.head_VH

    def blocks(self) -> list[nn.Module]:
        return [self]

    def first_hidden(self, batch: DraftBatch) -> torch.Tensor:
        return batch.aux_NF if self.config.layout == "mimo" else batch.last_NH

    def inputs(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embed_VH[tokens].to(hidden.dtype)
        if self.config.layout == "eagle":
            fused = linear(torch.cat([embedded, hidden], -1), self.input_proj)
            return fused, fused
        embedded = embedded.masked_fill((positions == 0).unsqueeze(-1), 0.0)  # as vLLM does
        pair = [self.hidden_layernorm(hidden), self.token_layernorm(embedded)]
        fused = linear(torch.cat(pair, -1), self.input_proj)
        return self.input_layernorm(fused), fused

    def outputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.final_layernorm(hidden) if self.config.layout == "mimo" else hidden
        return state, state


def layout_for(model_type: str) -> Literal["mimo", "eagle"]:
    return "mimo" if model_type in MIMO_TYPES else "eagle"


# ---- where one begins ---------------------------------------------------------------------------------------------


@torch.no_grad()
def from_verifier(drafter: Mtp, weights: Mapping[str, torch.Tensor], rms: float) -> None:
    """Begin as the verifier's last layer run once more on its last state: an early exit that has only to learn what the
    next token's embedding changes, and so begins without it. weights: the verifier's, by checkpoint names; rms: root
    mean square of its last block's output.

    In the eagle layout there are no norms to undo, so they are folded into the matrices: the residual stream lives in
    the space of the final-normed state, channel c of which is w_c / rms times the block's own.
    """
    c = drafter.config
    last = f"model.layers.{c.num_verifier_layers - 1}."
    get = lambda name: weights[last + name + ".weight"].float()  # noqa: E731
    final = weights["model.norm.weight"].float()
    attention, mlp = drafter.self_attn, drafter.mlp
    drafter.input_proj.weight.zero_()
    eye = torch.eye(c.hidden_size)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(attention, name).weight.copy_(get(f"self_attn.{name}"))
        if c.layout == "mimo":
            getattr(attention, name).bias.copy_(weights[f"{last}self_attn.{name}.bias"])
    attention.o_proj.weight.copy_(get("self_attn.o_proj"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(mlp, name).weight.copy_(get(f"mlp.{name}"))
    drafter.post_attention_layernorm.weight.copy_(get("post_attention_layernorm"))
    if c.layout == "mimo":
        drafter.input_proj.weight[:, : c.hidden_size].copy_(eye)
        drafter.hidden_layernorm.weight.fill_(rms)
        drafter.token_layernorm.weight.fill_(1.0)
        drafter.input_layernorm.weight.copy_(get("input_layernorm"))
        drafter.final_layernorm.weight.copy_(final)
        return
    safe = torch.where(final.abs() < 1e-3, torch.full_like(final, 1e-3), final)
    drafter.input_proj.weight[:, c.hidden_size :].copy_(eye)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(attention, name).weight.mul_(get("input_layernorm") / safe)
    for matrix in (attention.o_proj, mlp.down_proj):
        matrix.weight.mul_((final / rms).unsqueeze(1))
    drafter.post_attention_layernorm.weight.mul_(final.square().mean().sqrt() / safe)


# ---- what is served -------------------------------------------------------------------------------------------------


def served_tensors(drafter: Mtp) -> dict[str, torch.Tensor]:
    """What vLLM loads, by its checkpoint names, bfloat16 on the CPU."""
    names = _served_names(drafter)
    return {names[n]: t.detach().to("cpu", torch.bfloat16).contiguous() for n, t in drafter.named_parameters()}


def _served_names(drafter: Mtp) -> dict[str, str]:
    """Own name -> checkpoint name."""
    own = [name for name, _ in drafter.named_parameters()]
    if drafter.config.layout == "mimo":
        return {name: PREFIX + name for name in own}
    return {name: "fc.weight" if name == "input_proj.weight" else f"layers.0.{name}" for name in own}


def mimo_config() -> dict[str, Any]:
    """What the verifier's config.json says in place of its own, for vLLM to find the MTP layer."""
    return {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}


def export_eagle(drafter: Mtp, directory: Path, verifier: dict[str, str], readme: str) -> None:
    """Write `directory` for vLLM's `method: eagle`."""
    config = {"architectures": ["EagleLlamaForCausalLM"], **layer_config(drafter.config, "llama", 1, "bfloat16")}
    write_directory(directory, config, served_tensors(drafter), verifier, readme)


@torch.no_grad()
def load_init(drafter: Mtp, directory: Path) -> None:
    """Warm start from a directory that draftkit exported (the eagle layout, or a stitched verifier). Raises UserError
    when it lacks some of the layer's tensors."""
    wanted, parameters = (
        {served: own for own, served in _served_names(drafter).items()},
        dict(drafter.named_parameters()),
    )
    for served, tensor in stored_tensors(directory, lambda name: name in wanted):
        parameters[wanted.pop(served)].copy_(tensor)
    if missing := sorted(wanted):
        raise UserError(
            f"drafter.init: {directory} lacks {missing[0]} and {len(missing) - 1} more tensors of an MTP layer."
        )
