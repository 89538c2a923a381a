"""Group-relative policy optimisation: advantages, the surrogate loss of four presets, reward shaping. Pure functions.

Suffixes: N sampled tokens of a micro-batch, laid end to end (prompt, user and tool tokens are not among them);
S its sequences; M sequences of a whole step.

    preset    ratio              sum over tokens, divided by                      clip range     groups
    grpo      token              1 / length each, by the number of sequences      0.2, 0.2       (r - mean) / std
    dr-grpo   token              1 each, by max_tokens times sequences            0.2, 0.2       r - mean
    dapo      token              1 each, by the number of tokens                  0.2, 0.28      (r - mean) / std
    gspo      sequence, its      1 / length each, by the number of sequences      3e-4, 4e-4     (r - mean) / std
              geometric mean

The divisor is that of the whole optimizer step, over all micro-batches and ranks (`global_denominator`): a mean taken
per micro-batch would weigh the tokens of a short micro-batch more. So losses of micro-batches *add up* to the step's.

Engine and trainer disagree a little about the policy (kernels, lag). Truncated importance sampling weighs each token's
surrogate with min(trainer / engine, C), a constant without gradient; gspo takes that weight, like its ratio, as the
geometric mean over the sequence. The KL term is not weighted.

Left out: entropy bonus, dual clip, critics; a sequence is never split over micro-batches (gspo could not be computed).
Sources: GRPO, arXiv 2402.03300, eq. 3 and 4 (k3 estimator); Dr. GRPO, 2503.20783, section 3; DAPO, 2503.14476,
eq. 8 to 13; GSPO, 2507.18071, eq. 5 to 7 and section 5.1; truncated importance sampling as in measures.md 5.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from draftkit.recipe import Recipe

Preset = Literal["grpo", "dr-grpo", "dapo", "gspo"]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What the loss needs to know about the N sampled tokens of a micro-batch of S whole sequences.

    old_logp_N: the trainer's log-probabilities before the step's first update; engine_logp_N: those the engine sampled
    with; ref_logp_N: the reference policy's, None without a KL term; advantage_N: the advantage of the token's
    sequence; sequence_N int64: 0 <= sequence < S, within the micro-batch; length_S: sampled tokens of each sequence.
    """

    old_logp_N: torch.Tensor
    engine_logp_N: torch.Tensor
    ref_logp_N: torch.Tensor | None
    advantage_N: torch.Tensor
    sequence_N: torch.Tensor
    length_S: torch.Tensor


@dataclass(frozen=True, slots=True)
class LossSettings:
    """`recipe.rl` with the preset's defaults filled in. max_tokens: most sampled tokens of one sequence. one_update:
    a step makes no second update, so the policy that scored is the policy that moves and the ratio is 1; taken from two
    forwards it would hold their rounding, which in bfloat16 is more than GSPO's clip range."""

    loss: Preset
    clip_low: float
    clip_high: float
    dynamic_sampling: bool
    kl_coef: float
    tis_clip: float | None
    max_tokens: int
    one_update: bool = False


DEFAULTS: dict[Preset, tuple[float, float, bool]] = {  # clip_low, clip_high, dynamic_sampling
    "grpo": (0.2, 0.2, False),
    "dr-grpo": (0.2, 0.2, False),
    "dapo": (0.2, 0.28, True),
    "gspo": (3e-4, 4e-4, False),
}


def resolve_settings(recipe: Recipe) -> LossSettings:
    rl = recipe.rl
    low, high, dynamic = DEFAULTS[rl.loss]
    turns = 1 if rl.environment == "single-turn" else rl.max_turns
    return LossSettings(
        loss=rl.loss,
        clip_low=low if rl.clip_low is None else rl.clip_low,
        clip_high=high if rl.clip_high is None else rl.clip_high,
        dynamic_sampling=dynamic if rl.dynamic_sampling is None else rl.dynamic_sampling,
        kl_coef=rl.kl_coef,
        tis_clip=rl.tis_clip,
        max_tokens=recipe.sampling.max_tokens * turns,
        one_update=rl.updates == 1,
    )


# --- rewards ----------------------------------------------------------------------------------------------------

STD_FLOOR = 1e-6  # added to the standard deviation: rewards that differ by rounding must not become advantages of 1


def group_advantages(rewards_M: torch.Tensor, group_M: torch.Tensor, preset: Preset) -> torch.Tensor:
    """Advantage of each sequence within its group, float32 [M]; groups may differ in size.

    A group of equal rewards, one of a single sequence too, gives exactly 0. The standard deviation has the n - 1 of a
    sample, as in the public trainers. Computed in float64: a mean of equal float32 rewards is not always that reward.
    """
    rewards = rewards_M.double()
    advantages = torch.zeros_like(rewards)
    for group in group_M.unique():
        members = group_M == group
        own = rewards[members]
        if own.min() == own.max():
            continue
        centred = own - own.mean()
        advantages[members] = centred if preset == "dr-grpo" else centred / (own.std() + STD_FLOOR)
    return advantages.float()


def useful_groups(rewards: Sequence[float], groups: Sequence[int]) -> list[int]:
    """Groups that teach something, ascending: their rewards are not all equal (DAPO's dynamic sampling, eq. 11).

    Judge by the verifier's rewards: a length penalty would make a group useful in which nothing was solved.
    """
    seen: dict[int, set[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        seen.setdefault(group, set()).add(reward)
    return sorted(group for group, values in seen.items() if len(values) > 1)


def overlong_penalty(length: int, max_tokens: int, buffer: int) -> float:
    """Added to the reward of an answer of `length` tokens: falls from 0 to -1 over the last `buffer` tokens before
    max_tokens (DAPO, eq. 13). A buffer of 0 penalises nothing."""
    if buffer == 0:
        return 0.0
    return -min(1.0, max(0.0, (length - (max_tokens - buffer)) / buffer))


# --- loss -------------------------------------------------------------------------------------------------------


def global_denominator(settings: LossSettings, num_sequences: int, num_tokens: int) -> float:
    """What `policy_loss` divides by, from the counts of the whole optimizer step: all micro-batches, all ranks."""
    if settings.loss == "dapo":
        return float(num_tokens)
    if settings.loss == "dr-grpo":
        return float(settings.max_tokens * num_sequences)
    return float(num_sequences)


def policy_loss(
    logp_N: torch.Tensor, batch: TokenBatch, settings: LossSettings, denominator: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(scalar loss to minimise, metrics): this micro-batch's part of the step's loss, and sums over its tokens.

    logp_N: the policy's log-probabilities now, with gradient. Both returns add up over micro-batches and ranks;
    `metric_means` turns the sums into figures.
    """
    old_logp_N = logp_N.detach() if settings.one_update else batch.old_logp_N
    log_ratio_N = logp_N - old_logp_N
    log_weight_N = batch.old_logp_N - batch.engine_logp_N
    if settings.loss == "gspo":
        log_ratio_N, log_weight_N = _sequence_mean(log_ratio_N, batch), _sequence_mean(log_weight_N, batch)

    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    surrogate_N = torch.minimum(ratio_N * batch.advantage_N, clipped_N * batch.advantage_N)
    weight_N = log_weight_N.detach().exp()
    used_N = torch.ones_like(weight_N) if settings.tis_clip is None else weight_N.clamp(max=settings.tis_clip)
    loss_N = -used_N * surrogate_N
    if settings.kl_coef:
        kl_N = k3(batch.ref_logp_N - logp_N)
        loss_N = loss_N + settings.kl_coef * kl_N
    if settings.loss in ("grpo", "gspo"):
        loss_N = loss_N / batch.length_S[batch.sequence_N]
    loss = loss_N.sum() / denominator

    with torch.no_grad():
        sums = {
            "tokens": torch.ones_like(ratio_N),
            "ratio": ratio_N,
            "ratio_squared": ratio_N.square(),
            "clipped_low": (ratio_N < 1 - settings.clip_low) & (batch.advantage_N < 0),
            "clipped_high": (ratio_N > 1 + settings.clip_high) & (batch.advantage_N > 0),
            "approx_kl": k3(logp_N - old_logp_N),
            "tis_weight": used_N,
            "tis_capped": used_N < weight_N,
        }
        if settings.kl_coef:
            sums["ref_kl"] = kl_N
        metrics = {name: values.double().sum() for name, values in sums.items()}
    return loss, metrics


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Schulman's estimator r - 1 - log r of KL(p || q) from samples of p, r = q / p: never negative, unbiased.

    In the policy's gradient r = reference / policy; of an update, where the old policy sampled, r = new / old.
    """
    return log_ratio.exp() - 1 - log_ratio


def metric_means(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Per-token means of summed metrics, and the spread of the ratio instead of its square. `tokens` stays a count."""
    tokens = float(sums["tokens"])
    means = {name: float(value) / tokens for name, value in sums.items() if name != "tokens"}
    variance = means.pop("ratio_squared") - means["ratio"] ** 2
    return means | {"ratio_std": max(0.0, variance) ** 0.5, "tokens": tokens}


def _sequence_mean(values_N: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """The mean over each token's sequence, at every token of it."""
    sums_S = torch.zeros_like(batch.length_S, dtype=values_N.dtype).index_add(0, batch.sequence_N, values_N)
    return (sums_S / batch.length_S)[batch.sequence_N]
