"""What an engine step costs, fitted to measured steps: n requests running, k drafts each, C tokens in their caches.

    T(n, k, C) = V(n (k + 1)) + [k > 0] (r0 + r1 n) + a C + D(n, k)
    D(n, k)    = e0 + e1 n (k + 1) + (max(k, 1) - 1) (d0 + d1 n)       where the drafter runs, else 0
    P(t)       = p0 + p1 t, and p2 t for the drafter          more, in a step that reads t tokens of prompts

V is the verifier's forward: rising, and linear between knots at powers of two, because it is flat while memory binds
and climbs where arithmetic does, at a border that only measurement knows. r: rejection sampling. D: a first pass over
what was accepted, then one pass a further draft. All coefficients are >= 0 (non-negative least squares), so that no
prediction falls when work is added, and errors are relative to the prediction: relative to what was measured, slow
steps would count less than fast ones, and the fit would lie below their mean. It predicts k and n that were not
measured: V is shared by all k, since n (k + 1) tokens cost the same whoever drafted them.

Left out: CUDA graph sizes, which make V a staircase; the spread of a step's time. Source: measures.md (c), formula 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from draftkit.types import EngineStep

HEAVIEST = 50  # steps of one kind that still sharpen the fit: more of them only repeat its mean
DRAWS = 40  # fits to resampled measurements, for intervals
REWEIGHTED = 4  # fits, each weighted by the one before


@dataclass(frozen=True, slots=True)
class StepCell:
    """Engine steps of one kind: their number, and sums of what they had and took. drafted: the drafter ran in them."""

    k: int
    running: int
    drafted: bool
    prompt: int  # tokens of prompts in one step
    count: int
    context: int
    seconds: float
    draft_seconds: float

    @property
    def mean_s(self) -> float:
        return self.seconds / self.count


def cells_of(steps: Iterable[EngineStep]) -> list[StepCell]:
    """Steps that differ only in time and context, together. Sorted: the same steps give the same cells."""
    found: dict[tuple, list[EngineStep]] = {}
    for step in steps:
        found.setdefault((step.k, step.running, step.draft_seconds > 0, step.prompt), []).append(step)
    return [
        StepCell(
            *key,
            len(alike),
            sum(s.context for s in alike),
            sum(s.seconds for s in alike),
            sum(s.draft_seconds for s in alike),
        )
        for key, alike in sorted(found.items())
    ]


def to_rows(cells: Iterable[StepCell]) -> list[list[float]]:
    """For JSON; `StepCell(*row)` reads one back."""
    return [list(astuple(cell)) for cell in cells]


@dataclass(frozen=True)
class StepCost:
    """The fitted model; seconds. knots: tokens of a forward, V's first one being 0."""

    knots: tuple[float, ...]
    verify: tuple[float, ...]  # V at 0, then its slope in each segment
    reject: tuple[float, float]
    context: float
    drafter: tuple[float, float, float, float]  # e0, e1, d0, d1
    prompt: tuple[float, float, float]
    seen: tuple[int, int]  # most requests and most drafts measured: what lies beyond is extrapolated
    knows_plain: bool
    knows_drafts: bool

    @classmethod
    def fit(cls, cells: Sequence[StepCell]) -> StepCost | None:
        """None without a decoding step."""
        decoding = [c for c in cells if not c.prompt]
        if not decoding:
            return None
        most = max(c.running * (c.k + 1) for c in decoding)
        knots = (0.0, *(2.0**i for i in range(1, 20) if 2.0**i < most / 1.5))
        drafting = [c for c in decoding if c.drafted]
        drafter = _solve([_draft_terms(c.running, c.k) for c in drafting], drafting, lambda c: c.draft_seconds)
        terms = [_verify_terms(c.running, c.k, c.context / c.count, knots) for c in decoding]
        verify = _solve(terms, decoding, lambda c: c.seconds - c.draft_seconds)
        width = len(knots) + 1
        made = cls(
            knots=knots,
            verify=tuple(verify[:width]),
            reject=(verify[width], verify[width + 1]),
            context=verify[width + 2],
            drafter=drafter if drafting else (0.0,) * 4,
            prompt=(0.0, 0.0, 0.0),
            seen=(max(c.running for c in decoding), max(c.k for c in decoding)),
            knows_plain=any(c.k == 0 for c in decoding),
            knows_drafts=bool(drafting) or any(c.k for c in decoding),
        )
        return made._with_prompts([c for c in cells if c.prompt])

    def _with_prompts(self, cells: Sequence[StepCell]) -> StepCost:
        if not cells:
            return self
        extra = lambda c: max(0.0, c.seconds - c.count * self._decoding(c))  # noqa: E731
        terms = [(1.0, c.prompt, c.prompt * c.drafted) for c in cells]
        return replace(self, prompt=_solve(terms, cells, extra))

    def _decoding(self, cell: StepCell) -> float:
        return float(self.step(cell.running, cell.k, cell.context / cell.count, drafts=cell.drafted))

    # ---- prediction: numbers or arrays ----

    def draft(self, n: np.ndarray | float, k: np.ndarray | float) -> np.ndarray:
        """Seconds of the drafter in a step in which it runs."""
        return _draft_terms(n, k).T @ np.array(self.drafter)

    def step(
        self,
        n: np.ndarray | float,
        k: np.ndarray | float,
        context: np.ndarray | float = 0.0,
        *,
        drafts: np.ndarray | bool | None = None,
    ) -> np.ndarray:
        """Seconds of a decoding step. drafts: whether the drafter runs, by default where k > 0."""
        weights = np.array([*self.verify, *self.reject, self.context])
        runs = np.asarray(k) > 0 if drafts is None else drafts
        return _verify_terms(n, k, context, self.knots).T @ weights + np.where(runs, self.draft(n, k), 0.0)

    def prompt_s(self, tokens: np.ndarray | float, *, drafts: bool = False) -> np.ndarray:
        """Seconds that a step takes longer for `tokens` of prompts in it; drafts: the drafter reads them too."""
        each = self.prompt[1] + (self.prompt[2] if drafts else 0.0)
        return np.where(np.asarray(tokens) > 0, self.prompt[0] + each * np.asarray(tokens), 0.0)

    def round_cost(self, n: float, k: int, context: float = 0.0) -> float:
        """c(k, n): a round in plain steps of as many requests. context: tokens in the cache of each."""
        return float(self.step(n, k, n * context) / self.step(n, 0, n * context))


def _verify_terms(n, k, context, knots: Sequence[float]) -> np.ndarray:
    n, k, context = np.broadcast_arrays(*(np.asarray(value, dtype=float) for value in (n, k, context)))
    tokens = n * (k + 1)
    ends = [*knots[1:], np.inf]
    segments = [np.clip(tokens, low, high) - low for low, high in zip(knots, ends, strict=True)]
    return np.array([np.ones_like(tokens), *segments, k > 0, n * (k > 0), context])


def _draft_terms(n, k) -> np.ndarray:
    n, k = np.broadcast_arrays(np.asarray(n, dtype=float), np.asarray(k, dtype=float))
    more = np.maximum(k, 1) - 1
    return np.array([np.ones_like(n), n * (k + 1), more, more * n])


def _solve(terms: Sequence, cells: Sequence[StepCell], seconds: Callable[[StepCell], float]) -> tuple[float, ...]:
    """Coefficients >= 0 that fit the mean `seconds` of each cell: errors relative to the prediction, the more steps the
    more weight."""
    if not cells:
        return ()
    means = np.array([max(seconds(c), 0.0) / c.count for c in cells])
    counts = np.sqrt([min(c.count, HEAVIEST) for c in cells])
    table = np.array([np.asarray(row, dtype=float) for row in terms])
    least, predicted = 0.1 * np.median(means) + 1e-12, means
    for _ in range(REWEIGHTED):
        weights = counts / np.maximum(predicted, least)
        scale = np.abs(table * weights[:, None]).max(0)
        scale[scale == 0] = 1.0
        found = nnls(table * weights[:, None] / scale, means * weights)[0] / scale
        predicted = table @ found
    return tuple(float(x) for x in found)


# --- how far to trust it ----------------------------------------------------------------------------------------


def bootstrap(groups: Sequence[Sequence[StepCell]], draws: int, seed: int) -> list[StepCost]:
    """Models of resampled measurements: steps of one measurement share the machine's mood, so it is drawn whole."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(len(groups), size=(draws, len(groups)))
    models = (StepCost.fit([cell for i in row for cell in groups[i]]) for row in chosen)
    return [m for m in models if m is not None and m.knows_plain]


def round_costs(groups: Sequence[Sequence[StepCell]], most_k: int, seed: int) -> list[dict[str, Any]]:
    """c(k, B) of every k up to most_k and B = 1, 2, 4 .. up to the most requests measured, with 95 % intervals; cells
    that were not measured too. groups: steps of each measurement. Empty without both plain and speculative steps."""
    cells = [cell for group in groups for cell in group]
    made = StepCost.fit(cells)
    if made is None or not (made.knows_plain and made.knows_drafts):
        return []
    decoding = [c for c in cells if not c.prompt]
    context = sum(c.context for c in decoding) / sum(c.running * c.count for c in decoding)
    models = [m for m in bootstrap(groups, DRAWS, seed) if m.knows_drafts]
    measured = {(c.k, c.running) for c in decoding}
    rows = []
    for k in range(1, most_k + 1):
        for n in (2**i for i in range(16) if 2**i <= made.seen[0]):
            low, high = np.quantile([m.round_cost(n, k, context) for m in models], [0.025, 0.975])
            row = {"k": k, "running": n, "cost": made.round_cost(n, k, context), "cost_ci": [float(low), float(high)]}
            rows.append(row | {"measured": (k, n) in measured})
    return rows


def leave_one_out(groups: Mapping[tuple[int, int], Sequence[StepCell]]) -> list[dict[str, float]]:
    """groups: steps of each (k, concurrency). Each is predicted by a fit to the others: k, concurrency, predicted and
    measured mean seconds of a decoding step, and the relative error."""
    rows = []
    for key, mine in groups.items():
        others = [cell for other, cells in groups.items() if other != key for cell in cells]
        model, decoding = StepCost.fit(others), [c for c in mine if not c.prompt]
        if model is None or not decoding or not model.knows_plain or (key[0] and not model.knows_drafts):
            continue
        count = sum(c.count for c in decoding)
        predicted = sum(c.count * model._decoding(c) for c in decoding) / count
        measured = sum(c.seconds for c in decoding) / count
        rows.append(
            {
                "k": key[0],
                "concurrency": key[1],
                "predicted_s": predicted,
                "measured_s": measured,
                "error": predicted / measured - 1,
            }
        )
    return rows
