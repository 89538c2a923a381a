"""EAGLE-3 drafter: one decoder layer over the verifier's low, middle and high states (arXiv 2503.01840).

Module names are the tensor names of the published layout, so `state_dict()` is what vLLM loads. Alignment, for slot p:

    input token     x[p+1+i]           teacher-forced at every TTT step i
    input hidden    fc(aux[p]) at i=0, the layer's own output at slot p afterwards
    predicts        x[p+2+i]           rope position p + i

A slot is trained when x[p+1] .. x[p+2+i] are all supervised: exactly the slots at which a serving engine drafts. With
one layer, tokens that are no slot (the prompt) matter only through their step-0 keys and values, so nothing else is
computed for them: prompts cost a tenth of a response.

Left out: more than one layer, EAGLE-3.1 norms, tree drafting.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftkit.drafters.attention import ttt_attention
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

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """(2, n//2, n-3), vLLM's default, where these are three different layers; else the nearest three that are."""
    ids = (2, num_layers // 2, num_layers - 3)
    if num_layers >= 8:
        return ids
    assert num_layers >= 3, "EAGLE-3 needs a verifier of at least three layers"
    return (1, (num_layers + 1) // 2, num_layers - (num_layers > 3))


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class _Attention(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)


class _MLP(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.hidden_norm = _Norm(c.hidden_size, c.rms_norm_eps)
        self.input_layernorm = _Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = _Attention(c)
        self.post_attention_layernorm = _Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = _MLP(c)


class Eagle3(nn.Module):
    """The drafter. Parameters float32 (masters); matrix products run in the dtype of the batch's states.

    embed_VH, the verifier's embedding, is used frozen and is no parameter; d2t_D int64 holds the *offsets* of the
    published layout: verifier id = draft id + d2t[draft id].
    """

    def __init__(self, config: Eagle3Config, embed_VH: torch.Tensor, draft_to_target_D: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.aux_layers) * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", draft_to_target_D - torch.arange(config.draft_vocab_size))
        self.register_buffer("embed_VH", embed_VH, persistent=False)
        rope = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
        self.rope = LlamaRotaryEmbedding(rope)

    @property
    def draft_to_target_D(self) -> torch.Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(self, batch: DraftBatch, own_tokens: bool = False) -> list[torch.Tensor]:
        """Normed states [R, H] of every TTT step of the batch (L = len(valid_LR)); `lm_head` makes them logits.

        own_tokens: feed the drafter's own greedy proposals at steps i >= 1, as a serving engine does, instead of the
        document's tokens.
        """
        c, dtype = self.config, batch.aux_NF.dtype
        num_steps = len(batch.valid_LR)
        num_tokens = len(batch.tokens_N)
        slots = batch.slot_R

        # ---- step 0: keys and values of every token, queries of the slots ----
        hidden_NH = F.linear(batch.aux_NF, self.fc.weight.to(dtype))
        following_N = batch.tokens_N.roll(-1)  # x[p+1]; the last token of a document is never attended to
        inputs_NI = self._inputs(following_N, hidden_NH)
        k_NHD, v_NHD = self._keys(inputs_NI, self._rope(batch.pos_N))
        hidden, inputs = hidden_NH[slots], inputs_NI[slots]
        own_k: list[torch.Tensor] = []
        own_v: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        for i in range(num_steps):
            rope = self._rope(batch.pos_N[slots] + i)
            if i > 0:
                if own_tokens:
                    tokens = self.propose(states[-1])
                else:
                    tokens = batch.tokens_N[(slots + 1 + i).clamp_(max=num_tokens - 1)]
                inputs = self._inputs(tokens, hidden)
                k, v = self._keys(inputs, rope)
                own_k.append(k)
                own_v.append(v)
            # ---- attention ----
            q = self._heads(inputs, self.midlayer.self_attn.q_proj, c.num_attention_heads)
            attended = ttt_attention(
                _rotate(q, rope), k_NHD, v_NHD, own_k, own_v, batch.segments, c.head_dim**-0.5
            ).flatten(1)
            residual = self.midlayer.hidden_norm(hidden) if c.norm_before_residual else hidden
            hidden = residual + F.linear(attended, self.midlayer.self_attn.o_proj.weight.to(dtype))
            # ---- mlp ----
            mlp, x = self.midlayer.mlp, self.midlayer.post_attention_layernorm(hidden)
            gate = F.silu(F.linear(x, mlp.gate_proj.weight.to(dtype))) * F.linear(x, mlp.up_proj.weight.to(dtype))
            hidden = hidden + F.linear(gate, mlp.down_proj.weight.to(dtype))
            states.append(self.norm(hidden))
        return states

    def propose(self, state_RH: torch.Tensor) -> torch.Tensor:
        """Greedy proposals [R] as verifier token ids."""
        return self.draft_to_target_D[F.linear(state_RH, self.lm_head.weight.to(state_RH.dtype)).argmax(-1)]

    def _inputs(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """cat([norm(embedding), norm(hidden)]): the embedding comes first."""
        embedded = self.embed_VH[tokens].to(hidden.dtype)
        return torch.cat([self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(hidden)], -1)

    def _heads(self, x: torch.Tensor, projection: nn.Linear, num_heads: int) -> torch.Tensor:
        return F.linear(x, projection.weight.to(x.dtype)).view(len(x), num_heads, self.config.head_dim)

    def _keys(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values, repeated to the number of query heads: [N, H, D] each."""
        c, attention = self.config, self.midlayer.self_attn
        groups = c.num_attention_heads // c.num_key_value_heads
        k = _rotate(self._heads(x, attention.k_proj, c.num_key_value_heads), rope)
        v = self._heads(x, attention.v_proj, c.num_key_value_heads)
        return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def _rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [N, 1, D] of the positions, float32."""
        cos, sin = self.rope(self.midlayer.hidden_norm.weight, positions.unsqueeze(0))
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


def _rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
