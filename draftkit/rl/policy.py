"""The policy in training: a transformers causal LM in a DeepSpeed engine (ZeRO 0 to 3).

`score` is the log-probability forward of an RL step, without gradient: log-probabilities and statistics of the sampled
tokens and, from the same pass, the drafter's hidden states and teacher. They are detached, so no drafter can reach the
policy. `update` makes one optimizer step. `weights` yields what is published.

Answers to one prompt share its computation, and rows of similar length a micro-batch of at most
`policy.tokens_per_batch` tokens, padding included (`token_model`). Losses come divided by the denominator of the whole
step, so those of micro-batches and processes add up; DeepSpeed takes means over processes instead, which `update`
undoes. Every process runs as many micro-batches as the one with most, weightless ones at the end: under ZeRO-3 each
forward and each backward is a collective call.

A run draws no random numbers here: dropout stays off (it would make the policy another one than was sampled from), so
weights and optimizer are the whole state. Left out: tensor and pipeline parallelism, a model too large for one process
to load (`deepspeed.zero.Init`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import nn

from draftkit.data.capture import Taps
from draftkit.errors import RunFailed, UserError
from draftkit.models import HUB_FILES
from draftkit.recipe import PolicySection, Recipe
from draftkit.rl import token_model, zero
from draftkit.rl.grpo import TokenBatch
from draftkit.rl.token_model import Tokens
from draftkit.types import Sampling

STATE, TAG = "policy.json", "deepspeed"  # what `save_state` writes: the first one last
PER_TOKEN, TEACHER = ("logp", "entropy", "var", "cdf"), ("lse", "max", "top")

LossFunction = Callable[[torch.Tensor, TokenBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class Scores:
    """The log-probability forward of some sequences, in their order.

    logp, entropy, var, cdf: `TokenStatistics` of every sampled token, float32 [T] on the CPU, 0 elsewhere; ref_logp:
    the reference policy's, None without one. states: as `data.capture.Verifier.states` gives them, None unless asked
    for; with `document` this serves as a States.
    """

    documents: Sequence[Tokens]
    logp: list[torch.Tensor]
    entropy: list[torch.Tensor]
    var: list[torch.Tensor]
    cdf: list[torch.Tensor]
    ref_logp: list[torch.Tensor] | None
    states: list[dict[str, torch.Tensor]] | None

    def document(self, i: int) -> dict[str, torch.Tensor]:
        return self.states[i]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence of an update: T tokens, which of them count, and the constants of `TokenBatch` for them ([T], read
    where the mask is True). A supervised step needs the first two alone."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    advantage: float = 0.0
    old_logp: torch.Tensor | None = None
    engine_logp: torch.Tensor | None = None
    ref_logp: torch.Tensor | None = None


# What a process without sequences runs, with weight 0.
NOTHING = Sample((0, 0), (False, True), ref_logp=torch.zeros(2))


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step. loss, sums (the loss function's metrics): over all micro-batches and processes; grad_norm:
    before clipping."""

    loss: float
    sums: dict[str, torch.Tensor]
    grad_norm: float
    lr: float


def samples(scores: Scores, advantages: Sequence[float]) -> list[Sample]:
    """Of scored trajectories."""
    return [
        Sample(
            t.tokens,
            t.mask,
            float(advantage),
            scores.logp[i],
            torch.tensor(t.engine_logp),
            None if scores.ref_logp is None else scores.ref_logp[i],
        )
        for i, (t, advantage) in enumerate(zip(scores.documents, advantages, strict=True))
    ]


def token_batch(members: Sequence[Sample], device: torch.device | str = "cpu") -> TokenBatch:
    """The constants of these samples' supervised tokens, in the order of `token_model.pack`."""
    masks = [torch.tensor(m.mask) for m in members]
    length_S = torch.stack([mask.sum() for mask in masks])

    def flat(name: str) -> torch.Tensor:
        given = [getattr(m, name) for m in members]
        return torch.cat(
            [torch.zeros(int(n)) if v is None else v[mask] for v, mask, n in zip(given, masks, length_S, strict=True)]
        ).to(device)

    with_reference = any(m.ref_logp is not None for m in members)
    return TokenBatch(
        old_logp_N=flat("old_logp"),
        engine_logp_N=flat("engine_logp"),
        ref_logp_N=flat("ref_logp") if with_reference else None,
        advantage_N=torch.tensor([m.advantage for m in members]).repeat_interleave(length_S).to(device),
        sequence_N=torch.arange(len(members)).repeat_interleave(length_S).to(device),
        length_S=length_S.to(device),
    )


def lr_at(step: int, policy: PolicySection) -> float:
    """Learning rate of step 1, 2, ..: a pure function, so a resumed run needs no scheduler state."""
    return policy.lr * min(1.0, step / max(1, policy.lr_warmup_steps))


# ---- the policy -------------------------------------------------------------------------------------------------


class Policy:
    """model: transformers' causal LM (partitioned under ZeRO-3); steps: updates made; rank, world_size: of the
    trainer's processes, which call every method together, each with its own share of the sequences.
    """

    def __init__(
        self,
        model_dir: Path,
        recipe: Recipe,
        aux_layers: Sequence[int] | None = None,
        reference_dir: Path | None = None,
    ) -> None:
        """aux_layers: of the states that `score` can capture. reference_dir: of the policy that rl.kl_coef holds this
        one to, default model_dir; a whole frozen copy in every process, and only where kl_coef > 0."""
        zero.join_processes()
        self.path, self.settings = model_dir, recipe.policy
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device, self.dtype = zero.device(), zero.compute_dtype(recipe.policy)
        self.steps = 0

        s = recipe.sampling
        load = partial(
            token_model.load,
            sampling=Sampling(temperature=s.temperature or 1.0, top_p=s.top_p, top_k=s.top_k),
            dtype=self.dtype,
            trust=recipe.model.trust_remote_code,
        )
        trained = load(model_dir)
        self.model = trained.lm
        if recipe.policy.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._taps = Taps(self.model, aux_layers or ())
        self._taps.active = False
        self._reference = None
        if recipe.rl.kl_coef > 0:
            self._reference = load(reference_dir or model_dir).requires_grad_(False).to(self.device)
        self._engine = zero.engine(trained, self.settings, self.dtype)

    # ---- the log-probability forward ----

    def score(self, documents: Sequence[Tokens], *, capture: bool = False) -> Scores:
        """Statistics of the sampled tokens; with `capture` also the drafter's states, on the policy's device."""
        scored: dict[int, dict[str, torch.Tensor]] = {}
        states: dict[int, dict[str, torch.Tensor]] = {}
        for rows in self._rounds(documents):
            packed = self._pack(rows, documents, teacher=capture)
            self._taps.active = capture
            last_BTH, read = token_model.statistics(self._engine, packed)
            self._taps.active = False
            aux_BTF = self._taps.take() if capture else None
            columns = {name: packed.by_sequence(getattr(read, name)) for name in PER_TOKEN + TEACHER}
            if self._reference is not None:
                columns["ref_logp"] = packed.by_sequence(token_model.statistics(self._reference, packed)[1].logp)
            for s, i in enumerate(i for row in rows for i in row):
                mask = torch.tensor(documents[i].mask, device=self.device)
                own = {name: column[s] for name, column in columns.items()}
                # A token's statistics stand at the state before it, where it was predicted.
                scored[i] = {name: (own[name].roll(1) * mask).cpu() for name in own if name not in TEACHER}
                if capture:
                    place = packed.place[s]
                    states[i] = {"aux": aux_BTF.flatten(0, 1)[place], "last": last_BTH.flatten(0, 1)[place]}
                    states[i] |= {name: own[name] * mask for name in TEACHER}
        order = range(len(documents))
        return Scores(
            documents,
            **{name: [scored[i][name] for i in order] for name in PER_TOKEN},
            ref_logp=None if self._reference is None else [scored[i]["ref_logp"] for i in order],
            states=[states[i] for i in order] if capture else None,
        )

    # ---- one optimizer step ----

    def update(self, batch: Sequence[Sample], loss_function: LossFunction) -> Update:
        """loss_function(logp_N, constants) -> (this micro-batch's part of the step's loss, sums of metrics): what adds
        up over micro-batches and processes. RunFailed, before any weight moves, if the gradient is not finite."""
        lr = lr_at(self.steps + 1, self.settings)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        rounds, sums = self._rounds(batch), {}
        assert rounds, "no process has a sequence to learn from"
        self._checkpoint_layers(True)
        for number, rows in enumerate(rounds):
            self._engine.set_gradient_accumulation_boundary(number == len(rounds) - 1)
            logp_N = token_model.logp(self._engine, self._pack(rows, batch))
            members = [batch[i] for row in rows for i in row] or [NOTHING]
            loss, metrics = loss_function(logp_N, token_batch(members, self.device))
            weight = float(len(rows) > 0)
            self._engine.backward(loss * weight * self.world_size)
            for name, value in {"loss": loss.detach(), **metrics}.items():
                sums[name] = sums.get(name, 0.0) + weight * value.double()
        self._checkpoint_layers(False)
        grad_norm = self._step()
        self.steps += 1
        total = torch.stack(list(sums.values()))
        dist.all_reduce(total)
        sums = dict(zip(sums, total.cpu(), strict=True))
        return Update(float(sums.pop("loss")), sums, grad_norm, lr)

    def _step(self) -> float:
        if zero.is_plain(self.settings, self.dtype):
            norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip))
            _check_finite(norm)
            self._engine.step()
            return norm
        self._engine.step()  # leaves the weights alone when the norm is not finite
        norm = float(self._engine.get_global_grad_norm())
        _check_finite(norm)
        return norm

    def _rounds(self, sequences: Sequence[Tokens]) -> list[list[list[int]]]:
        """Micro-batches (`token_model.plan`); empty ones where another process has more of them."""
        rounds = token_model.plan(sequences, self.settings.tokens_per_batch, self._engine.module.worth)
        most = torch.tensor(len(rounds), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return rounds + [[]] * (int(most) - len(rounds))

    def _pack(self, rows: list[list[int]], sequences: Sequence[Tokens], teacher: bool = False) -> token_model.Packed:
        chosen = [[sequences[i] for i in row] for row in rows] or [[NOTHING]]
        return token_model.pack(chosen, teacher=teacher, device=self.device)

    def _checkpoint_layers(self, on: bool) -> None:
        """transformers recomputes a layer only in training mode, which would switch dropout on: so its layers alone."""
        for module in self.model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = on

    # ---- what leaves the trainer ----

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, whole tensor), gathered a module at a time; dtype: default the one trained in. On every
        process, each of which must take them all. A tensor may be the live one: read it before the next update."""
        seen: set[int] = set()
        for prefix, module in self.model.named_modules():
            own = {n: p for n, p in module.named_parameters(prefix, recurse=False) if id(p) not in seen}
            seen |= {id(p) for p in own.values()}
            with zero.gathered(own.values(), self.settings):
                for name, parameter in own.items():
                    yield name, parameter.detach().to(dtype or self.dtype, copy=self.settings.zero_stage == 3)

    def save(self, directory: Path) -> None:
        """A model directory for serving: the files of the one it came from, with these weights, in that one's dtype."""
        # Copies: under ZeRO the weights are views of one buffer, which safetensors refuses to write piece by piece.
        weights = self.weights(_stored_dtype(self.path))
        kept = {name: tensor.to("cpu", copy=True) for name, tensor in weights if self.rank == 0}
        if self.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            for pattern in HUB_FILES:
                for file in self.path.glob(pattern):
                    if "safetensors" not in file.name:
                        shutil.copyfile(file, directory / file.name)
            save_torch_state_dict(kept, directory)
        dist.barrier()

    def save_state(self, directory: Path) -> None:
        """Everything that `load_state` needs to go on exactly; every process writes its part."""
        self._engine.save_checkpoint(str(directory), tag=TAG, save_latest=False)
        if self.rank == 0:
            (directory / STATE).write_text(json.dumps({"steps": self.steps, "layout": self._layout()}))
        dist.barrier()

    def load_state(self, directory: Path) -> None:
        """Into a freshly made policy. DeepSpeed unpickles these files: never give it a directory from elsewhere."""
        saved, layout = json.loads((directory / STATE).read_text()), self._layout()
        if differing := [name for name in layout if saved["layout"][name] != layout[name]]:
            name = differing[0]
            raise UserError(
                f"{directory} was saved with {name} {saved['layout'][name]}; this run has {layout[name]}.",
                "Go on with the number of processes and the policy settings that the run began with.",
            )
        self._engine.load_checkpoint(str(directory), tag=TAG)
        self.steps = saved["steps"]

    def _layout(self) -> dict[str, Any]:
        return {
            "processes": self.world_size,
            "policy.zero_stage": self.settings.zero_stage,
            "weights of": str(self.dtype),
        }

    def close(self) -> None:
        """Take DeepSpeed's hooks off the model."""
        self._engine.destroy()


def _check_finite(norm: float) -> None:
    if not 0 <= norm < float("inf"):
        raise RunFailed(f"The policy's gradient is not finite (norm {norm}).", "Lower policy.lr.")


def _stored_dtype(path: Path) -> torch.dtype:
    with safe_open(next(path.glob("*.safetensors")), "pt") as file:
        stored = file.get_slice(next(iter(file.keys()))).get_dtype()
    return torch.float32 if stored == "F32" else torch.bfloat16
