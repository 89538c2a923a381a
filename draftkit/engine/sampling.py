"""What is sampled in a speculative round, in place of two functions of vLLM: the drafts, and the token that takes the
place of a rejected one.

vLLM draws exponential noise for every token of the vocabulary: for drafts over the verifier's whole vocabulary and
without notice of a request's seed, for recovered tokens twice where there is one. On a CPU that noise is most of a
round at T > 0 (`scripts/bench_sampling.py`). Here one uniform number a row is drawn, from the request's own generator
where it has one, and cumulated weights say which token that is: the same law, to the rounding of sums in float64.

Left out: the verifier's own tokens (bonus tokens and plain decoding), whose kernel is fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata

GREEDY = 1e-5  # vLLM's border: colder requests take the likeliest draft
BLOCK = 128  # weights whose sum is looked at first


def draw(weight_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """An index [R] int64 for each row, drawn in proportion to its weights >= 0. uniform_R: float64 in [0, 1).

    Inverse transform sampling in two levels, so that only one block of each row is cumulated weight by weight. An index
    of weight 0 is never drawn; a row without any weight gives some index.
    """
    num_rows, num_weights = weight_RV.shape
    weight_RKB = F.pad(weight_RV, (0, -num_weights % BLOCK)).view(num_rows, -(-num_weights // BLOCK), BLOCK)
    block_RK = weight_RKB.sum(-1).double()
    sums_RK = block_RK.cumsum(-1)
    target_R1 = uniform_R.unsqueeze(1) * sums_RK[:, -1:]
    # The first block whose sum exceeds the target: never an empty one.
    k_R1 = torch.searchsorted(sums_RK, target_R1, right=True).clamp(max=sums_RK.shape[1] - 1)
    own_R1 = block_RK.gather(1, k_R1)
    share_R1 = (target_R1 - sums_RK.gather(1, k_R1) + own_R1) / own_R1
    inside_RB = weight_RKB[torch.arange(num_rows, device=k_R1.device), k_R1.squeeze(1)].double().cumsum(-1)
    place_R1 = torch.searchsorted(inside_RB, share_R1.clamp(0, 1 - 2**-52) * inside_RB[:, -1:], right=True)
    return (k_R1 * BLOCK + place_R1.clamp(max=BLOCK - 1)).clamp(max=num_weights - 1).squeeze(1)


def uniform(num_requests: int, generators: Mapping[int, torch.Generator], device: torch.device) -> torch.Tensor:
    """[requests] float64 in [0, 1): request b's from its own generator where it has one."""
    uniform_B = torch.rand(num_requests, dtype=torch.float64, device=device)
    for b, generator in generators.items():
        uniform_B[b : b + 1].uniform_(generator=generator)
    return uniform_B


def sample_drafts(
    logits_BV: torch.Tensor, metadata: SamplingMetadata, use_fp64_gumbel: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(drafts [B] int64, their law q [B, V] float32), as rejection needs it; logits alone where all are greedy.

    For `compute_probs_and_sample_next_token`. A token whose logit is -inf in every row is outside the draft vocabulary.
    Row b belongs to request b; drafts that come several rows a request are drawn from other requests' generators, which
    costs them their repeatability only. use_fp64_gumbel: vLLM's, without meaning here.
    """
    if metadata.all_greedy:
        return logits_BV.argmax(-1), logits_BV
    temperature_B1 = metadata.temperature.unsqueeze(1)
    cold_B1 = temperature_B1 < GREEDY
    token_D = (logits_BV > -torch.inf).any(0).nonzero().squeeze(1)
    logits_BD = logits_BV[:, token_D].float() / torch.where(cold_B1, 1.0, temperature_B1)
    q_BD = logits_BD.softmax(-1)
    place_B = draw(q_BD, uniform(len(q_BD), metadata.generators, q_BD.device))
    if not metadata.all_random:
        place_B = torch.where(cold_B1.squeeze(1), q_BD.argmax(-1), place_B)
    q_BV = torch.zeros_like(logits_BV, dtype=torch.float32).index_copy_(1, token_D, q_BD)
    return token_D[place_B], q_BV


def sample_recovered(
    max_spec_len: int,
    num_drafts_B: Sequence[int],
    cu_num_drafts_B: torch.Tensor,
    draft_N: torch.Tensor,
    q_NV: torch.Tensor | None,
    p_NV: torch.Tensor,
    metadata: SamplingMetadata,
    device: torch.device,
    use_fp64_gumbel: bool = False,
) -> torch.Tensor:
    """[N] of draft_N's dtype: for every draft the token that takes its place if it is rejected, from (p - q)^+.

    For `sample_recovered_tokens`. N: the drafts of all requests. q None: each draft was certain (greedy, n-gram). At
    most one of a request's tokens is used, so that one uniform number a request is enough.
    """
    drafting = {b: generator for b, generator in metadata.generators.items() if num_drafts_B[b] > 0}
    counts_B = torch.tensor(num_drafts_B, device=device)
    uniform_N = uniform(len(num_drafts_B), drafting, device).repeat_interleave(counts_B, output_size=len(draft_N))
    if q_NV is None:
        residual_NV = p_NV.scatter(1, draft_N.long().unsqueeze(1), 0.0)
    else:
        residual_NV = (p_NV - q_NV).clamp_(min=0)
    return draw(residual_NV, uniform_N).to(draft_N.dtype)


def plain_without_drafts(runner: Any) -> None:
    """Let a step in which no request has drafts be sampled as an engine without speculation does it. vLLM sends it
    through the rejection sampler, whose copies of the logits cost a fifth of such a step on a CPU."""
    sample = runner._sample

    def sampled(logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        drafted = spec_decode_metadata is not None and spec_decode_metadata.max_spec_len > 0
        return sample(logits, spec_decode_metadata if drafted else None)

    runner._sample = sampled
