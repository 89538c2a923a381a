"""Exact and near duplicates: MinHash over word 5-grams, LSH bands to find candidates, Jaccard to decide.

Candidates come from MinHash with banding (Broder 1997; Leskovec et al., Mining of Massive Datasets, chapter 3); every
candidate is then decided on the true Jaccard similarity of the two shingle sets, so hashing can miss a pair (fewer
than one in a thousand at the threshold) but never invent one.

Numbers and signs are tokens, and texts whose numbers differ are never near duplicates: procedural prompts share
their wording and differ in their numbers alone, and "What is 3 + 4?" does not repeat "What is 3 + 5?".
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

NGRAM = 5
NUM_HASHES = 128
MAX_MISS = 1e-3
TOKEN = re.compile(r"\d+(?:\.\d+)?|[^\W\d]+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Repeat:
    """A text that repeats the kept text number `of`."""

    of: int
    exact: bool


def normalise(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def shingles(tokens: list[str]) -> frozenset[int]:
    """Stable 32-bit hashes of the token 5-grams (of the whole text where it is shorter)."""
    last = max(len(tokens) - NGRAM, 0)
    return frozenset(zlib.crc32("\x1f".join(tokens[i : i + NGRAM]).encode()) for i in range(last + 1))


def rows_per_band(threshold: float) -> int:
    """The most selective band that still finds all but MAX_MISS of the pairs at the threshold."""
    for rows in range(16, 1, -1):
        if (1 - threshold**rows) ** (NUM_HASHES // rows) <= MAX_MISS:
            return rows
    return 1


def bands(shingle_set: frozenset[int], rows: int) -> Iterator[tuple[int, bytes]]:
    multiplier, offset = _HASHES
    values = np.fromiter(shingle_set, dtype=np.uint64, count=len(shingle_set))
    # Multiply-shift hashing: 64-bit wrap-around is wanted, the high half is the hash.
    signature = ((values[None, :] * multiplier[:, None] + offset[:, None]) >> np.uint64(32)).min(axis=1)
    for band in range(NUM_HASHES // rows):
        yield band, signature[band * rows : (band + 1) * rows].tobytes()


def find_repeats(texts: list[str], threshold: float) -> list[Repeat | None]:
    """For every text the earlier kept text that it repeats, or None where it is kept."""
    rows = rows_per_band(threshold)
    kept_exact: dict[str, int] = {}
    kept_bands: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
    kept: dict[int, tuple[frozenset[int], list[str]]] = {}
    result: list[Repeat | None] = []
    for i, text in enumerate(texts):
        normal = normalise(text)
        if normal in kept_exact:
            result.append(Repeat(kept_exact[normal], exact=True))
            continue
        tokens = TOKEN.findall(normal)
        mine, numbers = shingles(tokens), [t for t in tokens if t[0].isdigit()]
        keys = list(bands(mine, rows))
        candidates = sorted({j for key in keys for j in kept_bands[key]})
        twin = next((j for j in candidates if kept[j][1] == numbers and _jaccard(mine, kept[j][0]) >= threshold), None)
        result.append(None if twin is None else Repeat(twin, exact=False))
        if twin is None:
            kept_exact[normal], kept[i] = i, (mine, numbers)
            for key in keys:
                kept_bands[key].append(i)
    return result


def _jaccard(a: frozenset[int], b: frozenset[int]) -> float:
    common = len(a & b)
    return common / (len(a) + len(b) - common)


def _hash_family() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(20260101)
    draw = rng.integers(1, 2**63, size=(2, NUM_HASHES), dtype=np.uint64)
    return draw[0] | np.uint64(1), draw[1]


_HASHES = _hash_family()
