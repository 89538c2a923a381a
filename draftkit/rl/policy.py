"""The policy in training: a transformers causal LM in a DeepSpeed engine (ZeRO 0 to 3).

`score` is the log-probability forward of an RL step, without gradient: log-probabilities and statistics of the sampled
tokens and, from the same pass, the drafter's hidden states and teacher. They are detached, so no drafter can reach the
policy. `update` makes one optimizer step. `weights` yields what is published.

Sequences of similar length share a padded micro-batch of at most `policy.tokens_per_batch` tokens. Losses come divided
by the denominator of the whole step, so those of micro-batches and processes add up; DeepSpeed takes means over
processes instead, which `update` undoes. Every process runs as many micro-batches as the one with most, weightless ones
at the end: under ZeRO-3 each forward and each backward is a collective call.

A run draws no random numbers here: dropout stays off (it would make the policy another one than was sampled from), so
weights and optimizer are the whole state. Left out: tensor and pipeline parallelism, a model too large for one process
to load (`deepspeed.zero.Init`).
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import nn

from draftkit.console import say_once
from draftkit.data.capture import Taps, chunks
from draftkit.errors import RunFailed, UserError
from draftkit.models import HUB_FILES, native_bf16
from draftkit.recipe import PolicySection, Recipe
from draftkit.rl.grpo import TokenBatch
from draftkit.rl.token_model import Padded, Tokens, load, pad, statistics_of
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
    """The constants of these samples' supervised tokens, in the order of `token_model.pad`."""
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


# ---- DeepSpeed --------------------------------------------------------------------------------------------------


def _plain(policy: PolicySection, dtype: torch.dtype) -> bool:
    """Float32 without ZeRO: there DeepSpeed would clip, but keep the norm to itself, so `update` clips."""
    return policy.zero_stage == 0 and dtype == torch.float32


def deepspeed_config(policy: PolicySection, dtype: torch.dtype, offload: bool) -> dict[str, Any]:
    """Batch sizes are not told: `update` says itself which micro-batch is the last."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if _plain(policy, dtype) else policy.grad_clip,
        "steps_per_print": None,
        "zero_optimization": {"stage": policy.zero_stage, "reduce_bucket_size": 50_000_000},
        "zero_force_ds_cpu_optimizer": False,
    }
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        if policy.zero_stage:  # stage 0 sums the gradients of micro-batches in bfloat16: DeepSpeed has nothing else
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _deepspeed() -> ModuleType:
    """DeepSpeed without its chatter, on the accelerator that torch has."""
    if not _on_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # torch 2.13 has new names for two collectives that DeepSpeed 0.19 calls.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed


def _join_processes() -> None:
    """torchrun's process group; one that is there already (vLLM makes one); or a group of this process alone."""
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it beside a group that it did not make
    os.environ.setdefault("LOCAL_RANK", "0")  # without it DeepSpeed refuses to start
    if dist.is_initialized():
        return
    backend = "nccl" if _on_gpu() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _on_gpu() -> bool:
    return torch.cuda.is_available()


def compute_dtype(policy: PolicySection) -> torch.dtype:
    """Of weights and products; masters and optimizer are float32 in any case."""
    if policy.dtype == "float32":
        return torch.float32
    if not _on_gpu() and not native_bf16():
        say_once("this CPU does not multiply bfloat16 natively: the policy is trained in float32.")
        return torch.float32
    return torch.bfloat16


def offloads(policy: PolicySection) -> bool:
    if policy.offload_optimizer and not policy.zero_stage:
        raise UserError("policy.offload_optimizer needs policy.zero_stage 1, 2 or 3; it is 0.")
    if policy.offload_optimizer and not _on_gpu():
        say_once("policy.offload_optimizer changes nothing here: the optimizer of a CPU is on the CPU already.")
    return policy.offload_optimizer and _on_gpu()


def _optimizer(model: nn.Module, policy: PolicySection) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": policy.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=policy.lr, betas=policy.betas, fused=True)


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
        deepspeed = _deepspeed()
        _join_processes()
        self.path, self.settings = model_dir, recipe.policy
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if _on_gpu() else "cpu")
        self.dtype = compute_dtype(recipe.policy)
        s = recipe.sampling
        sampling = Sampling(temperature=s.temperature or 1.0, top_p=s.top_p, top_k=s.top_k)
        self.steps = 0

        token_model = load(model_dir, sampling, self.dtype, recipe.model.trust_remote_code)
        self.model = token_model.lm
        if recipe.policy.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self._taps = Taps(self.model, aux_layers or ())
        self._taps.active = False
        self._reference = None
        if recipe.rl.kl_coef > 0:
            self._reference = load(reference_dir or model_dir, sampling, self.dtype, recipe.model.trust_remote_code)
            self._reference.requires_grad_(False).to(self.device)

        with redirect_stdout(io.StringIO()):  # it prints that it has built an extension
            self._engine, *_ = deepspeed.initialize(
                model=token_model,
                optimizer=_optimizer(token_model, self.settings),
                config=deepspeed_config(self.settings, self.dtype, offloads(self.settings)),
            )

    # ---- the log-probability forward ----

    def score(self, documents: Sequence[Tokens], *, capture: bool = False) -> Scores:
        """Statistics of the sampled tokens; with `capture` also the drafter's states, on the policy's device."""
        scored: dict[int, dict[str, torch.Tensor]] = {}
        states: dict[int, dict[str, torch.Tensor]] = {}
        for members in self._rounds(documents):
            padded = pad([documents[i] for i in members] or [NOTHING], teacher=capture, device=self.device)
            self._taps.active = capture
            last_BTH, read = statistics_of(self._engine, padded)
            self._taps.active = False
            columns = {name: _at_places(getattr(read, name), padded) for name in PER_TOKEN + TEACHER}
            if self._reference is not None:
                _, theirs = statistics_of(self._reference, padded)
                columns["ref_logp"] = _at_places(theirs.logp, padded)
            aux_BTF = self._taps.take() if capture else None
            for row, i in enumerate(members):
                length, mask = len(documents[i].tokens), torch.tensor(documents[i].mask, device=self.device)
                own = {name: column_BT[row, :length] for name, column_BT in columns.items()}
                # A token's statistics stand at the state before it, where it was predicted.
                scored[i] = {name: (own[name].roll(1) * mask).cpu() for name in own if name not in TEACHER}
                if capture:
                    states[i] = {"aux": aux_BTF[row, :length].contiguous(), "last": last_BTH[row, :length].contiguous()}
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
        for number, members in enumerate(rounds):
            self._engine.set_gradient_accumulation_boundary(number == len(rounds) - 1)
            chosen = [batch[i] for i in members] or [NOTHING]
            padded = pad(chosen, device=self.device)
            logp_N = self._engine(padded.tokens_BT, padded.row_N, padded.token_N, False)
            loss, metrics = loss_function(logp_N, token_batch(chosen, self.device))
            weight = float(len(members) > 0)
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
        if _plain(self.settings, self.dtype):
            norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip))
            _check_finite(norm)
            self._engine.step()
            return norm
        self._engine.step()  # leaves the weights alone when the norm is not finite
        norm = float(self._engine.get_global_grad_norm())
        _check_finite(norm)
        return norm

    def _rounds(self, sequences: Sequence[Tokens]) -> list[list[int]]:
        """Micro-batches as numbers of sequences; empty ones where another process has more of them."""
        plan = chunks([len(s.tokens) for s in sequences], self.settings.tokens_per_batch) if sequences else []
        most = torch.tensor(len(plan), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return plan + [[]] * (int(most) - len(plan))

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
            with self._gathered(own.values()):
                for name, parameter in own.items():
                    yield name, parameter.detach().to(dtype or self.dtype, copy=self.settings.zero_stage == 3)

    def _gathered(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager:
        if self.settings.zero_stage < 3:
            return nullcontext()
        return _deepspeed().zero.GatheredParameters(list(parameters))

    def save(self, directory: Path) -> None:
        """A model directory for serving: the files of the one it came from, with these weights, in that one's dtype."""
        kept = {name: tensor.cpu() for name, tensor in self.weights(_stored_dtype(self.path)) if self.rank == 0}
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


def _at_places(column_N: torch.Tensor, padded: Padded) -> torch.Tensor:
    """[B, T], zero where nothing was chosen."""
    column = torch.zeros(padded.tokens_BT.numel(), dtype=column_N.dtype, device=column_N.device)
    column[padded.row_N] = column_N
    return column.view(padded.tokens_BT.shape)


def _check_finite(norm: float) -> None:
    if not 0 <= norm < float("inf"):
        raise RunFailed(f"The policy's gradient is not finite (norm {norm}).", "Lower policy.lr.")


def _stored_dtype(path: Path) -> torch.dtype:
    with safe_open(next(path.glob("*.safetensors")), "pt") as file:
        stored = file.get_slice(next(iter(file.keys()))).get_dtype()
    return torch.float32 if stored == "F32" else torch.bfloat16
