"""A causal LM that answers about chosen tokens only: token sequences in, log-probabilities or statistics out.

    tokens   p0 p1 p2 a  b  q  c  d      q: a user's or a tool's token
    mask     .  .  .  a  b  .  c  d      sampled by the policy
    rows     .  .  p2 a  .  q  c  .      states that predict a sampled token
    teacher  .  .  .  a  b  .  c  d      with `teacher` also these, where `data.capture` keeps the drafter's teacher

The samples of a group have one prompt. `plan` lays them behind it in one row of the batch, where each sees the prompt
and itself (`allowed`, positions counted on from the prompt's), as long as the products saved are worth the attention
that such a row computes in vain: long answers to short prompts keep a row each, with the plain causal kernel.

    row of the batch    p0 p1 p2 a  b  q  c  d  e  f        e f: a second answer to p0 p1 p2
    position            0  1  2  3  4  5  6  7  3  4

The LM head is replaced by one that multiplies at the chosen rows alone. It keeps transformers' parameter and its name,
so that DeepSpeed's hooks gather the weight around it, also where it is the embedding's. What such a head leaves out
(bias, soft caps, scales) would be silently wrong, so `load` compares its logits with transformers' own once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from draftkit.data.capture import chunks
from draftkit.errors import UserError
from draftkit.rl.token_stats import TokenStatistics, token_logp, token_statistics
from draftkit.types import Document, Sampling

ATTENTION_SPEED = 1 / 3  # of a row with a mask, to that of matrix products


class Tokens(Protocol):
    """What a trajectory, a document and a sample have in common: T tokens, and which of them the policy sampled."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch: sequences in B rows of the batch, padded to T with token 0, which nothing before it can see.

    position_BT, allowed_B1TT: None where every row holds one sequence. row_N: chosen states, as places in B * T,
    sequence by sequence; token_N: the token that comes after each. place: for every sequence, where its tokens are in
    B * T; chosen: which of its tokens the rows are.
    """

    tokens_BT: torch.Tensor
    position_BT: torch.Tensor | None
    allowed_B1TT: torch.Tensor | None
    row_N: torch.Tensor
    token_N: torch.Tensor
    place: list[torch.Tensor]
    chosen: list[torch.Tensor]

    def by_sequence(self, column_N: torch.Tensor) -> list[torch.Tensor]:
        """[tokens] for each sequence, zero where nothing was chosen."""
        parts = column_N.split([len(chosen) for chosen in self.chosen])
        return [
            column_N.new_zeros(len(place)).index_copy_(0, chosen, part)
            for place, chosen, part in zip(self.place, self.chosen, parts, strict=True)
        ]


def prompt_length(sequence: Tokens) -> int:
    return next((t for t, sampled in enumerate(sequence.mask) if sampled), len(sequence.mask))


def plan(sequences: Sequence[Tokens], tokens_per_batch: int, worth: float) -> list[list[list[int]]]:
    """Micro-batches of rows of sequence numbers. worth: pairs of tokens whose attention costs what a token's products
    cost; 0 keeps every sequence in a row of its own."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for i, sequence in enumerate(sequences):
        by_prompt.setdefault(sequence.tokens[: prompt_length(sequence)], []).append(i)
    rows: list[list[int]] = []
    lengths: list[int] = []
    for prompt, members in by_prompt.items():
        for number, i in enumerate(members):
            alone = len(sequences[i].tokens)
            joined = lengths[-1] + alone - len(prompt) if number else 0
            extra = joined**2 - lengths[-1] ** 2 - alone**2 / 2 if number else 0.0
            if number and worth and joined <= tokens_per_batch and extra < worth * len(prompt):
                rows[-1].append(i)
                lengths[-1] = joined
            else:
                rows.append([i])
                lengths.append(alone)
    return [[rows[r] for r in batch] for batch in chunks(lengths, tokens_per_batch)] if rows else []


def pack(rows: Sequence[Sequence[Tokens]], *, teacher: bool = False, device: torch.device | str = "cpu") -> Packed:
    """Rows of sequences that share a prompt."""
    prompts = [prompt_length(row[0]) for row in rows]
    width = max(n + sum(len(s.tokens) - n for s in row) for n, row in zip(prompts, rows, strict=True))
    tokens_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    position_BT = torch.arange(width).repeat(len(rows), 1)
    answer_BT = torch.zeros(len(rows), width, dtype=torch.int64)  # number of the answer, 0: the prompt
    place, chosen, following = [], [], []
    for row, (prompt, sequences) in enumerate(zip(prompts, rows, strict=True)):
        end = prompt
        for number, sequence in enumerate(sequences, 1):
            mask, tokens = torch.tensor(sequence.mask), torch.tensor(sequence.tokens)
            assert not mask[0], "the first token of a sequence has nothing to be sampled from"
            here = torch.cat([torch.arange(prompt), torch.arange(end, end + len(tokens) - prompt)])
            tokens_BT[row, here], position_BT[row, here] = tokens, torch.arange(len(tokens))
            answer_BT[row, end : end + len(tokens) - prompt] = number
            end += len(tokens) - prompt
            place.append(row * width + here)
            predicts = mask.roll(-1)  # mask[0] is False: nothing comes after the last token
            chosen.append((predicts | mask if teacher else predicts).nonzero().squeeze(1))
            following.append(tokens.roll(-1)[chosen[-1]])
    allowed = None
    if any(len(row) > 1 for row in rows):
        visible = (answer_BT.unsqueeze(1) == 0) | (answer_BT.unsqueeze(1) == answer_BT.unsqueeze(2))
        allowed = visible.tril().unsqueeze(1).to(device)
    return Packed(
        tokens_BT=tokens_BT.to(device),
        position_BT=None if allowed is None else position_BT.to(device),
        allowed_B1TT=allowed,
        row_N=torch.cat([p[c] for p, c in zip(place, chosen, strict=True)]).to(device),
        token_N=torch.cat(following).to(device),
        place=[p.to(device) for p in place],
        chosen=[c.to(device) for c in chosen],
    )


class Head(nn.Module):
    """The LM head at chosen states."""

    def __init__(self, weight: nn.Parameter, sampling: Sampling) -> None:
        super().__init__()
        self.weight, self.sampling = weight, sampling

    def forward(
        self, hidden_NH: torch.Tensor, token_N: torch.Tensor, statistics: bool
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if not statistics:
            return token_logp(hidden_NH, self.weight, token_N, self.sampling)
        read = token_statistics(hidden_NH, self.weight, token_N, self.sampling)
        return tuple(getattr(read, f.name) for f in fields(read))


class TokenModel(nn.Module):
    """`lm` with a `Head`. Called through `logp` and `statistics`, which also take the engine around one.

    worth: see `plan`, 0 where rows cannot be shared.
    """

    def __init__(self, lm: nn.Module, sampling: Sampling) -> None:
        super().__init__()
        config = lm.config.get_text_config()
        body = sum(p.numel() for p in lm.model.parameters()) - lm.get_input_embeddings().weight.numel()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pairs = body / (2 * config.num_attention_heads * width * config.num_hidden_layers)
        self.worth = ATTENTION_SPEED * pairs if _attends_everywhere(config) else 0.0
        self.lm = lm
        lm.lm_head = Head(lm.lm_head.weight, sampling)

    def forward(
        self,
        tokens_BT: torch.Tensor,
        position_BT: torch.Tensor | None,
        allowed_B1TT: torch.Tensor | None,
        row_N: torch.Tensor,
        token_N: torch.Tensor,
        statistics: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        last_BTH = self.lm.model(
            input_ids=tokens_BT, position_ids=position_BT, attention_mask=allowed_B1TT, use_cache=False
        ).last_hidden_state
        answer = self.lm.lm_head(last_BTH.flatten(0, 1)[row_N], token_N, statistics)
        return (last_BTH, *answer) if statistics else answer


def logp(model: nn.Module, packed: Packed) -> torch.Tensor:
    """[N] float32, with gradient."""
    return _call(model, packed, False)


@torch.no_grad()
def statistics(model: nn.Module, packed: Packed) -> tuple[torch.Tensor, TokenStatistics]:
    """Final-normed states [B, T, H], and what is known of the chosen rows."""
    last_BTH, *columns = _call(model, packed, True)
    return last_BTH, TokenStatistics(*columns)


def _call(model: nn.Module, p: Packed, statistics: bool) -> torch.Tensor | tuple[torch.Tensor, ...]:
    return model(p.tokens_BT, p.position_BT, p.allowed_B1TT, p.row_N, p.token_N, statistics)


def _attends_everywhere(config: PreTrainedConfig) -> bool:
    """No window: transformers would take `allowed` for the mask of windowed layers too."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and not getattr(config, "sliding_window", None)


def load(path: Path, sampling: Sampling, dtype: torch.dtype, trust: bool = False) -> TokenModel:
    """From a model directory; UserError where weights or logits do not have the form needed here."""
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust).eval()
    architecture = type(lm).__name__
    if not (isinstance(getattr(lm, "lm_head", None), nn.Linear) and hasattr(getattr(lm, "model", None), "layers")):
        raise UserError(
            f"{path}: {architecture} has no `model.layers` and linear `lm_head`, which the policy trainer works with.",
            "Use a text model of the Llama, Qwen or Mistral kind.",
        )
    stored = {name for file in path.glob("*.safetensors") for name in safe_open(file, "pt").keys()}  # noqa: SIM118
    if missing := sorted({name for name, _ in lm.named_parameters()} - stored):
        raise UserError(
            f"{path} stores its weights under other names than {architecture} has in transformers ({missing[0]} is not "
            "among them), so that an engine could not be sent them.",
            "Use a dense text model.",
        )
    probe = pack([[Document(tuple(range(9)), (False,) + (True,) * 8)]])
    with torch.no_grad():
        expected = lm(input_ids=probe.tokens_BT, use_cache=False).logits[0, :-1].float() / (sampling.temperature or 1.0)
    model = TokenModel(lm, sampling)
    _, read = statistics(model, probe)
    for ours, theirs in ((read.max, expected.amax(-1)), (read.lse, expected.logsumexp(-1))):
        if not torch.allclose(ours, theirs, rtol=0.01, atol=0.01):
            raise UserError(
                f"{path}: the logits of {architecture} are not its last state times the LM head (it adds a bias, a "
                "scale or a soft cap), which the policy trainer and the drafters take them to be.",
                "Use a model without these.",
            )
    return model
