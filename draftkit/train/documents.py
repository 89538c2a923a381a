"""Rollouts of the corpus as the documents that a drafter is trained on."""

from __future__ import annotations

from collections import Counter

from draftkit.console import say
from draftkit.data.batch import check_supervised, slot_runs
from draftkit.data.shards import Corpus
from draftkit.errors import UserError
from draftkit.types import Document, Generation, Rollout


def document(rollout: Rollout | Generation, seq_len: int) -> Document:
    tokens = (*rollout.prompt_ids, *rollout.response_ids)
    mask = (False,) * len(rollout.prompt_ids) + (True,) * len(rollout.response_ids)
    return Document(tokens[:seq_len], mask[:seq_len], getattr(rollout, "task", ""))


def documents(corpus: Corpus, split: str, seq_len: int, temperatures: set[float]) -> list[Document]:
    """Rollouts that have a slot, as documents; how many were cut or too short to train on is said."""
    every = list(corpus.rollouts(split))
    rollouts = [r for r in every if r.temperature in temperatures]
    if not rollouts:
        wanted, have = sorted(temperatures), sorted({r.temperature for r in every})
        raise UserError(
            f"sampling.temperature: {corpus.path} ({split}) has no answers at temperatures {wanted}, only at {have}.",
            "Train at the temperature of the corpus, or prepare one at this temperature.",
        )
    all_documents = [document(r, seq_len) for r in rollouts]
    check_supervised(all_documents, f"{corpus.path} ({split})")
    useful = [d for d in all_documents if slot_runs(d.mask)]
    cut = sum(len(r.prompt_ids) + len(r.response_ids) > seq_len for r in rollouts)
    if cut:
        say(f"{split}: {cut} of {len(rollouts)} documents are longer than train.seq_len={seq_len} and were cut.")
    if len(useful) < len(rollouts):
        say(f"{split}: {len(rollouts) - len(useful)} documents have fewer than two response tokens and teach nothing.")
    return useful


def token_counts(documents: list[Document]) -> Counter[int]:
    return Counter(t for d in documents for t, supervised in zip(d.tokens, d.mask, strict=True) if supervised)
