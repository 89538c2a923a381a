"""Documents to batches: epochs, slots, layout."""

from __future__ import annotations

import random

import numpy as np
import pytest

from draftkit.data.batch import check_supervised, layout, plan_epoch, slot_runs
from draftkit.errors import UserError
from draftkit.types import Document


def _document(mask: str, first_token: int = 0) -> Document:
    return Document(tuple(range(first_token, first_token + len(mask))), tuple(c == "x" for c in mask))


@pytest.mark.parametrize("seed", range(20))
def test_an_epoch_covers_every_document_once_within_the_budget(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 120) for _ in range(rng.randint(1, 60))]
    batches = plan_epoch(lengths, 100, seed, epoch=seed % 3)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(batch and (sum(lengths[i] for i in batch) <= 100 or len(batch) == 1) for batch in batches)


def test_epochs_are_shuffled_and_repeatable():
    lengths = [10] * 50
    assert plan_epoch(lengths, 40, seed=1, epoch=2) == plan_epoch(lengths, 40, seed=1, epoch=2)
    orders = {str(plan_epoch(lengths, 40, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert plan_epoch([], 40, seed=1, epoch=0) == []


@pytest.mark.parametrize(
    ("mask", "runs"),
    [
        ("...xxxx.", [(2, 5)]),
        ("...xxxxx", [(2, 6)]),
        ("xxx", [(0, 1)]),  # no slot before the first token
        ("xx", []),
        ("x", []),
        ("", []),
        (".x.x.x", []),
        ("..xx.xxx..xx", [(1, 2), (4, 6), (9, 10)]),
    ],
)
def test_slot_runs(mask, runs):
    assert slot_runs([c == "x" for c in mask]) == runs


@pytest.mark.parametrize("seed", range(5))
def test_slot_runs_and_validity_equal_a_plain_loop(seed):
    rng, num_steps = random.Random(seed), 4
    documents = [_document("".join(rng.choices(".x", (1, 3), k=rng.randint(1, 40))), 100 * n) for n in range(30)]
    tokens, pos, segments, slots, valid = layout(documents, num_steps)
    assert tokens.tolist() == [t for d in documents for t in d.tokens]
    assert pos.tolist() == [p for d in documents for p in range(len(d.tokens))]

    want_slots, want_valid, want_starts, start = [], [], [], 0
    for d in documents:
        for p in range(len(d.tokens) - 2):
            if all(d.mask[p + 1 : p + 3]):
                want_slots.append(start + p)
                want_starts.append(start)
                want_valid.append(
                    [p + 2 + i < len(d.mask) and all(d.mask[p + 1 : p + 3 + i]) for i in range(num_steps)]
                )
        start += len(d.tokens)
    assert slots.tolist() == want_slots
    assert valid.T.tolist() == want_valid
    covered = [(s, p) for s, first, last in segments for p in range(first, last)]
    assert covered == list(zip(want_starts, want_slots, strict=True))


def test_layout_of_documents_without_slots_is_empty():
    tokens, pos, segments, slots, valid = layout([_document("..x"), _document("...")], 3)
    assert (len(tokens), pos.tolist(), segments) == (6, [0, 1, 2, 0, 1, 2], ())
    assert slots.dtype == np.int64 and len(slots) == 0
    assert valid.dtype == bool and valid.shape == (3, 0)


def test_nothing_supervised_is_an_error():
    check_supervised([_document("...."), _document(".xx.")], "corpus")
    with pytest.raises(UserError, match="outputs/corpus: no document has two supervised tokens"):
        check_supervised([_document("...."), _document(".x.x")], "outputs/corpus")
