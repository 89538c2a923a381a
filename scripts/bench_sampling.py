"""Milliseconds to sample one draft, or the recovered tokens of a round, for all requests: draftkit's functions beside
those of vLLM that they replace.

    python scripts/bench_sampling.py [--vocab 49152] [--draft-vocab 6144] [--k 3] [--requests 1,8,32,64] [--repeats 10]

All requests have seeds, as in an RL run; logits are random normal ones, -inf outside the draft vocabulary. Both take
turns; the table shows medians, with the range of each, and the ratio of the medians. vLLM's function for drafts takes
no notice of seeds, which is less work than ours does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from draftkit.console import table
from draftkit.engine import faults
from draftkit.engine.core import prepare_environment
from draftkit.engine.sampling import sample_drafts, sample_recovered
from draftkit.recipe import EngineSection

WARM = 2  # first repeats that are not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--draft-vocab", type=int, default=6144)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--requests", default="1,8,32,64")
    parser.add_argument("--repeats", type=int, default=10)
    asked = parser.parse_args()
    prepare_environment(EngineSection())
    faults.register_kernels_once()
    from vllm.v1.sample.rejection_sampler import sample_recovered_tokens
    from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token

    rows = []
    for requests in map(int, asked.requests.split(",")):
        for what, call, ours, theirs in (
            ("a draft", drafts(requests, asked), sample_drafts, compute_probs_and_sample_next_token),
            (f"recovered, k = {asked.k}", recovered(requests, asked), sample_recovered, sample_recovered_tokens),
        ):
            times = turns({"draftkit": ours, "vLLM": theirs}, call, asked.repeats)
            ratio = statistics.median(times["vLLM"]) / statistics.median(times["draftkit"])
            rows.append([str(requests), what, *map(shown, times.values()), f"{ratio:.1f}"])
    table("sampling of a speculative round", ["requests", "what", "draftkit, ms", "vLLM, ms", "ratio"], rows, left=2)


def metadata(requests: int) -> SimpleNamespace:
    return SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.ones(requests),
        generators={row: torch.Generator().manual_seed(row) for row in range(requests)},
    )


def drafts(requests: int, asked: argparse.Namespace) -> Callable[[Callable], object]:
    made, given = torch.Generator().manual_seed(0), metadata(requests)
    inside = torch.randperm(asked.vocab, generator=made)[: asked.draft_vocab].sort().values
    logits = torch.full((requests, asked.vocab), -torch.inf, dtype=torch.bfloat16)
    logits[:, inside] = (3 * torch.randn(requests, asked.draft_vocab, generator=made)).bfloat16()
    return lambda sample: sample(logits.clone(), given)  # vLLM's works in place


def recovered(requests: int, asked: argparse.Namespace) -> Callable[[Callable], object]:
    made, given, num = torch.Generator().manual_seed(1), metadata(requests), requests * asked.k
    p, q = ((3 * torch.randn(num, asked.vocab, generator=made)).softmax(-1) for _ in range(2))
    counts, token = [asked.k] * requests, torch.zeros(num, dtype=torch.int64)
    cumulated = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return lambda sample: sample(asked.k, counts, cumulated, token, q, p, given, p.device)


def turns(arms: dict[str, Callable], call: Callable[[Callable], object], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for repeat in range(repeats + WARM):
        for arm, sample in arms.items():
            start = time.perf_counter()
            call(sample)
            if repeat >= WARM:
                times[arm].append(1e3 * (time.perf_counter() - start))
    return times


def shown(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f})"


if __name__ == "__main__":
    main()
