"""Seconds of an RL step: generation, log-probabilities, training, publishing; synchronous, or with lagging rollouts.

    lag 0   generate, then log-probabilities, then train, on all GPUs in turn: the sum
    lag n   generation on some GPUs, the rest on the others, at the same time: the larger of the two, then publish. n
            batches are in flight together, so a step waits for an n-th of the time that n pooled batches take to drain.
            Each arm has the split of GPUs that suits it best, unless `train_gpus` fixes it.

Training and log-probabilities are FLOPs over a share of the bf16 peak: 6 and 2 a parameter and token, and attention.
`padded`: every response counts with its longest length. Left out: reward models, environments, pipeline bubbles by
name (they are in the share), publishing that grows with the model. Source: measures.md (c) 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from draftkit.project.model_shape import ModelShape
from draftkit.project.rollout import Rollouts

SPLITS = tuple(i / 16 for i in range(1, 16))  # of the GPUs, for training


@dataclass(frozen=True, slots=True)
class Trainer:
    """Shares are of the bf16 peak. other_s: data, weight synchronisation, waking the engine."""

    train_share: float
    logprob_share: float
    padded: bool = True
    other_s: float = 2.0
    drafter: bool = False  # trained along, on the same tokens

    def tokens(self, rollouts: Rollouts) -> float:
        length = rollouts.lengths.longest if self.padded else rollouts.lengths.mean
        return rollouts.requests * (length + rollouts.prompt)

    def seconds(self, rollouts: Rollouts, gpus: float, speculative: bool) -> tuple[float, float]:
        """(log-probabilities, training)."""
        server, tokens = rollouts.server, self.tokens(rollouts)
        context = self.tokens(rollouts) / rollouts.requests / 2
        flops = forward_flops(server.model, tokens, context)
        peak = gpus * server.hardware.bf16_flops
        train = 3 * flops
        if self.drafter and speculative and server.drafter is not None:
            train += 3 * forward_flops(server.drafter, tokens, context)
        return flops / (peak * self.logprob_share), train / (peak * self.train_share)


def forward_flops(model: ModelShape, tokens: float, context: float) -> float:
    return tokens * (2 * model.active_params + model.attention_flops(context))


@dataclass(frozen=True, slots=True)
class StepTime:
    """exposed: seconds of generation that the step waits for. total: of the step."""

    generate: float
    exposed: float
    logprob: float
    train: float
    other: float
    total: float
    train_gpus: int

    @property
    def generation_share(self) -> float:
        return self.exposed / self.total


@dataclass(frozen=True, slots=True)
class Cluster:
    """Rollouts, trainer and the GPUs that both use."""

    rollouts: Rollouts  # its replicas are set from the GPUs
    trainer: Trainer
    gpus: int
    lag: int = 0
    train_gpus: int | None = None

    def plain(self) -> StepTime:
        return self.step(0, ())

    def step(self, k: int | Callable[[int], int], survival: Sequence[float]) -> StepTime:
        if self.lag == 0:
            return self._sync(k, survival)
        if self.train_gpus is not None:
            return self._split(self.train_gpus, k, survival)
        tp = self.rollouts.server.tp
        splits = {max(1, round(self.gpus * share)) for share in SPLITS}
        steps = [self._split(split, k, survival) for split in sorted(splits) if self.gpus - split >= tp]
        return min(steps, key=lambda step: step.total)

    def with_fastest_tp(self) -> Cluster:
        """TP is the power of two, within a link domain, with which *plain* rollouts take least: the baseline's best."""
        tried = []
        server = self.rollouts.server
        tp = 1
        while tp <= min(self.gpus, server.hardware.domain):
            other = replace(self, rollouts=replace(self.rollouts, server=replace(server, tp=tp)))
            if other.rollouts.server.fits():
                tried.append((other.generation(self.gpus).seconds(), other))
            tp *= 2
        if not tried:
            replace(server, tp=tp // 2).check()
        return min(tried, key=lambda pair: pair[0])[1]

    def generation(self, gpus: int) -> Rollouts:
        return replace(self.rollouts, replicas=max(1, gpus // self.rollouts.server.tp))

    def _sync(self, k: int | Callable[[int], int], survival: Sequence[float]) -> StepTime:
        generate = self.generation(self.gpus).seconds(k, survival)
        logprob, train = self.trainer.seconds(self.rollouts, self.gpus, bool(k))
        total = generate + logprob + train + self.trainer.other_s
        return StepTime(generate, generate, logprob, train, self.trainer.other_s, total, self.gpus)

    def _split(self, split: int, k: int | Callable[[int], int], survival: Sequence[float]) -> StepTime:
        generate = self.generation(self.gpus - split).pooled(self.lag).seconds(k, survival) / self.lag
        logprob, train = self.trainer.seconds(self.rollouts, split, bool(k))
        side, other = logprob + train, self.trainer.other_s
        return StepTime(generate, max(0.0, generate - side), logprob, train, other, max(generate, side) + other, split)
