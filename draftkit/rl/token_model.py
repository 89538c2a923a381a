"""A causal LM that answers about chosen tokens only: padded sequences in, log-probabilities or statistics out.

    tokens   p0 p1 p2 a  b  q  c  d      q: a user's or a tool's token
    mask     .  .  .  a  b  .  c  d      sampled by the policy
    rows     .  .  p2 a  .  q  c  .      states that predict a sampled token
    teacher  .  .  .  a  b  .  c  d      with `teacher` also these, where `data.capture` keeps the drafter's teacher

The LM head is replaced by one that multiplies at those rows alone. It keeps transformers' parameter and its name, so
that DeepSpeed's hooks gather the weight around it, also where it is the embedding's. What such a head leaves out (bias,
soft caps, scales) would be silently wrong, so `load` compares its logits with transformers' own once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from draftkit.errors import UserError
from draftkit.rl.token_stats import TokenStatistics, token_logp, token_statistics
from draftkit.types import Sampling


class Tokens(Protocol):
    """What a trajectory, a document and a sample have in common: T tokens, and which of them the policy sampled."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Padded:
    """B sequences as one forward sees them. row_N: chosen states, as places in B * T, sequence by sequence; token_N:
    the token that comes after each."""

    tokens_BT: torch.Tensor
    row_N: torch.Tensor
    token_N: torch.Tensor


def pad(sequences: Sequence[Tokens], *, teacher: bool = False, device: torch.device | str = "cpu") -> Padded:
    """On the right, with token 0: under causal attention nothing before it can see it."""
    lengths = [len(s.tokens) for s in sequences]
    tokens_BT = torch.zeros(len(sequences), max(lengths), dtype=torch.int64)
    chosen_BT = torch.zeros(len(sequences), max(lengths), dtype=torch.bool)
    for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        mask = torch.tensor(sequence.mask)
        assert not mask[0], "the first token of a sequence has nothing to be sampled from"
        tokens_BT[row, :length] = torch.tensor(sequence.tokens)
        chosen_BT[row, : length - 1] = mask[1:]
        if teacher:
            chosen_BT[row, :length] |= mask
    row_N = chosen_BT.flatten().nonzero().squeeze(1)
    token_N = tokens_BT.roll(-1, 1).flatten()[row_N]  # after a last token comes nothing: only a teacher's row is there
    return Padded(tokens_BT.to(device), row_N.to(device), token_N.to(device))


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
    """`lm` with a `Head`. forward: logp_N, with gradient; with `statistics` (last_BTH, *TokenStatistics)."""

    def __init__(self, lm: nn.Module, sampling: Sampling) -> None:
        super().__init__()
        self.lm = lm
        lm.lm_head = Head(lm.lm_head.weight, sampling)

    def forward(
        self, tokens_BT: torch.Tensor, row_N: torch.Tensor, token_N: torch.Tensor, statistics: bool
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        last_BTH = self.lm.model(input_ids=tokens_BT, use_cache=False).last_hidden_state
        answer = self.lm.lm_head(last_BTH.flatten(0, 1)[row_N], token_N, statistics)
        return (last_BTH, *answer) if statistics else answer


@torch.no_grad()
def statistics_of(model: nn.Module, padded: Padded) -> tuple[torch.Tensor, TokenStatistics]:
    """Final-normed states [B, T, H], statistics at the chosen rows. model: a `TokenModel`, or the engine around one."""
    last_BTH, *columns = model(padded.tokens_BT, padded.row_N, padded.token_N, True)
    return last_BTH, TokenStatistics(*columns)


def load(path: Path, sampling: Sampling, dtype: torch.dtype, trust_remote_code: bool = False) -> TokenModel:
    """From a model directory; UserError where weights or logits do not have the form needed here."""
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code).eval()
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
    probe = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        expected = lm(input_ids=probe, use_cache=False).logits[0].float() / (sampling.temperature or 1.0)
    model = TokenModel(lm, sampling)
    _, read = statistics_of(model, Padded(probe, torch.arange(8), probe[0]))
    for ours, theirs in ((read.max, expected.amax(-1)), (read.lse, expected.logsumexp(-1))):
        if not torch.allclose(ours, theirs, rtol=0.01, atol=0.01):
            raise UserError(
                f"{path}: the logits of {architecture} are not its last state times the LM head (it adds a bias, a "
                "scale or a soft cap), which the policy trainer and the drafters take them to be.",
                "Use a model without these.",
            )
    return model
