"""`draftkit train-drafter`: corpus -> EAGLE-3 drafter that stock vLLM serves.

In the order in which data flows: documents, draft vocabulary, verifier states, the drafter, optimizer steps, export,
parity check. Batches and learning rate are pure functions of the step, so a run that was killed ends with the weights
of one that was not. Several processes (`accelerate launch`) share the batches of an optimizer step; gradients are
normalised by the slots of all of them together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

from draftkit.console import progress, say, say_once, table
from draftkit.data.batch import check_supervised, plan_epoch, slot_runs
from draftkit.data.capture import CachedStates, States, StreamedStates, Verifier, collate
from draftkit.data.shards import Corpus
from draftkit.drafters.eagle3 import Eagle3, Eagle3Config, default_aux_layers
from draftkit.drafters.export import export
from draftkit.drafters.init import config_of, from_drafter, from_verifier, verifier_of
from draftkit.drafters.losses import Teacher, drafter_loss
from draftkit.drafters.vocab import choose_vocab, coverage_of
from draftkit.errors import Interrupted, RunFailed, UserError
from draftkit.models import ModelFacts, fingerprint, load_tokenizer, model_facts, resolve_model
from draftkit.recipe import Recipe
from draftkit.run import Interrupt, RunDir
from draftkit.train import checkpoint, optim
from draftkit.train.parity import check_parity
from draftkit.train.predict import agreement, walk
from draftkit.types import Document, DraftBatch, Rollout, SpecCounters

DIVERGED = 20.0  # mean KL in nats that no trained drafter has: something is wrong, stop


# ---- documents ------------------------------------------------------------------------------------------------------


def document(rollout: Rollout, seq_len: int) -> Document:
    tokens = (*rollout.prompt_ids, *rollout.response_ids)
    mask = (False,) * len(rollout.prompt_ids) + (True,) * len(rollout.response_ids)
    return Document(tokens[:seq_len], mask[:seq_len])


def documents(corpus: Corpus, split: str, seq_len: int, temperatures: set[float]) -> list[Document]:
    """Rollouts that have a slot, as documents; how many were cut or too short to train on is said."""
    every = list(corpus.rollouts(split))
    rollouts = [r for r in every if r.temperature in temperatures]
    if not rollouts:
        wanted, have = sorted(temperatures), sorted({r.temperature for r in every})
        raise UserError(
            f"sampling.temperature: {corpus.path} ({split}) has no answers at temperatures {wanted}, only at {have}.",
            "Train at the temperature of the corpus, or prepare one at this temperature.",
        )
    all_documents = [document(r, seq_len) for r in rollouts]
    check_supervised(all_documents, f"{corpus.path} ({split})")
    useful = [d for d in all_documents if slot_runs(d.mask)]
    cut = sum(len(r.prompt_ids) + len(r.response_ids) > seq_len for r in rollouts)
    if cut:
        say(f"{split}: {cut} of {len(rollouts)} documents are longer than train.seq_len={seq_len} and were cut.")
    if len(useful) < len(rollouts):
        say(f"{split}: {len(rollouts) - len(useful)} documents have fewer than two response tokens and teach nothing.")
    return useful


def token_counts(documents: list[Document]) -> Counter[int]:
    return Counter(t for d in documents for t, supervised in zip(d.tokens, d.mask, strict=True) if supervised)


# ---- drafter --------------------------------------------------------------------------------------------------------


def aux_layers(recipe: Recipe, facts: ModelFacts) -> tuple[int, ...]:
    if recipe.drafter.init is not None:
        return config_of(Path(recipe.drafter.init)).aux_layers
    return tuple(sorted(recipe.drafter.aux_layers or default_aux_layers(facts.num_layers)))


def check_init(directory: Path, facts: ModelFacts, prints: dict[str, str]) -> None:
    """Refuse a warm start from a drafter whose sizes or tokens are not this verifier's. Other weights are what a warm
    start is for, when the policy has moved on, so they are only said."""
    config, how = config_of(directory), "Use a drafter of this verifier, or leave drafter.init out."
    theirs, ours = (config.target_hidden_size, config.vocab_size), (facts.hidden_size, facts.vocab_size)
    if theirs != ours:
        raise UserError(
            f"drafter.init: {directory} was made for another verifier: hidden size and vocabulary are {theirs}, "
            f"this one's are {ours}.",
            how,
        )
    made_for = verifier_of(directory)
    if made_for is None:
        say_once(f"drafter.init: {directory} does not say which verifier it was made for; only sizes were compared.")
    elif made_for["tokenizer"] != prints["tokenizer"]:
        raise UserError(f"drafter.init: {directory} was made for a verifier with another tokenizer.", how)
    elif made_for["weights"] != prints["weights"]:
        say_once(f"drafter.init: {directory} was made for other weights of this verifier.")


def build_drafter(
    recipe: Recipe, facts: ModelFacts, verifier: Verifier, counts: Counter[int], special: list[int]
) -> Eagle3:
    if recipe.drafter.init is not None:
        return from_drafter(Path(recipe.drafter.init), verifier.embed_VH)
    ids = choose_vocab(
        counts, special, facts.vocab_size, recipe.drafter.draft_vocab_size, recipe.drafter.vocab_coverage
    )
    config = Eagle3Config(
        hidden_size=facts.hidden_size,
        target_hidden_size=facts.hidden_size,
        intermediate_size=recipe.drafter.intermediate_size or facts.intermediate_size,
        num_attention_heads=facts.num_heads,
        num_key_value_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        vocab_size=facts.vocab_size,
        draft_vocab_size=len(ids),
        aux_layers=verifier.aux_layers,
        rms_norm_eps=facts.rms_norm_eps,
        rope_parameters=facts.rope_parameters,
        max_position_embeddings=facts.max_position_embeddings,
        norm_before_residual=recipe.drafter.norm_before_residual,
    )
    drafter = Eagle3(config, verifier.embed_VH, ids)
    from_verifier(drafter, verifier.model, recipe.train.seed)
    return drafter


class TeacherView:
    """The verifier's distribution at a batch's labels: p[label of slot r] = position slot_R + 1."""

    def __init__(self, drafter: Eagle3, verifier: Verifier) -> None:
        ids = drafter.draft_to_target_D
        self.head_DH, self.temperature = verifier.head_VH[ids].detach(), verifier.temperature
        self.to_draft_V = torch.full((verifier.head_VH.shape[0],), -1, device=ids.device)
        self.to_draft_V[ids] = torch.arange(len(ids), device=ids.device)

    def at(self, batch: DraftBatch) -> Teacher:
        label = batch.slot_R + 1
        return Teacher(
            batch.last_NH[label],
            batch.lse_N[label],
            self.to_draft_V[batch.top_N[label]],
            self.head_DH,
            self.temperature,
        )


# ---- metrics --------------------------------------------------------------------------------------------------------


def summarise(sums: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Sums over slots of `drafter_loss` -> what is logged."""
    count = sums["count"].clamp(min=1)
    rate = {name: (sums[name] / count).tolist() for name in ("kl", "correct", "greedy", "sampled", "ceiling")}
    chain, simulated = 1.0, 1.0
    for accuracy in rate["correct"]:
        chain *= accuracy
        simulated += chain
    return {
        "loss": rate["kl"][0],
        "kl": rate["kl"],
        "cond_acc": rate["correct"],
        "expected_acceptance_greedy": rate["greedy"],
        "expected_acceptance_sampled": rate["sampled"],
        "vocab_ceiling": rate["ceiling"][0],
        "simulated_acceptance_length": simulated,
    }


@torch.no_grad()
def evaluate(drafter: Eagle3, teacher: TeacherView, states: States, recipe: Recipe) -> dict[str, Any]:
    """The same metrics on held-out documents, and the walk's counters: acceptance as serving would meet it."""
    steps, sums, served = recipe.train.ttt_steps, {}, SpecCounters()
    max_p, slots = 0.0, 0
    for members in plan_epoch([len(d.tokens) for d in states.documents], recipe.train.tokens_per_batch, 0, 0):
        batch = collate(states, members, steps)
        _, metrics = drafter_loss(
            drafter(batch), drafter.lm_head.weight, teacher.at(batch), batch.valid_LR, recipe.train.ttt_decay, 1.0, True
        )
        for name in ("kl", "correct", "greedy", "sampled", "ceiling", "count"):
            sums[name] = sums.get(name, 0) + metrics[name]
        served = served + walk(agreement(drafter.draft_to_target_D[metrics["proposal_LR"]], batch), batch.segments)
        label = batch.slot_R + 1
        max_p += float((batch.max_N[label] - batch.lse_N[label]).exp().sum())
        slots += len(label)
    return summarise(sums) | {
        "walk_acceptance_length": served.acceptance_length,
        "walk_survival": served.survival(steps),
        "verifier_max_p": max_p / slots,  # no greedy draft can be accepted more often than this at the temperature
    }


# ---- the loop -------------------------------------------------------------------------------------------------------


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
    if recipe.drafter.init is not None:
        check_init(Path(recipe.drafter.init), facts, prints)
    rollout_temperature, seq_len = recipe.sampling.temperature, recipe.train.seq_len
    train_docs = documents(source, "train", seq_len, {rollout_temperature, 0.0})
    held_docs = documents(source, "heldout", seq_len, {rollout_temperature})
    verifier = Verifier(path, aux_layers(recipe, facts), recipe.sampling.temperature, device=str(accelerator.device))

    # ---- draft vocabulary and drafter ----
    counts = token_counts(train_docs)
    special = [*tokenizer.all_special_ids, *facts.eos_token_ids]
    drafter = build_drafter(recipe, facts, verifier, counts, special).to(accelerator.device)
    run.begin()
    held_coverage = coverage_of(token_counts(held_docs), drafter.draft_to_target_D)
    say(
        f"draft vocabulary: {drafter.config.draft_vocab_size:,} of {facts.vocab_size:,} tokens, covers "
        f"{coverage_of(counts, drafter.draft_to_target_D):.2%} of training and {held_coverage:.2%} of held-out tokens"
    )

    # ---- verifier states ----
    train_states = verifier_states(recipe, run, "train", verifier, prints, train_docs, accelerator)
    held_states = verifier_states(recipe, run, "heldout", verifier, prints, held_docs, accelerator)
    greedy_states = None
    if recipe.sampling.greedy_n and rollout_temperature > 0:
        greedy_docs = documents(source, "heldout", seq_len, {0.0})
        greedy_states = verifier_states(recipe, run, "heldout-greedy", verifier, prints, greedy_docs, accelerator)

    # ---- steps ----
    teacher = TeacherView(drafter, verifier)
    num_steps = train(recipe, run, accelerator, drafter, teacher, train_states, held_states)
    if not accelerator.is_main_process:
        return {}

    # ---- export and parity ----
    results: dict[str, Any] = {"schema": "draftkit.train-drafter/1", "verifier": str(recipe.model.path)}
    results |= {"steps": num_steps} | throughput(run)
    results["heldout"] = evaluate(drafter, teacher, held_states, recipe)
    if greedy_states is not None:
        results["heldout_greedy"] = evaluate(drafter, teacher, greedy_states, recipe)
    directory = run.path / "drafter"
    export(drafter, directory, prints, card={"recipe": recipe.model_dump(mode="json"), "heldout": results["heldout"]})
    if recipe.train.parity:
        prompts = [r.prompt_ids for r in source.rollouts("heldout") if r.sample == 0][: recipe.train.parity_prompts]
        results["parity"] = check_parity(recipe, path, directory, drafter, verifier, prompts)
    show(results)
    run.finish(results, headline(results, recipe))
    return results


def headline(results: dict[str, Any], recipe: Recipe) -> str:
    lengths = {f"{recipe.sampling.temperature:g}": results["heldout"]["walk_acceptance_length"]}
    if "heldout_greedy" in results:
        lengths["0"] = results["heldout_greedy"]["walk_acceptance_length"]
    shown = ", ".join(f"{length:.2f} at temperature {temperature}" for temperature, length in lengths.items())
    return f"held-out acceptance length at k = {recipe.train.ttt_steps}: {shown}"


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
    return CachedStates(directory, docs)


def train(
    recipe: Recipe,
    run: RunDir,
    accelerator: Accelerator,
    drafter: Eagle3,
    teacher: TeacherView,
    train_states: States,
    held_states: States,
) -> int:
    """Steps from the newest checkpoint to the last; returns their number."""
    t = recipe.train
    lengths = [len(d.tokens) for d in train_states.documents]
    slots = [sum(last - first for first, last in slot_runs(d.mask)) for d in train_states.documents]
    plan = Plan.make(lengths, recipe, accelerator.num_processes)
    optimizer = optim.build(drafter, t)
    checkpoints = run.path / "checkpoints"
    step = checkpoint.load_newest(checkpoints, drafter, optimizer)
    if step:
        say(f"resumed after step {step} of {len(plan.steps)}")
    run.rewind_metrics(step)
    model = accelerator.prepare_model(drafter) if accelerator.num_processes > 1 else drafter

    def save() -> None:
        if accelerator.is_main_process:
            checkpoint.save(checkpoints, step, drafter, optimizer, t.keep)
        accelerator.wait_for_everyone()

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
            for members in group[accelerator.process_index :: accelerator.num_processes]:
                batch = collate(train_states, members, t.ttt_steps)
                loss, metrics = drafter_loss(
                    model(batch),
                    drafter.lm_head.weight,
                    teacher.at(batch),
                    batch.valid_LR,
                    t.ttt_decay,
                    denominator,
                    True,
                )
                # DDP averages gradients over processes; the denominator already is the global one.
                accelerator.backward(loss * accelerator.num_processes)
                for name in ("kl", "correct", "greedy", "sampled", "ceiling", "count"):
                    sums[name] = sums.get(name, 0) + metrics[name]
            sums = {name: accelerator.reduce(value) for name, value in sums.items()}
            norm = torch.nn.utils.clip_grad_norm_(drafter.parameters(), t.grad_clip)
            if not torch.isfinite(norm) or float(sums["kl"][0] / sums["count"][0]) > DIVERGED:
                raise RunFailed(
                    f"The loss diverged at step {step} (gradient norm {float(norm):.3g}).", "Lower train.lr."
                )
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - start
            row = {"step": step, "tokens": denominator, **summarise(sums), "grad_norm": float(norm), "lr": lr}
            run.metrics(row | {"tokens_per_s": denominator / seconds})
            bar.advance(1, f"loss {row['loss']:.3f} acc {row['cond_acc'][0]:.3f} {denominator / seconds:,.0f} tok/s")
            if step % t.eval_every == 0 and accelerator.is_main_process:
                run.metrics({"step": step, "heldout": evaluate(drafter, teacher, held_states, recipe)})
            # A signal may reach one process only, or each at another step: they stop together.
            stopped = bool(accelerator.reduce(torch.tensor(float(stop.requested), device=accelerator.device)))
            if stopped or step % t.save_every == 0 or step == len(plan.steps):
                save()
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
