"""Does the recommended schedule hold what it promises? Replays of batches with three distributions of answer lengths.

    python scripts/bench_schedules.py --corpus outputs/demo/prepare --drafter outputs/demo/train-drafter/drafter

`long tail`: most answers short, a few long, so that the batch drains slowly; `even`: as a task whose answers are alike;
`hostile`: a full engine of answers of 6 to 12 tokens, where nothing pays. Each is one batch of prompts of the corpus,
written as an rl run writes its rollouts, and replayed by `draftkit eval-acceptance --replay`: the first repeat chooses
the schedule, the others judge it against k = 0 and every fixed k. Prints a table of all arms.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

from draftkit import console
from draftkit.data.rollouts import ROLLOUTS
from draftkit.data.shards import Corpus, write_shard
from draftkit.evals.report import interval
from draftkit.types import Rollout

COLUMNS = ("lengths", "arm", "seconds", "predicted", "speedup", "95 %", "verdict")
BATCHES = {
    "long tail": (40, lambda rng: min(288, max(8, round(rng.lognormvariate(3.2, 1.1))))),
    "even": (24, lambda rng: rng.randrange(60, 101)),
    "hostile": (64, lambda rng: rng.randrange(6, 13)),
}


def write_batch(source: Path, corpus: Corpus, num: int, draw, seed: int) -> None:
    rng = random.Random(seed)
    answers = {r.prompt_id: r for r in corpus.rollouts("train")}
    chosen = rng.sample(sorted(answers), num)
    rollouts = [
        Rollout(id, 0, answers[id].task, answers[id].prompt_ids, (0,) * draw(rng), "length", None, 1.0) for id in chosen
    ]
    (source / ROLLOUTS).mkdir(parents=True, exist_ok=True)
    write_shard(source / ROLLOUTS / "step-00001-turn-1-rank-0.parquet", rollouts)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--corpus", type=Path, required=True)
    arguments.add_argument("--drafter", required=True)
    arguments.add_argument("--model", default="demo")
    arguments.add_argument("--k", default="0,1,2,3,5")
    arguments.add_argument("--repeats", default="5")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--out", type=Path, default=Path("outputs/bench-schedules"))
    arguments.add_argument("overrides", nargs="*", help="of the recipe, as sampling.temperature=0")
    given = arguments.parse_args()

    rows = []
    for name, (num, draw) in BATCHES.items():
        source, out = given.out / name.replace(" ", "-"), given.out / f"{name.replace(' ', '-')}-replay"
        write_batch(source, Corpus.open(given.corpus), num, draw, given.seed)
        command = [sys.executable, "-m", "draftkit", "eval-acceptance", "--replay", str(source), "--resume", "-q"]
        command += ["--model", given.model, "--drafter", given.drafter, "--k", given.k, "--repeats", given.repeats]
        subprocess.run([*command, "--out", str(out), *given.overrides], check=True)
        found = json.loads((out / "results.json").read_text())
        for arm in found["arms"]:
            label = arm["arm"] + (f" (= {arm['same_as']})" if arm["same_as"] else "")
            label += f" {json.dumps(found['schedule'])}" if arm["arm"] == "schedule" else ""
            times = [f"{arm['rollout_s']:.2f}", f"{arm['predicted_s']:.2f}", f"{arm['speedup']:.3f}"]
            rows.append([name, label, *times, interval(arm["speedup_ci"]), arm["verdict"]])
    console.table("schedules", COLUMNS, rows)


if __name__ == "__main__":
    main()
