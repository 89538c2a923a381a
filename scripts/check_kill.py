"""kill -9 at random moments in each of the three commands: does --resume end with what an undisturbed run ends with?

    python scripts/check_kill.py [--work DIR] [--kills 10] [--seed 0] [prepare] [train-drafter] [eval-acceptance]

Each command runs once undisturbed, which also tells how long it takes. Then it runs with --resume in another directory
and is killed at a moment drawn from that time, again and again; a life that ends before its kill is compared and the
next one starts from nothing, until all kills have landed. What must be equal: every hash of the corpus; the weights,
the optimizer and the log of the training, and the exported drafter, bit for bit; of the evaluation the set of
measurements in the table and the counters of its greedy half (times, and samples at temperature 1, differ by nature).
Exit code 1 when anything differs.

Kills go to the process alone, as the kernel's out-of-memory killer does it. Left out: power cuts, which need a disk
that forgets what was not synced. About 15 minutes on 2 cores, on the demo verifier; name one command to run a part.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RECIPE = """
name: check-kill
engine: {max_model_len: 256, max_num_seqs: 8, kv_cache_gib: 1}
sampling: {n: 1, greedy_n: 1, max_tokens: 32}
data: {limit: 20, heldout: 4, shard_size: 4}
train: {epochs: 4, tokens_per_batch: 768, ttt_steps: 2, save_every: 4, eval_every: 6, parity_prompts: 2}
eval: {k: [0, 2], concurrency: [1, 2], temperatures: [1, 0], prompts: 4, max_tokens: 16, repeats: 2, warmup_tokens: 2}
"""
VERBS = ("prepare", "train-drafter", "eval-acceptance")
STARTUP_S = 0.3  # the earliest kill: before it the interpreter has not found the package


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verbs", nargs="*", metavar="verb", help="default: all three, in this order")
    parser.add_argument("--work", type=Path, default=Path("outputs/check-kill"), help="undisturbed runs are kept here")
    parser.add_argument("--kills", type=int, default=10, help="for each command")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := set(args.verbs) - set(VERBS):
        parser.error(f"{unknown.pop()} is none of {', '.join(VERBS)}")
    args.work.mkdir(parents=True, exist_ok=True)
    (args.work / "recipe.yaml").write_text(RECIPE)
    differences = []
    for verb in args.verbs or VERBS:
        for life, problems in check(verb, args.work, args.kills, random.Random(f"{args.seed}/{verb}")):
            print(f"{verb}: life {life} {'DIFFERS: ' + '; '.join(problems) if problems else 'equal: yes'}", flush=True)
            differences += problems
    print(f"{len(differences)} differences" if differences else "all equal")
    return 1 if differences else 0


def check(verb: str, work: Path, kills: int, rng: random.Random) -> Iterator[tuple[int, list[str]]]:
    """(number, differences) of every life that came to its end."""
    whole, killed = work / "whole" / verb, work / "killed" / verb
    for earlier in VERBS[: VERBS.index(verb) + 1]:  # each reads what the ones before it made
        seconds = undisturbed(earlier, work, work / "whole" / earlier)
    print(f"{verb}: undisturbed {seconds:.1f} s", flush=True)
    print(f"  {'kill':>4} {'life':>4} {'after':>7}  on the disk", flush=True)
    landed, life = 0, 1
    shutil.rmtree(killed, ignore_errors=True)
    while True:
        moment = rng.uniform(STARTUP_S, seconds) if landed < kills else None
        finished = run(verb, work, killed, moment)
        if not finished:
            landed += 1
            print(f"  {landed:>4} {life:>4} {moment:>6.1f}s  {on_disk(killed)}", flush=True)
            continue
        yield life, COMPARE[verb](whole, killed)
        if landed == kills:
            return
        life += 1
        shutil.rmtree(killed)


def undisturbed(verb: str, work: Path, out: Path) -> float:
    """Seconds of the undisturbed run, which is made on first use."""
    clock = out.with_name(f"{verb}.seconds")
    if not clock.exists():
        shutil.rmtree(out, ignore_errors=True)
        start = time.monotonic()
        run(verb, work, out, None)
        clock.write_text(str(time.monotonic() - start))
    return float(clock.read_text())


def run(verb: str, work: Path, out: Path, kill_after: float | None) -> bool:
    """True when the command came to its end, False when it was killed. Any other end is an error."""
    inputs = [] if verb == "prepare" else ["--corpus", str(work / "whole" / "prepare")]
    if verb == "eval-acceptance":
        inputs += ["--drafter", str(work / "whole" / "train-drafter" / "drafter")]
    words = [verb, "-r", str(work / "recipe.yaml"), "--out", str(out), "--resume", *inputs]
    log = work / f"{verb}.log"
    with log.open("a") as file:
        process = subprocess.Popen([sys.executable, "-m", "draftkit", *words], stdout=file, stderr=file)
        try:
            code = process.wait(kill_after)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    if code not in (0, -9):
        raise SystemExit(f"{verb} ended with exit code {code}: see {log}")
    return code == 0


def on_disk(out: Path) -> str:
    """What the kill left, in a few words."""
    if not (out / "config.json").exists():
        return "nothing yet"
    counts = Counter(path.relative_to(out).parts[0] for path in out.rglob("*") if path.is_file())
    folders = [f"{name} {counts[name]}" for name in ("shards", "states", "drafter") if counts[name]]
    checkpoints = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    metrics = (out / "metrics.jsonl").read_bytes() if (out / "metrics.jsonl").exists() else b""
    lines = [
        f"metrics {len(metrics.splitlines())}" + (", the last one torn" if metrics[-1:] not in (b"", b"\n") else "")
    ]
    aside = [str(path.relative_to(out)) for path in out.rglob("*tmp*")] + [p.name for p in out.glob("checkpoints/.*")]
    ends = [name for name in ("manifest.json", "results.json") if (out / name).exists()]
    return ", ".join([*folders, *checkpoints[-1:], *lines, *ends, *(f"half-written {name}" for name in aside)])


# --- what must be equal -----------------------------------------------------------------------------------------


def same_corpus(whole: Path, killed: Path) -> list[str]:
    one, other = (json.loads((out / "manifest.json").read_text()) for out in (whole, killed))
    problems = [f"manifest: {key}" for key in one if one[key] != other.get(key)]
    problems += [
        f"{e['file']} is not as the manifest says" for e in other["shards"] if digest(killed / e["file"]) != e["sha256"]
    ]
    one, other = (json.loads((out / "results.json").read_text()) for out in (whole, killed))
    return problems + [f"results.json: {key}" for key in one if one[key] != other.get(key)]


def same_training(whole: Path, killed: Path) -> list[str]:
    files = [path.relative_to(whole) for part in ("checkpoints", "drafter") for path in (whole / part).rglob("*")]
    files = [file for file in files if file.suffix in {".safetensors", ".pt"}]
    problems = [
        f"{file}" for file in files if not (killed / file).exists() or digest(whole / file) != digest(killed / file)
    ]
    one, other = (drop(json.loads((out / "results.json").read_text()), "tokens_per_s") for out in (whole, killed))
    problems += [f"results.json: {key}" for key in one if one[key] != other.get(key)]
    one, other = ([drop(row, "tokens_per_s") for row in rows(out)] for out in (whole, killed))
    return problems + (["metrics.jsonl"] if one != other else [])


def same_table(whole: Path, killed: Path) -> list[str]:
    one, other = (table(out) for out in (whole, killed))
    problems = [f"{key} is missing" for key in one.keys() - other.keys()]
    problems += [f"{key} is too much" for key in other.keys() - one.keys()]
    greedy = [key for key in one.keys() & other.keys() if key[1] == 0]
    problems += [f"{key} has other counters" for key in greedy if one[key] != other[key]]
    return problems + (["results.json: cells"] if cells(whole) != cells(killed) else [])


def cells(out: Path) -> list[dict[str, Any]]:
    """What of the table does not depend on a clock, nor on samples at temperature 1."""
    named, greedy = ("temperature", "concurrency", "k", "repeats"), ("acceptance_length", "survival", "num_tokens")
    found = json.loads((out / "results.json").read_text())["cells"]
    return [{name: cell[name] for name in named + (() if cell["temperature"] else greedy)} for cell in found]


def table(out: Path) -> dict[tuple, list[dict[str, Any]]]:
    """(repeat, temperature, concurrency, block, k) -> requests, the last row of a key, as the report reads them."""
    key = ("repeat", "temperature", "concurrency", "block", "k")
    return {tuple(row[name] for name in key): row["requests"] for row in rows(out) if row["event"] == "measured"}


COMPARE: dict[str, Callable[[Path, Path], list[str]]] = {
    "prepare": same_corpus,
    "train-drafter": same_training,
    "eval-acceptance": same_table,
}


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def drop(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
