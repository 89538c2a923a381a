"""What an RL run stands on, built in an order: prompts, environment, the policy to begin with, engine, drafter.

One process holds trainer and engine when it is alone; of several ranks each has an engine in a process of its own,
because vLLM wants the process group for itself, and so has a run whose rollouts overlap with training.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from draftkit.console import say, say_once
from draftkit.data.capture import States
from draftkit.drafters.draft_lm import shared_with
from draftkit.drafters.eagle3 import Eagle3, default_aux_layers
from draftkit.drafters.layouts import config_of, from_drafter, head_of, write
from draftkit.engine import Engine, EngineProcess
from draftkit.engine.methods import refuse_by_name
from draftkit.errors import UserError
from draftkit.models import ModelFacts, fingerprint, model_facts, stored_tensors
from draftkit.recipe import Recipe
from draftkit.rl import zero
from draftkit.rl.canary import Canary
from draftkit.rl.cotrain import CoTrainer, needed, provisional
from draftkit.rl.policy import Policy
from draftkit.rl.publish import Ends, Publisher
from draftkit.rl.template import ChatTemplate
from draftkit.rl.world import World
from draftkit.run import RunDir
from draftkit.train.start import check_init
from draftkit.types import Document, Prompt, SpecConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STARTED = """# A drafter before its first training in this run

The one that the run was given, or one made of the policy's last layer with a placeholder vocabulary, so that an engine
could be built for its sizes. The run that this belongs to exports the trained one when it finishes.
"""
COTRAINED = "eagle3"  # the one method whose drafter is ours to train


def check(recipe: Recipe) -> None:
    """Refuse what cannot work before anything is built. Raises UserError."""
    spec, method = recipe.spec, recipe.spec.method
    refuse_by_name(spec.rejection_sample_method)
    if method in ("mtp", "draft-lm") and spec.drafter is None:
        raise UserError(
            f"spec.method={method} needs a drafter: only eagle3 drafters can be grown.", "Give one with --drafter."
        )
    if method in ("ngram", "none") and spec.drafter is not None:
        raise UserError(f"spec.method={method} uses no drafter, and --drafter names one.", "Leave one of the two out.")
    if recipe.sampling.n < 2:
        raise UserError(
            f"sampling.n ({recipe.sampling.n}): a group needs two or more responses to compare.", "For example 8."
        )
    if recipe.sampling.temperature == 0:
        raise UserError("sampling.temperature (0): greedy responses of a group are all the same.", "For example 1.0.")
    if spec.adapt and (spec.schedule is not None or method == "none"):
        other = "spec.method none" if spec.schedule is None else "spec.schedule"
        raise UserError(f"spec.adapt finds a schedule, and {other} leaves it none to find.", "Give one of the two.")
    if spec.schedule is not None and any(k > spec.k for _, _, k in spec.schedule):
        raise UserError(
            f"spec.schedule asks for more drafts than spec.k ({spec.k}).", "Raise spec.k to its largest entry."
        )
    if recipe.cotrain.mode != "off" and method not in (COTRAINED, "none", "ngram"):
        say_once(f"cotrain: only {COTRAINED} drafters are trained along; this {method} drafter stays as it is.")


def cotrains(recipe: Recipe) -> bool:
    return recipe.spec.method == COTRAINED and recipe.cotrain.mode != "off"


@dataclass
class Actors:
    """Everything with weights. drafter, cotrainer, ends: None unless the drafter is an EAGLE-3 one."""

    policy: Policy
    engine: Engine | EngineProcess
    publisher: Publisher
    canary: Canary
    ends: Ends | None
    drafter: Eagle3 | None
    cotrainer: CoTrainer | None

    def close(self) -> None:
        self.engine.close()
        self.policy.close()


def build(
    recipe: Recipe,
    run: RunDir,
    world: World,
    model: Path,
    facts: ModelFacts,
    tokenizer: PreTrainedTokenizerBase,
    canary_prompts: Sequence[Prompt],
) -> Actors:
    """model: the directory of the policy to begin with. The engine starts with the same weights."""
    spec, prints = recipe.spec, fingerprint(model)
    aux = None
    if spec.method == COTRAINED:
        given = spec.drafter and config_of(Path(spec.drafter), recipe.drafter.aux_ids, facts.num_layers)
        wanted = recipe.drafter.aux_layers or default_aux_layers(facts.num_layers)
        aux = given.aux_layers if given else tuple(sorted(wanted))  # vLLM sorts them
        if spec.drafter:
            check_init(Path(spec.drafter), facts, prints, recipe.drafter.aux_ids)
    # The engine first: vLLM wants to make the process group, and DeepSpeed takes one that is there.
    policy = None
    if world.size > 1:
        policy = Policy(model, recipe, aux)

    # ---- drafter ----
    served, drafter, ends = spec.drafter, None, None
    if aux is not None:
        source = policy.weights() if policy else stored_tensors(model)
        kept = needed(source, facts.num_layers, recipe.drafter.num_layers or 1)
        ends = Ends(iter(kept.items()), recipe.sampling.temperature, zero.compute_dtype(recipe.policy))
        if spec.drafter:
            drafter = from_drafter(Path(spec.drafter), ends.embed_VH, recipe.drafter.aux_ids, facts.num_layers)
        else:
            drafter = provisional(recipe, facts, aux, ends, kept)
            say("no drafter was given: one grows from the policy's last layer on the first rollouts")
        served = str(run.path / "drafter-start")  # also a given one: it may be of a layout that vLLM would misread
        if world.is_main:
            write(head_of(drafter), Path(served), "vllm", prints, readme=STARTED)
        world.barrier()

    # ---- engine ----
    config = None
    if spec.method != "none":
        config = SpecConfig(spec.method, served, spec.k, spec.draft_sample_method, spec.rejection_sample_method)
    if spec.method == "draft-lm":
        size = model_facts(Path(served), recipe.model.trust_remote_code).vocab_size
        own_vocab = shared_with(Path(served), model, size, facts.vocab_size) is not None
        config = replace(config, own_vocab=own_vocab)
    own_process = world.size > 1 or recipe.rl.lag > 0 and torch.cuda.device_count() > 1
    kind = EngineProcess if own_process else Engine
    if recipe.rl.lag and not own_process:
        say_once(
            "rl.lag: there is one device, so rollouts and training take turns on it; the lag is kept, no time won."
        )
    options = {"env": _engine_environment(world)} if own_process else {}
    engine = kind(model, recipe_engine=recipe.engine, spec=config, seed=recipe.rl.seed, **options)
    policy = policy or Policy(model, recipe, aux)

    # ---- what keeps them together ----
    cotrainer = None
    if drafter is not None and ends is not None:
        cotrainer = CoTrainer(recipe, drafter, ends, world, grows=spec.drafter is None)
    publisher = Publisher(engine, policy, drafter, ends)
    template = ChatTemplate(tokenizer, recipe.sampling.thinking)

    def rescore(documents: Sequence[Document]) -> States:
        return policy.score(documents, capture=True)

    prompts = [template.prompt(p.messages) for p in canary_prompts]
    canary = Canary(engine, policy, drafter, prompts, recipe.canary, spec.k, rescore, world)
    return Actors(policy, engine, publisher, canary, ends, drafter, cotrainer)


def _engine_environment(world: World) -> dict[str, str]:
    """One GPU or its share of the cores for each rank's engine."""
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        spare = torch.cuda.device_count() >= 2 * world.size
        return {"CUDA_VISIBLE_DEVICES": str(local + world.size if spare else local)}
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[world.rank % len(cores) :: world.size] or cores
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine)), "OMP_NUM_THREADS": str(len(mine))}
