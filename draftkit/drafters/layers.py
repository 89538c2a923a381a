"""The parts of a decoder layer that drafters share. Parameters are float32 masters; products run in the input's dtype.

N or R rows, H hidden size, I the input width of an attention (2H in EAGLE-3's first layer), D the head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

CosSin = tuple[torch.Tensor, torch.Tensor]


class Sizes(Protocol):
    """What the parts read from a drafter's configuration."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int


class Norm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Projections of grouped-query attention; what happens between queries and keys is `ttt_attention`'s business.

    bias: of q, k and v, as Qwen2 has; output_bias: of the output, as Llama's `attention_bias` has beside them.
    qk_norm: RMSNorm over each head's query and key, as Qwen3 has.
    """

    def __init__(
        self, input_size: int, sizes: Sizes, bias: bool = False, output_bias: bool = False, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            sizes.num_attention_heads,
            sizes.num_key_value_heads,
            sizes.head_dim,
        )
        self.q_proj = nn.Linear(input_size, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, sizes.hidden_size, bias=output_bias)
        self.q_norm = Norm(self.head_dim, sizes.rms_norm_eps) if qk_norm else None
        self.k_norm = Norm(self.head_dim, sizes.rms_norm_eps) if qk_norm else None

    def queries(self, x: torch.Tensor, rope: CosSin) -> torch.Tensor:
        """[R, I] -> rotated queries [R, heads, D]."""
        q = linear(x, self.q_proj).view(len(x), self.num_heads, self.head_dim)
        return rotate(q if self.q_norm is None else self.q_norm(q), rope)

    def keys(self, x: torch.Tensor, rope: CosSin) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, I] -> rotated keys and values, repeated to the number of query heads: [N, heads, D] each."""
        k = linear(x, self.k_proj).view(len(x), self.num_kv_heads, self.head_dim)
        k = rotate(k if self.k_norm is None else self.k_norm(k), rope)
        v = linear(x, self.v_proj).view(len(x), self.num_kv_heads, self.head_dim)
        groups = self.num_heads // self.num_kv_heads
        return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def output(self, attended_RHD: torch.Tensor) -> torch.Tensor:
        return linear(attended_RHD.flatten(1), self.o_proj)


class Mlp(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(F.silu(linear(x, self.gate_proj)) * linear(x, self.up_proj), self.down_proj)


class Rope(LlamaRotaryEmbedding):
    """Rotary embedding of any kind that transformers knows."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(
            LlamaConfig(
                hidden_size=sizes.hidden_size,
                num_attention_heads=sizes.num_attention_heads,
                head_dim=sizes.head_dim,
                max_position_embeddings=sizes.max_position_embeddings,
                rope_parameters=dict(sizes.rope_parameters),
            )
        )

    def forward(self, positions: torch.Tensor) -> CosSin:
        """Positions [R] -> cos, sin [R, 1, D], float32 or wider."""
        cos, sin = super().forward(self.inv_freq, positions.unsqueeze(0))
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


def linear(x: torch.Tensor, projection: nn.Linear) -> torch.Tensor:
    bias = None if projection.bias is None else projection.bias.to(x.dtype)
    return F.linear(x, projection.weight.to(x.dtype), bias)


def rotate(x: torch.Tensor, rope: CosSin) -> torch.Tensor:
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def layer_config(
    sizes: Sizes, model_type: str, num_layers: int, dtype: str, attention_bias: bool = False
) -> dict[str, Any]:
    """What config.json says of such layers, for transformers and vLLM."""
    return {
        "model_type": model_type,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "num_hidden_layers": num_layers,
        "vocab_size": sizes.vocab_size,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_parameters": sizes.rope_parameters,
        "max_position_embeddings": sizes.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
