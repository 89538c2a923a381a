"""What an engine holds, in a form that can be compared with a checkpoint: the canary's fingerprint of weights.

A published weight may sit in packed, fused or tied form, or not have arrived at all. So no tensor is trusted: every
matrix is multiplied by a fixed pseudo-random vector *by the engine's own kernels*, and the products are compared with
those of the checkpoint: N products a matrix, which catch permuted rows and columns as well.

Kernels that compute in bfloat16 round their output to 8 bits, far more than an RL step changes. There the matrix is
read back column by column, exactly (a basis vector times a matrix is free of rounding), and multiplied in float64.
Float32 kernels take the vector at once. Either way the difference that is left is noise of summation, under TOLERANCE
of a tensor's root mean square; one weight of a row that moves by its last bfloat16 bit changes the row's product by
about 1e-4 of that, so that a single optimizer step shows.

Left out: quantised engines, whose weights are never the checkpoint's, and fused experts (MoE), refused by name;
buffers that no checkpoint has (rotary tables).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from draftkit.errors import UserError

TOLERANCE = 3e-5
BLOCK = 1024  # columns read back, or rows multiplied, at a time
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
VERIFIER, DRAFTER = "verifier", "drafter"
# Tensors of a checkpoint that vLLM computes by itself or does not need.
NOT_SERVED = ("t2d", "rotary_emb.inv_freq")
# What vLLM makes and never uses: an EAGLE-3 layer after the first has no hidden state to norm.
UNUSED = re.compile(r"layers\.([1-9]\d*)\.hidden_norm$")


# ---- what the engine holds ------------------------------------------------------------------------------------------


@torch.inference_mode()
def held(verifier: Any, drafter: Any | None, columns: int | None = None) -> dict[str, torch.Tensor]:
    """{"verifier.<name>" or "drafter.<name>": products [N] float32, or the values of vectors and integer tensors}.

    Modules that the drafter shares with the verifier appear once, as the verifier's. columns: use only so many inputs
    of each matrix (a fixed choice), for models where all of them take too long.
    """
    found = dict(_of_model(verifier, VERIFIER, set(), columns))
    if drafter is not None:
        found |= _of_model(drafter, DRAFTER, {id(module) for module in verifier.modules()}, columns)
    return found


def _of_model(model: Any, part: str, skip: set[int], columns: int | None) -> Iterator[tuple[str, torch.Tensor]]:
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    fused = FUSED | (getattr(model, "packed_modules_mapping", None) or {})
    start = getattr(getattr(model, "model", None), "mtp_start_layer_idx", 0)
    for path, module in model.named_modules():
        if id(module) in skip or UNUSED.search(path):
            continue
        method = getattr(module, "quant_method", None)
        if isinstance(module, LinearBase | VocabParallelEmbedding) and not isinstance(
            method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod
        ):
            raise UserError(f"the engine's {path} is quantised: its weights cannot be compared with a checkpoint.")
        own = dict(module.named_parameters(recurse=False))
        if isinstance(module, LinearBase):
            names, sizes = _split(path, module, fused)
            apply = functools.partial(method.apply, module)
            own["weight"] = _products(
                apply, getattr(module, "input_size_per_partition", module.input_size), module, columns
            )
        else:
            names, sizes = [path], None
            if isinstance(module, ParallelLMHead):
                apply = functools.partial(method.apply, module)
                own["weight"] = _products(apply, module.embedding_dim, module, columns)
            if isinstance(module, VocabParallelEmbedding):
                own["weight"] = own["weight"][: module.org_vocab_size]
        for leaf, tensor in own.items():
            value = _response(tensor, f"{path}.{leaf}", columns)
            pieces = value.split(sizes) if sizes else [value]
            for name, piece in zip(names, pieces, strict=True):
                yield f"{part}.{canonical(f'{name}.{leaf}'.lstrip('.'), part, start)}", piece.cpu()


def _split(path: str, module: Any, fused: dict[str, list[str]]) -> tuple[list[str], list[int]]:
    """Checkpoint names of a (fused) linear layer, and the outputs of each."""
    parent, _, leaf = path.rpartition(".")
    sizes = list(module.output_partition_sizes)
    parts = fused.get(leaf, [leaf])
    if len(parts) != len(sizes):
        parts, sizes = [leaf], [sum(sizes)]
    return [f"{parent}.{name}".lstrip(".") for name in parts], sizes


def _products(
    apply: Callable[[torch.Tensor], torch.Tensor], num_inputs: int, module: Any, columns: int | None
) -> torch.Tensor:
    """W @ v by the layer's own kernel, [N] float32."""
    parameter = next(module.parameters(recurse=False))
    dtype, device = parameter.dtype, parameter.device
    v, chosen = direction(num_inputs, columns)
    if dtype in (torch.float32, torch.float64):
        x = torch.zeros(1, num_inputs, dtype=dtype)
        x[0, chosen] = v[chosen].to(dtype)
        return apply(x.to(device))[0].float()
    total: torch.Tensor | float = 0.0
    for block in chosen.split(BLOCK):
        x = torch.zeros(len(block), num_inputs, dtype=dtype)
        x[torch.arange(len(block)), block] = 1.0
        total = total + v[block].to(device) @ apply(x.to(device)).double()
    return total.float()  # type: ignore[union-attr]


# ---- what a checkpoint should give ----------------------------------------------------------------------------------


@torch.inference_mode()
def expected_probe(
    weights: Iterable[tuple[str, torch.Tensor]],
    part: str,
    dtype: torch.dtype | None = None,
    columns: int | None = None,
) -> dict[str, torch.Tensor]:
    """The same from checkpoint tensors. part: verifier or drafter. dtype: what the engine rounds weights to
    (`Engine.dtype`); None where the tensors already have that type. columns: as in the probe compared with."""
    assert part in (VERIFIER, DRAFTER), part
    found = {}
    for name, tensor in weights:
        if not name.endswith(NOT_SERVED):
            rounded = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            found[f"{part}.{canonical(name, part)}"] = _response(rounded, name, columns).cpu()
    return found


def canonical(name: str, part: str, mtp_start: int = 0) -> str:
    """One name for what checkpoints of a drafter, vLLM's loader and vLLM's modules each call their own way."""
    if part == VERIFIER:
        return name
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.").replace("draft_id_to_target_id", "d2t")
    name = name.replace(".mtp_block.", ".")
    head, _, rest = name.partition(".")
    if head == "mtp_layers":
        index, _, rest = rest.partition(".")
        name = f"mtp_layers.{int(index) - mtp_start}.{rest}"
    return name


def direction(num_inputs: int, columns: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(v [K] float64, the inputs used): the same for every matrix of K inputs, in every process."""
    made = torch.Generator().manual_seed(num_inputs)
    v = torch.randn(num_inputs, generator=made, dtype=torch.float64).float().double()
    if columns is None or columns >= num_inputs:
        return v, torch.arange(num_inputs)
    return v, torch.randperm(num_inputs, generator=made)[:columns].sort().values


def _response(tensor: torch.Tensor, name: str, columns: int | None) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    if tensor.dim() < 2:
        return tensor.detach().float().clone()
    if tensor.dim() > 2:
        raise UserError(f"{name} holds the weights of several experts at once: the probe cannot read those.")
    v, chosen = direction(tensor.shape[1], columns)
    v, chosen = v[chosen].to(tensor.device), chosen.to(tensor.device)
    whole = len(chosen) == tensor.shape[1]
    rows = [(rows if whole else rows[:, chosen]).double() @ v for rows in tensor.detach().split(BLOCK)]
    return torch.cat(rows).float()


# ---- the comparison -------------------------------------------------------------------------------------------------


def probe_mismatches(held: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that differ, that the engine lacks, or that no checkpoint accounts for. Only the parts
    that `expected` speaks of are compared."""
    parts = {name.partition(".")[0] for name in expected}
    names = sorted(name for name in held.keys() | expected.keys() if name.partition(".")[0] in parts)
    return [name for name in names if not _agree(name, held, expected)]


def _agree(name: str, held: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    part, _, leaf = name.partition(".")
    theirs, ours = expected.get(name), held.get(name)
    if ours is None:  # a drafter that embeds with the verifier's own module ignores the copy in its checkpoint
        return part == DRAFTER and leaf == "embed_tokens.weight"
    if theirs is None and leaf == "lm_head.weight":  # tied: the checkpoint has the embedding only
        theirs = expected.get(f"{part}.{canonical('model.embed_tokens.weight', part)}")
    if theirs is None or theirs.shape != ours.shape:
        return False
    if not theirs.is_floating_point():
        return bool((ours == theirs).all())
    scale = theirs.double().square().mean().sqrt().clamp(min=1e-30)
    return bool(((ours.double() - theirs.double()).abs() <= TOLERANCE * scale).all())  # false for nan
