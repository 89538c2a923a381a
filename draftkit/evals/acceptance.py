"""Statistics of a bench: from raw measurement rows to cells with intervals. Pure: the same rows give the same cells.

A *measurement* is one block of prompts answered by one arm (one k) once. Its row holds the wall time and the
counters of every request (`bench.measure` writes it). A *cell* pools the measurements of one (temperature,
concurrency, k).

Acceptance length. Tokens of one answer are dependent, so requests of one prompt form a cluster and the bootstrap
resamples prompts. Percentile intervals are too short for a handful of clusters; the expanded percentile interval
(Hesterberg, arXiv 1411.5279, section 4.4) reads the quantiles further out, as a t interval would.

Speedup. Within a (repeat, block) every arm answers the same prompts one after the other, so the ratio of time per
token to the k = 0 arm's is a pair, and slow drift of the machine cancels. The log of a ratio splits into

    log S = log AL - log c        AL: how well the drafter fits the prompts;  c: what a round costs on this machine

Blocks of repeated prompts are no new prompts, so the pairs are not independent in AL: taking them for independent
gives intervals that are too short. But c hardly depends on the prompts. So the variance of log S is taken as
var(log AL) from the bootstrap over prompts, plus var(mean log c) over the pairs, and the t interval gets
Welch-Satterthwaite degrees of freedom. With 3 pairs it is as wide as 2 degrees of freedom make it.

Rounds. vLLM counts a draft only when something was drafted; n-gram drafters often propose nothing. A round here is
any decoding step of a request, drafted or not, so that 1 + sum(s_i) = AL and AL / speedup = c hold for them too.
For model drafters the two notions coincide.

Left out: correction for looking at many cells, and the choice of k being made on the data that show its speedup.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from draftkit.evals.speed_model import limit, schedule
from draftkit.evals.step_cost import StepCell, leave_one_out, round_costs

SCHEMA = "draftkit.eval-acceptance/1"
LEVEL = 0.95
BOOTSTRAP_DRAWS = 4000

Row = dict[str, Any]
Interval = list[float]  # [low, high], as it stands in results.json

# --- counts of one request --------------------------------------------------------------------------------------


def num_rounds(request: Row) -> int:
    """Decoding steps of a request: drafted ones, plus steps without a draft, each of which gave one token.

    The first token comes from the prefill. A last round may be cut by the length limit, so tokens can fall short of
    1 + drafts + accepted; they never show a negative number of undrafted steps.
    """
    undrafted = request["tokens"] - 1 - request["drafts"] - request["accepted"]
    return request["drafts"] + max(0, undrafted)


def pooled_acceptance_length(requests: Iterable[Row]) -> float:
    rounds = accepted = 0
    for request in requests:
        rounds += num_rounds(request)
        accepted += request["accepted"]
    return 1.0 + accepted / rounds if rounds else 1.0


def pooled_survival(requests: Sequence[Row], k: int) -> list[float]:
    """[s_1 .. s_k], s_i the share of rounds in which draft tokens 1..i were all accepted."""
    rounds = sum(map(num_rounds, requests))
    counts = [sum(request["per_pos"][i] for request in requests if i < len(request["per_pos"])) for i in range(k)]
    return [count / rounds if rounds else 0.0 for count in counts]


def makespan(steps: Sequence[int], concurrency: int) -> int:
    """Engine steps that `concurrency` slots need for a queue of requests that take `steps` each, first come first.

    A block drains towards its end, so sum(steps) / makespan, the mean number of running requests, is below
    `concurrency`; `mean_running` of a cell says by how much.
    """
    slots = [0] * concurrency
    for need in steps:
        heapq.heappush(slots, heapq.heappop(slots) + need)
    return max(slots)


# --- intervals --------------------------------------------------------------------------------------------------


def student_t_quantile(df: float, level: float = LEVEL) -> float:
    """t with P(|T| < t) = level. With t = sqrt(df) tan(a) the density is cos(a)^(df-1), smooth for df >= 1."""
    norm = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        angles = np.linspace(0, middle, 2001)
        mass = 2 * norm * float(np.trapezoid(np.cos(angles) ** (df - 1), angles))
        low, high = (middle, high) if mass < level else (low, middle)
    return math.sqrt(df) * math.tan(low)


def bootstrap_acceptance_length(requests: Iterable[Row], seed: Sequence[int]) -> np.ndarray:
    """Draws of the pooled acceptance length, prompts resampled with replacement. Empty with fewer than two prompts."""
    clusters: dict[str, list[int]] = {}
    for request in requests:
        sums = clusters.setdefault(request["prompt"], [0, 0])
        sums[0] += num_rounds(request)
        sums[1] += request["accepted"]
    if len(clusters) < 2:
        return np.empty(0)
    sums_P2 = np.array([clusters[prompt] for prompt in sorted(clusters)], dtype=float)
    num_prompts = len(sums_P2)
    rng = np.random.default_rng(list(seed))
    weights_NP = rng.multinomial(num_prompts, [1 / num_prompts] * num_prompts, size=BOOTSTRAP_DRAWS)
    rounds_N, accepted_N = (weights_NP @ sums_P2).T
    return 1.0 + accepted_N / np.maximum(rounds_N, 1.0)


def expanded_percentile_interval(draws: np.ndarray, num_clusters: int) -> Interval | None:
    """Bootstrap interval whose tail probability makes up for n instead of n - 1 and for the normal instead of t."""
    if not len(draws):
        return None
    z = student_t_quantile(num_clusters - 1) * math.sqrt(num_clusters / (num_clusters - 1))
    tail = NormalDist().cdf(-z)
    low, high = np.quantile(draws, [tail, 1 - tail])
    return [float(low), float(high)]


def speedup_interval(
    log_speedup: float, log_cost_pairs: Sequence[float], log_al_draws: np.ndarray, num_clusters: int
) -> Interval | None:
    """exp(log S +- t sqrt(var(log AL) + var(mean log c))); None where a single pair or prompt leaves no spread."""
    num_pairs = len(log_cost_pairs)
    if num_pairs < 2 or not len(log_al_draws):
        return None
    var_prompts = float(np.var(log_al_draws)) * num_clusters / (num_clusters - 1)
    var_machine = float(np.var(log_cost_pairs, ddof=1)) / num_pairs
    total = var_prompts + var_machine
    if total == 0:
        return [math.exp(log_speedup), math.exp(log_speedup)]
    df = total**2 / (var_prompts**2 / (num_clusters - 1) + var_machine**2 / (num_pairs - 1))
    half = student_t_quantile(df) * math.sqrt(total)
    return [math.exp(log_speedup - half), math.exp(log_speedup + half)]


def verdict(interval: Interval | None) -> str:
    if interval is None or interval[0] <= 1 <= interval[1]:
        return "undecided"
    return "faster" if interval[0] > 1 else "slower"


# --- cells ------------------------------------------------------------------------------------------------------


def time_per_token(rows: Iterable[Row]) -> float:
    rows = list(rows)
    return sum(row["wall_s"] for row in rows) / sum(request["tokens"] for row in rows for request in row["requests"])


def cells_from_rows(rows: Iterable[Row], seed: int) -> list[Row]:
    """One cell per (temperature, concurrency, k), in the order temperature as first seen, concurrency, k.

    A block that was interrupted between its arms is measured again as a whole, so the last row of a key counts.
    """
    measured: dict[tuple, Row] = {}
    for row in rows:
        measured[row["temperature"], row["concurrency"], row["k"], row["repeat"], row["block"]] = row
    cells: dict[tuple, list[Row]] = {}
    for key in sorted(measured):
        cells.setdefault(key[:3], []).append(measured[key])
    seen = list(dict.fromkeys(key[0] for key in measured))
    return [_cell(cells[key], measured, seed) for key in sorted(cells, key=lambda key: (seen.index(key[0]), *key[1:]))]


def _cell(rows: list[Row], measured: dict[tuple, Row], seed: int) -> Row:
    temperature, concurrency, k = (rows[0][name] for name in ("temperature", "concurrency", "k"))
    requests = [request for row in rows for request in row["requests"]]
    rounds = sum(map(num_rounds, requests))
    num_prompts = len({request["prompt"] for request in requests})
    draws = bootstrap_acceptance_length(requests, (seed, k, concurrency, round(1000 * temperature)))
    repeats = sorted({row["repeat"] for row in rows})
    steps = [[1 + num_rounds(request) for request in row["requests"]] for row in rows]
    cell = {
        "k": k,
        "concurrency": concurrency,
        "temperature": temperature,
        "repeats": len(repeats),
        "num_prompts": num_prompts,
        "num_tokens": sum(request["tokens"] for request in requests),
        "num_rounds": rounds,
        "mean_running": sum(map(sum, steps)) / sum(makespan(block, concurrency) for block in steps),
        "tokens_per_s": 1 / time_per_token(rows),
        "tokens_per_s_repeats": [1 / time_per_token(row for row in rows if row["repeat"] == r) for r in repeats],
        "acceptance_length": pooled_acceptance_length(requests),
        "acceptance_length_ci": expanded_percentile_interval(draws, num_prompts) if k else [1.0, 1.0],
        "survival": pooled_survival(requests, k),
        "drafted_share": sum(request["drafts"] for request in requests) / rounds if rounds else 0.0,
    }
    pairs = [(row, measured.get((temperature, concurrency, 0, row["repeat"], row["block"]))) for row in rows]
    pairs = [pair for pair in pairs if pair[1]]
    cell |= speed(pairs, cell["acceptance_length"], np.log(draws), num_prompts, baseline=k == 0)
    return cell | _limits(cell) | _split_cost(rows, cell["round_cost"])


def speed(
    pairs: list[tuple[Row, Row]], acceptance: float, log_draws: np.ndarray, num_prompts: int, *, baseline: bool = False
) -> Row:
    """Speedup over the k = 0 arm, whose own speedup is 1 by definition, with no width and no verdict.

    pairs: (row of the arm, row of k = 0) of the same prompts; log_draws: of the arm's acceptance length."""
    if not pairs:  # an interrupted run can end before the k = 0 arm of its only block
        nothing = dict.fromkeys(("round_cost", "break_even", "speedup", "speedup_ci"))
        return nothing | {"num_pairs": 0, "verdict": "undecided"}
    log_ratios = [math.log(time_per_token([plain]) / time_per_token([row])) for row, plain in pairs]
    log_costs = [
        math.log(pooled_acceptance_length(row["requests"])) - log_ratio
        for (row, _), log_ratio in zip(pairs, log_ratios, strict=True)
    ]
    log_speedup = sum(log_ratios) / len(log_ratios)
    interval = [1.0, 1.0] if baseline else speedup_interval(log_speedup, log_costs, log_draws, num_prompts)
    cost = acceptance / math.exp(log_speedup)
    return {
        "round_cost": cost,
        "break_even": cost,  # the acceptance length at which this cell would be even with k = 0
        "speedup": math.exp(log_speedup),
        "speedup_ci": interval,
        "num_pairs": len(pairs),
        "verdict": verdict(interval),
    }


def _limits(cell: Row) -> Row:
    """The speedup of a drafter that is always accepted, and what holds a slower cell back."""
    k, cost, found = cell["k"], cell["round_cost"], cell["speedup"]
    if not k or cost is None:
        return {"perfect_speedup": None, "limit": None}
    return {"perfect_speedup": (k + 1) / cost, "limit": limit(k, cost, found)}


def _split_cost(rows: list[Row], cost: float | None) -> Row:
    """Draft and verify cost of a round in plain steps: each part's share of the wall time times the round cost.

    Verify is the rest of an engine step: the verifier's forward over k + 1 tokens, and sampling. What is missing to
    the round cost is spent between steps. Null where the engine could not time its parts.
    """
    if cost is None or any(row["parts_s"] is None for row in rows):
        return {"draft_cost": None, "verify_cost": None}
    wall, draft, step = (sum(values) for values in zip(*map(_times, rows), strict=True))
    return {"draft_cost": cost * draft / wall, "verify_cost": cost * (step - draft) / wall}


def _times(row: Row) -> tuple[float, float, float]:
    return row["wall_s"], row["parts_s"]["draft_s"], row["parts_s"]["step_s"]


# --- results ----------------------------------------------------------------------------------------------------


def results_from_rows(rows: list[Row]) -> Row:
    """The lines of metrics.jsonl -> everything in results.json but `env`. Pure: same rows, same table."""
    plan = rows[0]
    cells = cells_from_rows((row for row in rows if row["event"] == "measured"), plan["seed"])
    by_temperature: dict[float, list[Row]] = {}
    for cell in cells:
        by_temperature.setdefault(cell["temperature"], []).append(cell)
    schedules = {t: schedule(of_t, plan["max_num_seqs"]) for t, of_t in by_temperature.items()}
    return {
        "schema": SCHEMA,
        **{name: plan[name] for name in ("verifier", "drafter", "method", "draft_sample_method", "temperature")},
        "verifier_fingerprint": plan["verifier_fingerprint"],
        "own_vocab": plan.get("own_vocab", False),
        "cells": cells,
        "schedule": schedules[plan["temperature"]],
        "costs": [{"temperature": t} | fitted_costs(rows, t, plan["seed"]) for t in by_temperature],
        "schedules": [{"temperature": t, "ranges": ranges} for t, ranges in schedules.items()],
    }


def fitted_costs(rows: list[Row], temperature: float, seed: int) -> Row:
    """Round costs of every k and batch size from the sweep's engine steps, also of those that were not measured, and
    the error of predicting each measured cell from the others (`step_cost`)."""
    timed = [r for r in rows if r["event"] == "measured" and r["temperature"] == temperature and "steps" in r]
    groups = [[StepCell(*cell) for cell in row["steps"]] for row in timed]
    by_cell: dict[tuple[int, int], list[StepCell]] = {}
    for row, group in zip(timed, groups, strict=True):
        by_cell.setdefault((row["k"], row["concurrency"]), []).extend(group)
    most_k = max((row["k"] for row in timed), default=0)
    return {"round_cost": round_costs(groups, most_k, seed), "leave_one_out": leave_one_out(by_cell)}
