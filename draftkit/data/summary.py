"""What a corpus looks like: counts, lengths, how answers ended, rewards, and one sample in colour."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape

from draftkit import console
from draftkit.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}
DROPPED = {
    "too_long": "too long",
    "exact_duplicates": "exact duplicates",
    "near_duplicates": "near duplicates",
    "contaminated": "repeat a held-out prompt",
    "unused": "beyond data.limit and data.heldout",
}


@dataclass
class Summary:
    """Gathers one shard after the other, so that a large corpus is never held in memory."""

    counts: dict[str, int]
    num_sampled: int  # answers of a prompt from this number on are greedy, and not part of the mean reward
    lengths: dict[str, list[int]] = field(default_factory=lambda: {"prompt": [], "response": []})
    tokens: Counter[str] = field(default_factory=Counter)
    finish: Counter[str] = field(default_factory=Counter)
    rewards: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    tasks: Counter[str] = field(default_factory=Counter)
    verifier_errors: Counter[str] = field(default_factory=Counter)

    def add(self, split: str, rollouts: list[Rollout], verifier_errors: dict[str, int]) -> None:
        self.verifier_errors.update(verifier_errors)
        for r in rollouts:
            self.lengths["prompt"].append(len(r.prompt_ids))
            self.lengths["response"].append(len(r.response_ids))
            self.tokens[split] += len(r.response_ids)
            self.finish[r.finish_reason] += 1
            self.tasks[r.task] += 1
            if r.reward is not None and r.sample < self.num_sampled:
                self.rewards[r.task].append(r.reward)

    def results(self) -> dict[str, Any]:
        return {
            "prompts": self.counts,
            "response_tokens": dict(self.tokens),
            "prompt_tokens": sum(self.lengths["prompt"]),
            "lengths": {kind: self._quantiles(kind) for kind in self.lengths},
            "finish_reasons": dict(sorted(self.finish.items())),
            "reward_mean": {task: float(np.mean(values)) for task, values in sorted(self.rewards.items())},
            "verifier_errors": dict(self.verifier_errors),
        }

    def _quantiles(self, kind: str) -> dict[str, int]:
        values = np.quantile(self.lengths[kind], list(QUANTILES.values()), method="higher")
        return dict(zip(QUANTILES, (int(v) for v in values), strict=True))

    def headline(self) -> str:
        rewards = [r for values in self.rewards.values() for r in values]
        scored = f", mean reward {np.mean(rewards):.2f}" if rewards else ""
        return (
            f"{self.tokens.total():,} response tokens to {self.counts['train']} training and "
            f"{self.counts['heldout']} held-out prompts{scored}"
        )

    def show(self) -> None:
        num_dropped = [(f"  {noun}", self.counts[key], "") for key, noun in DROPPED.items() if self.counts[key]]
        kept = [
            ("training", self.counts["train"], f"{self.tokens['train']:,}"),
            ("held out", self.counts["heldout"], f"{self.tokens['heldout']:,}"),
        ]
        read = [("read", self.counts["read"], "")]
        console.table("prompts", ["", "prompts", "response tokens"], read + num_dropped + kept)
        quantiles = {kind: self._quantiles(kind) for kind in self.lengths}
        console.table("tokens", ["", *QUANTILES], [(kind, *q.values()) for kind, q in quantiles.items()])
        total = self.finish.total()
        console.table(
            "how answers ended",
            ["", "answers", "share"],
            [(reason, n, f"{n / total:.0%}") for reason, n in sorted(self.finish.items())],
        )
        rows = [
            (task, n, f"{np.mean(self.rewards[task]):.2f}" if task in self.rewards else "none")
            for task, n in sorted(self.tasks.items())
        ]
        failed = self.verifier_errors.total()
        caption = f"{failed} answers got 0 because their verifier raised: {dict(self.verifier_errors.most_common(3))}"
        console.table("reward", ["task", "answers", "mean"], rows, caption if failed else None)


def show_sample(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> None:
    """One document as the drafter sees it: grey tokens are context, green ones are supervised."""
    masked, supervised = (escape(tokenizer.decode(ids)) for ids in (rollout.prompt_ids, rollout.response_ids))
    reward = "" if rollout.reward is None else f", reward {rollout.reward:.2f}"
    console.say(
        f"[bold]sample[/bold] {escape(rollout.prompt_id)} ({escape(rollout.task)}{reward}): "
        f"{len(rollout.prompt_ids)} masked tokens in grey, {len(rollout.response_ids)} supervised in green\n"
        f"[bright_black]{masked}[/bright_black][green]{supervised}[/green]"
    )
