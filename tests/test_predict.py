"""The walk over sampled documents against the plainest loop that says what serving does."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from draftkit.data.batch import layout, slot_runs
from draftkit.train.predict import agreement, rounds, walk
from draftkit.types import Document, DraftBatch

STEPS, ALPHABET = 3, 3  # so few tokens that a random proposal is right a third of the time


def _documents(seed: int) -> list[Document]:
    """Several, with several supervised runs each, some of them too short for a slot."""
    made = random.Random(seed)
    documents = []
    for _ in range(made.randint(1, 5)):
        mask: list[bool] = []
        for _ in range(made.randint(1, 4)):
            mask += [False] * made.randint(0, 3) + [True] * made.randint(0, 12)
        mask = mask or [False]
        documents.append(Document(tuple(made.randrange(ALPHABET) for _ in mask), tuple(mask)))
    return documents


def _batch(documents: Sequence[Document]) -> DraftBatch:
    tokens, pos, segments, slots, valid = layout(documents, STEPS)
    none = torch.zeros(0)
    return DraftBatch(
        tokens_N=torch.from_numpy(tokens), pos_N=torch.from_numpy(pos), aux_NF=none, last_NH=none, lse_N=none,
        max_N=none, top_N=none, segments=segments, slot_R=torch.from_numpy(slots), valid_LR=torch.from_numpy(valid),
    )  # fmt: skip


def _naive_rounds(documents: Sequence[Document], proposals: list[list[int]]) -> list[tuple[int, int]]:
    """(slot row, accepted) by walking each supervised run token by token: proposals[step][row]."""
    played, row_of_run = [], 0
    for document in documents:
        for first, last in slot_runs(document.mask):
            p = first
            while p < last:
                row, accepted = row_of_run + p - first, 0
                while accepted < STEPS:
                    target = p + 2 + accepted
                    in_run = target <= last + 1  # slots end two tokens before the run does
                    if not in_run or proposals[accepted][row] != document.tokens[target]:
                        break
                    accepted += 1
                played.append((row, accepted))
                p += accepted + 1
            row_of_run += last - first
    return played


@pytest.mark.parametrize("seed", range(40))
def test_rounds_and_counters_equal_the_naive_walk(seed):
    documents = _documents(seed)
    batch = _batch(documents)
    proposal_LR = torch.randint(ALPHABET, (STEPS, len(batch.slot_R)), generator=torch.Generator().manual_seed(seed))
    agree_LR = agreement(proposal_LR, batch)
    expected = _naive_rounds(documents, proposal_LR.tolist())
    assert list(rounds(agree_LR, batch.segments)) == expected

    counters = walk(agree_LR, batch.segments)
    assert counters.num_drafts == len(expected)
    assert counters.num_draft_tokens == STEPS * len(expected)
    assert counters.num_accepted == sum(accepted for _, accepted in expected)
    assert counters.accepted_per_pos == tuple(sum(a > i for _, a in expected) for i in range(STEPS))


def test_the_random_documents_exercise_what_they_should():
    """Several runs in a document, no slot at all, and every number of accepted tokens."""
    all_documents = [_documents(seed) for seed in range(40)]
    runs = [len(slot_runs(d.mask)) for documents in all_documents for d in documents]
    assert max(runs) >= 3 and min(runs) == 0
    accepted = set()
    for seed, documents in enumerate(all_documents):
        num_slots = len(_batch(documents).slot_R)
        made = torch.Generator().manual_seed(seed)
        proposals = torch.randint(ALPHABET, (STEPS, num_slots), generator=made).tolist()
        accepted |= {a for _, a in _naive_rounds(documents, proposals)}
    assert accepted == {0, 1, 2, 3}


def test_a_perfect_drafter_is_stopped_only_by_the_end_of_the_answer():
    """Ten response tokens: the first is the verifier's, nine follow in rounds of 4, 4 and 1 (one draft, no bonus)."""
    document = Document(tuple(i % ALPHABET for i in range(14)), (False,) * 4 + (True,) * 10)
    batch = _batch([document])
    right = torch.stack([batch.tokens_N[(batch.slot_R + 2 + i).clamp(max=13)] for i in range(STEPS)])
    counters = walk(agreement(right, batch), batch.segments)
    assert (counters.num_drafts, counters.num_accepted) == (3, 7)
    assert counters.accepted_per_pos == (3, 2, 2)


def test_agreement_ends_with_the_answer_even_where_the_next_document_continues_it():
    """Packed documents of one repeated token: a proposal past the end equals the neighbour's token by accident."""
    document = Document((1,) * 6, (False,) * 2 + (True,) * 4)
    batch = _batch([document, document])
    agree_LR = agreement(torch.ones(STEPS, len(batch.slot_R), dtype=torch.int64), batch)
    assert agree_LR.tolist() == [[True] * 6, [True, True, False] * 2, [True, False, False] * 2]


def test_no_slots_no_rounds():
    batch = _batch([Document((1, 2, 0), (False, False, True))])
    counters = walk(agreement(torch.zeros(STEPS, 0, dtype=torch.int64), batch), batch.segments)
    assert (counters.num_drafts, counters.acceptance_length) == (0, 1.0)
