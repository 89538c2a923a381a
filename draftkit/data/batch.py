"""Documents to batches: which go together, in which order, and how slots are found. Pure functions of their input.

    p                 0 1 2 3 4 5 6 7          tokens of one document
    mask              . . . x x x x .          supervised (sampled by the verifier)
    slots             . . s s s . . .          p with p+1 and p+2 supervised: where a serving engine drafts
    valid at step 1   . . s s . . . .          ... and p+3 too

Documents are laid end to end without padding; attention is cut at document borders by construction (a segment names
the first token that its slots may see), so packing cannot leak.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from draftkit.errors import UserError
from draftkit.types import Document


def plan_epoch(lengths: Sequence[int], tokens_per_batch: int, seed: int | str, epoch: int) -> list[list[int]]:
    """Batches of document numbers, each at most tokens_per_batch tokens (a longer document makes its own batch).

    Shuffled by (seed, epoch), so that position (epoch, batch) is all a resumed run needs to know.
    """
    order = list(range(len(lengths)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    batches: list[list[int]] = []
    room = 0
    for i in order:
        if not batches or lengths[i] > room:
            batches.append([])
            room = tokens_per_batch
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def slot_runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Runs (first, last) of the document's slots: first <= p < last, p+1 and p+2 supervised."""
    m = np.asarray(mask, dtype=bool)
    slots = np.zeros(len(m), dtype=bool)
    slots[: max(len(m) - 2, 0)] = m[1:-1] & m[2:]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], slots.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def check_supervised(documents: Sequence[Document], where: str) -> None:
    """An empty mask would train on nothing and report a fine loss. Raises UserError."""
    if not any(slot_runs(d.mask) for d in documents):
        raise UserError(
            f"{where}: no document has two supervised tokens in a row, so there is nothing to train on.",
            "Check that the corpus holds responses (sampling.max_tokens) and that train.seq_len exceeds the prompts.",
        )


def layout(documents: Sequence[Document], num_steps: int):
    """(tokens_N, pos_N, segments, slot_R, valid_LR) of the documents laid end to end, as in `DraftBatch`.

    A run of slots in tokens first..last-1 of a document of supervised run length n is valid at step i for all but its
    last i slots.
    """
    tokens = np.concatenate([np.asarray(d.tokens, dtype=np.int64) for d in documents])
    pos = np.concatenate([np.arange(len(d.tokens), dtype=np.int64) for d in documents])
    segments: list[tuple[int, int, int]] = []
    slots = [np.zeros(0, dtype=np.int64)]  # a batch whose documents have no slot is empty, not an error
    valid = [np.zeros((num_steps, 0), dtype=bool)]
    start = 0
    for document in documents:
        for first, last in slot_runs(document.mask):
            segments.append((start, start + first, start + last))
            slots.append(np.arange(start + first, start + last, dtype=np.int64))
            left = np.arange(last - first, 0, -1)  # slots from here to the end of the run, this one included
            valid.append(left[None, :] > np.arange(num_steps)[:, None])
        start += len(document.tokens)
    return tokens, pos, tuple(segments), np.concatenate(slots), np.concatenate(valid, axis=1)
