"""Drafters that run decoder layers on their own output: the test-time-training loop that EAGLE-3 and MTP share.

    input token     x[p+1+i]           teacher-forced at every TTT step i
    input hidden    the verifier's at slot p at i=0, the drafter's own output at slot p afterwards
    predicts        x[p+2+i]           rope position p + i

A slot is trained when x[p+1] .. x[p+2+i] are all supervised: exactly the slots at which a serving engine drafts. Tokens
that are no slot (the prompt) matter only through the last layer's step-0 keys and values, so nothing else is computed
for them there: with one layer, prompts cost a tenth of a response.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from draftkit.drafters.attention import ttt_attention
from draftkit.drafters.base import Drafter, document_spans
from draftkit.drafters.layers import Rope
from draftkit.types import DraftBatch


class Recurrent(Drafter):
    """What a kind says of itself: its blocks, what they read, and what becomes of their output."""

    rope: Rope

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return self.config.head_dim**-0.5

    def blocks(self) -> list[nn.Module]:
        """Decoder layers with self_attn, post_attention_layernorm and mlp; after the first also input_layernorm."""
        raise NotImplementedError

    def first_hidden(self, batch: DraftBatch) -> torch.Tensor:
        """[N, H] of every token: what step 0 reads in place of an output of its own."""
        raise NotImplementedError

    def inputs(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the first block's attention reads, the residual stream), of these tokens beside `hidden`."""
        raise NotImplementedError

    def outputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the state that `head_DH` makes logits of, what the next step reads), of the last block's output."""
        raise NotImplementedError

    def forward(self, batch: DraftBatch, own_tokens: bool = False) -> list[torch.Tensor]:
        slots, last, scale = batch.slot_R, len(batch.tokens_N) - 1, self.scale
        blocks = self.blocks()

        # ---- step 0: every token up to the last block's keys and values, the slots from there on ----
        rope_N = self.rope(batch.pos_N)
        following_N = batch.tokens_N.roll(-1)  # x[p+1]; the last token of a document is never attended to
        x, residual = self.inputs(following_N, self.first_hidden(batch), batch.pos_N)
        keys = [blocks[0].self_attn.keys(x, rope_N)]
        every_token = tuple((start, start, end) for start, end in document_spans(batch)) if len(blocks) > 1 else ()
        for block, above in pairwise(blocks):
            q = block.self_attn.queries(x, rope_N)
            residual = _finish(block, x, residual, ttt_attention(q, *keys[-1], [], [], every_token, scale))
            x = above.input_layernorm(residual)
            keys.append(above.self_attn.keys(x, rope_N))
        x, residual = x[slots], residual[slots]
        q = blocks[-1].self_attn.queries(x, self.rope(batch.pos_N[slots]))
        hidden = _finish(blocks[-1], x, residual, ttt_attention(q, *keys[-1], [], [], batch.segments, scale))
        state, fed = self.outputs(hidden)
        states = [state]

        # ---- later steps: the slots, which see their own keys of the steps in between ----
        own: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in blocks]
        for i in range(1, len(batch.valid_LR)):
            positions = batch.pos_N[slots] + i
            rope = self.rope(positions)
            tokens = self.propose(states[-1]) if own_tokens else batch.tokens_N[(slots + 1 + i).clamp_(max=last)]
            x, residual = self.inputs(tokens, fed, positions)
            for number, (block, of_tokens, mine) in enumerate(zip(blocks, keys, own, strict=True)):
                x = block.input_layernorm(residual) if number else x
                for kept, new in zip(mine, block.self_attn.keys(x, rope), strict=True):
                    kept.append(new)
                q = block.self_attn.queries(x, rope)
                residual = _finish(block, x, residual, ttt_attention(q, *of_tokens, *mine, batch.segments, scale))
            state, fed = self.outputs(residual)
            states.append(state)
        return states


def _finish(block: nn.Module, x: torch.Tensor, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """The block's output, from what its queries attended to. x: what they were made of."""
    hidden = residual + block.self_attn.output(attended, x)
    return hidden + block.mlp(block.post_attention_layernorm(hidden))
