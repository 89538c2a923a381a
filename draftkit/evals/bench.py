"""`draftkit eval-acceptance`: a k sweep x concurrency x temperature on held-out prompts, in the real engine.

Two engines share the process: a plain one, the k = 0 arm, and a speculative one built for the largest k, whose draft
length is changed live. Arms therefore take turns within seconds on the same prompts, and drift of the machine hits all
of them alike. Time is wall time of a block of prompts, prefill included, as a rollout pays it; answers end where they
end, so arms differ in length at T > 0 and the compared quantity is time per response token.

Requests carry no seed of their own: a generator per request takes vLLM off its batched sampling path (and off
FlashInfer on CUDA), so the timed sampler would not be the one that rollouts use. The engines are seeded instead.

Every measurement is one line of metrics.jsonl, and the table is a pure function of those lines. Left out: the ceiling
that the verifier's entropy sets to acceptance, serving under an arrival rate, and other schedules than a constant k.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftkit.console import Progress, progress, say
from draftkit.data.shards import Corpus
from draftkit.engine import Engine
from draftkit.errors import Interrupted, RunFailed, UserError
from draftkit.evals import report, samples
from draftkit.evals.acceptance import Row, results_from_rows
from draftkit.evals.drafter import NGRAM, resolve_drafter
from draftkit.evals.step_cost import cells_of, to_rows
from draftkit.models import fingerprint, load_tokenizer, model_facts, render, resolve_model
from draftkit.recipe import Recipe
from draftkit.run import Interrupt, RunDir, environment
from draftkit.types import Generation, Sampling, SpecConfig

MIN_BLOCK = 4  # prompts: shorter blocks give more pairs, but start and drain take more of each


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to measure; a block is measured by every k before the next block begins."""

    repeat: int
    temperature: float
    concurrency: int
    block: int
    k: int

    @property
    def of_block(self) -> tuple:
        return self.repeat, self.temperature, self.concurrency, self.block


def run(recipe: Recipe, run: RunDir, *, corpus: Path, drafter: str | None) -> dict[str, Any]:
    """Measure what the run's metrics.jsonl lacks, write the report and results.json, and return the results.

    Raises UserError before an engine is built when corpus, drafter and verifier do not belong together, and
    Interrupted after the measurement during which a signal came.
    """
    verifier = resolve_model(recipe.model.path, recipe.model.revision)
    facts = model_facts(verifier, recipe.model.trust_remote_code)
    spec = resolve_drafter(drafter, facts, fingerprint(verifier), max(recipe.eval.k))
    spec = replace(spec, draft_sample_method=recipe.eval.draft_sample_method)
    prompts = heldout_prompts(recipe, corpus, verifier, spec.k)
    plan = plan_row(recipe, verifier, spec, drafter, list(prompts))
    run.begin()
    done = finished_points(run, plan)
    todo = [block for block in blocks(recipe, list(prompts)) if not done.issuperset(block.points)]
    if todo:
        measure_all(recipe, run, verifier, spec, prompts, todo)
    results = results_from_rows(run.read_metrics()) | {"env": environment()}
    report.show(results)
    report.write(results, run.path)
    run.finish(results, report.headline(results))
    return results


# --- what is measured -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    prompt_ids: list[str]
    points: list[Point]  # in the order in which the arms take their turn


def blocks(recipe: Recipe, prompt_ids: list[str]) -> Iterator[Block]:
    """All blocks in order. Arms rotate from block to block, and every other block turns them round, so that no arm
    always follows the same neighbour or always comes last."""
    arms = recipe.eval.k
    for repeat in range(recipe.eval.repeats):
        for temperature in temperatures(recipe):
            for concurrency in recipe.eval.concurrency:
                parts = split_prompts(prompt_ids, concurrency)
                for block, part in enumerate(parts):
                    turn = repeat * len(parts) + block
                    order = arms[turn % len(arms) :] + arms[: turn % len(arms)]
                    order = order[::-1] if turn % 2 else order
                    yield Block(part, [Point(repeat, temperature, concurrency, block, k) for k in order])


def split_prompts(prompt_ids: list[str], concurrency: int) -> list[list[str]]:
    """Even blocks of at least `concurrency` and MIN_BLOCK prompts; prompts repeat only to fill the concurrency."""
    filled = [prompt_ids[i % len(prompt_ids)] for i in range(max(len(prompt_ids), concurrency))]
    count = max(1, len(filled) // max(concurrency, MIN_BLOCK))
    return [filled[i * len(filled) // count : (i + 1) * len(filled) // count] for i in range(count)]


def temperatures(recipe: Recipe) -> list[float]:
    """The rollout temperature first: the recommended schedule is for it."""
    return recipe.eval.temperatures or list(dict.fromkeys([recipe.sampling.temperature, 0.0]))


def sampling_at(recipe: Recipe, temperature: float, max_tokens: int) -> Sampling:
    own = recipe.sampling
    return Sampling(temperature, own.top_p, own.top_k, max_tokens, tuple(own.stop))


def heldout_prompts(recipe: Recipe, corpus: Path, verifier: Path, k: int) -> dict[str, list[int]]:
    """{prompt id: token ids} of the first `eval.prompts` held-out prompts, rendered as the verifier was trained to
    read them. Raises UserError for another verifier's corpus and for what does not fit into the context."""
    opened = Corpus.open(corpus)
    opened.check_verifier(fingerprint(verifier))
    chosen = opened.prompts("heldout")[: recipe.eval.prompts]
    if not chosen:
        raise UserError(f"The corpus {corpus} has no held-out prompts.", "Prepare it with data.heldout of at least 1.")
    if len(chosen) < recipe.eval.prompts:
        say(f"the corpus has {len(chosen)} held-out prompts, eval.prompts asks for {recipe.eval.prompts}: using those")
    if max(recipe.eval.concurrency) > recipe.engine.max_num_seqs:
        raise UserError(
            f"eval.concurrency {max(recipe.eval.concurrency)} is more than engine.max_num_seqs "
            f"{recipe.engine.max_num_seqs}.",
            "Raise engine.max_num_seqs.",
        )
    tokenizer = load_tokenizer(verifier, recipe.model.trust_remote_code)
    rendered = {prompt.id: render(tokenizer, list(prompt.messages), recipe.sampling.thinking) for prompt in chosen}
    longest = max(rendered, key=lambda id: len(rendered[id]))
    # The drafter looks k + 1 tokens past the last one; a cut answer would be a different workload for each k.
    need = len(rendered[longest]) + recipe.eval.max_tokens + k + 1
    if need > recipe.engine.max_model_len:
        raise UserError(
            f"The held-out prompt '{longest}' has {len(rendered[longest])} tokens; with eval.max_tokens and k it needs "
            f"{need}, more than engine.max_model_len {recipe.engine.max_model_len}.",
            "Raise engine.max_model_len or lower eval.max_tokens.",
        )
    return rendered


# --- what was measured ------------------------------------------------------------------------------------------


def plan_row(recipe: Recipe, verifier: Path, spec: SpecConfig, drafter: str | None, prompt_ids: list[str]) -> Row:
    """The first line of metrics.jsonl: all that the table needs beside the measurements."""
    served = spec.model or spec.target
    own_vocab = {"own_vocab": True} if spec.own_vocab else {}
    return {
        "event": "plan",
        "verifier": recipe.model.path,
        "verifier_fingerprint": fingerprint(verifier),
        "drafter": None if spec.method == NGRAM else drafter,
        "drafter_weights": fingerprint(Path(served))["weights"] if served else None,
        "method": spec.method,
        "draft_sample_method": spec.draft_sample_method,
        "temperature": temperatures(recipe)[0],
        "max_num_seqs": recipe.engine.max_num_seqs,
        "prompts": prompt_ids,
        "seed": recipe.eval.seed,
        **own_vocab,
    }


def finished_points(run: RunDir, plan: Row) -> set[Point]:
    """Points already in metrics.jsonl; writes the plan when there is none. Raises UserError when what the run
    measured has changed since."""
    rows = run.read_metrics()
    if not rows:
        run.metrics(plan)
        return set()
    changed = [name for name in plan if plan[name] != rows[0].get(name)]
    if changed:
        raise UserError(
            f"{run.path} cannot be resumed: {', '.join(changed)} changed since it began.",
            "Use --overwrite, or another --out.",
        )
    return {Point(*(row[name] for name in Point.__slots__)) for row in rows if row["event"] == "measured"}


# --- measuring --------------------------------------------------------------------------------------------------


def measure_all(
    recipe: Recipe, run: RunDir, verifier: Path, spec: SpecConfig, prompts: dict[str, list[int]], todo: list[Block]
) -> None:
    """Measure whole blocks: one cut short is measured again by all arms, or its pairs would span two processes."""
    warm: set[tuple[float, int]] = set()
    total = sum(_weight(point, block) for block in todo for point in block.points)
    with Interrupt() as interrupt, ExitStack() as stack:
        stop = raise_when(interrupt, run)
        plain, speculative = build_engines(recipe, verifier, spec, stack, stop)

        def engine_for(k: int) -> Engine:
            if k == 0:
                return plain
            speculative.set_k(k)
            return speculative

        bar = stack.enter_context(progress("eval-acceptance", total))
        for block in todo:
            first = block.points[0]
            if (first.temperature, first.concurrency) not in warm:
                warm.add((first.temperature, first.concurrency))
                warm_up(recipe, engine_for, block, prompts, stop)
            for point in block.points:
                run.metrics(measure(recipe, engine_for(point.k), spec, point, block, prompts))
                _advance(bar, point, block)
                stop()
        record_samples(recipe, run, verifier, engine_for, prompts)


def record_samples(
    recipe: Recipe,
    run: RunDir,
    verifier: Path,
    engine_for: Callable[[int], Engine],
    prompts: dict[str, list[int]],
) -> None:
    """After the last measurement: a few answers at each temperature with their drafts, for `draftkit report`. At the
    k that is recommended for the fewest requests, or the largest."""
    if recipe.engine.tensor_parallel_size > 1:
        return  # the drafter lives in other processes, where its proposals cannot be seen
    k = results_from_rows(run.read_metrics())["schedule"][0][2] or max(recipe.eval.k)
    shown = list(prompts.values())[: min(samples.RESPONSES, recipe.engine.max_num_seqs)]
    tokenizer = load_tokenizer(verifier, recipe.model.trust_remote_code)
    rows = []
    for temperature in temperatures(recipe):
        sampling = sampling_at(recipe, temperature, recipe.eval.max_tokens)
        seeded = [replace(sampling, seed=recipe.eval.seed + i) for i in range(len(shown))]
        rows += samples.record(engine_for(k), tokenizer, shown, seeded, k)
    samples.keep(run, rows)


def raise_when(interrupt: Interrupt, run: RunDir) -> Callable[[], None]:
    def stop() -> None:
        if interrupt.requested:
            raise Interrupted(f"measurements are saved in {run.path}")

    return stop


def build_engines(
    recipe: Recipe, verifier: Path, spec: SpecConfig, stack: ExitStack, stop: Callable[[], None]
) -> tuple[Engine, Engine]:
    """A plain one and one that speculates. Both live on one device, so each gets half of its memory share."""
    share = recipe.engine.gpu_memory_utilization / 2
    section = recipe.engine.model_copy(update={"gpu_memory_utilization": share})
    engines = []
    for config in (None, spec):
        say(f"loading the {'plain' if config is None else f'speculative ({spec.method})'} engine")
        engines.append(stack.enter_context(Engine(verifier, recipe_engine=section, spec=config, seed=recipe.eval.seed)))
        stop()
    return engines[0], engines[1]


def warm_up(
    recipe: Recipe,
    engine_for: Callable[[int], Engine],
    block: Block,
    prompts: dict[str, list[int]],
    stop: Callable[[], None],
) -> None:
    """Outside any window: the first steps of a new shape allocate and compile."""
    if not recipe.eval.warmup_tokens:
        return
    first = block.points[0]
    sampling = sampling_at(recipe, first.temperature, recipe.eval.warmup_tokens)
    for point in block.points:
        engine_for(point.k).generate([prompts[id] for id in block.prompt_ids[: first.concurrency]], sampling)
        stop()


def measure(
    recipe: Recipe, engine: Engine, spec: SpecConfig, point: Point, block: Block, prompts: dict[str, list[int]]
) -> Row:
    """Answer the block's prompts with one arm and return the raw row."""
    sampling = sampling_at(recipe, point.temperature, recipe.eval.max_tokens)
    engine.step_log()
    start = time.perf_counter()
    answers = engine.generate([prompts[id] for id in block.prompt_ids], sampling, max_concurrency=point.concurrency)
    wall_s, steps = time.perf_counter() - start, engine.step_log()
    requests = [request_row(id, answer) for id, answer in zip(block.prompt_ids, answers, strict=True)]
    if point.k:
        check_draft_length(requests, spec.method, point.k)
    row = {"event": "measured"} | {name: getattr(point, name) for name in Point.__slots__}
    return row | {
        "wall_s": wall_s,
        "parts_s": {"draft_s": sum(s.draft_seconds for s in steps), "step_s": sum(s.seconds for s in steps)},
        "requests": requests,
        "steps": to_rows(cells_of(steps)),
    }


def request_row(prompt_id: str, answer: Generation) -> Row:
    counters = answer.spec
    return {
        "prompt": prompt_id,
        "tokens": len(answer.response_ids),
        "finish": answer.finish_reason,
        "drafts": counters.num_drafts if counters else 0,
        "draft_tokens": counters.num_draft_tokens if counters else 0,
        "accepted": counters.num_accepted if counters else 0,
        "per_pos": list(counters.accepted_per_pos) if counters else [],
    }


def check_draft_length(requests: list[Row], method: str, k: int) -> None:
    """A draft length that did not take effect would spoil a whole column. N-gram drafts may be shorter."""
    drafts, tokens = (sum(request[name] for request in requests) for name in ("drafts", "draft_tokens"))
    if tokens > drafts * k or (drafts and method != NGRAM and tokens <= drafts * (k - 1)):
        raise RunFailed(
            f"The engine drafted {tokens / drafts:.2f} tokens a round where k = {k} was set.",
            "This is a fault of draftkit or of this vLLM version: please report it.",
        )


def _weight(point: Point, block: Block) -> float:
    return len(block.prompt_ids) / point.concurrency


def _advance(bar: Progress, point: Point, block: Block) -> None:
    bar.advance(_weight(point, block), f"T={point.temperature:g} concurrency={point.concurrency} k={point.k}")
