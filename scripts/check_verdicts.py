"""Are the verdicts of `eval-acceptance` honest? A real engine against itself, and against itself with a planted delay.

    python scripts/check_verdicts.py --model demo --corpus outputs/demo/prepare

Twenty small benches each way, each of `--repeats` passes over the prompts in blocks that both arms answer in turns.
Both arms are the same plain engine, so that a verdict other than "undecided" is a false one: at 95 % one in twenty is
expected. Then one arm sleeps for `--planted` (0.1) of the time of every engine step, which has to be called slower.
Prints each interval and the counts; exits 1 when more than three false verdicts came (which honest intervals do one
time in sixty) or fewer than 17 planted ones were found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from draftkit import console
from draftkit.evals.acceptance import speed
from draftkit.evals.bench import heldout_prompts, request_row, split_prompts
from draftkit.models import resolve_model
from draftkit.recipe import load_recipe

TIMES, FEWEST_RIGHT = 20, 17


@contextmanager
def delayed(engine, share: float):
    """Every engine step is followed by a sleep of `share` of its time."""
    step = engine._llm.llm_engine.step

    def slow():
        start = time.perf_counter()
        result = step()
        time.sleep(share * (time.perf_counter() - start))
        return result

    engine._llm.llm_engine.step = slow
    try:
        yield
    finally:
        engine._llm.llm_engine.step = step


def timed(engine, prompts: dict[str, list[int]], ids: list[str], sampling, concurrency: int) -> dict:
    start = time.perf_counter()
    answers = engine.generate([prompts[id] for id in ids], sampling, max_concurrency=concurrency)
    wall_s = time.perf_counter() - start
    return {"wall_s": wall_s, "requests": [request_row(id, a) for id, a in zip(ids, answers, strict=True)]}


def bench(measure: Callable[[list[str], bool], dict], blocks: list[list[str]], turn: int, repeats: int) -> dict:
    """One small bench: every block by both arms as often, in alternating order."""
    pairs = []
    for number, block in enumerate(blocks * repeats):
        first = bool((turn + number) % 2)
        rows = {second: measure(block, second) for second in (first, not first)}
        pairs.append((rows[True], rows[False]))
    num_prompts = sum(map(len, blocks))
    return speed(pairs, 1.0, np.zeros(num_prompts), num_prompts)  # nothing is drafted: AL 1, without spread


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", default="demo")
    arguments.add_argument("--corpus", type=Path, required=True)
    arguments.add_argument("--planted", type=float, default=0.1)
    arguments.add_argument("--times", type=int, default=TIMES)
    arguments.add_argument("--repeats", type=int, default=4)
    arguments.add_argument("--tokens", type=int, default=24)
    arguments.add_argument("--concurrency", type=int, default=4)
    given = arguments.parse_args()

    from draftkit.engine import Engine
    from draftkit.types import Sampling

    recipe, _ = load_recipe("quickstart", [f"model.path={given.model}", f"eval.max_tokens={given.tokens}"])
    verifier = resolve_model(recipe.model.path)
    prompts = heldout_prompts(recipe, given.corpus, verifier, 0)
    sampling = Sampling(recipe.sampling.temperature, max_tokens=given.tokens, ignore_eos=True)
    blocks = split_prompts(list(prompts), given.concurrency)
    counts = {}
    with Engine(verifier, recipe_engine=recipe.engine, seed=0) as engine:
        timed(engine, prompts, blocks[0], sampling, given.concurrency)  # warm
        for name, share in (("A against A", 0.0), (f"A against A + {given.planted:.0%}", given.planted)):

            def measure(block: list[str], second: bool, share: float = share) -> dict:
                with delayed(engine, share if second else 0.0):
                    return timed(engine, prompts, block, sampling, given.concurrency)

            found = [bench(measure, blocks, turn, given.repeats) for turn in range(given.times)]
            shown = [[f"{f['speedup']:.3f}", "{:.3f}-{:.3f}".format(*f["speedup_ci"]), f["verdict"]] for f in found]
            console.table(name, ["speedup", "95 %", "verdict"], shown)
            counts[name] = {verdict: sum(f["verdict"] == verdict for f in found) for verdict in
                            ("faster", "slower", "undecided")}  # fmt: skip
            console.closing(f"{name}: {counts[name]}")
    same, planted = counts.values()
    wrong = given.times - same["undecided"] > given.times - FEWEST_RIGHT or planted["slower"] < FEWEST_RIGHT
    sys.exit(1 if wrong and given.times == TIMES else 0)


if __name__ == "__main__":
    main()
