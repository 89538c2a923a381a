"""After every publish: does the engine hold what the trainer holds, and is the drafter still worth its time?

    one long request            nothing of its prompt may come from the prefix cache
    probe of every tensor       against the trainer's own tensors, gathered apart from what was published
    auxiliary layers            as the engine reads them, against those the drafter was trained on
    fixed prompts, greedy       acceptance served, against the trainer's drafter walking the same answers

The first three find what is wrong, `cause` names it; the last finds whether it matters, and also what the others do
not look at. A drafter that collapsed is not paid for: `speculate` is False and the engine decodes plainly until a later
canary, which always drafts, sees it accepted again. Speculation is lossless, so none of that can bias a rollout; what
can is a verifier that is not the policy or a cache that remembers another one: `policy_intact`.

The seven causes are those that public systems met, each in silence (rl-rollouts.md, section 3 and trap 1). Every rank
checks its own engine; they agree through `World`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from draftkit.data.batch import slot_runs
from draftkit.data.capture import States
from draftkit.drafters.export import served_tensors
from draftkit.drafters.init import EMBEDDING, HEAD
from draftkit.engine import expected_probe, probe_mismatches
from draftkit.recipe import CanarySection
from draftkit.rl.publish import Published
from draftkit.rl.world import World
from draftkit.train.documents import document
from draftkit.train.predict import predicted
from draftkit.types import Document, Generation, Sampling, SpecCounters

if TYPE_CHECKING:
    from draftkit.drafters.eagle3 import Eagle3
    from draftkit.engine import Engine
    from draftkit.rl.policy import Policy

Probe = dict[str, torch.Tensor]
VERIFIER, DRAFTER = "verifier", "drafter"
MAP = f"{DRAFTER}.d2t"
CACHE_TOKENS = 100  # of the request that looks for a stale cache: three blocks of it
FAR_BELOW = 0.5  # served excess of the acceptance length over 1, as a share of the predicted one
MIN_ROUNDS = 8  # rounds that say anything about acceptance


@dataclass(frozen=True, slots=True)
class CanaryRecord:
    """ok: nothing is wrong. cause: what is, in words, None when ok. policy_intact: rollouts come from the policy.
    speculate: the drafter is worth using in the next rollouts. served and predicted: acceptance lengths of greedy
    drafts on the canary's prompts, None without a drafter. mismatched: tensors that the engine holds otherwise."""

    ok: bool
    cause: str | None
    policy_intact: bool
    speculate: bool
    served: float | None
    predicted: float | None
    num_rounds: int
    num_cached: int
    mismatched: tuple[str, ...]
    seconds: float

    def asdict(self) -> dict[str, Any]:
        return asdict(self) | {"mismatched": list(self.mismatched)}


class Canary:
    """prompts: token ids, fixed for the run. rescore: documents -> the policy's states of them, as `policy.score`
    captures. drafter None: the engine does not draft with weights of ours. speculating: the decision in force, False
    for a drafter that has yet to be accepted once."""

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        drafter: Eagle3 | None,
        prompts: Sequence[Sequence[int]],
        section: CanarySection,
        k: int,
        rescore: Callable[[Sequence[Document]], States],
        world: World,
        speculating: bool = True,
    ) -> None:
        self.engine, self.policy, self.drafter = engine, policy, drafter
        self.prompts, self.section, self.k, self.rescore, self.world = prompts, section, k, rescore, world
        self.speculating = speculating
        self._room = engine.max_model_len - k - 2
        endless = itertools.cycle([t for p in prompts for t in p])
        self._cache_prompt = list(itertools.islice(endless, min(CACHE_TOKENS, self._room)))
        self._before: Probe = {}  # what the engine was last seen to hold as it should

    def check(self, published: Published, recent: Sequence[int] = ()) -> CanaryRecord:
        """Draft at k for the canary's own requests, compare, and leave the engine at k or at 0 by the decision. What to
        do about a fault is the loop's business. recent: tokens of the last rollouts, which a stale cache remembers
        even where it is so small that the canary's own prompt was evicted."""
        start = time.perf_counter()
        drafts = self.engine.spec is not None
        if drafts:
            self.engine.set_k(self.k)

        # ---- cache, acceptance ----
        prompt = list(recent[: self._room]) or self._cache_prompt
        first = self.engine.generate([prompt], Sampling(temperature=0.0, max_tokens=1, ignore_eos=True))
        greedy = Sampling(temperature=0.0, max_tokens=self.section.max_tokens)
        answers = self.engine.generate(self.prompts, greedy)
        counters = sum((a.spec or SpecCounters() for a in answers), SpecCounters())
        expectation = self._predicted(answers) if self.drafter is not None else None

        # ---- weights, layers ----
        found = Findings(
            held=self.engine.probe(self.section.columns),
            expected=self._expected(),
            before=self._before,
            num_cached=first[0].num_cached if published.policy or published.drafter else 0,
            layers=self.engine.aux_layers() if self.drafter is not None else None,
            trained_on=self.drafter.config.aux_layers if self.drafter is not None else None,
            slept=published.slept,
        )
        cause, intact = fault(found)
        mismatched = found.mismatched()
        self._before |= {name: value for name, value in found.held.items() if name not in mismatched}

        record = judge(
            CanaryRecord(
                ok=cause is None,
                cause=cause,
                policy_intact=intact,
                speculate=self.speculating and drafts,
                served=counters.acceptance_length if drafts else None,
                predicted=expectation,
                num_rounds=counters.num_drafts,
                num_cached=first[0].num_cached,
                mismatched=tuple(mismatched),
                seconds=0.0,
            ),
            self.section.min_acceptance,
        )
        record = agree(self.world.gather(record))
        self.speculating = record.speculate
        if drafts and not record.speculate:
            self.engine.set_k(0)
        return replace(record, seconds=time.perf_counter() - start)

    def _predicted(self, answers: Sequence[Generation]) -> float | None:
        documents = [document(a, len(a.prompt_ids) + len(a.response_ids)) for a in answers]
        states = self.rescore(documents)  # of all ranks at once, also where there is nothing to predict
        if not any(slot_runs(d.mask) for d in documents):
            return None
        return predicted(self.drafter, states, self.k).acceptance_length

    def _expected(self) -> Probe:
        dtype, columns = self.engine.dtype, self.section.columns
        expected = expected_probe(self.policy.weights(), VERIFIER, dtype, columns)
        if self.drafter is not None:
            expected |= expected_probe(served_tensors(self.drafter).items(), DRAFTER, dtype, columns)
        return expected


# ---- the verdict ----------------------------------------------------------------------------------------------------


def judge(record: CanaryRecord, min_acceptance: float) -> CanaryRecord:
    """With what acceptance says. A drafter under min_acceptance is not used; one far below its prediction is at fault
    even where no cause was found. Too few rounds say nothing: the decision in force stays."""
    if record.served is None or record.num_rounds < MIN_ROUNDS:
        return record
    record = replace(record, speculate=record.served >= min_acceptance)
    if record.predicted is None or record.predicted < min_acceptance or not record.ok:
        return record
    if record.served - 1 < FAR_BELOW * (record.predicted - 1):
        figures = f"acceptance length {record.served:.2f} served, {record.predicted:.2f} predicted"
        return replace(record, ok=False, cause=f"collapsed for no known reason: {figures}")
    return record


def agree(records: Sequence[CanaryRecord]) -> CanaryRecord:
    """One record for all ranks: the first that is at fault speaks for all."""
    worst = next((r for r in records if not r.ok), records[0])
    return replace(
        worst,
        policy_intact=all(r.policy_intact for r in records),
        speculate=all(r.speculate for r in records),
    )


# ---- naming a fault -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Findings:
    """held, expected: probes of the engine and of the trainer's tensors; before: what the engine held when it was last
    seen right. num_cached: prompt tokens that came from the cache though something was published. layers, trained_on:
    auxiliary layers of engine and drafter, None without one."""

    held: Probe
    expected: Probe
    before: Probe
    num_cached: int
    layers: tuple[int, ...] | None
    trained_on: tuple[int, ...] | None
    slept: bool

    def mismatched(self) -> list[str]:
        return probe_mismatches(self.held, self.expected)

    def is_stale(self, name: str) -> bool:
        return self._holds(name, self.before.get(name))

    def is_empty(self, name: str) -> bool:
        """Zeros, or no numbers at all."""
        return name in self.held and not (bool(self.held[name].isfinite().all()) and bool(self.held[name].any()))

    def taken(self, names: Sequence[str]) -> str:
        """Tensors that hold what belongs into another: "a holds b, ..."; empty when there is none."""
        return _listed(
            f"{name} holds {other}"
            for name in names
            if not self.is_empty(name)
            for other in [next((o for o, v in self.expected.items() if o != name and self._holds(name, v)), None)]
            if other
        )

    def _holds(self, name: str, value: torch.Tensor | None) -> bool:
        if value is None or name not in self.held:
            return False
        return not probe_mismatches({name: self.held[name]}, {name: value})


def fault(found: Findings) -> tuple[str | None, bool]:
    """(what is wrong, None when nothing is; whether rollouts come from the policy). The worst first: what biases
    rollouts."""
    mismatched = found.mismatched()
    verifier = [name for name in mismatched if name.startswith(VERIFIER)]
    if verifier:
        return _verifier_fault(verifier, found), False
    if found.num_cached:
        return f"stale prefix cache: {found.num_cached} tokens of a prompt came from it right after the publish", False
    if mismatched:
        return _drafter_fault(mismatched, found), True
    if found.layers != found.trained_on:
        return _layers_fault(found.layers or (), found.trained_on or ()), True
    return None, True


def _verifier_fault(names: Sequence[str], found: Findings) -> str:
    if set(names) <= {f"{VERIFIER}.{EMBEDDING}", f"{VERIFIER}.{HEAD}"} and f"{VERIFIER}.{EMBEDDING}" in names:
        return "target embeddings overwritten: the engine's embedding is not the policy's, all its layers are"
    if all(found.is_stale(name) for name in names):
        return f"policy weights not published: the engine holds {_listed(names)} of an earlier version"
    if taken := found.taken(names):
        return f"published to the wrong tensors: {taken}"
    return f"policy weights differ: {_listed(names)}"


def _drafter_fault(names: Sequence[str], found: Findings) -> str:
    if list(names) == [MAP]:
        return f"vocabulary map {'zeroed' if found.is_empty(MAP) else 'differs'}: the engine's d2t is not the drafter's"
    if all(found.is_stale(name) for name in names):
        return f"drafter weights not published: the engine holds {_listed(names)} of an earlier version"
    if taken := found.taken(names):
        return f"published to the wrong tensors: {taken}"
    what = f"the engine holds {_listed(names)} as they were never published"
    if found.slept or sum(map(found.is_empty, names)) > len(names) / 2:
        return f"sleep dropped the drafter: {what}"
    return f"drafter weights differ: {what}"


def _layers_fault(layers: Sequence[int], trained_on: Sequence[int]) -> str:
    shifts = {a - b for a, b in zip(layers, trained_on, strict=False)}
    off = f"off by {shifts.pop():+d}" if len(layers) == len(trained_on) and len(shifts) == 1 else "differ"
    return f"auxiliary layers {off}: the engine reads {list(layers)}, the drafter was trained on {list(trained_on)}"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
