"""Where the sampled tokens lie towards the drafter: sums against loops, and the two tests on a tiny real pair."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch

from draftkit.data.capture import StreamedStates
from draftkit.drafters.losses import Teacher
from draftkit.rl import directions, lossless
from draftkit.rl.directions import direction_sums, slot_sums
from draftkit.train.evaluate import TeacherView

VOCAB, CHOSEN, HIDDEN, SLOTS = 12, [1, 4, 5, 9], 6, 11


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [4, 128])
def test_slot_sums_are_loops_over_the_vocabulary(monkeypatch, temperature, chunk):
    monkeypatch.setattr(directions, "CHUNK", chunk)
    made = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=made, dtype=torch.float64)  # noqa: E731
    hidden, head, state, draft_head = normal(SLOTS, HIDDEN), normal(VOCAB, HIDDEN), normal(SLOTS, HIDDEN), normal(4, 6)
    token = torch.randint(VOCAB, (SLOTS,), generator=made)
    draft_id = torch.tensor([CHOSEN.index(t) if t in CHOSEN else -1 for t in token.tolist()])
    lse = (hidden @ head.T / temperature).logsumexp(-1)
    teacher = Teacher(hidden, lse, draft_id, draft_id, head[CHOSEN], temperature)
    got = slot_sums(teacher, state, draft_head, draft_id)
    favourite = favourite_var = overlap = overlap_var = 0.0
    for r in range(SLOTS):
        p = (hidden[r] @ head.T / temperature).softmax(-1).tolist()
        q = [0.0] * VOCAB
        for t, share in zip(CHOSEN, (state[r] @ draft_head.T / temperature).softmax(-1).tolist(), strict=True):
            q[t] = share
        a = [min(1.0, q[v] / p[v]) for v in range(VOCAB)]
        mean = sum(p[v] * a[v] for v in range(VOCAB))
        overlap += a[token[r]] - mean
        overlap_var += sum(p[v] * (a[v] - mean) ** 2 for v in range(VOCAB))
        best = max(range(VOCAB), key=q.__getitem__)
        favourite += (int(token[r]) == best) - p[best]
        favourite_var += p[best] * (1 - p[best])
    assert -1 in draft_id and (draft_id >= 0).any()
    assert got.drafted == SLOTS and got.tokens == 0
    assert (got.favourite, got.favourite_var) == pytest.approx((favourite, favourite_var), abs=1e-12)
    assert (got.overlap, got.overlap_var) == pytest.approx((overlap, overlap_var), abs=1e-12)


class Moved:
    """The states of some documents under tokens that are one place off."""

    def __init__(self, states: StreamedStates) -> None:
        self.document = states.document
        self.documents = [replace(d, tokens=d.tokens[1:] + d.tokens[:1]) for d in states.documents]


def test_answers_of_the_verifier_lie_as_they_should_and_tokens_one_place_off_do_not():
    drafter, view = tiny.trained_drafter(), TeacherView(tiny.trained_drafter(), tiny.verifier())
    states = StreamedStates(tiny.verifier(), tiny.sample_documents(tiny.verifier_dir(), 96, 40, seed=5))
    faithful = direction_sums(drafter, view, states, 1024)
    assert faithful.drafted == 96 * 39  # the first token of an answer is no draft's
    moved = direction_sums(drafter, view, Moved(states), 1024)
    for name in ("favourite", "overlap"):
        assert getattr(faithful, f"{name}_var") > 100
        assert abs(lossless.z(faithful, name)) < 3.5 < 10 < abs(lossless.z(moved, name))
