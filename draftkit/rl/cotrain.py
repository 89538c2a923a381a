"""The drafter learns along: from the states of the trainer's own log-probability forward, no further verifier pass.

    score(trajectories, capture) -> States ── plus a few re-scored replay documents ──> drafter_loss -> AdamW
                    Ends (embedding, LM head as last published) ──────────────────────────┘

States and head must be of one version: train between scoring and the policy's own update. Nothing here can reach the
policy: states arrive detached, the head is a copy, and the drafter has an optimizer, a schedule and a gradient clip of
its own, because under a common clip its large early gradients shrink the policy's update (rl-rollouts.md, trap 4).

The drafter is trained for as many steps as the engine drafts (`spec.k`), at the sampling temperature, against the
policy's full head rows of the draft vocabulary; its own head stays trainable. Several ranks train on their own
trajectories: slots are counted over all, gradients are added up, so that all hold the same drafter bit for bit.

A drafter can also be *grown*: it begins as the policy's last layer (`provisional`), and takes its vocabulary from the
first rollouts (`grow`): the tokens seen, most frequent first, then those that the policy finds likeliest where it was
not sampled, until the table that the engine was built for is full. It stays as it is then: changing the map of a
trained head would scramble it, and `vocab_ceiling` in the metrics tells when it no longer fits.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from draftkit.data.batch import plan_epoch, slot_runs
from draftkit.data.capture import LOGIT_ROWS, States, collate
from draftkit.drafters.eagle3 import Eagle3
from draftkit.drafters.init import from_weights, last_layer
from draftkit.drafters.losses import drafter_loss
from draftkit.drafters.vocab import MULTIPLE, choose_vocab, coverage_of
from draftkit.errors import UserError
from draftkit.models import ModelFacts
from draftkit.recipe import Recipe
from draftkit.rl.publish import Ends
from draftkit.rl.world import World
from draftkit.train import optim
from draftkit.train.documents import token_counts
from draftkit.train.evaluate import TeacherView, summarise
from draftkit.train.start import drafter_config
from draftkit.types import DraftBatch

WARMUP = 10  # updates
COUNTS = ("num_updates", "num_trainings", "grows", "is_grown")  # of a checkpoint
SUMS = ("kl", "correct", "greedy", "sampled", "ceiling", "count")
VOCAB_SHARE = 8  # a grown drafter proposes one of so many verifier tokens, unless drafter.draft_vocab_size says
LIKELY_ROWS = 1024  # positions whose distributions rank the tokens that were not sampled


class Joined:
    """Two sources of states as one."""

    def __init__(self, first: States, second: States | None) -> None:
        self.parts = [first] if second is None else [first, second]
        self.documents = [d for part in self.parts for d in part.documents]

    def document(self, i: int) -> dict[str, torch.Tensor]:
        for part in self.parts:
            if i < len(part.documents):
                return part.document(i)
            i -= len(part.documents)
        raise IndexError


class CoTrainer:
    """Owns the drafter's optimizer and counts its updates; when to train is `trigger`'s business, and what of earlier
    steps to train on `replay`'s. grows: the drafter is provisional until `grow`."""

    def __init__(self, recipe: Recipe, drafter: Eagle3, ends: Ends, world: World, grows: bool = False) -> None:
        self.recipe, self.drafter, self.ends, self.world = recipe, drafter, ends, world
        drafter.embed_VH = ends.embed_VH  # published to, and read by the served drafter: the same table
        self.optimizer = optim.build(drafter, recipe.train.model_copy(update={"lr": recipe.cotrain.lr}))
        self.num_updates, self.num_trainings = 0, 0
        self.grows, self.is_grown = grows, not grows

    # ---- one training -------------------------------------------------------------------------------------------

    def train(self, states: States, num_batches: int, replayed: States | None = None) -> dict[str, Any]:
        """num_batches updates on this rank's documents; a share of every batch comes from `replayed`. Metrics are over
        all ranks and updates; seconds are this rank's."""
        start, section = time.perf_counter(), self.recipe.cotrain
        joined = Joined(states, replayed)
        teacher = TeacherView(self.drafter, self.ends)
        total, norms, skipped, num_tokens = 0, [], 0, 0
        batches = self._batches(joined, len(states.documents))
        for _ in range(num_batches):
            members = next(batches)
            num_tokens += sum(len(joined.documents[i].tokens) for i in members)
            sums, norm = self._update(joined, members, teacher)
            total = total + sums
            norms.append(norm)
            skipped += not math.isfinite(norm)
        self.num_trainings += 1
        if num_batches == 0:
            return {"updates": 0, "seconds": time.perf_counter() - start}
        return summarise(dict(zip(SUMS, total, strict=True))) | {
            "updates": num_batches,
            "skipped_updates": skipped,
            "tokens": sum(self.world.gather(num_tokens)),
            "slots": int(total[SUMS.index("count")][0]),
            "replayed_documents": sum(self.world.gather(len(joined.documents) - len(states.documents))),
            "grad_norm": norms[-1],
            "lr": self.lr_at(self.num_updates),
            "grad_clip": section.grad_clip,
            "seconds": time.perf_counter() - start,
        }

    def _update(self, states: Joined, members: Sequence[int], teacher: TeacherView) -> tuple[torch.Tensor, float]:
        """One optimizer step; (sums [6, L] over all ranks, gradient norm before the clip). An update whose gradient is
        not finite is left out and shows as such a norm."""
        parameters = list(self.drafter.parameters())
        device, steps = self.drafter.d2t.device, self.recipe.spec.k
        slots = sum(last - first for i in members for first, last in slot_runs(states.documents[i].mask))
        # Slots of all ranks, so that every supervised token weighs the same.
        denominator = max(1, sum(self.world.gather(slots)))
        sums = torch.zeros(len(SUMS), steps, device=device)
        if slots:  # a rank without any takes part in the sums below all the same
            batch = collate(states, members, steps, device)
            assert not batch.aux_NF.requires_grad and not batch.last_NH.requires_grad
            loss, metrics = self._loss(batch, teacher, denominator)
            loss.backward()
            sums = torch.stack([metrics[name] for name in SUMS])
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if self.world.size > 1:
            _add_up([p.grad for p in parameters])
            dist.all_reduce(sums)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.recipe.cotrain.grad_clip))
        self.num_updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_at(self.num_updates)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return sums, norm

    def _loss(self, batch: DraftBatch, teacher: TeacherView, denominator: int):
        states, decay = self.drafter(batch), self.recipe.train.ttt_decay
        head = self.drafter.lm_head.weight
        return drafter_loss(states, head, teacher.at(batch), batch.valid_LR, decay, denominator, True)

    def _batches(self, joined: Joined, num_fresh: int) -> Iterator[list[int]]:
        """Document numbers of `joined`, batch by batch without end: fresh ones, with a share of replayed ones."""
        section, useful = self.recipe.cotrain, [bool(slot_runs(d.mask)) for d in joined.documents]
        fresh = [i for i in range(num_fresh) if useful[i]]
        old = [i for i in range(num_fresh, len(useful)) if useful[i]]
        kept = round(section.tokens_per_batch * section.replay_share) if old else 0
        return (a + b for a, b in zip(
            self._stream(joined, fresh, section.tokens_per_batch - kept), self._stream(joined, old, kept), strict=False
        ))  # fmt: skip

    def _stream(self, joined: Joined, members: Sequence[int], tokens: int) -> Iterator[list[int]]:
        lengths, seed = [len(joined.documents[i].tokens) for i in members], self.recipe.rl.seed
        epoch = 0
        while True:
            for batch in plan_epoch(lengths, tokens, f"{seed}/{self.num_trainings}", epoch) if members else [[]]:
                yield [members[i] for i in batch]
            epoch += 1

    def lr_at(self, update: int) -> float:
        """Learning rate of update >= 1: warm-up, then constant, for the policy never stops moving. The updates of a
        growing drafter begin at train.lr and come down to cotrain.lr by a cosine."""
        section, peak = self.recipe.cotrain, self.recipe.cotrain.lr
        if self.grows and update <= section.grow_batches:
            progress = update / section.grow_batches
            peak += (self.recipe.settled().train.lr - peak) * 0.5 * (1 + math.cos(math.pi * progress))
        return peak * min(1.0, update / WARMUP)

    # ---- growing ------------------------------------------------------------------------------------------------

    def grow(self, states: States, special: Iterable[int]) -> dict[str, Any]:
        """Give the provisional drafter its vocabulary, from the first rollouts, and train it on them. special: tokens
        that it always holds: those that end an answer, and the tokenizer's own."""
        drafter, documents = self.drafter, list(states.documents)
        counts: Counter[int] = Counter()
        for part in self.world.gather(token_counts(documents)):
            counts += part
        seen, likely = len(counts), self._likely(states)
        # Seen tokens count at least 1, the others less: the policy's own probability only fills what is left.
        ranked = Counter({t: counts[t] + p for t, p in enumerate(likely.tolist())})
        ids = choose_vocab(ranked, special, drafter.config.vocab_size, drafter.config.draft_vocab_size, 1.0)
        with torch.no_grad():
            drafter.d2t.copy_(ids - torch.arange(len(ids)))
            drafter.lm_head.weight.copy_(self.ends.head_VH[drafter.draft_to_target_D])
        self.is_grown = True
        metrics = self.train(states, self.recipe.cotrain.grow_batches)
        return metrics | {
            "tokens_seen": seen,
            "draft_vocab_size": len(ids),
            "coverage": coverage_of(counts, ids),
            "likely_coverage": float(likely[ids].sum()),
        }

    @torch.no_grad()
    def _likely(self, states: States) -> torch.Tensor:
        """[V] float64: the policy's mean probability of every token over the supervised positions of all ranks, of
        which a rank looks at LIKELY_ROWS, evenly spread."""
        places = [(i, t) for i, d in enumerate(states.documents) for t, sampled in enumerate(d.mask) if sampled]
        chosen: dict[int, list[int]] = {}
        for i, t in places[:: math.ceil(len(places) / LIKELY_ROWS) or 1]:
            chosen.setdefault(i, []).append(t)
        head = self.ends.head_VH
        total, rows = torch.zeros(len(head), dtype=torch.float64, device=head.device), 0
        for i, positions in chosen.items():
            for part in states.document(i)["last"][positions].split(LOGIT_ROWS):
                logits = (part.to(head.device, head.dtype) @ head.T).float() / self.ends.temperature
                total += logits.softmax(-1).sum(0).double()
            rows += len(positions)
        if self.world.size > 1:
            dist.all_reduce(total)
        return (total / max(1, sum(self.world.gather(rows)))).cpu()

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Drafter, optimizer and counts. All ranks hold the same, so one writes them."""
        tensors = {name: tensor.contiguous() for name, tensor in self.drafter.state_dict().items()}
        save_file(tensors, directory / "drafter.safetensors")
        torch.save(self.optimizer.state_dict(), directory / "drafter-optimizer.pt")
        (directory / "cotrain.json").write_text(json.dumps({name: getattr(self, name) for name in COUNTS}))

    def load(self, directory: Path) -> None:
        self.drafter.load_state_dict(load_file(directory / "drafter.safetensors"))
        self.optimizer.load_state_dict(torch.load(directory / "drafter-optimizer.pt", weights_only=True))
        for name, value in json.loads((directory / "cotrain.json").read_text()).items():
            setattr(self, name, value)


def _add_up(gradients: Sequence[torch.Tensor]) -> None:
    """Their sums over all ranks, in place, in one message."""
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


# ---- a drafter to grow ----------------------------------------------------------------------------------------------


def provisional(
    recipe: Recipe, facts: ModelFacts, aux_layers: tuple[int, ...], ends: Ends, weights: Mapping[str, torch.Tensor]
) -> Eagle3:
    """A drafter of the final sizes, so that an engine can be built with it, made of the policy's last layer; its
    vocabulary is a placeholder. weights: those that `from_weights` asks for (`needed`)."""
    size = recipe.drafter.draft_vocab_size or math.ceil(facts.vocab_size / VOCAB_SHARE / MULTIPLE) * MULTIPLE
    if size >= facts.vocab_size:
        raise UserError(
            f"drafter.draft_vocab_size ({size}) is the verifier's whole vocabulary. A drafter that is to grow begins "
            "with the verifier's head, and vLLM would take the two for one.",
            f"Give fewer than {facts.vocab_size} tokens.",
        )
    drafter = Eagle3(drafter_config(recipe, facts, aux_layers, size), ends.embed_VH, torch.arange(size))
    from_weights(drafter, weights, facts.num_layers, recipe.train.seed)
    return drafter


def needed(weights: Iterable[tuple[str, torch.Tensor]], num_layers: int, count: int) -> dict[str, torch.Tensor]:
    """What `provisional` reads, out of the policy's stream of weights: its last `count` layers and its ends."""
    layers = tuple(last_layer(num_layers - i) for i in range(count))
    wanted = lambda name: name.startswith(layers) or "layers" not in name  # noqa: E731
    return {name: tensor.detach().clone() for name, tensor in weights if wanted(name)}
