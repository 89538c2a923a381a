"""A drafter in training, spread over processes: whole in each (DDP), or in shards (FSDP2, `train.shard`).

Sharded, each process keeps its part of parameters, gradients and optimizer states; a forward gathers what it needs.
What one process does alone (held-out metrics, export, parity) it does on `whole()`, a drafter of plain tensors. The
loss is part of the module that is spread, because it multiplies by the drafter's head. Checkpoints hold whole tensors
by name, so that a run may go on with other processes, sharded or not.

Left out: accelerate's own FSDP and DeepSpeed wrappers, which take the optimizer and its step over; `accelerate launch
--use_fsdp` shards as `train.shard` does. Source: torch's fully_shard, arXiv 2304.11277.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from draftkit.drafters.base import Drafter, trainable, trained
from draftkit.drafters.losses import drafter_loss
from draftkit.errors import UserError
from draftkit.recipe import TrainSection
from draftkit.train import checkpoint, optim
from draftkit.train.evaluate import TeacherView
from draftkit.types import DraftBatch

INSIDE = "drafter."  # of the names in `_Step`
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)


class _Step(nn.Module):
    """Batch -> loss and metrics, all of the drafter's parameters used inside."""

    def __init__(self, drafter: Drafter, teacher: TeacherView, recipe: TrainSection) -> None:
        super().__init__()
        self.drafter, self.teacher, self.recipe = drafter, teacher, recipe

    def forward(self, batch: DraftBatch, denominator: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        states, teacher = self.drafter(batch), self.teacher.at(batch)
        decay, loss = self.recipe.ttt_decay, self.recipe.loss
        return drafter_loss(
            states, self.drafter.head_DH, teacher, batch.valid_LR, decay, denominator, with_sampled=True, objective=loss
        )


class Spread:
    """drafter: as it was built; afterwards this process's part of it. The optimizer is made here."""

    def __init__(self, drafter: Drafter, teacher: TeacherView, recipe: TrainSection, accelerator: Accelerator) -> None:
        self.accelerator, self.drafter = accelerator, drafter
        self.step = _Step(drafter, teacher, recipe)
        self.sharded = wants_shards(recipe, accelerator) and accelerator.num_processes > 1
        self._twin = None
        if self.sharded:
            if accelerator.is_main_process:
                self._twin = copy.deepcopy(drafter, {id(buffer): buffer for buffer in drafter.buffers()})
            _shard(self.step, drafter, accelerator)
        self.optimizer = optim.build(drafter, recipe)
        replicated = accelerator.num_processes > 1 and not self.sharded
        self.model = accelerator.prepare_model(self.step) if replicated else self.step

    def clip(self, norm: float) -> float:
        """Clip the gradient to `norm`; the norm it had."""
        found = nn.utils.clip_grad_norm_(trainable(self.drafter), norm)
        return float(found.full_tensor() if hasattr(found, "full_tensor") else found)

    def whole(self) -> Drafter | None:
        """The drafter as it is now, of plain tensors, on the main process; None on the others. Collective."""
        if not self.sharded:
            return self.drafter if self.accelerator.is_main_process else None
        state = get_model_state_dict(self.step, options=WHOLE)
        if self._twin is not None:
            self._twin.load_state_dict({name.removeprefix(INSIDE): tensor for name, tensor in state.items()})
        return self._twin

    # ---- checkpoints ----

    def save(self, directory: Path, step: int, keep: int) -> None:
        """The state after `step`; all but the newest `keep` checkpoints go. Collective."""
        drafter = self.whole()
        states = get_optimizer_state_dict(self.step, self.optimizer, options=WHOLE)
        if drafter is not None:
            with checkpoint.whole(directory, step, keep) as aside:
                save_file({name: t.contiguous() for name, t in trained(drafter).items()}, aside / "model.safetensors")
                torch.save(states, aside / "optimizer.pt")
        self.accelerator.wait_for_everyone()

    def load_newest(self, directory: Path) -> int:
        """Restore the newest checkpoint; its step, or 0 when there is none. Collective."""
        found = checkpoint.found(directory)
        if not found:
            return 0
        state = load_file(found[-1] / "model.safetensors")
        assert state.keys() <= self.drafter.state_dict().keys(), f"{found[-1]} is of another kind of drafter"
        # What is frozen is the verifier's, and there already.
        set_model_state_dict(self.step, {INSIDE + name: tensor for name, tensor in state.items()}, options=WHOLE)
        states: dict[str, Any] = torch.load(found[-1] / "optimizer.pt", weights_only=True)
        set_optimizer_state_dict(self.step, self.optimizer, states, options=WHOLE)
        return checkpoint.step_of(found[-1])


def wants_shards(recipe: TrainSection, accelerator: Accelerator) -> bool:
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        plugin = accelerator.distributed_type.value
        raise UserError(
            f"train-drafter under accelerate's {plugin} plugin, which takes the optimizer over.",
            "Launch without it and set train.shard=true, which shards as ZeRO-3 does.",
        )
    return recipe.shard or accelerator.distributed_type is DistributedType.FSDP


def _shard(step: nn.Module, drafter: Drafter, accelerator: Accelerator) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for block in drafter.shardable():
        fully_shard(block, mesh=mesh)
    fully_shard(step, mesh=mesh, reshard_after_forward=False)  # the loss needs the head once more
