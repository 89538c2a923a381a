"""Work for the engine, first in first out: rollouts and publishes, at most `rl.lag` rollouts ahead of the trainer.

    lag 0    roll(1) -> train 1, publish -> roll(2) -> train 2, publish -> ...
    lag 1    roll(1), roll(2) -> train 1, publish -> roll(3) -> train 2, publish -> ...   roll(3): weights after train 1

Because work is done in the order in which it was asked for, rollouts that are consumed at version v were sampled at
v - lag, no matter how fast either side is. An engine in a process of its own (on a device of its own) works while the
trainer does; one that shares this process and its device takes turns with it, which keeps the lag and saves nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Pipeline(Generic[T]):
    """`ask(work)` queues work; `do(work)` queues and waits. `roll(work)` queues a batch of rollouts, `take()` gives the
    oldest. overlapped: work runs in a thread (which only waits for the engine's process), else at once."""

    def __init__(self, overlapped: bool) -> None:
        self.overlapped = overlapped
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine") if overlapped else None
        self._rolled: deque[Future[T]] = deque()

    def ask(self, work: Callable[[], Any]) -> Future[Any]:
        if self._pool is not None:
            return self._pool.submit(work)
        done: Future[Any] = Future()
        done.set_result(work())  # what it raises is raised here: one thread, one story
        return done

    def do(self, work: Callable[[], Any]) -> Any:
        return self.ask(work).result()

    def roll(self, work: Callable[[], T]) -> None:
        self._rolled.append(self.ask(work))

    def keep(self, batch: T) -> None:
        """Rollouts that exist already, from a checkpoint."""
        done: Future[T] = Future()
        done.set_result(batch)
        self._rolled.append(done)

    def take(self) -> T:
        return self._rolled.popleft().result()

    @property
    def ready(self) -> bool:
        """Whether `take` would not wait."""
        return bool(self._rolled) and self._rolled[0].done()

    def waiting(self) -> list[T]:
        """All batches asked for and not yet taken, when they are done, oldest first (for a checkpoint)."""
        return [future.result() for future in self._rolled]

    def __len__(self) -> int:
        return len(self._rolled)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
