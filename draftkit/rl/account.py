"""The figures of a step for `metrics.jsonl`, from what every rank measured, and what has to be remembered for them.

A forecast is made from *earlier* steps: decoding times (`StepCost`), survival of the last few speculative steps.
Lengths are this step's own, because a batch of long answers must not count as a slow one. Decoding times and lengths
are the main rank's: ranks generate side by side, and the slowest decides (`generate_s` is the maximum).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from draftkit.evals.drain import Requests, Schedule
from draftkit.evals.step_cost import StepCost, cells_of
from draftkit.recipe import Recipe
from draftkit.rl import ledger
from draftkit.types import EngineStep, SpecCounters

RECENT = 4  # speculative steps whose survival predicts the next one's
REMEMBERED = 3000  # engine steps of each draft length that decoding times are fitted to


class Account:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.times: list[ledger.StepTime] = []
        self.engine_steps: dict[int, deque[EngineStep]] = {}
        self.counters: deque[SpecCounters] = deque(maxlen=RECENT)

    def step(
        self, number: int, everybody: Sequence[dict[str, Any]], seconds: dict[str, float], schedule: Schedule
    ) -> dict[str, Any]:
        """everybody: `Loop._figures` of all ranks; seconds: the main loop's clock; schedule: drafts by requests running
        in this step's rollouts."""
        k = max(k for _, _, k in schedule)
        rewards = [r for one in everybody for r in one["rewards"]]
        lengths = [n for one in everybody for n in one["lengths"]]
        by_turn = zip_longest(*(one["turns"] for one in everybody), fillvalue=SpecCounters())
        turns = [sum(counters, SpecCounters()) for counters in by_turn]
        drafted = sum(turns, SpecCounters())
        generate_s = max(one["generate_s"] for one in everybody)
        step_s = ledger.step_seconds(seconds)
        mine = everybody[0]

        forecast = self._forecast(mine, seconds, schedule)
        if number > 1:  # the first step pays for kernels and memory that are made once, and for a drafter that grows
            trains = 0.0 if k else seconds["train_drafter"]  # a run without speculation would not pay for this
            self.times.append(ledger.StepTime(k, sum(lengths), generate_s, step_s - trains))
        self._remember(mine["engine_steps"], drafted)
        realised = ledger.realised(self.times)
        row: dict[str, Any] = {
            "reward_mean": _mean(rewards),
            "reward_std": (_mean([(r - _mean(rewards)) ** 2 for r in rewards])) ** 0.5,
            "response_tokens": sum(lengths),
            "response_length": _mean(lengths),
            "truncated": sum(one["truncated"] for one in everybody) / max(1, len(lengths)),
            "entropy": sum(one["entropy"] for one in everybody) / max(1, sum(lengths)),
            "acceptance_length": drafted.acceptance_length if drafted.num_drafts else None,
            "survival": drafted.survival(self.recipe.spec.k) if drafted.num_drafts else None,
            "acceptance_by_turn": [
                {"turn": t + 1, "acceptance_length": c.acceptance_length, "rounds": c.num_drafts}
                for t, c in enumerate(turns)
                if c.num_drafts
            ],
            "time_s": seconds,
            "share": ledger.shares(seconds),
            "generate_s": generate_s,
            "tokens_per_s": sum(lengths) / generate_s if generate_s else None,
            "generation_share": generate_s / step_s if step_s else 0.0,
            "predicted_speedup": None,
            "predicted_generation_speedup": None,
            "attribution": None,
            "realised_speedup": None,
            "realised": None,
        }
        if forecast is not None:
            row |= {
                "predicted_speedup": forecast.step_speedup,
                "predicted_generation_speedup": forecast.generation_speedup,
                "plain_generation_share": forecast.generation_share,
                "attribution": ledger.attribute(forecast.parts, ledger.measured_parts(seconds, mine["engine_steps"])),
            }
        if realised is not None:
            row |= {"realised_speedup": realised.step, "realised": asdict(realised)}
        return row

    def _forecast(self, mine: dict[str, Any], seconds: dict[str, float], schedule: Schedule) -> ledger.Forecast | None:
        drafted = sum(self.counters, SpecCounters())
        if not any(k for _, _, k in schedule) or not drafted.num_drafts or self.recipe.rl.lag:
            return None
        cost = self.cost()
        if cost is None:
            return None
        named = ("generate", "publish", "train_drafter", "eval")
        return ledger.forecast(
            Requests(tuple(mine["prompts"]), tuple(mine["lengths"]), self.recipe.engine.max_num_seqs),
            drafted.survival(self.recipe.spec.k),
            cost,
            schedule=schedule,
            prefill_s=max(0.0, ledger.prefill_excess(cost, mine["engine_steps"])),
            sync_s=seconds["sync"] + seconds["publish"],
            rest_s=seconds["total"] - sum(seconds[part] for part in named),
            train_drafter_s=seconds["train_drafter"],
        )

    def cost(self) -> StepCost | None:
        return StepCost.fit(cells_of(step for steps in self.engine_steps.values() for step in steps))

    def _remember(self, steps: Sequence[EngineStep], drafted: SpecCounters) -> None:
        for step in steps:
            self.engine_steps.setdefault(step.k, deque(maxlen=REMEMBERED)).append(step)
        if drafted.num_drafts:
            self.counters.append(drafted)

    def state(self) -> dict[str, Any]:
        return {
            "times": [asdict(t) for t in self.times],
            "engine_steps": [asdict(s) for steps in self.engine_steps.values() for s in steps],
            "counters": [asdict(c) for c in self.counters],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.times = [ledger.StepTime(**t) for t in state["times"]]
        self.engine_steps = {}
        self._remember([EngineStep(**s) for s in state["engine_steps"]], SpecCounters())
        self.counters.clear()
        self.counters.extend(SpecCounters.read(c) for c in state["counters"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
