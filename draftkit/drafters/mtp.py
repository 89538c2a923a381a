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

Alignment, masks and the trick with the prompt (only keys and values are computed for tokens that are no slot) are
those of `eagle3`. A verifier that carries such a layer already (MiMo's layout) has it fine-tuned. Left out: several MTP
layers, which vLLM re-runs as one; families whose decoder layer is another (`mtp_families`: MLA, gated attention, MoE).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from draftkit.drafters.attention import ttt_attention
from draftkit.drafters.base import Drafter, whole_directory
from draftkit.drafters.layers import Attention, Mlp, Norm, Rope
from draftkit.errors import UserError
from draftkit.types import DraftBatch

MIMO_TYPES = {"qwen2"}  # verifiers (model_type) that vLLM also runs as MiMoForCausalLM
PREFIX = "model.mtp_layers.0."


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

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


class Mtp(Drafter):
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

    def forward(self, batch: DraftBatch, own_tokens: bool = False) -> list[torch.Tensor]:
        last, slots = len(batch.tokens_N) - 1, batch.slot_R
        hidden_NH = batch.aux_NF if self.config.layout == "mimo" else batch.last_NH

        # ---- step 0: keys and values of every token, queries of the slots ----
        fused_NH = self._fuse(batch.tokens_N.roll(-1), hidden_NH, batch.pos_N)
        k_NHD, v_NHD = self.self_attn.keys(self._input_norm(fused_NH), self.rope(batch.pos_N))
        fused = fused_NH[slots]
        own_k: list[torch.Tensor] = []
        own_v: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        for i in range(len(batch.valid_LR)):
            position = batch.pos_N[slots] + i
            rope = self.rope(position)
            if i > 0:
                tokens = self.propose(states[-1]) if own_tokens else batch.tokens_N[(slots + 1 + i).clamp(max=last)]
                fused = self._fuse(tokens, states[-1], position)
                k, v = self.self_attn.keys(self._input_norm(fused), rope)
                own_k.append(k)
                own_v.append(v)
            q = self.self_attn.queries(self._input_norm(fused), rope)
            attended = ttt_attention(q, k_NHD, v_NHD, own_k, own_v, batch.segments, self.config.head_dim**-0.5)
            hidden = fused + self.self_attn.output(attended)
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
            states.append(self.final_layernorm(hidden) if self.config.layout == "mimo" else hidden)
        return states

    def _fuse(self, tokens: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        embedded = self.embed_VH[tokens].to(hidden.dtype)
        if self.config.layout == "mimo":
            embedded = embedded.masked_fill((position == 0).unsqueeze(-1), 0.0)  # as vLLM does
            pair = [self.hidden_layernorm(hidden), self.token_layernorm(embedded)]
        else:
            pair = [embedded, hidden]
        return F.linear(torch.cat(pair, -1), self.input_proj.weight.to(hidden.dtype))

    def _input_norm(self, fused: torch.Tensor) -> torch.Tensor:
        return self.input_layernorm(fused) if self.config.layout == "mimo" else fused


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
        bias = weights.get(f"{last}self_attn.{name}.bias")
        if bias is not None and getattr(attention, name).bias is not None:
            getattr(attention, name).bias.copy_(bias)
        elif getattr(attention, name).bias is not None:
            getattr(attention, name).bias.zero_()
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
    tensors = {n: t.detach().to("cpu", torch.bfloat16).contiguous() for n, t in drafter.named_parameters()}
    if drafter.config.layout == "mimo":
        return {PREFIX + name: tensor for name, tensor in tensors.items()}
    fc = tensors.pop("input_proj.weight")
    return {"fc.weight": fc} | {f"layers.0.{name}": tensor for name, tensor in tensors.items()}


def mimo_config() -> dict[str, Any]:
    """What the verifier's config.json says in place of its own, for vLLM to find the MTP layer."""
    return {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}


def eagle_config(c: MtpConfig) -> dict[str, Any]:
    return {
        "architectures": ["EagleLlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_parameters": c.rope_parameters,
        "max_position_embeddings": c.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def export_eagle(drafter: Mtp, directory: Path, verifier: dict[str, str], readme: str) -> None:
    """Write `directory` for vLLM's `method: eagle`."""
    with whole_directory(directory, verifier) as aside:
        save_file(served_tensors(drafter), aside / "model.safetensors", metadata={"format": "pt"})
        (aside / "config.json").write_text(json.dumps(eagle_config(drafter.config), indent=2) + "\n")
        (aside / "README.md").write_text(readme)


@torch.no_grad()
def from_tensors(drafter: Mtp, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Fill from served tensors, for a warm start. Raises UserError when some are missing."""
    names = {served: own for own, served in _served_names(drafter).items()}
    missing = sorted(names.keys() - tensors.keys())
    if missing:
        raise UserError(
            f"drafter.init: {where} lacks {missing[0]} and {len(missing) - 1} more tensors of an MTP layer."
        )
    parameters = dict(drafter.named_parameters())
    for served, own in names.items():
        parameters[own].copy_(tensors[served])


def _served_names(drafter: Mtp) -> dict[str, str]:
    own = [name for name, _ in drafter.named_parameters()]
    if drafter.config.layout == "mimo":
        return {name: PREFIX + name for name in own}
    return {name: "fc.weight" if name == "input_proj.weight" else f"layers.0.{name}" for name in own}


def load_init(drafter: Mtp, directory: Path) -> None:
    """Warm start from a directory that draftkit exported (the eagle layout, or a stitched verifier)."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    from_tensors(drafter, tensors, str(directory))
