"""The projection's arithmetic: against counts by hand, Monte Carlo, a simulation token by token, and known limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from draftkit.evals.speed_model import acceptance_length, amdahl
from draftkit.project.calibration import ROOFLINE, TRAINER, VLLM
from draftkit.project.cost import Server
from draftkit.project.hardware import TABLE as HARDWARE
from draftkit.project.model_shape import TABLE as MODELS
from draftkit.project.model_shape import ModelShape, eagle3_shape, read_config
from draftkit.project.phases import phases
from draftkit.project.rollout import Lengths, Rollouts, even_survival
from draftkit.project.step import Cluster, forward_flops

TINY = ModelShape("tiny", hidden=8, layers=3, heads=4, kv_heads=2, head_dim=2, inner=16, vocab=50)
FREE = replace(HARDWARE["h100"], name="free memory", hbm_bytes_s=1e30)


def server(model: str = "qwen3-8b", hardware: str = "gb200", engine=VLLM, **options) -> Server:
    shape = MODELS[model]
    return Server(shape, eagle3_shape(shape, 32000), HARDWARE[hardware], engine, **options)


def rollouts(requests: int = 64, replicas: int = 4, mean: float = 900.0, longest: int = 4096, **options) -> Rollouts:
    return Rollouts(server(**options), requests, replicas, Lengths(mean, longest))


# --- sizes ------------------------------------------------------------------------------------------------------


def test_parameters_and_flops_by_hand():
    attention = 8 * 8 + 2 * (8 * 4) + 8 * 8  # queries, keys and values of two heads of two, output
    assert TINY.attention_params == attention
    assert TINY.fixed_params == 3 * (attention + 3 * 8 * 16) + 8 * 50
    assert TINY.total_params == TINY.fixed_params + 8 * 50
    assert TINY.kv_values() == 2 * 3 * 2 * 2
    # one token looking back on 10: scores and weighted sum are 2 x (2 FLOPs x 10 x 4 heads of 2), in 3 layers
    assert TINY.attention_flops(10) == 3 * 2 * (2 * 10 * 8)
    assert forward_flops(TINY, 5, 10) == 5 * (2 * TINY.fixed_params + 960)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-8b", 8.19), ("qwen3-32b", 32.8), ("llama3.1-8b", 8.03), ("olmoe-1b-7b", 6.92), ("qwen3-30b-a3b", 30.5)],
)
def test_the_table_has_the_published_sizes(name, billions):
    assert MODELS[name].total_params / 1e9 == pytest.approx(billions, rel=0.005)


def test_active_parameters_of_the_large_mixture():
    big = MODELS["qwen3-235b-a22b"]
    assert big.total_params / 1e9 == pytest.approx(235, rel=0.005)
    assert (big.active_params + big.head_params) / 1e9 == pytest.approx(22.2, rel=0.01)  # A22B counts the embedding


@pytest.mark.parametrize("experts", [0, 6])
def test_a_config_has_the_parameters_of_the_model_that_transformers_builds(tmp_path, experts):
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(
        vocab_size=70, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, tie_word_embeddings=False,
    )  # fmt: skip
    if experts:
        config = Qwen3MoeConfig(**sizes, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=12)
        model = Qwen3MoeForCausalLM(config)
    else:
        config = Qwen3Config(**sizes)
        model = Qwen3ForCausalLM(config)
    config.save_pretrained(tmp_path)
    matrices = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
    assert read_config(tmp_path / "config.json").total_params == matrices


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(16, 2, 1), (16, 2, 7), (128, 8, 40), (64, 8, 300)])
def test_distinct_experts_against_monte_carlo(experts, top_k, tokens):
    rng = np.random.default_rng(experts + tokens)
    shape = replace(TINY, num_experts=experts, top_k=top_k, expert_inner=4)
    counts = []
    for _ in range(400):
        woken = set()
        for _ in range(tokens):
            woken.update(rng.choice(experts, top_k, replace=False).tolist())
        counts.append(len(woken))
    noise = 4 * np.std(counts) / len(counts) ** 0.5 + 1e-9
    assert shape.distinct_experts(tokens) == pytest.approx(np.mean(counts), abs=noise)


# --- draining ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [None, 1, 3, 8])
def test_phases_against_a_simulation_token_by_token(slots):
    rng = np.random.default_rng(slots or 0)
    lengths = rng.integers(1, 40, 11).tolist()
    cost = lambda n, made: 1.0 + 0.3 * n + 0.02 * n * made  # noqa: E731  affine in what is held, as KV reads are
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < (slots or len(lengths)):
            running.append([0, waiting.pop(0)])
        # a step that makes token t of a request has half of it behind it at its middle
        seconds += cost(len(running), np.mean([done + 0.5 for done, _ in running]))
        running = [[done + 1, length] for done, length in running if done + 1 < length]
    assert sum(r * cost(n, made) for n, r, made in phases(lengths, 1.0, slots)) == pytest.approx(seconds)


def test_rollouts_against_a_simulation_token_by_token():
    batch = Rollouts(server(), 12, 1, Lengths(60.0, 200), prompt=30)
    lengths = [round(length) for length in batch.per_replica()]
    batch = replace(batch, lengths=Lengths(60.0, 200, sample=tuple(map(float, lengths))))
    # the even sample of a sample is interpolated; compare on what is really drained
    drained = batch.per_replica()
    seconds = 0.0
    for token in range(int(np.ceil(max(drained)))):
        running = sum(length > token for length in drained)
        part = min(1.0, max(drained) - token)
        seconds += part * batch.server.round(running, 30 + token + 0.5, 0)
    assert batch.seconds() == pytest.approx(seconds, rel=0.02)


def test_lengths_keep_their_mean_and_their_cut():
    lengths = Lengths(1500.0, 2048, 0.9)
    sample = np.array(lengths.of_replica(4000, 0))
    assert sample.mean() == pytest.approx(1500, rel=0.01) and sample.max() == 2048
    assert lengths.of_replica(8, 10_000)[-1] >= lengths.of_replica(8, 8)[-1]
    assert Lengths(3.0, 5, sample=(1.0, 3.0, 5.0)).of_replica(3, 3)[-1] > 4


@pytest.mark.parametrize(("tau", "k"), [(1.0, 3), (2.77, 3), (3.48, 7), (7.9, 7)])
def test_even_survival_has_the_acceptance_length(tau, k):
    survival = even_survival(tau, k)
    assert acceptance_length(survival) == pytest.approx(tau, abs=1e-6) and len(survival) == k
    assert all(a >= b for a, b in zip([1.0, *survival], survival, strict=False))


# --- limits -----------------------------------------------------------------------------------------------------


def test_one_request_bound_by_memory_gains_its_acceptance_length():
    """Weights dominate, drafts are nearly free: c -> 1 + k drafter / target bytes (Leviathan's form)."""
    one = Rollouts(server(engine=ROOFLINE), 1, 1, Lengths(500.0, 4096, sample=(500.0,)))
    survival = even_survival(3.0, 3)
    ratio = (one.server.draft(1, 300, 3) / one.server.plain(1, 300).total).item()
    assert 0 < ratio < 0.2
    assert one.speedup(3, survival) == pytest.approx(3.0 / (1 + ratio), rel=0.02)


def test_a_batch_bound_by_arithmetic_pays_for_every_draft():
    bound = Server(MODELS["qwen3-8b"], None, FREE, ROOFLINE)
    cost = bound.round(4096, 0.0, 3) / bound.round(4096, 0.0, 0)
    assert cost == pytest.approx(4.0, rel=0.01)


def test_verification_wakes_experts_that_a_small_batch_left_asleep():
    few, many = (
        server("qwen3-235b-a22b", engine=ROOFLINE, tp=8).verify(n, 500, 3).matrix
        / server("qwen3-235b-a22b", engine=ROOFLINE, tp=8).plain(n, 500).matrix
        for n in (1, 128)
    )
    assert few > 2 and many == pytest.approx(1, abs=0.05)


def test_a_pass_too_large_for_a_cuda_graph_pays_once_a_layer():
    inside, outside = (server().verify(n, 1000, 3).host for n in (128, 129))
    assert outside - inside == pytest.approx(VLLM.eager_s * 36)
    assert server().verify(1, 1000, 3, graphs=False).host == outside


def test_more_acceptance_less_host_time_and_more_bandwidth_are_never_worse():
    batch = rollouts()
    speedups = [batch.speedup(3, even_survival(tau, 3)) for tau in (1.5, 2.0, 2.5, 3.0, 3.5)]
    assert speedups == sorted(speedups)
    quicker = replace(VLLM, draft_s=VLLM.draft_s / 2)
    assert rollouts(engine=quicker).speedup(3, even_survival(2.5, 3)) > batch.speedup(3, even_survival(2.5, 3))
    assert rollouts(hardware="h200").seconds() < rollouts(hardware="h100").seconds()
    assert rollouts(requests=128).seconds() > rollouts(requests=64).seconds()


def test_requests_that_do_not_fit_wait():
    batch = rollouts(requests=64, replicas=1)
    assert replace(batch, max_num_seqs=8).seconds() > batch.seconds()
    assert server(hardware="a100-40gb").most_requests(4000) < server().most_requests(4000)


def test_a_schedule_is_not_slower_than_any_fixed_k():
    for requests in (16, 256, 2048):
        batch = rollouts(requests=requests)
        survival = even_survival(2.4, 7)
        scheduled = batch.speedup(batch.schedule([1, 3, 7], survival), survival)
        assert scheduled >= max(1.0, *(batch.speedup(k, survival) for k in (1, 3, 7))) - 0.01


# --- steps ------------------------------------------------------------------------------------------------------


def test_a_synchronous_step_is_amdahl():
    cluster = Cluster(rollouts(), TRAINER, gpus=8)
    plain, fast = cluster.plain(), cluster.step(3, even_survival(3.0, 3))
    generation = plain.generate / fast.generate
    assert plain.total / fast.total == pytest.approx(amdahl(plain.generation_share, generation))
    assert plain.total == pytest.approx(plain.generate + plain.logprob + plain.train + plain.other)


def test_the_asynchronous_gain_ends_where_training_is_what_one_waits_for():
    slow_trainer = replace(TRAINER, train_share=0.001)
    cluster = Cluster(rollouts(), slow_trainer, gpus=16, lag=1, train_gpus=8)
    plain, fast = cluster.plain(), cluster.step(3, even_survival(3.0, 3))
    assert fast.generate < plain.generate < plain.train and plain.exposed == fast.exposed == 0
    assert fast.total == plain.total
    fast_trainer = replace(TRAINER, train_share=1.0, logprob_share=1.0)
    cluster = replace(cluster, trainer=fast_trainer)
    plain, fast = cluster.plain(), cluster.step(3, even_survival(3.0, 3))
    assert plain.total / fast.total > 1.3 and plain.exposed > 0


def test_the_best_split_is_no_worse_than_any_fixed_one():
    cluster = Cluster(rollouts(), TRAINER, gpus=16, lag=1)
    totals = [replace(cluster, train_gpus=n).plain().total for n in range(1, 16)]
    assert cluster.plain().total == pytest.approx(min(totals))


def test_pooled_batches_take_less_than_one_after_the_other():
    batch = rollouts(requests=32)
    assert batch.seconds() < batch.pooled(3).seconds() < 3 * batch.seconds()


def test_training_the_drafter_along_is_paid_by_the_speculative_arm_alone():
    cluster = Cluster(rollouts(), replace(TRAINER, drafter=True), gpus=8)
    without = Cluster(rollouts(), TRAINER, gpus=8)
    survival = even_survival(3.0, 3)
    assert cluster.plain() == without.plain()
    extra = cluster.step(3, survival).train / without.step(3, survival).train
    assert 1.01 < extra < 1.1  # the drafter has a twentieth of the parameters


def test_the_best_tp_is_the_fastest_that_fits():
    cluster = Cluster(rollouts(requests=64, model="qwen3-235b-a22b", hardware="h100"), TRAINER, gpus=64)
    found = cluster.with_fastest_tp().rollouts.server.tp
    assert found == 8  # bf16: 470 GB over a link domain of eight with 80 GB each
