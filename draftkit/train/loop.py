"""`draftkit train-drafter`: corpus -> a drafter of any kind that stock vLLM serves.

In the order in which data flows: documents, draft vocabulary, verifier states, the drafter, optimizer steps, export,
parity check. Batches and learning rate are pure functions of the step, so a run that was killed ends with the weights
of one that was not. Several processes (`accelerate launch`; without accelerators `torchrun`, as the former then starts
one only) share the batches of an optimizer step; gradients are normalised by the slots of all of them together.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

from draftkit.console import progress, say, table
from draftkit.data.batch import plan_epoch, slot_runs
from draftkit.data.capture import CachedStates, States, StreamedStates, Verifier, collate, state_dtype
from draftkit.data.shards import Corpus
from draftkit.drafters.base import Drafter, trainable
from draftkit.drafters.vocab import coverage_of
from draftkit.errors import Interrupted, RunFailed
from draftkit.models import ModelFacts, fingerprint, load_tokenizer, model_facts, resolve_model
from draftkit.recipe import Recipe
from draftkit.run import Interrupt, RunDir
from draftkit.train import optim, where
from draftkit.train.documents import documents, token_counts
from draftkit.train.evaluate import TeacherView, evaluate, summarise
from draftkit.train.parity import check_parity
from draftkit.train.served import export
from draftkit.train.server import ServedVerifier
from draftkit.train.spread import Spread
from draftkit.train.start import aux_layers, build_drafter, check_start
from draftkit.types import Document

DIVERGED = 20.0  # mean KL in nats that no trained drafter has: something is wrong, stop


@dataclass(frozen=True, slots=True)
class Plan:
    """Optimizer steps of the run: each a list of batches, each a list of document numbers."""

    steps: list[list[list[int]]]

    @classmethod
    def make(cls, lengths: list[int], recipe: Recipe, num_processes: int) -> Plan:
        t = recipe.train
        per_step = t.grad_accum * num_processes
        first = plan_epoch(lengths, t.tokens_per_batch, t.seed, 0)
        total = max(1, round(t.epochs * len(first) / per_step))

        def batches() -> Iterator[list[int]]:
            epoch = 0
            while True:
                yield from plan_epoch(lengths, t.tokens_per_batch, t.seed, epoch)
                epoch += 1

        stream = batches()
        return cls([[next(stream) for _ in range(per_step)] for _ in range(total)])


def run(recipe: Recipe, run: RunDir, corpus: Path) -> dict[str, Any]:
    """Train, export to `<run>/drafter` and check against vLLM. Returns what `results.json` holds.

    Raises UserError for a corpus or drafter of another verifier, RunFailed when the loss diverges or the served
    drafter is not the trained one, Interrupted after a signal (state saved).
    """
    recipe = recipe.settled()
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # several processes without accelerators are several otherwise
        # The buffers are constants: the verifier's embedding would travel at every forward.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    torch.manual_seed(recipe.train.seed)

    # ---- documents and verifier ----
    path = resolve_model(recipe.model.path, recipe.model.revision)
    facts, prints = model_facts(path, recipe.model.trust_remote_code), fingerprint(path)
    tokenizer = load_tokenizer(path, recipe.model.trust_remote_code)
    source = Corpus.open(corpus)
    source.check_verifier(prints)
    check_start(recipe, facts, prints)
    rollout_temperature, seq_len = recipe.sampling.temperature, recipe.train.seq_len
    train_docs = documents(source, "train", seq_len, {rollout_temperature, 0.0})
    held_docs = documents(source, "heldout", seq_len, {rollout_temperature})
    with_greedy = recipe.sampling.greedy_n and rollout_temperature > 0
    greedy_docs = documents(source, "heldout", seq_len, {0.0}) if with_greedy else []
    device = str(accelerator.device)
    dtype, temperature = state_dtype(device), recipe.sampling.temperature
    layers, form, server = aux_layers(recipe, facts), recipe.train.cache_form, recipe.train.server
    if server is None:
        verifier = Verifier(path, layers, temperature, dtype, device, form)
    else:
        count = recipe.drafter.num_layers or 1
        verifier = ServedVerifier(path, layers, temperature, dtype, device, form, server=server, last_layers=count)

    # ---- draft vocabulary and drafter ----
    counts = token_counts(train_docs)
    special = [*tokenizer.all_special_ids, *facts.eos_token_ids]
    drafter = build_drafter(recipe, facts, verifier, counts, special, train_docs).to(accelerator.device)
    run.begin()
    say_sizes(drafter, facts, counts, token_counts(held_docs))

    # ---- verifier states ----
    train_states = verifier_states(recipe, run, "train", verifier, prints, train_docs, accelerator)
    held_states = verifier_states(recipe, run, "heldout", verifier, prints, held_docs, accelerator)
    greedy_states = None
    if greedy_docs:
        greedy_states = verifier_states(recipe, run, "heldout-greedy", verifier, prints, greedy_docs, accelerator)

    # ---- steps ----
    teacher = TeacherView(drafter, verifier)
    spread = Spread(drafter, teacher, recipe.train, accelerator)
    num_steps = train(recipe, run, accelerator, spread, teacher, train_states, held_states)
    drafter = spread.whole()
    if drafter is None:
        return {}

    # ---- export and parity ----
    results: dict[str, Any] = {"schema": "draftkit.train-drafter/1", "verifier": str(recipe.model.path)}
    results |= {"kind": recipe.drafter.kind, "steps": num_steps} | throughput(run)
    results["trained_parameters"] = sum(p.numel() for p in trainable(drafter))
    results["heldout"] = evaluate(drafter, teacher, held_states, recipe)
    if greedy_states is not None:
        results["heldout_greedy"] = evaluate(drafter, teacher, greedy_states, recipe)
    results["where"] = where.where(drafter, teacher, verifier, held_states, recipe.train.tokens_per_batch, tokenizer)
    where.write(results["where"], run.path)
    directory = run.path / "drafter"
    export(drafter, directory, path, prints, {"recipe": recipe.model_dump(mode="json"), "heldout": results["heldout"]})
    if recipe.train.parity:
        prompts = [r.prompt_ids for r in source.rollouts("heldout") if r.sample == 0][: recipe.train.parity_prompts]
        results["parity"] = check_parity(recipe, path, directory, drafter, verifier, prompts)
    show(results)
    run.finish(results, headline(results, recipe))
    return results


def say_sizes(drafter: Drafter, facts: ModelFacts, counts: Counter[int], held_counts: Counter[int]) -> None:
    ids = drafter.draft_to_target_D
    say(f"{drafter.method}: {sum(p.numel() for p in trainable(drafter)) / 1e6:.1f} M parameters train")
    if len(ids) < facts.vocab_size:
        say(
            f"draft vocabulary: {len(ids):,} of {facts.vocab_size:,} tokens, covers {coverage_of(counts, ids):.2%} of "
            f"training and {coverage_of(held_counts, ids):.2%} of held-out tokens"
        )


def headline(results: dict[str, Any], recipe: Recipe) -> str:
    lengths = {f"{recipe.sampling.temperature:g}": results["heldout"]["walk_acceptance_length"]}
    if "heldout_greedy" in results:
        lengths["0"] = results["heldout_greedy"]["walk_acceptance_length"]
    shown = ", ".join(f"{length:.2f} at temperature {temperature}" for temperature, length in lengths.items())
    return f"held-out acceptance length of greedy drafts at k = {recipe.train.ttt_steps}: {shown}"


def verifier_states(
    recipe: Recipe,
    run: RunDir,
    split: str,
    verifier: Verifier,
    prints: dict[str, str],
    docs: list[Document],
    accelerator: Accelerator,
) -> States:
    if recipe.train.capture == "stream":
        return StreamedStates(verifier, docs)
    directory, total = run.path / "states" / split, sum(len(d.tokens) for d in docs)
    gib = total * CachedStates.bytes_per_token(verifier) / 2**30
    if accelerator.is_main_process:
        say(f"verifier states, {split}: {len(docs)} documents, {total:,} tokens, {gib:.2f} GiB on disk")
        with Interrupt() as stop, progress(f"capture {split}", total) as bar:

            def advance(n: int) -> None:
                bar.advance(n)
                if stop.requested:
                    raise Interrupted

            CachedStates.fill(directory, verifier, prints, docs, advance)
    accelerator.wait_for_everyone()
    return CachedStates(directory, docs, verifier.form, verifier.embed_VH.dtype)


def train(
    recipe: Recipe,
    run: RunDir,
    accelerator: Accelerator,
    spread: Spread,
    teacher: TeacherView,
    train_states: States,
    held_states: States,
) -> int:
    """Steps from the newest checkpoint to the last; returns their number."""
    t = recipe.train
    lengths = [len(d.tokens) for d in train_states.documents]
    slots = [sum(last - first for first, last in slot_runs(d.mask)) for d in train_states.documents]
    plan = Plan.make(lengths, recipe, accelerator.num_processes)
    optimizer, num_processes = spread.optimizer, accelerator.num_processes
    checkpoints, ttt_steps = run.path / "checkpoints", t.ttt_steps if spread.drafter.sees_itself else 1
    step = spread.load_newest(checkpoints)
    if step:
        say(f"resumed after step {step} of {len(plan.steps)}")
    run.rewind_metrics(step)

    with Interrupt() as stop, progress("train", len(plan.steps)) as bar:
        bar.advance(step)
        while step < len(plan.steps):
            start = time.perf_counter()
            group = plan.steps[step]
            step += 1
            lr = optim.lr_at(step, len(plan.steps), t)
            for parameters in optimizer.param_groups:
                parameters["lr"] = lr
            # Slots of all processes and micro-batches, so that every supervised token weighs the same.
            denominator = sum(slots[i] for members in group for i in members)
            sums: dict[str, torch.Tensor] = {}
            for members in group[accelerator.process_index :: num_processes]:
                batch = collate(train_states, members, ttt_steps, accelerator.device)
                loss, metrics = spread.model(batch, denominator)
                # Gradients are averaged over processes; the denominator already is the global one.
                accelerator.backward(loss * num_processes)
                metrics["objective"] = loss.detach()
                for name in ("kl", "correct", "greedy", "sampled", "ceiling", "count", "objective"):
                    sums[name] = sums.get(name, 0) + metrics[name]
            sums = {name: accelerator.reduce(value) for name, value in sums.items()}
            norm = spread.clip(t.grad_clip)
            if not math.isfinite(norm) or float(sums["kl"][0] / sums["count"][0]) > DIVERGED:
                raise RunFailed(f"The loss diverged at step {step} (gradient norm {norm:.3g}).", "Lower train.lr.")
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - start
            row = {"step": step, "tokens": denominator, **summarise(sums), "grad_norm": norm, "lr": lr}
            row["objective"] = float(sums["objective"])
            run.metrics(row | {"tokens_per_s": denominator / seconds})
            bar.advance(1, f"loss {row['loss']:.3f} acc {row['cond_acc'][0]:.3f} {denominator / seconds:,.0f} tok/s")
            if step % t.eval_every == 0 and (drafter := spread.whole()) is not None:
                run.metrics({"step": step, "heldout": evaluate(drafter, teacher, held_states, recipe)})
            # A signal may reach one process only, or each at another step: they stop together.
            stopped = bool(accelerator.reduce(torch.tensor(float(stop.requested), device=accelerator.device)))
            if stopped or step % t.save_every == 0 or step == len(plan.steps):
                spread.save(checkpoints, step, t.keep)
            if stopped and step < len(plan.steps):
                raise Interrupted(f"step {step} of {len(plan.steps)} is saved")
    return step


def throughput(run: RunDir) -> dict[str, Any]:
    """Over all steps of the run, those before a resume included."""
    steps = [row for row in run.read_metrics() if "lr" in row]
    tokens, seconds = sum(row["tokens"] for row in steps), sum(row["tokens"] / row["tokens_per_s"] for row in steps)
    return {"tokens": tokens, "tokens_per_s": tokens / seconds}


def show(results: dict[str, Any]) -> None:
    held = results["heldout"]
    table(
        "held-out prompts",
        ["TTT step", "cond. accuracy", "greedy acceptance", "sampled acceptance", "walk survival"],
        [
            [i + 1, f"{a:.3f}", f"{g:.3f}", f"{s:.3f}", f"{w:.3f}"]
            for i, (a, g, s, w) in enumerate(
                zip(
                    held["cond_acc"],
                    held["expected_acceptance_greedy"],
                    held["expected_acceptance_sampled"],
                    held["walk_survival"],
                    strict=True,
                )
            )
        ],
    )
    say(
        f"vocabulary ceiling {held['vocab_ceiling']:.3f}, verifier's own E(max p) {held['verifier_max_p']:.3f}: "
        "no greedy draft is accepted more often than the latter at this temperature"
    )
