"""Forms in which hidden states are kept: `exact`, as the verifier computed them, and `int8`, half as large.

int8: absmax per token and group of GROUP channels, so that the few channels that hidden states have far above all
others spoil no more than their own group. On the demo verifier's states a group of 64 leaves a relative error of
1.4-1.6 % (the whole state as one group: 3-5 %), and moves the teacher's distribution by a KL of 2e-3 nats. The
teacher's numbers (log-sum-exp, maximum, argmax) are those of the state as it is read back: a teacher of one state
normalised by another is no distribution (its mass would scatter by 8 %).
"""

from __future__ import annotations

import math
from typing import Literal

import torch

Form = Literal["exact", "int8"]
GROUP = 64
LEVELS = 127
WIDE = ("aux", "last")  # the fields of a document's states that have a form


def encode(states: dict[str, torch.Tensor], form: Form) -> dict[str, torch.Tensor]:
    """As they are stored: `aux` and `last` become codes and scales."""
    if form == "exact":
        return states
    stored = {name: tensor for name, tensor in states.items() if name not in WIDE}
    for name in WIDE:
        stored[f"{name}.codes"], stored[f"{name}.scales"] = _quantise(states[name])
    return stored


def decode(stored: dict[str, torch.Tensor], form: Form, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if form == "exact":
        return stored
    states = {name: tensor for name, tensor in stored.items() if "." not in name}
    for name in WIDE:
        states[name] = _restore(stored[f"{name}.codes"], stored[f"{name}.scales"], dtype)
    return states


def fields(form: Form) -> tuple[str, ...]:
    """Names of what is stored in place of `aux` and `last`."""
    return WIDE if form == "exact" else tuple(f"{name}.{part}" for name in WIDE for part in ("codes", "scales"))


def read_back(state: torch.Tensor, form: Form) -> torch.Tensor:
    """What a reader of the stored state sees."""
    return state if form == "exact" else _restore(*_quantise(state), state.dtype)


def bytes_of(width: int, dtype: torch.dtype, form: Form) -> int:
    """Of one token's state of `width` channels."""
    return width * dtype.itemsize if form == "exact" else width + 2 * (width // _group(width) if width else 0)


def _group(width: int) -> int:
    return math.gcd(width, GROUP)


def _quantise(x_TF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [T, F] int8, scales [T, groups] bfloat16)."""
    if x_TF.shape[1] == 0:
        return x_TF.to(torch.int8), x_TF.to(torch.bfloat16)
    groups = x_TF.float().unflatten(1, (-1, _group(x_TF.shape[1])))
    scales = (groups.abs().amax(-1) / LEVELS).to(torch.bfloat16)
    codes = (groups / scales.float().clamp(min=1e-30).unsqueeze(-1)).round_().clamp_(-LEVELS, LEVELS)
    return codes.to(torch.int8).flatten(1), scales


def _restore(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if codes.shape[1] == 0:
        return codes.to(dtype)
    return (codes.float().unflatten(1, (scales.shape[1], -1)) * scales.float().unsqueeze(-1)).flatten(1).to(dtype)
