"""A batch that drains evenly: how many rounds it spends at each number of running requests.

All start; each ends at its own length; with fewer slots than requests the rest waits and takes the places of those that
finish. Exact for one token a round; with drafts tokens flow evenly, without the rounding of a last round. That is what
thousands of long answers do; `evals.drain` draws every round instead, for batches as small as can be measured here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence


def phases(
    lengths: Sequence[float], tau: float | Callable[[int], float], slots: int | None = None
) -> Iterator[tuple[int, float, float]]:
    """(requests running, rounds, mean tokens that each has made halfway), a row for every change of the number running.

    The step of the prompt gives one token, every later one tau(n), n the requests running.
    """
    rate = tau if callable(tau) else lambda n: tau
    waiting = [length for length in lengths if length > 0][::-1]
    slots = slots or len(waiting)
    ends: list[tuple[float, float]] = []  # (end, start) in tokens that a request running from the beginning has made
    made = starts = 0.0
    while waiting or ends:
        running = min(slots, len(ends) + len(waiting))
        while len(ends) < running:
            heapq.heappush(ends, (made + waiting.pop() - 1 + rate(running), made))
            starts += made
        step = ends[0][0] - made
        yield running, step / rate(running), made + step / 2 - starts / running
        made += step
        while ends and ends[0][0] <= made + 1e-9:
            starts -= heapq.heappop(ends)[1]
