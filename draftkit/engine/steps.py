"""What one engine step did and how long it took: hooks on this engine's scheduler and drafter, and `EngineStep` rows.

Also where drafting is skipped: at k = 0 vLLM still runs one draft forward a step to keep the drafter's KV cache in
step with the verifier's. That is right while k may rise again within a request; between two calls it is pure cost.

vLLM hands a request's record of drafts over with its last step, which a request that a stop string ends does not have;
so the records are kept here.

On a GPU kernels run on after a call returns: there the draft seconds are launch times and only whole steps are exact.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from draftkit.types import EngineStep

T = TypeVar("T")


class StepRecorder:
    """Hooks into one engine. `paused`: draft nothing, not even to keep the drafter's cache."""

    def __init__(self, scheduler: Any, drafter: Any | None) -> None:
        self.paused = False
        self.drafted: dict[str, Any] = {}  # request -> vLLM's record of its drafts, None where nothing drafts
        self.lengths: dict[str, Counter[int]] = {}  # request -> rounds by the number of drafts
        self._rows: list[EngineStep] | None = None
        self._now = _Step()
        self._hook_scheduler(scheduler)
        if drafter is not None:
            self._hook_drafter(drafter)

    def _hook_scheduler(self, scheduler: Any) -> None:
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            drafts, counts = output.scheduled_spec_decode_tokens, output.num_scheduled_tokens
            self._now.running = len(counts)
            self._now.k = output.num_spec_tokens_to_schedule
            for id, tokens in drafts.items():
                self.lengths.setdefault(outer_id(id), Counter())[len(tokens)] += 1
            decoded = {id: 1 + len(drafts.get(id, ())) for id in counts}
            self._now.prompt = sum(n for id, n in counts.items() if n > decoded[id])
            self._now.context = sum(scheduler.requests[id].num_computed_tokens - n for id, n in counts.items())
            for new in output.scheduled_new_reqs:
                self.drafted[outer_id(new.req_id)] = scheduler.requests[new.req_id].spec_decode_metrics
            return output

        def updated(*args: Any, **kwargs: Any) -> Any:
            outputs = update(*args, **kwargs)
            self._now.tokens += sum(len(one.new_token_ids) for per in outputs.values() for one in per.outputs)
            return outputs

        scheduler.schedule, scheduler.update_from_output = scheduled, updated

    def forget(self) -> None:
        """What requests that will not finish have left."""
        self.drafted.clear()
        self.lengths.clear()

    def _hook_drafter(self, drafter: Any) -> None:
        propose = drafter.propose

        def proposed(num_speculative_tokens: int, *args: Any, **kwargs: Any) -> Any:
            if self.paused and num_speculative_tokens == 0:
                return _nothing(drafter, *args, **kwargs)
            start = time.perf_counter()
            try:
                return propose(num_speculative_tokens, *args, **kwargs)
            finally:
                self._now.draft_seconds += time.perf_counter() - start

        drafter.propose = proposed

    def timed(self, step: Callable[[], T]) -> T:
        """Run one engine step and write its row."""
        start = time.perf_counter()
        result = step()
        seconds = time.perf_counter() - start
        now, self._now = self._now, _Step()
        if self._rows is not None and now.running:
            times = (seconds, now.draft_seconds)
            self._rows.append(EngineStep(now.running, now.k, now.tokens, *times, now.prompt, now.context))
        return result

    def take(self) -> list[EngineStep]:
        """Rows since the last call; the first call starts recording."""
        rows, self._rows = self._rows or [], []
        return rows


def outer_id(request_id: str) -> str:
    """The id a request was given, without what vLLM appends to it."""
    return request_id.partition("-")[0]


class _Step:
    """A step in the making."""

    def __init__(self) -> None:
        self.running = self.k = self.tokens = self.prompt = self.context = 0
        self.draft_seconds = 0.0


def _nothing(drafter: Any, *args: Any, **kwargs: Any) -> Any:
    """No drafts, in the form that this drafter's `propose` has for k = 0."""
    import torch

    if "next_token_ids" not in kwargs:  # n-gram: lists of sampled ids in, lists of drafts out
        return [[] for _ in args[0]]
    drafter._last_draft_probs = None
    return kwargs["next_token_ids"].new_empty((len(kwargs["next_token_ids"]), 0), dtype=torch.int64)
