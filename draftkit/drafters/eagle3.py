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
from torch import nn

from draftkit.drafters.attention import ttt_attention
from draftkit.drafters.base import Drafter
from draftkit.drafters.layers import Attention, Mlp, Norm, Rope, linear
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


class _Layer(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(2 * c.hidden_size, c)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size)


class Eagle3(Drafter):
    """The drafter.

    embed_VH, the verifier's embedding, is used frozen and is no parameter; d2t_D int64 holds the *offsets* of the
    published layout: verifier id = draft id + d2t[draft id].
    """

    method = "eagle3"

    def __init__(self, config: Eagle3Config, embed_VH: torch.Tensor, draft_to_target_D: torch.Tensor) -> None:
        super().__init__()
        self.config, self.aux_layers = config, config.aux_layers
        self.fc = nn.Linear(len(config.aux_layers) * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
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

    def forward(self, batch: DraftBatch, own_tokens: bool = False) -> list[torch.Tensor]:
        slots, last = batch.slot_R, len(batch.tokens_N) - 1
        layer, attention = self.midlayer, self.midlayer.self_attn

        # ---- step 0: keys and values of every token, queries of the slots ----
        hidden_NH = linear(batch.aux_NF, self.fc)
        following_N = batch.tokens_N.roll(-1)  # x[p+1]; the last token of a document is never attended to
        inputs_NI = self._inputs(following_N, hidden_NH)
        k_NHD, v_NHD = attention.keys(inputs_NI, self.rope(batch.pos_N))
        hidden, inputs = hidden_NH[slots], inputs_NI[slots]
        own_k: list[torch.Tensor] = []
        own_v: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        for i in range(len(batch.valid_LR)):
            rope = self.rope(batch.pos_N[slots] + i)
            if i > 0:
                tokens = self.propose(states[-1]) if own_tokens else batch.tokens_N[(slots + 1 + i).clamp_(max=last)]
                inputs = self._inputs(tokens, hidden)
                k, v = attention.keys(inputs, rope)
                own_k.append(k)
                own_v.append(v)
            q = attention.queries(inputs, rope)
            attended = ttt_attention(q, k_NHD, v_NHD, own_k, own_v, batch.segments, self.config.head_dim**-0.5)
            residual = layer.hidden_norm(hidden) if self.config.norm_before_residual else hidden
            hidden = residual + attention.output(attended)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            states.append(self.norm(hidden))
        return states

    def _inputs(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """cat([norm(embedding), norm(hidden)]): the embedding comes first."""
        embedded = self.embed_VH[tokens].to(hidden.dtype)
        return torch.cat([self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(hidden)], -1)
