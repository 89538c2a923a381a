"""DeepSpeed as the policy trainer uses it: the engine's settings in one place, its process group, its silence.

Left out: DeepSpeed's own optimizers, schedules, data loading and launcher. Optimizer offload is ZeRO's; a trainer on
the CPU has its optimizer there in any case.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from draftkit.console import say_once
from draftkit.errors import UserError
from draftkit.models import native_bf16
from draftkit.recipe import PolicySection

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def on_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu() else "cpu")


def join_processes() -> None:
    """torchrun's process group; one that is there already (vLLM makes one); or a group of this process alone."""
    os.environ.setdefault("LOCAL_RANK", "0")  # without it DeepSpeed refuses to start
    if dist.is_initialized():
        return
    backend = "nccl" if on_gpu() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def compute_dtype(policy: PolicySection) -> torch.dtype:
    """Of weights and products; masters and optimizer are float32 in any case."""
    if policy.dtype == "float32":
        return torch.float32
    if not on_gpu() and not native_bf16():
        say_once("this CPU does not multiply bfloat16 natively: the policy is trained in float32.")
        return torch.float32
    return torch.bfloat16


def offloads(policy: PolicySection) -> bool:
    if policy.offload_optimizer and not policy.zero_stage:
        raise UserError("policy.offload_optimizer needs policy.zero_stage 1, 2 or 3; it is 0.")
    if policy.offload_optimizer and not on_gpu():
        say_once("policy.offload_optimizer changes nothing here: the optimizer of a CPU is on the CPU already.")
    return policy.offload_optimizer and on_gpu()


def is_plain(policy: PolicySection, dtype: torch.dtype) -> bool:
    """Float32 without ZeRO: there DeepSpeed would clip, but keep the norm to itself, so the policy clips."""
    return policy.zero_stage == 0 and dtype == torch.float32


def config(policy: PolicySection, dtype: torch.dtype, offload: bool) -> dict[str, Any]:
    """Batch sizes are formal: the policy says itself which micro-batch is the last of a step."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if is_plain(policy, dtype) else policy.grad_clip,
        "steps_per_print": None,
        "zero_optimization": {"stage": policy.zero_stage, "reduce_bucket_size": 50_000_000},
        "zero_force_ds_cpu_optimizer": False,
    }
    if offload:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if dtype == torch.bfloat16:
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
        if policy.zero_stage:  # stage 0 sums the gradients of micro-batches in bfloat16: DeepSpeed has nothing else
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def optimizer(model: nn.Module, policy: PolicySection) -> torch.optim.Optimizer:
    """AdamW; decay of weights on matrices only."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": policy.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=policy.lr, betas=policy.betas, fused=True)


def engine(model: nn.Module, policy: PolicySection, dtype: torch.dtype) -> DeepSpeedEngine:
    offload = offloads(policy)
    with redirect_stdout(io.StringIO()):  # it prints that it has built an extension
        made, *_ = _deepspeed().initialize(
            model=model, optimizer=optimizer(model, policy), config=config(policy, dtype, offload)
        )
    return made


def gathered(parameters: Iterable[nn.Parameter], policy: PolicySection) -> AbstractContextManager:
    """Whole parameters inside; a collective call under ZeRO-3."""
    return _deepspeed().zero.GatheredParameters(list(parameters)) if policy.zero_stage == 3 else nullcontext()


def _deepspeed() -> ModuleType:
    """Without its chatter, on the accelerator that torch has."""
    if not on_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # torch 2.13 has new names for two collectives that DeepSpeed 0.19 calls.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed
