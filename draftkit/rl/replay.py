"""A few trajectories of earlier steps, mixed into the drafter's training against forgetting.

Only their tokens are kept; a training scores the few that it draws with the policy of the day. The states and the
teacher of an old policy would pull the drafter back to it (the drafter is served with the states of the next policy),
and would weigh: 4 KiB a token at 135M parameters, 32 KiB at 8B, in memory and in every checkpoint. Scoring 512 tokens
again costs a fiftieth of a step's log-probability forward.

Between recency and a uniform reservoir, because the text ages as well: a step replaces at most 1 / SPAN of what is
kept, chosen at random, so ages are geometric with a mean of SPAN steps (biased reservoir sampling, Aggarwal, VLDB
2006). What is kept and drawn depends on seed and step alone, so that its contents are all of its state.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftkit.data.batch import slot_runs
from draftkit.types import Document

SPAN = 8  # steps


class Replay:
    """documents: what is kept; born: the step that each came from. capacity 0 keeps nothing."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity, self.seed = capacity, seed
        self.documents: list[Document] = []
        self.born: list[int] = []

    def add(self, documents: Sequence[Document], step: int) -> None:
        """Take some of this step's documents in."""
        rng = random.Random(f"replay/{self.seed}/{step}")
        useful = [d for d in documents if slot_runs(d.mask)]
        room = self.capacity - len(self.documents)
        taken = rng.sample(useful, min(len(useful), max(room, math.ceil(self.capacity / SPAN))))
        for number in sorted(rng.sample(range(len(self.documents)), max(0, len(taken) - room)), reverse=True):
            del self.documents[number], self.born[number]
        self.documents += taken
        self.born += [step] * len(taken)

    def draw(self, num_tokens: int, step: int) -> list[Document]:
        """Documents of about num_tokens tokens together (the last may overshoot), fewer when fewer are kept."""
        order = random.Random(f"draw/{self.seed}/{step}").sample(self.documents, len(self.documents))
        drawn: list[Document] = []
        for document in order:
            if num_tokens <= 0:
                break
            drawn.append(document)
            num_tokens -= len(document.tokens)
        return drawn

    def save(self, file: Path) -> None:
        flat = torch.tensor([t for d in self.documents for t in d.tokens], dtype=torch.int64)
        mask = torch.tensor([m for d in self.documents for m in d.mask], dtype=torch.bool)
        lengths = torch.tensor([len(d.tokens) for d in self.documents], dtype=torch.int64)
        born = torch.tensor(self.born, dtype=torch.int64)
        save_file({"tokens": flat, "mask": mask, "lengths": lengths, "born": born}, file)

    def load(self, file: Path) -> None:
        held = load_file(file)
        lengths = held["lengths"].tolist()
        tokens, mask = held["tokens"].split(lengths), held["mask"].split(lengths)
        self.documents = [Document(tuple(t.tolist()), tuple(m.tolist())) for t, m in zip(tokens, mask, strict=True)]
        self.born = held["born"].tolist()
