"""The verifier answers: shard by shard, at the RL run's own sampling settings, keeping the engine's token ids.

Every answer is a request of its own with a seed made of (recipe seed, prompt id, sample number), so a resumed run asks
for exactly what the interrupted one would have. As far as the engine computes the same logits for a request whatever
else is in the batch, which bf16 does not promise to the last bit, it also gets the same answers. Shards that are
complete are never asked for again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from draftkit.data.prompts import Split
from draftkit.data.rewards import score
from draftkit.data.shards import SHARDS, SplitName, read_shard, write_shard
from draftkit.errors import Interrupted, UserError
from draftkit.recipe import SamplingSection
from draftkit.types import Generation, Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence


class Answers(Protocol):
    """The part of `engine.Engine` that is used here."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling], *, progress: Callable[[int], None]
    ) -> list[Generation]: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """What one shard file will hold. Follows from the prompts and the shard size alone."""

    split: SplitName
    file: str
    prompts: tuple[Prompt, ...]


def plan_shards(split: Split, shard_size: int) -> list[Shard]:
    """Held-out prompts first: they are the few that every later number is measured on."""
    plan: list[Shard] = []
    name: SplitName
    for name in ("heldout", "train"):
        prompts = getattr(split, name)
        for number, start in enumerate(range(0, len(prompts), shard_size)):
            file = f"{SHARDS}/{name}-{number:05d}.parquet"
            plan.append(Shard(name, file, tuple(prompts[start : start + shard_size])))
    return plan


def requests(shard: Shard, settings: SamplingSection) -> Iterator[tuple[Prompt, int, Sampling]]:
    """n sampled answers a prompt, numbered 0 .. n-1, then the greedy ones from n on."""
    for prompt in shard.prompts:
        for sample in range(settings.n + settings.greedy_n):
            yield (
                prompt,
                sample,
                Sampling(
                    temperature=settings.temperature if sample < settings.n else 0.0,
                    top_p=settings.top_p,
                    top_k=settings.top_k,
                    max_tokens=settings.max_tokens,
                    stop=tuple(settings.stop),
                    seed=request_seed(settings.seed, prompt.id, sample),
                ),
            )


def request_seed(*parts: int | str) -> int:
    """A seed made of what tells a request from every other: here (recipe seed, prompt id, sample)."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def is_complete(path: Path, shard: Shard, settings: SamplingSection) -> bool:
    """Whether the file holds exactly the answers planned. A file that is there but unreadable is an error."""
    if not path.is_file():
        return False
    have = [(r.prompt_id, r.sample) for r in read_shard(path)[0]]
    want = [(prompt.id, sample) for prompt, sample, _ in requests(shard, settings)]
    if have != want:
        raise UserError(f"Shard {path} holds answers to other prompts.", "Use --overwrite, or another --out.")
    return True


def answer_shard(
    engine: Answers,
    shard: Shard,
    path: Path,
    *,
    settings: SamplingSection,
    rendered: dict[str, list[int]],
    decode: Callable[[Sequence[int]], str],
    advance: Callable[[int], None],
    stop_requested: Callable[[], bool],
) -> dict[str, Any]:
    """Generate, score and write one shard; returns its progress record."""

    def on_progress(num_finished: int) -> None:
        advance(num_finished)
        if stop_requested():
            raise Interrupted(f"stopped before {path.name} was complete; the shards before it are kept")

    asked = list(requests(shard, settings))
    start = time.monotonic()
    generations = engine.generate(
        [rendered[prompt.id] for prompt, _, _ in asked], [sampling for _, _, sampling in asked], progress=on_progress
    )
    generate_s = time.monotonic() - start

    rollouts: list[Rollout] = []
    verifier_errors: dict[str, int] = {}
    for (prompt, sample, sampling), generation in zip(asked, generations, strict=True):
        if not generation.response_ids:
            raise UserError(
                f"Prompt {prompt.id!r} got an answer of no tokens: nothing of it could be supervised.",
                "Check sampling.stop and sampling.max_tokens.",
            )
        scored = score(prompt, decode(generation.response_ids))
        if scored.error:
            verifier_errors[scored.error] = verifier_errors.get(scored.error, 0) + 1
        rollouts.append(
            Rollout(
                prompt.id,
                sample,
                prompt.task,
                generation.prompt_ids,
                generation.response_ids,
                generation.finish_reason,
                scored.value,
                sampling.temperature,
            )
        )
    write_shard(path, rollouts, {"verifier_errors": verifier_errors})
    num_tokens = sum(len(r.response_ids) for r in rollouts)
    return {
        "shard": shard.file,
        "rollouts": len(rollouts),
        "response_tokens": num_tokens,
        "tokens_per_s": num_tokens / generate_s,
    }
