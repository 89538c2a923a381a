"""Faults of vLLM 0.32 that would spoil results silently, and one that stops speculative engines asked for top-k:
detected by behaviour, not by version, and mended before an engine is built.

Of the CPU build: temperature, top-p and top-k of speculative requests, top-k in a step without drafts; a tied LM head
that a weight update leaves behind (`weights.repack_tied_heads`). Of every build: sampled drafts ignore seeds.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from draftkit.engine.sampling import sample_drafts, sample_recovered

if TYPE_CHECKING:
    import torch


def _expand_reference(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Torch version of vLLM's `expand_batch_to_tokens`: [a, b], cumulative [2, 5] -> [a, a, b, b, b]."""
    import torch

    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    expanded = x.repeat_interleave(counts.to(x.device), output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to) if replace_from != replace_to else expanded


def register_kernels_once() -> None:
    """Bind vLLM's C++ kernels now, and never again in this process.

    Every engine start registers them anew by a scan over all loaded modules, which fails once numba (the n-gram
    drafter) is among them: an engine after an n-gram engine could not be built.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    current_platform.import_kernels()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its scan touches every deprecated attribute there is
        current_platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = classmethod(lambda cls: None)


def allow_amx() -> None:
    """Ask the operating system for this process' AMX tiles. vLLM's attention uses them without having asked: unless a
    product of torch's did so before, as loading a policy does, the process ends by an illegal instruction."""
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def sampling_fault() -> str | None:
    """None when `expand_batch_to_tokens` is right for every dtype the sampler gives it, else what is wrong.

    vLLM 0.32 on CPU writes the result into a temporary copy for anything but int64, so temperature, top-p and top-k
    of speculative requests are uninitialised memory (upstream issues 55005, 42638).
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if current_platform.is_cpu():
        register_kernels_once()
    counts = torch.tensor([2, 5, 6], dtype=torch.int32)
    for dtype in (torch.float32, torch.int32, torch.int64):
        x = torch.tensor([3, 0, 7], dtype=dtype)
        got = rejection_sampler.expand_batch_to_tokens(x, counts, 6, replace_from=0, replace_to=1)
        if got.tolist() != [3, 3, 1, 1, 1, 7]:
            return f"expand_batch_to_tokens({dtype}) returned {got.tolist()} where [3, 3, 1, 1, 1, 7] is right"
    return None


def top_k_fault() -> str | None:
    """None when top-k takes a step in which no request has drafts (the first of every call), else the error of it."""
    import torch
    from vllm.v1.sample import rejection_sampler

    try:
        rejection_sampler.apply_top_k_top_p(torch.empty(0, 8), torch.empty(0, dtype=torch.int32), None)
    except RuntimeError as error:
        return f"apply_top_k_top_p fails on no rows ({str(error).splitlines()[0][:90]})"
    return None


def draft_seed_fault() -> str | None:
    """None when drafts sampled for a seeded request repeat, else what is wrong."""
    import torch
    from vllm.v1.spec_decode import llm_base_proposer

    class Seeded:
        all_greedy, all_random, temperature = False, True, torch.ones(1)

        def __init__(self) -> None:
            self.generators = {0: torch.Generator().manual_seed(0)}

    draws = []
    for _ in range(2):
        tokens, _ = llm_base_proposer.compute_probs_and_sample_next_token(torch.zeros(1, 10_000), Seeded())
        draws.append(tokens.tolist())
    return None if draws[0] == draws[1] else "sampled drafts of a request with a seed differ from one time to the next"


def cure_draft_seeds() -> None:
    """Sample drafts by `sampling.sample_drafts`: repeatable, and several times as fast on a CPU."""
    from vllm.v1.spec_decode import llm_base_proposer

    llm_base_proposer.compute_probs_and_sample_next_token = sample_drafts


def recover_faster() -> None:
    """Sample recovered tokens by `sampling.sample_recovered`: no fault, but most of a round's time on a CPU."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.sample_recovered_tokens = sample_recovered


def cure_sampling() -> bool:
    """Replace the faulty functions where a self-test finds a fault; True when something was mended."""
    from vllm.v1.sample import rejection_sampler

    mended = False
    if sampling_fault() is not None:
        rejection_sampler.expand_batch_to_tokens = _expand_reference
        mended = True
    if top_k_fault() is not None:
        original = rejection_sampler.apply_top_k_top_p
        rejection_sampler.apply_top_k_top_p = lambda logits, k, p: original(logits, k, p) if len(logits) else logits
        mended = True
    fault = sampling_fault() or top_k_fault()
    assert not mended or fault is None, fault
    return mended


def rank_without_compiling() -> None:
    """Count a sampled token's rank, which comes with its log-probability and which nothing here reads, eagerly: vLLM
    compiles that one comparison with inductor, anew for kinds of batches, for 10 to 16 seconds each on two cores."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = lambda logits, values: (logits >= values).sum(-1)
