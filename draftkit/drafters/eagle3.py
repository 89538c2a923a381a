"""EAGLE-3 drafter: one decoder layer over the verifier's low, middle and high states (arXiv 2503.01840).

Module names are the tensor names of the published layout, so `state_dict()` is what vLLM loads. Alignment, for slot p:

    input token     x[p+1+i]           teacher-forced at every TTT step i
    input hidden    fc(aux[p]) at i=0, the layer's own output at slot p afterwards
    predicts        x[p+2+i]           rope position p + i

A slot is trained when x[p+1] .. x[p+2+i] are all supervised: exactly the slots at which a serving engine drafts. Tokens
that are no slot (the prompt) matter only through the last layer's step-0 keys and values, so nothing else is computed
for them there: with one layer, prompts cost a tenth of a response.

Variants that vLLM 0.32 serves (`llama_eagle3`, `qwen3_eagle3`):

    norm_before_fc          one norm over all auxiliary states side by side, before fc
    fc_norm                 a norm for each of them (EAGLE-3.1)
    norm_output             what is fed back is the normed state (EAGLE-3.1)
    norm_before_residual    the residual stream begins with the normed hidden state
    num_hidden_layers       layers after the first are ordinary blocks on the hidden state alone
    qk_norm                 norms on each head's queries and keys, as Qwen3 has

Left out: tree drafting, P-EAGLE's parallel drafts.
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
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    num_hidden_layers: int = 1
    qk_norm: bool = False

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
    """first: reads [norm(embedding), norm(hidden)]; others the normed hidden state."""

    def __init__(self, c: Eagle3Config, first: bool) -> None:
        super().__init__()
        if first:
            self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention((1 + first) * c.hidden_size, c, qk_norm=c.qk_norm)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Mlp(c.hidden_size, c.intermediate_size)

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output, from what its queries attended to."""
        hidden = residual + self.self_attn.output(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(Drafter):
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

    def forward(self, batch: DraftBatch, own_tokens: bool = False) -> list[torch.Tensor]:
        slots, last, scale = batch.slot_R, len(batch.tokens_N) - 1, self.config.head_dim**-0.5
        layers = [self.midlayer, *self.layers.values()]

        # ---- step 0: every token up to the last layer's keys and values, the slots from there on ----
        rope_N = self.rope(batch.pos_N)
        following_N = batch.tokens_N.roll(-1)  # x[p+1]; the last token of a document is never attended to
        x, residual = self._inputs(following_N, self._fuse(batch.aux_NF))
        keys = []
        for layer, above in zip(layers, [*layers[1:], None], strict=True):
            keys.append(layer.self_attn.keys(x, rope_N))
            if above is not None:
                q = layer.self_attn.queries(x, rope_N)
                residual = layer.finish(residual, ttt_attention(q, *keys[-1], [], [], _whole(batch), scale))
                x = above.input_layernorm(residual)
        rope = self.rope(batch.pos_N[slots])
        q = layers[-1].self_attn.queries(x[slots], rope)
        hidden = layers[-1].finish(residual[slots], ttt_attention(q, *keys[-1], [], [], batch.segments, scale))
        states = [self.norm(hidden)]

        # ---- later steps: the slots, which see their own keys of the steps in between ----
        own: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in layers]
        for i in range(1, len(batch.valid_LR)):
            rope = self.rope(batch.pos_N[slots] + i)
            tokens = self.propose(states[-1]) if own_tokens else batch.tokens_N[(slots + 1 + i).clamp_(max=last)]
            x, residual = self._inputs(tokens, states[-1] if self.config.norm_output else hidden)
            for layer, above, of_tokens, mine in zip(layers, [*layers[1:], None], keys, own, strict=True):
                for kept, new in zip(mine, layer.self_attn.keys(x, rope), strict=True):
                    kept.append(new)
                q = layer.self_attn.queries(x, rope)
                residual = layer.finish(residual, ttt_attention(q, *of_tokens, *mine, batch.segments, scale))
                x = residual if above is None else above.input_layernorm(residual)
            hidden = residual
            states.append(self.norm(hidden))
        return states

    def _fuse(self, aux_NF: torch.Tensor) -> torch.Tensor:
        if self.config.norm_before_fc:
            aux_NF = self.input_norm(aux_NF)
        if self.config.fc_norm:
            parts = aux_NF.chunk(len(self.aux_layers), -1)
            aux_NF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return linear(aux_NF, self.fc)

    def _inputs(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cat([norm(embedding), norm(hidden)]), the residual stream): the embedding comes first."""
        embedded = self.embed_VH[tokens].to(hidden.dtype)
        normed = self.midlayer.hidden_norm(hidden)
        x = torch.cat([self.midlayer.input_layernorm(embedded), normed], -1)
        return x, normed if self.config.norm_before_residual else hidden


def _whole(batch: DraftBatch) -> tuple[tuple[int, int, int], ...]:
    """Segments in which every token is a slot: document by document."""
    starts = (batch.pos_N == 0).nonzero().flatten().tolist()
    return tuple((a, a, b) for a, b in zip(starts, [*starts[1:], len(batch.pos_N)], strict=True))
