"""Duplicates: what counts as one, and that hashing agrees with comparing every pair."""

import random

import pytest

from draftkit.data.dedup import TOKEN, Repeat, find_repeats, normalise, rows_per_band, shingles

WORDS = ["river", "stone", "apple", "seven", "garden", "window", "yellow", "market", "farmer", "bridge", "winter"]


def story(seed: int, length: int = 60) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(length))


def test_case_and_spacing_do_not_make_a_new_text():
    assert find_repeats(["How many  legs?", "other", "how many\nLEGS?"], 0.95) == [None, None, Repeat(0, exact=True)]


def test_an_edited_word_is_a_near_duplicate_only_below_its_similarity():
    text = story(1)
    edited = text + " tractor"
    assert find_repeats([text, edited], 0.95) == [None, Repeat(0, exact=False)]
    assert find_repeats([text, edited], 0.99) == [None, None]


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_other_numbers_are_another_question(threshold):
    words = story(2, 300)
    assert find_repeats([f"{words} 17 apples", f"{words} 18 apples"], threshold) == [None, None]


def test_procedural_questions_that_share_their_wording_are_all_kept():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    texts = []
    for task in ("chain_sum", "spell_backward", "leg_counting", "word_sorting", "simple_equations"):
        dataset = reasoning_gym.create_dataset(task, size=60, seed=3)
        texts += sorted({normalise(dataset[i]["question"]) for i in range(60)})
    assert find_repeats(texts, 0.95) == [None] * len(texts)


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_hashing_finds_what_comparing_every_pair_finds(threshold):
    draw = random.Random(0)
    texts = []
    for seed in range(60):
        words = story(seed, 50).split()
        texts.append(" ".join(words))
        for _ in range(draw.randint(0, 5)):
            words[draw.randrange(len(words))] = draw.choice(WORDS)
        texts.append(" ".join(words) + " end")
    sets = [shingles(TOKEN.findall(normalise(text))) for text in texts]

    kept: list[int] = []
    expected = []
    for i, mine in enumerate(sets):
        twin = next((j for j in kept if len(mine & sets[j]) / len(mine | sets[j]) >= threshold), None)
        expected.append(twin)
        kept += [i] if twin is None else []
    found = [None if repeat is None else repeat.of for repeat in find_repeats(texts, threshold)]
    assert found == expected
    assert any(twin is not None for twin in expected)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.9, 0.95, 1.0])
def test_bands_miss_fewer_than_one_pair_in_a_thousand(threshold):
    rows = rows_per_band(threshold)
    assert (1 - threshold**rows) ** (128 // rows) <= 1e-3
