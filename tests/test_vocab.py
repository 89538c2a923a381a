"""Draft vocabulary: what is in, how many, in which order."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from draftkit.drafters.vocab import MULTIPLE, choose_vocab, coverage_of
from draftkit.errors import UserError

SPECIAL = (0, 999)


def _counts(seed: int = 0) -> Counter[int]:
    """Zipf-like counts of 400 of 1,000 tokens."""
    tokens = random.Random(seed).sample(range(1, 999), 400)
    return Counter({token: 10_000 // (rank + 1) for rank, token in enumerate(tokens)})


@pytest.mark.parametrize("coverage", [0.5, 0.9, 0.99, 1.0])
def test_coverage_is_reached_with_the_most_frequent_tokens(coverage):
    counts = _counts()
    chosen = choose_vocab(counts, SPECIAL, 1000, None, coverage)
    assert coverage_of(counts, chosen) >= coverage
    assert len(chosen) % MULTIPLE == 0
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert set(SPECIAL) <= set(chosen.tolist())
    inside, outside = set(chosen.tolist()) - set(SPECIAL), set(counts) - set(chosen.tolist())
    assert min(counts[t] for t in inside) >= max((counts[t] for t in outside), default=0)


def test_no_larger_than_needed():
    """One multiple less would miss the coverage that was asked for."""
    counts = _counts()
    size = len(choose_vocab(counts, SPECIAL, 1000, None, 0.95))
    smaller = choose_vocab(counts, SPECIAL, 1000, size - MULTIPLE, 0.95)
    assert len(smaller) == size - MULTIPLE
    assert coverage_of(counts, smaller) < 0.95


@pytest.mark.parametrize("size", [10, 100, 777, 1000, 5000])
def test_a_given_size_is_kept_up_to_the_whole_vocabulary(size):
    chosen = choose_vocab(_counts(), SPECIAL, 1000, size, 0.1)
    assert len(chosen) == min(size, 1000)
    assert set(SPECIAL) <= set(chosen.tolist())
    assert int(chosen.min()) >= 0 and int(chosen.max()) < 1000


def test_small_vocabulary_is_taken_whole():
    assert choose_vocab(Counter({3: 5, 7: 1}), (0,), 30, None, 1.0).tolist() == list(range(30))


def test_equal_corpora_give_equal_maps():
    """The order in which tokens were counted must not show, not even among equal counts."""
    pairs = [(token, 3) for token in range(1, 300)]
    forward, backward = Counter(dict(pairs)), Counter(dict(reversed(pairs)))
    assert choose_vocab(forward, SPECIAL, 1000, 128, 1.0).equal(
        choose_vocab(backward, reversed(SPECIAL), 1000, 128, 1.0)
    )


def test_special_tokens_that_the_model_does_not_have_are_left_out():
    """A tokenizer may name ids beyond the embedding."""
    assert 1200 not in choose_vocab(_counts(), (0, 1200), 1000, None, 0.9).tolist()


def test_coverage_of_nothing_is_zero():
    assert coverage_of(Counter(), choose_vocab(Counter(), SPECIAL, 1000, None, 1.0)) == 0


def test_a_size_that_the_special_tokens_do_not_fit_is_refused():
    with pytest.raises(UserError, match=r"draft_vocab_size \(3\) is smaller than the 5 special"):
        choose_vocab(_counts(), range(5), 1000, 3, 1.0)
    assert choose_vocab(_counts(), range(5), 1000, 5, 1.0).tolist() == [0, 1, 2, 3, 4]
