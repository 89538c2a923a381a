"""Known ways in which a served drafter is not the trained one, each made in PyTorch on purpose.

The parity check asks which of them proposes what vLLM proposed: if any does so more often than the drafter as it is,
that is the likely cause.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from draftkit.data.capture import Verifier
from draftkit.drafters.base import Drafter
from draftkit.drafters.draft_lm import DraftLM
from draftkit.drafters.eagle3 import Eagle3
from draftkit.drafters.experts import DeepSeek
from draftkit.drafters.layers import Attention, GatedAttention, NormPlusOne
from draftkit.drafters.mtp import Mtp
from draftkit.drafters.mtp_native import NativeMtp
from draftkit.train.server import ServedVerifier

SWAPPED = "concatenation order: hidden state and embedding are exchanged"


def of_drafter(drafter: Drafter, verifier: Verifier) -> Iterator[tuple[str, Drafter]]:
    """(name, the drafter with that mistake)."""
    if isinstance(drafter, Eagle3):
        yield from _eagle3(drafter, verifier)
    elif isinstance(drafter, Mtp):
        yield from _mtp(drafter)
    elif isinstance(drafter, NativeMtp):
        yield from _native_mtp(drafter)
    else:
        assert isinstance(drafter, DraftLM)
        yield from _draft_lm(drafter)


def of_states(drafter: Drafter, verifier: Verifier) -> Iterator[tuple[str, Verifier]]:
    """(name, the verifier tapped at other layers); none where a server chose the layers."""
    if isinstance(verifier, ServedVerifier):
        return
    for shift in (-1, 1):
        shifted = Verifier.shifted(verifier, shift)
        if shifted.aux_layers != verifier.aux_layers:
            yield f"auxiliary layers: served as {list(shifted.aux_layers)}", shifted


def _eagle3(drafter: Eagle3, verifier: Verifier) -> Iterator[tuple[str, Drafter]]:
    def flip_norm(d: Eagle3) -> None:
        d.config = dataclasses.replace(d.config, norm_before_residual=not d.config.norm_before_residual)

    def flip_output(d: Eagle3) -> None:
        d.config = dataclasses.replace(d.config, norm_output=not d.config.norm_output)

    def no_input_norms(d: Eagle3) -> None:
        d.config = dataclasses.replace(d.config, fc_norm=False, norm_before_fc=False)

    def verifier_head(d: Eagle3) -> None:
        d.lm_head.weight.copy_(verifier.head_VH[d.draft_to_target_D])

    yield "vocabulary map (d2t): draft ids were proposed as verifier ids", _changed(drafter, lambda d: d.d2t.zero_())
    yield "norm flags: norm_before_residual differs", _changed(drafter, flip_norm)
    yield "norm flags: norm_output differs", _changed(drafter, flip_output)
    if drafter.config.fc_norm or drafter.config.norm_before_fc:
        yield "norm flags: the norms before fc are left out", _changed(drafter, no_input_norms)
    if drafter.config.hidden_size == drafter.config.target_hidden_size:
        yield "shared head: vLLM proposed with the verifier's LM head", _changed(drafter, verifier_head)
    yield "rope: another base frequency", _changed(drafter, lambda d: _default_rope(d.rope))


def _mtp(drafter: Mtp) -> Iterator[tuple[str, Drafter]]:
    def swap_norms(d: Mtp) -> None:
        d.token_layernorm, d.hidden_layernorm = d.hidden_layernorm, d.token_layernorm

    yield SWAPPED, _changed(drafter, lambda d: _swap_halves(d.input_proj))
    yield "rope: another base frequency", _changed(drafter, lambda d: _default_rope(d.rope))
    if drafter.config.layout == "mimo":
        yield "norms: those of the two inputs are exchanged", _changed(drafter, swap_norms)
        yield "norms: no final norm", _changed(drafter, lambda d: setattr(d, "final_layernorm", torch.nn.Identity()))
        yield "attention biases were not loaded", _changed(drafter, lambda d: _no_biases(d.self_attn))


def _native_mtp(drafter: NativeMtp) -> Iterator[tuple[str, Drafter]]:
    block = drafter.block

    def swap_norms(d: NativeMtp) -> None:
        d.embed_norm, d.hidden_norm = d.hidden_norm, d.embed_norm

    def plain_norms(d: NativeMtp) -> None:
        for norm in (module for module in d.modules() if isinstance(module, NormPlusOne)):
            norm.weight.sub_(1.0)

    def no_gate(d: NativeMtp) -> None:
        d.block.self_attn.output = functools.partial(Attention.output, d.block.self_attn)

    yield SWAPPED, _changed(drafter, lambda d: _swap_halves(d.fuse))
    yield "norms: those of the two inputs are exchanged", _changed(drafter, swap_norms)
    yield "rope: another base frequency", _changed(drafter, lambda d: _default_rope(d.rope))
    if drafter.final_norm is not None:
        yield "norms: no final norm", _changed(drafter, lambda d: setattr(d, "final_norm", None))
    if drafter.config.family.norm_adds_one:
        yield "norms: scaled by the weight, not by 1 + weight", _changed(drafter, plain_norms)
    if isinstance(block.self_attn, GatedAttention):
        yield "attention: no output gate", _changed(drafter, no_gate)
    elif isinstance(block.self_attn, Attention) and block.self_attn.q_proj.bias is not None:
        yield "attention biases were not loaded", _changed(drafter, lambda d: _no_biases(d.block.self_attn))
    if isinstance(block.mlp, DeepSeek):
        changed = _changed(drafter, lambda d: d.block.mlp.gate.e_score_correction_bias.zero_())
        yield "experts: the router's correction bias was not loaded", changed


def _draft_lm(drafter: DraftLM) -> Iterator[tuple[str, Drafter]]:
    yield "rope: another base frequency", _changed(drafter, lambda d: _default_rope(d.model.base_model.rotary_emb))
    yield "norms: the final norm has no weight", _changed(drafter, lambda d: d.model.base_model.norm.weight.fill_(1.0))


def _changed(drafter: Drafter, edit: Callable) -> Drafter:
    """A copy with one thing changed; what is the verifier's may be huge and is shared."""
    shared = {id(b): b for name, b in drafter.named_buffers() if name in ("embed_VH", "head_VH")}
    shared |= {id(p): p for p in drafter.parameters() if not p.requires_grad}
    other = copy.deepcopy(drafter, shared)
    with torch.no_grad():
        edit(other)
    return other


def _swap_halves(projection: torch.nn.Linear) -> None:
    projection.weight.copy_(torch.cat(projection.weight.chunk(2, 1)[::-1], 1))


def _no_biases(attention: Attention) -> None:
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.bias.zero_()


def _default_rope(rotary: torch.nn.Module) -> None:
    size = 2 * len(rotary.inv_freq)
    rotary.inv_freq.copy_(1.0 / (10000.0 ** (torch.arange(0, size, 2, dtype=torch.float32) / size)))
