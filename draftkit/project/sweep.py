"""Every cell of a scenario: k x requests x GPUs x lag x acceptance, and the best of them.

A cell's rollout speedup is of the batch on the GPUs that generate in the plain arm, its step speedup of the whole step.
`k = "schedule"` drafts, at every number of running requests, the k that pays most there, and none where none pays.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from draftkit.evals.speed_model import acceptance_length
from draftkit.project.scenario import Scenario, cluster_of, survival_for
from draftkit.project.step import Cluster, StepTime

SCHEDULE = "schedule"
AXES = ("gpus", "lag", "requests", "acceptance", "k")


def sweep(scenario: Scenario) -> list[dict[str, Any]]:
    drafter = scenario.drafter
    acceptances = drafter.acceptance if drafter.survival is None else [None]
    cells = []
    for gpus, lag, requests in product(scenario.gpus, scenario.lag, sorted(set(scenario.rollout.requests))):
        cluster = cluster_of(scenario, gpus, lag, requests)
        plain = cluster.plain()
        for acceptance in acceptances:
            survival = survival_for(drafter, acceptance or 0.0)
            where = {"gpus": gpus, "lag": lag, "requests": requests, "acceptance": acceptance}
            for k in (*sorted(set(drafter.k)), SCHEDULE):
                cells.append(where | _cell(cluster, plain, k, drafter.k, survival))
    return cells


def _cell(cluster: Cluster, plain: StepTime, k: int | str, ks: list[int], survival: list[float]) -> dict[str, Any]:
    batch = cluster.generation(cluster.gpus if cluster.lag == 0 else cluster.gpus - plain.train_gpus)
    batch = batch.pooled(max(1, cluster.lag))
    drafts: int | Callable[[int], int] = batch.schedule(ks, survival) if k == SCHEDULE else int(k)
    step = cluster.step(drafts, survival)
    tau = None if k == SCHEDULE else acceptance_length(survival[: int(k)])
    speedup = plain.generate / step.generate if cluster.lag == 0 else batch.speedup(drafts, survival)
    per_replica = len(batch.per_replica())
    return {
        "k": k,
        "acceptance_length": tau,
        "tp": batch.server.tp,
        "requests_per_replica": min(per_replica, batch.slots()),
        "rollout_speedup": speedup,
        "step_speedup": plain.total / step.total,
        "plain_rollout_s": plain.generate,
        "rollout_s": step.generate,
        "plain_step_s": plain.total,
        "step_s": step.total,
        "exposed_s": step.exposed,
        "plain_exposed_s": plain.exposed,
        "generation_share": plain.generation_share,
        "logprob_s": step.logprob,
        "train_s": step.train,
        "train_gpus": step.train_gpus if cluster.lag else None,
    }


def best(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The fixed k with the fastest step; of equal ones the smaller."""
    fixed = [cell for cell in cells if cell["k"] != SCHEDULE]
    return max(fixed, key=lambda cell: (cell["step_speedup"], -cell["k"]))


def axes_of(cells: list[dict[str, Any]]) -> list[str]:
    """Axes with more than one value, k last and always there; the schedule counts as no value."""
    varied = [axis for axis in AXES[:-1] if len({cell[axis] for cell in cells}) > 1]
    return [*varied, "k"]
