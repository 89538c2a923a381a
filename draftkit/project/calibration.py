"""The constants that no data sheet gives, where they come from, and how they were found.

Three host times of vLLM inside an RL framework and two shares of the trainer are calibrated, on one set: Qwen3-8B on 32
GB200, synchronous GRPO [2nd: arXiv 2604.26779 as public notes repeat it]. The set-up of that run is not published as
far as we know; ours is an assumption and part of the calibration: 2,048 rollouts (64 prompts x 32, as NeMo RL's
performance recipes), longest 8,192 tokens, TP 2, so 128 requests a replica. The mean length of either workload follows
from its *plain* generation time; no speculative number enters it.

`refit` finds the host times again, with or without a point, so that the leave-one-out error can be shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from draftkit.project.cost import Server
from draftkit.project.hardware import TABLE as HARDWARE
from draftkit.project.hardware import Engine
from draftkit.project.model_shape import TABLE as MODELS
from draftkit.project.model_shape import eagle3_shape
from draftkit.project.rollout import Lengths, Rollouts, even_survival
from draftkit.project.step import Trainer

DRAFT_VOCAB = 32000  # of published EAGLE-3 heads
HBM_SHARE, FLOPS_SHARE = 0.8, 0.4  # set, not fitted: the fit is nearly indifferent to 0.25-0.6 of the second
CALIBRATED = ("step_s", "draft_s", "eager_s")  # fitted, in this order

VLLM = Engine("vllm", HBM_SHARE, FLOPS_SHARE, step_s=9.5e-3, round_s=0.0, draft_s=3.6e-3, eager_s=0.79e-3)
ROOFLINE = Engine("roofline", HBM_SHARE, FLOPS_SHARE, 0.0, 0.0, 0.0, 0.0, graph_tokens=10**9)
ENGINES = {engine.name: engine for engine in (VLLM, ROOFLINE)}

# From the plain stage times of both workloads, alike: 17.8 s log-probabilities, 31.3 s training, 2.2 s the rest.
TRAINER = Trainer(train_share=0.365, logprob_share=0.215, padded=True, other_s=2.2)

ABOUT = {
    "vllm": "vLLM in an RL step, calibrated on Qwen3-8B, 32 GB200 [2nd: arXiv 2604.26779]",
    "roofline": "every pass a CUDA graph, what hardware alone allows: a bound for an engine",
}


@dataclass(frozen=True, slots=True)
class Setup:
    """What we assume of a run whose schedule was not published."""

    requests: int
    longest: int
    tp: int
    gpus: int = 32
    sigma: float = 0.7
    prompt: int = 256

    def rollouts(self, engine: Engine, mean: float, *, drafter: bool = True) -> Rollouts:
        model = MODELS["qwen3-8b"]
        head = eagle3_shape(model, DRAFT_VOCAB) if drafter else None
        server = Server(model, head, HARDWARE["gb200"], engine, self.tp)
        lengths = Lengths(mean, self.longest, self.sigma)
        return Rollouts(server, self.requests, self.gpus // self.tp, lengths, self.prompt)


SETUP = Setup(2048, 8192, 2)
OTHER_SETUPS = (Setup(1024, 8192, 1), Setup(2048, 8192, 1), Setup(4096, 4096, 1), Setup(4096, 8192, 1))
PLAIN_S = {"RL-Zero": 100.0, "RL-Think": 133.6}  # [2nd] plain generation


@dataclass(frozen=True, slots=True)
class Observed:
    """One measured generation speedup of the 8B runs."""

    workload: str
    k: int
    tau: float
    speedup: float


# [2nd] the sweep over k (Table 4): acceptance lengths and generation speedups
FITTED = (
    Observed("RL-Zero", 3, 3.32, 1.77),
    Observed("RL-Zero", 5, 4.35, 1.44),
    Observed("RL-Zero", 7, 5.06, 1.21),
    Observed("RL-Think", 3, 2.77, 1.53),
    Observed("RL-Think", 5, 3.23, 0.84),
    Observed("RL-Think", 7, 3.48, 0.71),
)


def mean_length(engine: Engine, setup: Setup, plain_s: float) -> float:
    """Of a workload: that which makes plain generation take plain_s; the nearest possible where none does."""
    low, high = 50.0, 0.999 * setup.longest
    for _ in range(14):
        middle = (low + high) / 2
        too_slow = setup.rollouts(engine, middle).seconds() > plain_s
        low, high = (low, middle) if too_slow else (middle, high)
    return (low + high) / 2


def predict(engine: Engine, setup: Setup, points: Sequence[Observed]) -> list[float]:
    """Generation speedups; lengths of a workload from its plain time alone."""
    means = {workload: mean_length(engine, setup, PLAIN_S[workload]) for workload in {p.workload for p in points}}
    batches = {workload: setup.rollouts(engine, mean) for workload, mean in means.items()}
    return [batches[p.workload].speedup(p.k, even_survival(p.tau, p.k)) for p in points]


def refit(points: Sequence[Observed] = FITTED, setup: Setup = SETUP, start: Engine = VLLM, rounds: int = 6) -> Engine:
    """Gauss-Newton on log constants; residuals are log ratios of speedups, and of plain times (weight 2)."""
    x = np.log([getattr(start, name) for name in CALIBRATED])
    best, error = x, _residuals(x, points, setup, start)
    damping = 1e-2
    for _ in range(rounds):
        slopes = [(_residuals(best + step, points, setup, start) - error) / 0.05 for step in 0.05 * np.eye(3)]
        jacobian = np.array(slopes).T
        move = -np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(3), jacobian.T @ error)
        tried = best + np.clip(move, -0.5, 0.5)
        value = _residuals(tried, points, setup, start)
        if value @ value < error @ error:
            best, error, damping = tried, value, damping / 3
        else:
            damping *= 5
    return replace(start, **dict(zip(CALIBRATED, np.exp(best).tolist(), strict=True)))


def _residuals(x: np.ndarray, points: Sequence[Observed], setup: Setup, start: Engine) -> np.ndarray:
    engine = replace(start, **dict(zip(CALIBRATED, np.exp(x).tolist(), strict=True)))
    ratios, plain = [], []
    for workload, seconds in PLAIN_S.items():
        own = [p for p in points if p.workload == workload]
        batch = setup.rollouts(engine, mean_length(engine, setup, seconds))
        base = batch.seconds()
        plain.append(2 * np.log(base / seconds))
        ratios += [np.log(base / batch.seconds(p.k, even_survival(p.tau, p.k)) / p.speedup) for p in own]
    return np.array(ratios + plain)
