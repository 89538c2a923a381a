"""`draftkit project --validate`: every public number we know against what the model says, error by error.

Each point names its source; [2nd] is second-hand (the paper's numbers as public notes repeat them), [own] was measured
by draftkit, [public] is somebody's published measurement. A point may carry inputs (model, cluster, k, acceptance
length, plain time), never a constant of its own: predictions come from the functions below, one a group.

    fitted        the six points from which three host times were found; leave-one-out beside them
    held out      same set of constants, points that did not enter the fit
    235B          the paper's simulator against ours: two engines, since its own is not published
    own           a 135M model on two CPU cores, calibrated from the k = 0 cells alone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftkit.project import calibration as c
from draftkit.project.cost import Server
from draftkit.project.hardware import TABLE as HARDWARE
from draftkit.project.hardware import Engine, Hardware
from draftkit.project.model_shape import TABLE as MODELS
from draftkit.project.model_shape import eagle3_shape
from draftkit.project.rollout import Lengths, Rollouts, even_survival
from draftkit.project.step import Cluster

PAPER = "[2nd] arXiv 2604.26779"
BIG = dict(model="qwen3-235b-a22b", mean=4000.0, longest=8192, requests=4096)  # mean and longest: assumed


@dataclass(frozen=True, slots=True)
class Point:
    """What is known and what is said. target: largest error allowed, where the project has set one."""

    group: str
    name: str
    source: str
    known: float
    predicted: float
    target: float | None = None
    left_out: float | None = None  # prediction of a fit without this point

    @property
    def error(self) -> float:
        return self.predicted / self.known - 1

    @property
    def met(self) -> bool | None:
        return None if self.target is None else abs(self.error) <= self.target


def validate(engine: Engine | None = None) -> list[Point]:
    """All points. engine: instead of the calibrated one (its leave-one-out column then stays empty)."""
    used = engine or c.VLLM
    return [
        *calibrated(used, leave_one_out=engine is None),
        *held_out(used),
        *steps_8b(used),
        *projections(used),
        *projections(c.ROOFLINE),
        *moe_sweep(used),
        *own_cpu(),
    ]


# --- Qwen3-8B on 32 GB200 ------------------------------------------------------------------------------------------


def calibrated(engine: Engine, *, leave_one_out: bool) -> list[Point]:
    points = []
    for i, (point, said) in enumerate(zip(c.FITTED, c.predict(engine, c.SETUP, c.FITTED), strict=True)):
        without = None
        if leave_one_out:
            others = c.FITTED[:i] + c.FITTED[i + 1 :]
            without = c.predict(c.refit(others, start=engine, rounds=3), c.SETUP, [point])[0]
        name = f"{point.workload}, k = {point.k}, AL {point.tau}: rollout"
        points.append(Point("fitted", name, PAPER, point.speedup, said, 0.15, without))
    return points


# [2nd] Tables 3 and 5 (other drafters, k = 3): acceptance length and speedup
OTHER_DRAFTERS = (
    ("general-domain drafter", c.Observed("RL-Zero", 3, 2.88, 1.51)),
    ("general-domain drafter", c.Observed("RL-Think", 3, 2.40, 1.19)),
    ("the same, trained along", c.Observed("RL-Zero", 3, 3.04, 1.63)),
    ("the same, trained along", c.Observed("RL-Think", 3, 2.55, 1.26)),
    ("in-domain, trained along", c.Observed("RL-Zero", 3, 3.29, 1.78)),
    ("in-domain, trained along", c.Observed("RL-Think", 3, 2.74, 1.52)),
)
# [2nd] Table 2; its k is not in our notes, 3 as everywhere else in the paper is assumed
NGRAM = (c.Observed("RL-Zero", 3, 2.47, 100.0 / 140.2), c.Observed("RL-Think", 3, 2.05, 133.6 / 262.9))


def held_out(engine: Engine) -> list[Point]:
    said = c.predict(engine, c.SETUP, [point for _, point in OTHER_DRAFTERS])
    points = [
        Point("held out", f"{p.workload}, {what}, k = 3, AL {p.tau}: rollout", PAPER, p.speedup, value, 0.15)
        for (what, p), value in zip(OTHER_DRAFTERS, said, strict=True)
    ]
    for p in NGRAM:
        mean = c.mean_length(engine, c.SETUP, c.PLAIN_S[p.workload])
        value = c.SETUP.rollouts(engine, mean, drafter=False).speedup(p.k, even_survival(p.tau, p.k))
        name = f"{p.workload}, n-gram, k = 3, AL {p.tau}: rollout"
        points.append(Point("held out", name, PAPER, p.speedup, value, 0.15))
    return points


def steps_8b(engine: Engine) -> list[Point]:
    """Of the step: its other stages from the trainer's shares, which the plain stage times gave."""
    points = []
    for p, known in ((c.FITTED[0], 1.41), (c.FITTED[3], 1.35)):
        cluster = _cluster_8b(engine, p.workload, gpus=32)
        value = cluster.plain().total / cluster.step(p.k, even_survival(p.tau, p.k)).total
        points.append(Point("held out", f"{p.workload}, k = 3: step", PAPER, known, value, 0.15))
    p = c.FITTED[3]
    cluster = _cluster_8b(engine, p.workload, gpus=64, lag=1, train_gpus=16)
    value = cluster.plain().total / cluster.step(p.k, even_survival(p.tau, p.k)).total
    name = "RL-Think, k = 3, lag 1, 48 + 16 GPUs: step"
    return [*points, Point("held out", name, f"{PAPER}; sources disagree", 1.24, value)]


def _cluster_8b(engine: Engine, workload: str, **options: int) -> Cluster:
    rollouts = c.SETUP.rollouts(engine, c.mean_length(engine, c.SETUP, c.PLAIN_S[workload]))
    return Cluster(rollouts, c.TRAINER, **options)


# --- Qwen3-235B-A22B: the paper's simulator -------------------------------------------------------------------------

# [2nd] (gpus, lag, k, acceptance length, rollout, step)
PROJECTED = ((512, 0, 3, 3.0, 2.72, 1.70), (512, 0, 7, 5.0, 4.07, 1.96), (2048, 2, 5, 4.0, 3.5, 2.5))


def projections(engine: Engine) -> list[Point]:
    """FP8, 4,096 rollouts [2nd]; lengths are ours, TP the best for plain rollouts: the paper's are not published."""
    points = []
    for gpus, lag, k, tau, rollout, step in PROJECTED:
        cluster = cluster_235b(engine, gpus, lag)
        survival = even_survival(tau, k)
        plain, fast = cluster.plain(), cluster.step(k, survival)
        batch = cluster.generation(gpus)
        name = f"{gpus} GPUs (TP {batch.server.tp}), lag {lag}, k = {k}, AL {tau:g}"
        group = f"235B {engine.name}"
        points.append(Point(group, f"{name}: rollout", PAPER, rollout, batch.speedup(k, survival), 0.2))
        points.append(Point(group, f"{name}: step", PAPER, step, plain.total / fast.total, 0.2))
    return points


def cluster_235b(engine: Engine, gpus: int, lag: int) -> Cluster:
    model = MODELS[BIG["model"]]
    head = eagle3_shape(model, c.DRAFT_VOCAB)
    server = Server(model, head, HARDWARE["gb200"], engine, precision="fp8", kv_precision="fp8")
    batch = Rollouts(server, BIG["requests"], 1, Lengths(BIG["mean"], BIG["longest"]))
    return Cluster(batch, c.TRAINER, gpus, lag).with_fastest_tp()


# --- OLMoE on A100: what four tokens a request cost -----------------------------------------------------------------

# [public] open-instruct fork, 2026-08-08 sweep, TP 2: a pass over 4 n tokens in passes over n; 256: "linear"
OLMOE = ((16, 1.40), (64, 1.83))


def moe_sweep(engine: Engine) -> list[Point]:
    server = Server(MODELS["olmoe-1b-7b"], None, HARDWARE["a100-40gb"], engine, tp=2)
    points = []
    for n, known in OLMOE:
        passes = [server.forward(server.model, m, m, 512.0, engine.step_s).total for m in (n, 4 * n)]
        name = f"OLMoE-1B-7B, A100, {n} requests: cost of 4 x the tokens"
        points.append(Point("held out", name, "[public] open-instruct fork", known, float(passes[1] / passes[0])))
    return points


# --- draftkit's own table: SmolLM2-135M, two CPU cores --------------------------------------------------------------

# [own] README, T = 0 then T = 1: {k: (acceptance length, tokens/s)} by concurrency
CELLS = {
    "T = 0": {
        1: {0: (1, 40.9), 1: (1.76, 57.6), 2: (2.29, 73.9), 3: (2.66, 80.7), 5: (2.95, 79.7)},
        4: {0: (1, 141.6), 1: (1.76, 164.6), 2: (2.29, 169.1), 3: (2.66, 169.7), 5: (2.95, 146.8)},
        16: {0: (1, 290.9), 1: (1.72, 279.8), 2: (2.22, 257.2), 3: (2.50, 242.7), 5: (2.77, 215.3)},
    },
    "T = 1": {
        1: {0: (1, 39.0), 1: (1.49, 43.3), 2: (1.71, 49.0), 3: (1.88, 50.4), 5: (1.82, 40.9)},
        4: {0: (1, 134.0), 1: (1.51, 120.0), 2: (1.63, 101.6), 3: (1.71, 88.9), 5: (1.79, 74.5)},
        16: {0: (1, 279.9), 1: (1.52, 196.8), 2: (1.73, 165.7), 3: (1.87, 150.0), 5: (1.86, 104.2)},
    },
}
SMOL_DRAFT_VOCAB = 3456


def own_cpu() -> list[Point]:
    points = []
    for temperature, by_concurrency in CELLS.items():
        server = fitted_server({n: n / cells[0][1] for n, cells in by_concurrency.items()})
        for n, cells in by_concurrency.items():
            for k, (tau, rate) in cells.items():
                if k == 0:
                    continue
                said = tau * server.round(n, 64.0, 0) / server.round(n, 64.0, k)
                name = f"135M, 2 cores, {temperature}, {n} at once, k = {k}: rollout"
                points.append(Point("own", name, "[own] README", rate / cells[0][1], float(said)))
    return points


def fitted_server(plain: dict[int, float], model: str = "smollm2-135m", draft_vocab: int = SMOL_DRAFT_VOCAB) -> Server:
    """A user's own machine from plain steps alone, {requests: seconds}: seconds = host + tokens x FLOPs / rate.

    The weights' reading cannot be told from host time by such cells, so it counts as host time; a pass of the drafter
    has the share of it that its layers have of the verifier's.
    """
    shape = MODELS[model]
    sizes, seconds = np.array(list(plain), dtype=float), np.array(list(plain.values()))
    slope, host = np.polyfit(sizes, seconds, 1)
    rate = 2 * shape.active_params / max(slope, 1e-12)
    hardware = Hardware("own", rate, rate, 1e18, 1e18, 1e18, 1e18, 1)
    engine = Engine("own", 1.0, 1.0, float(max(host, 0.0)), 0.0, float(max(host, 0.0)) / shape.layers, 0.0, 10**9)
    return Server(shape, eagle3_shape(shape, draft_vocab), hardware, engine)


# --- as people read it ----------------------------------------------------------------------------------------------


def setup_sensitivity(engine: Engine = c.VLLM) -> list[tuple[c.Setup, Engine, float]]:
    """The three host times refitted under other set-ups that the 8B runs may have had: largest error of six."""
    found = []
    for setup in (c.SETUP, *c.OTHER_SETUPS):
        fit = engine if setup == c.SETUP else c.refit(setup=setup, start=engine, rounds=5)
        said = c.predict(fit, setup, c.FITTED)
        found.append((setup, fit, max(abs(s / p.speedup - 1) for s, p in zip(said, c.FITTED, strict=True))))
    return found


def rows(points: Sequence[Point]) -> list[list[str]]:
    return [
        [
            point.group,
            point.name,
            point.source.partition("]")[0] + "]",
            f"{point.known:.2f}",
            f"{point.predicted:.2f}",
            f"{100 * point.error:+.0f} %",
            "" if point.left_out is None else f"{100 * (point.left_out / point.known - 1):+.0f} %",
            {None: "", True: "met", False: "not met"}[point.met],
        ]
        for point in points
    ]


COLUMNS = ("set", "point", "", "known", "said", "error", "left out", "target")
