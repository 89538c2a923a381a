"""The parts of a decoder layer that drafters share. Parameters are float32 masters; products run in the input's dtype.

N or R rows, H hidden size, I the input width of an attention (2H in EAGLE-3's first layer), D the head size.
"""

from __future__ import annotations

from dataclasses import dataclass
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


class NormPlusOne(Norm):
    """RMSNorm that scales by 1 + weight, as Qwen3-Next's. The sum is taken in the weight's own precision: rounded to
    bfloat16 it would lose most of a small weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, 1 + self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Projections of grouped-query attention; what happens between queries and keys is `ttt_attention`'s business.

    bias: of q, k and v, as Qwen2 has; output_bias: of the output, as Llama's `attention_bias` has beside them.
    qk_norm: RMSNorm over each head's query and key, as Qwen3 has; norm: of which kind.
    """

    def __init__(
        self,
        input_size: int,
        sizes: Sizes,
        bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        norm: type[Norm] = Norm,
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
        self.q_norm = norm(self.head_dim, sizes.rms_norm_eps) if qk_norm else None
        self.k_norm = norm(self.head_dim, sizes.rms_norm_eps) if qk_norm else None

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

    def output(self, attended_RHD: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What these queries attended to -> [R, H]. x: what the queries were made of."""
        return linear(attended_RHD.flatten(1), self.o_proj)


class GatedAttention(Attention):
    """The same with query-key norms and an output gate, as Qwen3-Next has: q_proj yields a query and a gate for every
    head in turn, and what a head attended to is multiplied by the sigmoid of its gate."""

    def __init__(self, input_size: int, sizes: Sizes, norm: type[Norm] = Norm) -> None:
        super().__init__(input_size, sizes, qk_norm=True, norm=norm)
        self.q_proj = nn.Linear(input_size, self.num_heads * 2 * self.head_dim, bias=False)

    def queries(self, x: torch.Tensor, rope: CosSin) -> torch.Tensor:
        return rotate(self.q_norm(self._half(x, 0)), rope)

    def output(self, attended_RHD: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().output(attended_RHD * self._half(x, 1).sigmoid(), x)

    def _half(self, x: torch.Tensor, half: int) -> torch.Tensor:
        """[R, I] -> [R, heads, D]: queries (0) or gates (1)."""
        weight = self.q_proj.weight.unflatten(0, (self.num_heads, 2, self.head_dim))[:, half].flatten(0, 1)
        return F.linear(x, weight.to(x.dtype)).unflatten(1, (self.num_heads, self.head_dim))


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of a latent attention. query_rank: None where queries have no latent. plain and rotary: parts of a head's
    query and key without and with rotary embedding; value: of a head."""

    query_rank: int | None
    rank: int
    plain: int
    rotary: int
    value: int


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) with keys and values written out for
    every head, which is what it computes while training. Rotary pairs are neighbours, and all heads share one rotary
    key. Queries, keys and values come out as wide as the widest of them, zeros behind."""

    def __init__(self, input_size: int, sizes: Sizes, latent: Latent) -> None:
        super().__init__()
        self.num_heads, self.latent = sizes.num_attention_heads, latent
        self.width = max(latent.plain + latent.rotary, latent.value)
        queries = self.num_heads * (latent.plain + latent.rotary)
        if latent.query_rank is None:
            self.q_proj = nn.Linear(input_size, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(input_size, latent.query_rank, bias=False)
            self.q_a_layernorm = Norm(latent.query_rank, sizes.rms_norm_eps)
            self.q_b_proj = nn.Linear(latent.query_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, latent.rank + latent.rotary, bias=False)
        self.kv_a_layernorm = Norm(latent.rank, sizes.rms_norm_eps)
        self.kv_b_proj = nn.Linear(latent.rank, self.num_heads * (latent.plain + latent.value), bias=False)
        self.o_proj = nn.Linear(self.num_heads * latent.value, sizes.hidden_size, bias=False)

    def queries(self, x: torch.Tensor, rope: CosSin) -> torch.Tensor:
        """[R, I] -> queries [R, heads, width]."""
        if self.latent.query_rank is None:
            q = linear(x, self.q_proj)
        else:
            q = linear(self.q_a_layernorm(linear(x, self.q_a_proj)), self.q_b_proj)
        plain, turning = q.unflatten(1, (self.num_heads, -1)).split([self.latent.plain, self.latent.rotary], -1)
        return self._padded(torch.cat([plain, rotate(_pairs_apart(turning), rope)], -1))

    def keys(self, x: torch.Tensor, rope: CosSin) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, I] -> keys and values [N, heads, width]."""
        compressed, turning = linear(x, self.kv_a_proj_with_mqa).split([self.latent.rank, self.latent.rotary], -1)
        both = linear(self.kv_a_layernorm(compressed), self.kv_b_proj).unflatten(1, (self.num_heads, -1))
        plain, value = both.split([self.latent.plain, self.latent.value], -1)
        shared = rotate(_pairs_apart(turning).unsqueeze(1), rope).expand(-1, self.num_heads, -1)
        return self._padded(torch.cat([plain, shared], -1)), self._padded(value)

    def output(self, attended_RHD: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return linear(attended_RHD[..., : self.latent.value].flatten(1), self.o_proj)

    def _padded(self, heads: torch.Tensor) -> torch.Tensor:
        return F.pad(heads, (0, self.width - heads.shape[-1]))


def _pairs_apart(x: torch.Tensor) -> torch.Tensor:
    """Neighbours that rotate together, half the width apart, where `rotate` wants them: products of queries and keys
    stay the same when both are reordered."""
    return torch.cat([x[..., ::2], x[..., 1::2]], -1)


class Mlp(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(F.silu(linear(x, self.gate_proj)) * linear(x, self.up_proj), self.down_proj)


class Rope(LlamaRotaryEmbedding):
    """Rotary embedding of any kind that transformers knows, of the first `size` of each head's dimensions (all)."""

    def __init__(self, sizes: Sizes, size: int | None = None) -> None:
        size = size or sizes.head_dim
        super().__init__(
            LlamaConfig(
                hidden_size=size,  # one head of this size: LlamaConfig refuses heads that do not divide a hidden size
                num_attention_heads=1,
                head_dim=size,
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
    """Rotate the first dimensions of x, as many as rope has; the others stay."""
    cos, sin = rope
    x, rest = x.tensor_split([cos.shape[-1]], -1)
    first, second = x.chunk(2, -1)
    rotated = (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
    return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


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
