"""Publishing: the trainer's policy and drafter into the running engine, in place, versioned and timed.

What policy and drafter share goes once, with the policy: an engine's drafter reads the verifier's own embedding, and a
drafter that came with an embedding would overwrite it there (`served_tensors` holds none). `Ends` keeps what the
trainer's drafter shares as it passes by, so that both sides use the same version without another gather.

The engine resets its prefix cache with every load. Sleep goes through here so that the canary knows of it. How tensors
travel is the engine room's business; whether they arrived is asked by the canary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from draftkit.drafters.export import served_tensors
from draftkit.drafters.init import EMBEDDING, HEAD

if TYPE_CHECKING:
    from draftkit.drafters.eagle3 import Eagle3
    from draftkit.engine import Engine
    from draftkit.rl.policy import Policy

Weights = Iterator[tuple[str, torch.Tensor]]


class Ends:
    """The policy's embedding and LM head (the same tensor when tied) as last published. A trained drafter reads the
    one, and its teacher the other: `TeacherView` takes an `Ends` where else a verifier stands.

    The tensors are copies that every publish writes again, so whoever holds one follows the policy. They have the dtype
    that the policy computes in: a head rounded to another one gives logits that no longer fit the policy's normaliser,
    and every probability is off by the same factor (tests/test_directions.py).
    """

    def __init__(self, weights: Weights, temperature: float, dtype: torch.dtype) -> None:
        """weights: all of the policy's, under checkpoint names. dtype: `Policy.dtype`."""
        self.temperature = temperature or 1.0
        kept = {name: tensor.detach().to(dtype, copy=True) for name, tensor in weights if name in (EMBEDDING, HEAD)}
        self.embed_VH = kept[EMBEDDING]
        self.head_VH = kept.get(HEAD, self.embed_VH)

    @torch.no_grad()
    def watch(self, weights: Weights) -> Weights:
        """The same stream; what is kept here is copied as it passes. Without a head in it the embedding is the head,
        also where the checkpoint that this began with stored both."""
        tied = True
        for name, tensor in weights:
            if name == EMBEDDING:
                self.embed_VH.copy_(tensor)
            elif name == HEAD:
                self.head_VH.copy_(tensor)
                tied = False
            yield name, tensor
        if tied and self.head_VH is not self.embed_VH:
            self.head_VH.copy_(self.embed_VH)


@dataclass(frozen=True, slots=True)
class Published:
    """policy, drafter: what was sent. slept: the engine slept since the publish before."""

    policy_version: int
    draft_version: int
    policy: bool
    drafter: bool
    slept: bool
    seconds_policy: float
    seconds_drafter: float

    @property
    def seconds(self) -> float:
        return self.seconds_policy + self.seconds_drafter


class Publisher:
    """One per engine. ends None: nothing is shared (no drafter). Versions count what was sent, from 0: what the engine
    was built with."""

    def __init__(self, engine: Engine, policy: Policy, drafter: Eagle3 | None, ends: Ends | None = None) -> None:
        self.engine, self.policy, self.drafter, self.ends = engine, policy, drafter, ends
        self.policy_version, self.draft_version = 0, 0
        self._asleep = self._slept = False

    def publish(self, *, policy: bool, drafter: bool) -> Published:
        """Send what changed. Collective where the policy is spread over ranks: all call it alike."""
        self.wake()
        start = time.perf_counter()
        if policy:
            weights = self.policy.weights()
            self.engine.load_verifier(weights if self.ends is None else self.ends.watch(weights))
            self.policy_version += 1
        middle = time.perf_counter()
        if drafter:
            assert self.drafter is not None
            self.engine.load_drafter(served_tensors(self.drafter).items())
            self.draft_version += 1
        end = time.perf_counter()
        slept, self._slept = self._slept, False
        return Published(self.policy_version, self.draft_version, policy, drafter, slept, middle - start, end - middle)

    def sleep(self) -> None:
        """Give the engine's memory to the trainer."""
        if not self._asleep:
            self.engine.sleep()
            self._asleep = self._slept = True

    def wake(self) -> None:
        if self._asleep:
            self.engine.wake()
            self._asleep = False

    def state(self) -> dict[str, Any]:
        """For a checkpoint. The engine of a resumed run is built anew: publish both after `load`."""
        return {"policy_version": self.policy_version, "draft_version": self.draft_version}

    def load(self, state: dict[str, Any]) -> None:
        self.policy_version, self.draft_version = state["policy_version"], state["draft_version"]
