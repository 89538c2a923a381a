"""Seconds to sample one draft for every request: draftkit's function beside the one of vLLM that it replaces.

    python scripts/bench_drafting.py [--vocab 49152] [--draft-vocab 6144] [--requests 1,8,32,64] [--repeats 20]

All requests have seeds, as in an RL run; logits are random normal ones, -inf outside the draft vocabulary. Both take
turns; the table shows medians, with the range of each, and the ratio of the medians. vLLM's takes no notice of the
seeds, so a cure that is right but slow stands beside them: vLLM's function, then noise of a request's own for its row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from rich.console import Console
from rich.table import Table

from draftkit.engine.core import prepare_environment
from draftkit.engine.drafting import sample_drafts
from draftkit.recipe import EngineSection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--draft-vocab", type=int, default=6144)
    parser.add_argument("--requests", default="1,8,32,64")
    parser.add_argument("--repeats", type=int, default=20)
    asked = parser.parse_args()
    prepare_environment(EngineSection())
    from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token as theirs

    def reseeded(logits_BV: torch.Tensor, metadata: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        tokens_B, q_BV = theirs(logits_BV, metadata)
        for row, generator in metadata.generators.items():
            noise_V = torch.empty(q_BV.shape[1]).exponential_(generator=generator)
            tokens_B[row] = (q_BV[row] / noise_V).argmax()
        return tokens_B, q_BV

    arms = {"draftkit": sample_drafts, "vLLM (no seeds)": theirs, "vLLM, then seeded": reseeded}
    table = Table("requests", *(f"{arm}, ms" for arm in arms), *(f"{arm} / draftkit" for arm in list(arms)[1:]))
    for requests in map(int, asked.requests.split(",")):
        times = measure(arms, requests, asked.vocab, asked.draft_vocab, asked.repeats)
        middle = {arm: statistics.median(ts) for arm, ts in times.items()}
        table.add_row(
            str(requests),
            *(f"{1e3 * middle[arm]:.2f} ({1e3 * min(ts):.2f}-{1e3 * max(ts):.2f})" for arm, ts in times.items()),
            *(f"{middle[arm] / middle['draftkit']:.1f}" for arm in list(arms)[1:]),
        )
    Console().print(table)


def measure(
    arms: dict[str, Callable], requests: int, vocab: int, draft_vocab: int, repeats: int
) -> dict[str, list[float]]:
    made = torch.Generator().manual_seed(0)
    inside = torch.randperm(vocab, generator=made)[:draft_vocab].sort().values
    logits_BV = torch.full((requests, vocab), -torch.inf, dtype=torch.bfloat16)
    logits_BV[:, inside] = (3 * torch.randn(requests, draft_vocab, generator=made)).bfloat16()
    metadata = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.ones(requests),
        generators={row: torch.Generator().manual_seed(row) for row in range(requests)},
    )
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for repeat in range(repeats + 2):  # the first two warm up
        for arm, sample in arms.items():
            logits = logits_BV.clone()  # vLLM's works in place
            start = time.perf_counter()
            sample(logits, metadata)
            if repeat > 1:
                times[arm].append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
