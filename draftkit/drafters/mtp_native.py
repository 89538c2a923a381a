"""The MTP layer that a verifier carries, to be fine-tuned: the families of `mtp_families` but MiMo, which is in `mtp`.

One row of the table says what the layer reads and in which order, the verifier's config.json how large it is; the
decoder layer follows vLLM 0.32 where transformers computes otherwise, because vLLM serves the result:

    ernie4_5      a Llama block, whose rotary pairs lie half a head apart; in the verifier they are neighbours
    deepseek_v3   norms of the latents take rms_norm_eps of config.json; in transformers always 1e-6

Parameters are called by the table's roles, so reading and writing a checkpoint is one renaming. Everything trains but
the routers' correction bias, which only balances load. Only the first of several layers is run and trained (vLLM runs
it again for every draft); the others, and whatever copies of embedding and LM head the checkpoint keeps, stay as they
are. Alignment, masks and steps are those of `recurrent`.

Left out, and refused by name: quantised checkpoints, sparse and windowed attention, biases that vLLM's modules do not
load, rope kinds on which vLLM and transformers differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftkit.drafters import experts
from draftkit.drafters.experts import MoeConfig, moe_config
from draftkit.drafters.layers import (
    Attention,
    GatedAttention,
    Latent,
    LatentAttention,
    Mlp,
    Norm,
    NormPlusOne,
    Rope,
    linear,
)
from draftkit.drafters.mtp_families import Family, is_mtp, names, text_of
from draftkit.drafters.recurrent import Recurrent
from draftkit.errors import UserError
from draftkit.models import stored_names, stored_tensors
from draftkit.types import DraftBatch

GATED = ("qwen3_next", "qwen3_5")  # block types with an output gate, and the softmax mixture
DEEPSEEK_ROPES, ROPES = ("default", "yarn"), ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class NativeConfig:
    """family: the row; names: role -> tensor name of layer 0 in the checkpoint, embedding and head left out. Sizes are
    the verifier's. rotary: how many of a head's dimensions rotate. latent: of a latent attention, None for grouped
    queries; experts: None for a dense MLP. scale: of products of queries and keys; rope_scale: of rotated dimensions,
    None where transformers knows it."""

    family: Family
    names: Mapping[str, str]
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
    rotary: int
    scale: float
    rope_scale: float | None = None
    latent: Latent | None = None
    experts: MoeConfig | None = None


class NativeMtp(Recurrent):
    """embed_VH and head_VH are the verifier's, frozen, and no parameters. dtypes: tensor name -> in which dtype the
    checkpoint keeps it; `load` fills it."""

    method = "mtp"

    def __init__(self, config: NativeConfig, embed_VH: torch.Tensor, head_VH: torch.Tensor) -> None:
        super().__init__()
        c, row = config, config.family
        self.config, self.dtypes = config, dict[str, torch.dtype]()
        self.aux_layers = aux_layers(row, c.num_verifier_layers)
        norm = NormPlusOne if row.norm_adds_one else Norm
        self.embed_norm = norm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = norm(c.hidden_size, c.rms_norm_eps)
        self.fuse = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.block = Block(c, norm)
        self.final_norm = norm(c.hidden_size, c.rms_norm_eps) if row.final_norm else None
        self.rope = Rope(c, c.rotary)
        if c.rope_scale is not None:
            self.rope.attention_scaling = c.rope_scale
        self.register_buffer("embed_VH", embed_VH, persistent=False)
        self.register_buffer("head_VH", head_VH, persistent=False)
        self.register_buffer("draft_to_target_D", torch.arange(c.vocab_size), persistent=False)

    @property
    def head_DH(self) -> torch.Tensor:
        return self.head_VH

    @property
    def scale(self) -> float:
        return self.config.scale

    def blocks(self) -> list[nn.Module]:
        return [self.block]

    def first_hidden(self, batch: DraftBatch) -> torch.Tensor:
        return batch.aux_NF if self.config.family.verifier_state == "pre-norm" else batch.last_NH

    def inputs(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        row, embedded = self.config.family, self.embed_VH[tokens].to(hidden.dtype)
        if row.zero_first:
            embedded = embedded.masked_fill((positions == 0).unsqueeze(-1), 0.0)
        pair = [self.embed_norm(embedded), self.hidden_norm(hidden)]
        fused = linear(torch.cat(pair if row.embedding_first else pair[::-1], -1), self.fuse)
        return self.block.input_layernorm(fused), fused

    def outputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = hidden if self.final_norm is None else self.final_norm(hidden)
        return state, state if self.config.family.feedback == "post-norm" else hidden


class Block(nn.Module):
    """A decoder layer of the family's kind; `recurrent` runs its parts."""

    def __init__(self, config: NativeConfig, norm: type[Norm]) -> None:
        super().__init__()
        c = config
        self.input_layernorm = norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = _attention(c, norm)
        self.post_attention_layernorm = norm(c.hidden_size, c.rms_norm_eps)
        if c.experts is None:
            self.mlp: nn.Module = Mlp(c.hidden_size, c.intermediate_size)
        else:
            self.mlp = experts.build(c.hidden_size, c.experts)


def _attention(c: NativeConfig, norm: type[Norm]) -> nn.Module:
    if c.latent is not None:
        return LatentAttention(c.hidden_size, c, c.latent)
    if c.family.block_type in GATED:
        return GatedAttention(c.hidden_size, c, norm)
    has_bias, has_norms = (f"block.self_attn.{name}" in c.names for name in ("q_proj.bias", "q_norm.weight"))
    return Attention(c.hidden_size, c, bias=has_bias, qk_norm=has_norms, norm=norm)


def aux_layers(family: Family, num_layers: int) -> tuple[int, ...]:
    """Verifier layers whose states it reads: the last block's before the final norm, or none, as a batch holds the
    final-normed state anyway."""
    return (num_layers,) if family.verifier_state == "pre-norm" else ()


# ---- from the verifier's directory ----------------------------------------------------------------------------------


def native_config(directory: Path, family: Family) -> NativeConfig:
    """Of the verifier in `directory`. Raises UserError for what is not built, or not served by vLLM."""
    from transformers import AutoConfig

    whole = AutoConfig.from_pretrained(directory).to_dict()  # with every default, as vLLM reads it
    stacked = any(
        name.endswith(".mlp.experts.gate_up_proj") and is_mtp(family, whole, name) for name in stored_names(directory)
    )
    return config_of(family, whole, stacked, str(directory / "config.json"))


def config_of(family: Family, whole: Mapping[str, Any], stacked: bool, where: str) -> NativeConfig:
    """whole: a config.json with every default filled in; where: it was read."""
    c = text_of(whole)
    every = names(family, whole, stacked=stacked)
    called = {role: name for role, name in every.items() if role not in ("embedding", "head")}
    moe = "block.mlp.gate.weight" in called
    rope = dict(c["rope_parameters"])
    for field, why in _refusals(family, whole, c, rope, moe):
        raise UserError(
            f"{where}: {field}: {why}, so the MTP layer of this {family.name} verifier cannot be fine-tuned.",
            "Serve the layer as it is, or train an EAGLE-3 drafter or a draft-lm.",
        )
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    latent, rope_scale, scale = None, None, head_dim**-0.5
    rotary = int(head_dim * rope.pop("partial_rotary_factor", 1.0))
    if family.block_type == "deepseek_v3":
        rotary = c["qk_rope_head_dim"]
        latent = Latent(c["q_lora_rank"], c["kv_lora_rank"], c["qk_nope_head_dim"], rotary, c["v_head_dim"])
        scale = (latent.plain + latent.rotary) ** -0.5
        if rope["rope_type"] == "yarn":
            over_all = _yarn_mscale(rope["factor"], rope.get("mscale_all_dim") or 0.0)
            rope_scale = _yarn_mscale(rope["factor"], rope.get("mscale", 1.0)) / over_all
            scale *= over_all**2
    kind = "qwen" if family.block_type in GATED else "deepseek"
    return NativeConfig(
        family=family,
        names=called,
        num_verifier_layers=c["num_hidden_layers"],
        hidden_size=c["hidden_size"],
        intermediate_size=c.get("intermediate_size", 0),  # mixtures without a dense layer have none
        num_attention_heads=c["num_attention_heads"],
        num_key_value_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
        head_dim=head_dim,
        vocab_size=c["vocab_size"],
        rms_norm_eps=c["rms_norm_eps"],
        rope_parameters={name: value for name, value in rope.items() if not name.startswith("mrope")},
        max_position_embeddings=c["max_position_embeddings"],
        rotary=rotary,
        scale=scale,
        rope_scale=rope_scale,
        latent=latent,
        experts=moe_config(c, kind, stacked) if moe else None,
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _refusals(
    family: Family, whole: Mapping[str, Any], c: Mapping[str, Any], rope: Mapping[str, Any], moe: bool
) -> Iterator[tuple[str, str]]:
    """(field of config.json and its value, what is wrong with it)."""
    kind = family.block_type
    if whole.get("quantization_config") or c.get("quantization_config"):
        yield "quantization_config", "weights are trained from bfloat16 or wider, and served in the verifier's form"
    unlike: dict[str, Any] = {
        "is_causal": True,
        "hidden_act": "silu",
        "attn_output_gate": True,
        "rope_interleave": True,
        "attention_bias": False,
        "bias": False,
        "qkv_bias": False,
        "use_bias": False,
        "mlp_bias": False,
        "layer_scale": False,
        "dual_chunk_attention_config": None,
        "index_topk": None,
    }
    if kind == "glm4_moe":
        del unlike["attention_bias"]
    for name, usual in unlike.items():
        if (c.get(name, usual) or None) != (usual or None):
            yield f"{name} is {c[name]!r}", f"only {usual!r} is built"
    if c.get("sliding_window") and c.get("use_sliding_window", True):
        yield f"sliding_window is {c['sliding_window']}", "windowed attention is not built"
    if moe and kind in GATED and not c["shared_expert_intermediate_size"]:
        yield "shared_expert_intermediate_size is 0", "the gate of the shared expert would have nothing to do"
    if moe and kind == "deepseek_v3":
        for name, only in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
            if c.get(name) != only:
                yield f"{name} is {c.get(name)!r}", f"vLLM then routes otherwise than DeepSeek V3 ({only!r})"
    rope_type, known = rope.get("rope_type", "default"), DEEPSEEK_ROPES if kind == "deepseek_v3" else ROPES
    if rope_type not in known:
        yield f"rope_parameters.rope_type is {rope_type!r}", f"only {', '.join(known)} are built"
    scales = ("attention_factor",) if kind == "deepseek_v3" else ("attention_factor", "mscale", "mscale_all_dim")
    for name in scales:
        if rope_type == "yarn" and rope.get(name) is not None:
            yield f"rope_parameters.{name} is {rope[name]}", "vLLM and transformers make different things of it"


# ---- tensors --------------------------------------------------------------------------------------------------------


def _role(own: str) -> str:
    """Own name of a tensor -> its role in the table."""
    return own if own.startswith("block.") else own.removesuffix(".weight")


@torch.no_grad()
def load(drafter: NativeMtp, directory: Path) -> None:
    """Take the layer from a verifier's checkpoint. Raises UserError when it lacks some of the layer's tensors, or has
    them in other shapes."""
    held = drafter.state_dict()
    wanted = {drafter.config.names[_role(own)]: tensor for own, tensor in held.items()}
    for name, tensor in stored_tensors(directory, lambda name: name in wanted):
        if tensor.shape != wanted[name].shape:
            raise UserError(
                f"{directory}: {name} is {list(tensor.shape)}, and config.json says {list(wanted[name].shape)}.",
                "Take config.json and weights of one model.",
            )
        wanted.pop(name).copy_(tensor)
        drafter.dtypes[name] = tensor.dtype
    if missing := sorted(wanted):
        raise UserError(
            f"{directory} lacks {missing[0]} and {len(missing) - 1} more tensors of its MTP layer.",
            "transformers drops MTP tensors when it saves a model: take the checkpoint as it was published.",
        )


def served_tensors(drafter: NativeMtp) -> dict[str, torch.Tensor]:
    """What vLLM loads, by its checkpoint names, on the CPU, in the dtype in which it was found."""
    called, dtypes = drafter.config.names, drafter.dtypes
    tensors = {called[_role(own)]: tensor for own, tensor in drafter.state_dict().items()}
    return {n: t.to("cpu", dtypes.get(n, torch.bfloat16)).contiguous() for n, t in tensors.items()}
