"""EAGLE-3 drafter: one decoder layer over the verifier's low, middle and high states (arXiv 2503.01840).

Module names are the tensor names of the published layout, so `state_dict()` is what vLLM loads. It reads fc(aux[p]) at
step 0 and its own output afterwards; alignment, masks and steps are those of `recurrent`.

Variants that vLLM 0.32 serves (`llama_eagle3`, `qwen3_eagle3`):

    norm_before_fc          one norm over all auxiliary states side by side, before fc
    fc_norm                 a norm for each of them (EAGLE-3.1)
    norm_output             what is fed back is the normed state (EAGLE-3.1)
    norm_before_residual    the residual stream begins with the normed hidden state
    num_hidden_layers       layers after the first are ordinary blocks on the hidden state alone
    qk_norm                 norms on each head's queries and keys, as Qwen3 has
    attention_bias          biases of queries, keys and values, and without qk_norm of the output: as vLLM's two modules

Left out: tree drafting, P-EAGLE's parallel drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from draftkit.drafters.layers import Attention, Mlp, Norm, Rope, linear
from draftkit.drafters.recurrent import Recurrent
from draftkit.types import DraftBatch


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Sizes as in `config.json`. aux_layers: verifier layer ids as vLLM counts them (id L = state after L blocks)."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    num_hidden_layers: int = 1
    qk_norm: bool = False
    attention_bias: bool = False


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """(2, n//2, n-3), vLLM's default, where these are three different layers; else the nearest three that are."""
    ids = (2, num_layers // 2, num_layers - 3)
    if num_layers >= 8:
        return ids
    assert num_layers >= 3, "EAGLE-3 needs a verifier of at least three layers"
    return (1, (num_layers + 1) // 2, num_layers - (num_layers > 3))


class _Layer(nn.Module):
    """first: reads [norm(embedding), norm(hidden)]; others the normed hidden state."""

    def __init__(self, c: Eagle3Config, first: bool) -> None:
        super().__init__()
        if first:
            self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        biases = {"bias": c.attention_bias, "output_bias": c.attention_bias and not c.qk_norm}
        self.self_attn = Attention((1 + first) * c.hidden_size, c, **biases, qk_norm=c.qk_norm)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size)


class Eagle3(Recurrent):
    """The drafter.

    embed_VH, the verifier's embedding, is used frozen and is no parameter; d2t_D int64 holds the *offsets* of the
    published layout: verifier id = draft id + d2t[draft id].
    """

    method = "eagle3"

    def __init__(self, config: Eagle3Config, embed_VH: torch.Tensor, draft_to_target_D: torch.Tensor) -> None:
        super().__init__()
        self.config, self.aux_layers = config, config.aux_layers
        width = len(config.aux_layers) * config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = Norm(width, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(config.target_hidden_size, config.rms_norm_eps) for _ in self.aux_layers)
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.midlayer = _Layer(config, first=True)
        self.layers = nn.ModuleDict({f"{i}": _Layer(config, first=False) for i in range(1, config.num_hidden_layers)})
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", draft_to_target_D - torch.arange(config.draft_vocab_size))
        self.register_buffer("embed_VH", embed_VH, persistent=False)
        self.rope = Rope(config)

    @property
    def draft_to_target_D(self) -> torch.Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def head_DH(self) -> torch.Tensor:
        return self.lm_head.weight

    def blocks(self) -> list[nn.Module]:
        return [self.midlayer, *self.layers.values()]

    def first_hidden(self, batch: DraftBatch) -> torch.Tensor:
        return self._fuse(batch.aux_NF)

    def outputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.norm(hidden)
        return state, state if self.config.norm_output else hidden

    def _fuse(self, aux_NF: torch.Tensor) -> torch.Tensor:
        if self.config.norm_before_fc:
            aux_NF = self.input_norm(aux_NF)
        if self.config.fc_norm:
            parts = aux_NF.chunk(len(self.aux_layers), -1)
            aux_NF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return linear(aux_NF, self.fc)

    def inputs(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(cat([norm(embedding), norm(hidden)]), the residual stream): the embedding comes first."""
        embedded = self.embed_VH[tokens].to(hidden.dtype)
        normed = self.midlayer.hidden_norm(hidden)
        x = torch.cat([self.midlayer.input_layernorm(embedded), normed], -1)
        return x, normed if self.config.norm_before_residual else hidden
