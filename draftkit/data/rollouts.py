"""Rollouts of single batches on disk, and what a replay needs of them: prompts, lengths, and who waits for whom.

    <rl run>/rollouts/step-00012-turn-1-rank-0.parquet     one file for each step, turn and rank: the shards' columns
    <prepare run>/shards/train-00000.parquet               a corpus has no batches: prompts are cut into some

All requests of a batch are sent at once, the samples of a prompt side by side, as `rl` sends them; each turn of its
conversations is a batch of its own, because none begins before every answer of the turn before is there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from draftkit.data.shards import MANIFEST, Corpus, read_shard, write_shard
from draftkit.errors import UserError
from draftkit.types import Rollout, Trajectory

ROLLOUTS = "rollouts"
NAME = re.compile(r"step-(\d+)-turn-(\d+)-rank-(\d+)\.parquet")


@dataclass(frozen=True, slots=True)
class Batch:
    """name: of the step and turn. Request i reads prompts[i] and answered with lengths[i] tokens; ids[i] names its
    prompt and tasks[i] the family of it."""

    name: str
    ids: tuple[str, ...]
    tasks: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, name: str, rollouts: Sequence[Rollout]) -> Batch:
        rollouts = [r for r in rollouts if r.response_ids]
        return cls(
            name,
            tuple(r.prompt_id for r in rollouts),
            tuple(r.task for r in rollouts),
            tuple(r.prompt_ids for r in rollouts),
            tuple(len(r.response_ids) for r in rollouts),
        )


def save_step(
    run: Path, step: int, rank: int, trajectories: Sequence[Trajectory], temperature: float, keep: int
) -> None:
    """One file a turn; those of steps before the last `keep` are removed."""
    folder = run / ROLLOUTS
    folder.mkdir(exist_ok=True)
    for turn in range(max((len(t.turns) for t in trajectories), default=0)):
        rollouts = [_rollout(t, turn, temperature) for t in trajectories if turn < len(t.turns)]
        write_shard(folder / f"step-{step:05d}-turn-{turn + 1}-rank-{rank}.parquet", rollouts)
    for file in folder.iterdir():
        found = NAME.fullmatch(file.name)
        if found and int(found[1]) <= step - keep and int(found[3]) == rank:
            file.unlink()


def _rollout(t: Trajectory, turn: int, temperature: float) -> Rollout:
    said = t.turns[turn]
    reward = t.reward if turn == len(t.turns) - 1 else None
    tokens = (t.tokens[: said.first], t.tokens[said.first : said.last])
    return Rollout(t.prompt_id, t.sample, t.task, *tokens, said.finish_reason, reward, temperature)


def read_batches(run: Path, most: int, prompts_per_batch: int) -> list[Batch]:
    """The last `most` batches of an rl run, or as many of a corpus, of `prompts_per_batch` prompts each.

    Raises UserError for a directory that has neither.
    """
    folder = run / ROLLOUTS
    if folder.is_dir():
        return _of_steps(folder, most)
    if (run / MANIFEST).is_file():
        return _of_corpus(Corpus.open(run), most, prompts_per_batch)
    raise UserError(
        f"--replay {run}: neither an rl run with a folder {ROLLOUTS} nor a prepare run.",
        "Give the directory of a `draftkit rl` run (rl.keep_rollouts of 1 or more) or of `draftkit prepare`.",
    )


def _of_steps(folder: Path, most: int) -> list[Batch]:
    files: dict[tuple[int, int], list[Path]] = {}
    for file in sorted(folder.iterdir()):
        if found := NAME.fullmatch(file.name):
            files.setdefault((int(found[1]), int(found[2])), []).append(file)
    if not files:
        raise UserError(f"--replay: {folder} holds no rollouts.", "Run `draftkit rl` for at least one step.")
    return [
        Batch.of(f"step {step}, turn {turn}", [r for file in files[step, turn] for r in read_shard(file)[0]])
        for step, turn in sorted(files)[-most:]
    ]


def _of_corpus(corpus: Corpus, most: int, prompts_per_batch: int) -> list[Batch]:
    sampled = (r for r in corpus.rollouts("train") if r.temperature > 0)
    by_prompt = (list(answers) for _, answers in groupby(sampled, key=lambda r: r.prompt_id))
    batches = []
    while len(batches) < most and (part := list(islice(by_prompt, prompts_per_batch))):
        batches.append(Batch.of(f"batch {len(batches) + 1}", [r for answers in part for r in answers]))
    return batches
