"""The trainer's processes: one that runs alone, or the ranks of `torchrun` / `deepspeed` / `accelerate launch`.

Every rank runs the same loop on its own share of the prompts, with an engine of its own; what all must agree on
(denominators, decisions, metrics) goes through `gather`. Leaves out how gradients travel: that is DeepSpeed's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class World:
    """rank of size. Alone (size 1) every method is free and no process group is needed."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, mine: T) -> list[T]:
        """Everybody's, in the order of ranks, on every rank. mine: anything that pickles."""
        if self.size == 1:
            return [mine]
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, mine)
        return every

    def joined(self, mine: Sequence[T]) -> list[T]:
        return [item for part in self.gather(list(mine)) for item in part]

    def any(self, mine: bool) -> bool:
        return any(self.gather(mine))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def share(self, items: Sequence[T]) -> list[T]:
        """This rank's items: every size-th, so that neighbours spread."""
        return list(items[self.rank :: self.size])
