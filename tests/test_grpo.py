"""GRPO's pure functions against loops over single tokens in Python floats."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch

from draftkit.recipe import Recipe
from draftkit.rl.grpo import (
    LossSettings,
    TokenBatch,
    global_denominator,
    group_advantages,
    metric_means,
    overlong_penalty,
    policy_loss,
    resolve_settings,
    useful_groups,
)

PRESETS = ("grpo", "dr-grpo", "dapo", "gspo")
LENGTHS = (5, 1, 9, 3, 12, 2)
ALL = tuple(range(len(LENGTHS)))
MAX_TOKENS = 16


def settings(preset: str, **fields) -> LossSettings:
    # gspo's own range is so narrow that nearly every random ratio lies outside: a wider one tests both branches.
    clips = {"grpo": (0.2, 0.2), "dr-grpo": (0.15, 0.2), "dapo": (0.2, 0.28), "gspo": (0.05, 0.08)}
    low, high = clips[preset]
    made = LossSettings(preset, low, high, dynamic_sampling=False, kl_coef=0.0, tis_clip=2.0, max_tokens=MAX_TOKENS)
    return replace(made, **fields)


class Sequences:
    """Random log-probabilities of whole sequences, as lists of Python floats; `batch` lays chosen ones end to end."""

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        near = lambda values, width: [v + rng.gauss(0, width) for v in values]  # noqa: E731
        self.old = [[-rng.expovariate(1.0) for _ in range(n)] for n in LENGTHS]
        self.new = [near(row, 0.3) for row in self.old]
        self.engine = [near(row, 0.8) for row in self.old]
        self.ref = [near(row, 0.5) for row in self.old]
        self.advantage = [1.2, -0.7, 0.4, -1.5, 0.0, 0.9]

    def batch(self, chosen: Sequence[int] = ALL, with_ref: bool = True) -> tuple[torch.Tensor, TokenBatch]:
        flat = lambda rows: torch.tensor([v for s in chosen for v in rows[s]], dtype=torch.float64)  # noqa: E731
        length = torch.tensor([LENGTHS[s] for s in chosen])
        number = torch.arange(len(length)).repeat_interleave(length)
        advantage = torch.tensor([self.advantage[s] for s in chosen], dtype=torch.float64)[number]
        ref = flat(self.ref) if with_ref else None
        made = TokenBatch(flat(self.old), flat(self.engine), ref, advantage, number, length)
        return flat(self.new).requires_grad_(), made


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def reference(data: Sequences, chosen: Sequence[int], s: LossSettings, denominator: float) -> tuple[float, list[float]]:
    """(loss, gradient by token) from the formulae of the papers, one token at a time."""
    loss, gradient = 0.0, []
    for i in chosen:
        new, old, engine, ref = data.new[i], data.old[i], data.engine[i], data.ref[i]
        advantage, length = data.advantage[i], LENGTHS[i]
        cap = math.inf if s.tis_clip is None else s.tis_clip
        for t in range(length):
            if s.loss == "gspo":
                log_ratio = sum(n - o for n, o in zip(new, old, strict=True)) / length
                log_weight = sum(o - e for o, e in zip(old, engine, strict=True)) / length
            else:
                log_ratio, log_weight = new[t] - old[t], old[t] - engine[t]
            ratio = math.exp(log_ratio)
            weight = 1.0 if s.tis_clip is None else min(math.exp(log_weight), cap)
            free, clipped = ratio * advantage, clip(ratio, 1 - s.clip_low, 1 + s.clip_high) * advantage
            scale = {"grpo": 1 / length, "dr-grpo": 1.0, "dapo": 1.0, "gspo": 1 / length}[s.loss] / denominator
            loss -= weight * min(free, clipped) * scale
            # d ratio / d logp = ratio; of gspo's mean each token has 1/length, and there are length equal terms.
            slope = -weight * free * scale if free <= clipped else 0.0
            if s.kl_coef:
                r = math.exp(ref[t] - new[t])
                loss += s.kl_coef * (r - 1 - math.log(r)) * scale
                slope += s.kl_coef * (1 - r) * scale
            gradient.append(slope)
    return loss, gradient


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("tis_clip", [None, 1.5])
def test_loss_and_gradient_equal_a_loop_over_tokens(preset, kl_coef, tis_clip):
    for seed in range(5):
        data, s = Sequences(seed), settings(preset, kl_coef=kl_coef, tis_clip=tis_clip)
        logp, batch = data.batch(with_ref=kl_coef > 0)
        denominator = global_denominator(s, len(LENGTHS), sum(LENGTHS))
        loss, _ = policy_loss(logp, batch, s, denominator)
        loss.backward()
        expected, gradient = reference(data, ALL, s, denominator)
        assert loss.item() == pytest.approx(expected, abs=1e-12)
        assert logp.grad.tolist() == pytest.approx(gradient, abs=1e-12)
        assert any(g == 0 for g in gradient) == (kl_coef == 0)  # a clipped token, and the sequence of advantage 0


@pytest.mark.parametrize("preset", PRESETS)
def test_gradient_equals_finite_differences(preset):
    """Independent of the reference's own derivative. Points at a clip's kink are off the random data."""
    logp, batch = Sequences().batch()
    s = settings(preset, kl_coef=0.3, tis_clip=1.5)
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, batch, s, 7.0)[0], logp, eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("split", [([0, 1, 2], [3, 4, 5]), ([4], [0, 5, 1], [3, 2])])
def test_micro_batches_add_up_to_one_big_batch(preset, split):
    data, s = Sequences(), settings(preset, kl_coef=0.1)
    whole, batch = data.batch()
    denominator = global_denominator(s, len(LENGTHS), sum(LENGTHS))
    loss, sums = policy_loss(whole, batch, s, denominator)
    loss.backward()
    by_sequence = dict(zip(ALL, whole.grad.split(list(LENGTHS)), strict=True))
    parts = []
    for chosen in split:
        logp, part = data.batch(chosen)
        part_loss, part_sums = policy_loss(logp, part, s, denominator)
        part_loss.backward()
        torch.testing.assert_close(logp.grad, torch.cat([by_sequence[i] for i in chosen]))
        parts.append((part_loss, part_sums))
    torch.testing.assert_close(sum(p for p, _ in parts), loss)
    for name, value in sums.items():
        torch.testing.assert_close(sum(p[name] for _, p in parts), value)


def test_a_mean_per_micro_batch_would_not_add_up():
    """Why the denominator is global: token means of two parts, averaged, weigh the tokens of the short part more."""
    data, s = Sequences(), settings("dapo")
    loss = lambda chosen, by: policy_loss(*data.batch(chosen), s, by)[0].item()  # noqa: E731
    whole = loss(ALL, sum(LENGTHS))
    halves = [[1], [0, 2, 3, 4, 5]]
    assert sum(loss(h, sum(LENGTHS)) for h in halves) == pytest.approx(whole, abs=1e-12)
    mean_of_means = sum(loss(h, sum(LENGTHS[i] for i in h)) for h in halves) / 2
    assert abs(mean_of_means - whole) > 0.01


def test_denominators():
    counts = dict(num_sequences=24, num_tokens=1000)
    expected = {"grpo": 24, "gspo": 24, "dapo": 1000, "dr-grpo": 24 * MAX_TOKENS}
    assert {p: global_denominator(settings(p), **counts) for p in PRESETS} == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_is_written_into_the_batch(preset):
    logp, batch = Sequences().batch()
    before = {f.name: getattr(batch, f.name).clone() for f in fields(batch)} | {"logp": logp.detach().clone()}
    loss, _ = policy_loss(logp, batch, settings(preset, kl_coef=0.1), 6.0)
    loss.backward()
    after = {f.name: getattr(batch, f.name) for f in fields(batch)} | {"logp": logp.detach()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(getattr(batch, f.name).requires_grad for f in fields(batch))


@pytest.mark.parametrize("preset", PRESETS)
def test_on_the_policy_that_sampled_the_gradient_is_the_plain_policy_gradient(preset):
    """First update, same weights in the engine: ratio and weight are 1, so d loss / d logp = -advantage * scale."""
    logp, batch = Sequences().batch()
    same = replace(batch, old_logp_N=logp.detach().clone(), engine_logp_N=logp.detach().clone())
    loss, sums = policy_loss(logp, same, settings(preset), 6.0)
    loss.backward()
    scale = 1 / batch.length_S[batch.sequence_N] if preset in ("grpo", "gspo") else 1.0
    torch.testing.assert_close(logp.grad, -batch.advantage_N * scale / 6.0)
    means = metric_means(sums)
    assert means["ratio"] == means["tis_weight"] == 1 and means["tokens"] == sum(LENGTHS)
    assert means["clipped_low"] == means["clipped_high"] == means["tis_capped"] == means["approx_kl"] == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_a_single_update_begins_where_it_is(preset):
    """Two forwards of one policy round differently; that must neither clip nor weigh anything."""
    logp, batch = Sequences().batch()
    noisy = replace(batch, old_logp_N=logp.detach() + 0.05 * torch.randn_like(logp))
    exact = replace(noisy, old_logp_N=logp.detach())
    one = replace(settings(preset, tis_clip=None), one_update=True)
    gradients = []
    for s, given in ((one, noisy), (settings(preset, tis_clip=None), exact), (settings(preset, tis_clip=None), noisy)):
        loss, sums = policy_loss(logp, given, s, 6.0)
        gradients.append(torch.autograd.grad(loss, logp)[0])
        if s is one:
            assert metric_means(sums)["ratio"] == 1 and metric_means(sums)["approx_kl"] == 0
    torch.testing.assert_close(gradients[0], gradients[1])
    assert not torch.allclose(gradients[0], gradients[2])


def test_importance_weights_carry_no_gradient_to_the_engine_or_the_old_policy():
    logp, batch = Sequences().batch()
    watched = replace(batch, old_logp_N=batch.old_logp_N.clone().requires_grad_())
    loss, _ = policy_loss(logp, watched, settings("grpo"), 6.0)
    (with_weight,) = torch.autograd.grad(loss, watched.old_logp_N, retain_graph=True)
    (of_policy,) = torch.autograd.grad(loss, logp)
    torch.testing.assert_close(with_weight, -of_policy)  # through the ratio alone


def test_metrics_are_what_they_say():
    data, s = Sequences(), settings("dapo", kl_coef=0.2, tis_clip=1.5)
    means = metric_means(policy_loss(*data.batch(), s, 1.0)[1])
    rows = [
        (math.exp(n - o), math.exp(o - e), a, math.exp(f - n))
        for new, old, engine, ref, a in zip(data.new, data.old, data.engine, data.ref, data.advantage, strict=True)
        for n, o, e, f in zip(new, old, engine, ref, strict=True)
    ]
    mean = lambda values: sum(values) / len(rows)  # noqa: E731
    ratios = [r for r, *_ in rows]
    assert means["ratio"] == pytest.approx(mean(ratios))
    assert means["ratio_std"] == pytest.approx(statistics.pstdev(ratios))
    assert (
        means["clipped_low"] == pytest.approx(mean([r < 0.8 and a < 0 for r, _, a, _ in rows])) and means["clipped_low"]
    )
    assert (
        means["clipped_high"] == pytest.approx(mean([r > 1.28 and a > 0 for r, _, a, _ in rows]))
        and means["clipped_high"]
    )
    assert means["tis_capped"] == pytest.approx(mean([w > 1.5 for _, w, _, _ in rows])) and means["tis_capped"]
    assert means["tis_weight"] == pytest.approx(mean([min(w, 1.5) for _, w, _, _ in rows]))
    assert means["approx_kl"] == pytest.approx(mean([r - 1 - math.log(r) for r in ratios]))
    assert means["ref_kl"] == pytest.approx(mean([f - 1 - math.log(f) for *_, f in rows]))


# --- settings ---------------------------------------------------------------------------------------------------


def test_presets_bring_their_defaults_and_the_recipe_overrides_them():
    made = lambda **rl: resolve_settings(Recipe.model_validate({"rl": rl}))  # noqa: E731
    shown = {p: (made(loss=p).clip_low, made(loss=p).clip_high, made(loss=p).dynamic_sampling) for p in PRESETS}
    assert shown == {
        "grpo": (0.2, 0.2, False),
        "dr-grpo": (0.2, 0.2, False),
        "dapo": (0.2, 0.28, True),
        "gspo": (3e-4, 4e-4, False),
    }
    mine = made(loss="dapo", clip_low=0.1, clip_high=0.5, dynamic_sampling=False, kl_coef=0.01, tis_clip=None)
    assert (mine.clip_low, mine.clip_high, mine.dynamic_sampling) == (0.1, 0.5, False)
    assert (mine.kl_coef, mine.tis_clip) == (0.01, None)
    assert made().max_tokens == Recipe().sampling.max_tokens
    assert made(environment="calculator", max_turns=3).max_tokens == 3 * Recipe().sampling.max_tokens


# --- advantages and rewards -------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_advantages_equal_a_loop_over_groups(preset):
    rewards = [0.0, 1.0, 0.3, 1.0, 0.0, 0.5, 0.2, 0.2, 0.9]
    groups = [4, 0, 4, 0, 0, 4, 7, 7, 4]
    got = group_advantages(torch.tensor(rewards), torch.tensor(groups), preset)
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        spread = 1.0 if preset == "dr-grpo" else statistics.stdev(own) + 1e-6
        assert got[i].item() == pytest.approx((reward - statistics.fmean(own)) / spread, abs=1e-6)
    assert got.dtype == torch.float32


@pytest.mark.parametrize("preset", PRESETS)
def test_groups_of_equal_rewards_give_exactly_zero(preset):
    """0.1 has no exact binary form: three of them divided by three are not 0.1."""
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7, 1.0, 0.0], dtype=torch.float32)
    got = group_advantages(rewards, torch.tensor([0, 0, 0, 1, 2, 2]), preset)
    assert got[:4].tolist() == [0.0] * 4
    assert got[4] == -got[5] != 0


def test_useful_groups_are_those_with_a_difference():
    assert useful_groups([1.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.2], [3, 3, 1, 1, 0, 0, 9]) == [3]
    assert useful_groups([0.0, 1.0, 1.0, 0.0], [5, 2, 5, 2]) == [2, 5]
    assert useful_groups([], []) == []


def test_overlong_penalty_falls_over_the_buffer():
    of = lambda length: overlong_penalty(length, max_tokens=100, buffer=20)  # noqa: E731
    assert [of(n) for n in (1, 79, 80, 85, 90, 100, 130)] == [0, 0, 0, -0.25, -0.5, -1, -1]
    assert overlong_penalty(100, max_tokens=100, buffer=0) == 0
