"""Run as a program: vLLM's own MTP module of every family, filled from a checkpoint and run, for test_mtp_families.

`python mtp_modules.py DIRECTORY`: every subdirectory holds config.json, model.safetensors (MTP tensors, head and
embedding) and inputs.safetensors; params.safetensors (what the module holds), outputs.safetensors and facts.json come
beside them.
A process of its own, because it builds vLLM's process groups anew for every family and stands in for torchvision.

Sequences are one token long, so attention returns the token's own value and needs no cache. Mixtures of experts are
loaded but then count as zero.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

os.environ |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.models import registry


class Stub(types.ModuleType):
    """A module of which everything can be imported and nothing used."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class Zero(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def stand_in() -> None:
    """Qwen3.5's file imports image processing, which wants torchvision; the CPU build is used without it."""
    for name in ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.v2"):
        sys.modules[name] = Stub(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    registry._run_in_subprocess = lambda inspect: inspect()  # its child would not have the stand-in


def own_value(self: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object):
    heads = value.view(-1, self.num_kv_heads, self.head_size_v)
    return heads.repeat_interleave(self.num_heads // self.num_kv_heads, 1).flatten(1)


def own_latent_value(self: MLAAttention, q: torch.Tensor, latent: torch.Tensor, *_: object, **__: object):
    both = self.kv_b_proj(latent)[0].view(len(latent), self.num_heads, -1)
    return both[..., self.qk_nope_head_dim :].flatten(1)


def silence_experts(model: torch.nn.Module) -> None:
    for module in model.modules():
        if hasattr(getattr(module, "mlp", None), "experts"):
            module.mlp = Zero()


def build(config: VllmConfig, draft: bool) -> torch.nn.Module:
    model_config = config.speculative_config.draft_model_config if draft else config.model_config
    return initialize_model(config, model_config=model_config)


def run(config: VllmConfig, model: torch.nn.Module, call: Callable[[], object]) -> object:
    with torch.no_grad(), set_forward_context(None, config):
        return call()


def drafted(config: VllmConfig, directory: Path) -> dict[str, object]:
    """Load the family's MTP module, save what it holds, and save what it makes of the inputs."""
    model = build(config, draft=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    loaded = model.load_weights(iter(load_file(directory / "model.safetensors").items()))
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, directory / "params.safetensors")
    silence_experts(model)
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    x = load_file(directory / "inputs.safetensors")
    out = run(config, model, lambda: model(x["tokens"], x["positions"], x["hidden"].clone()))
    state, feedback = out if isinstance(out, tuple) else (out, out)
    logits = run(config, model, lambda: model.compute_logits(state))
    save_file({"logits": logits.contiguous(), "feedback": feedback.contiguous()}, directory / "outputs.safetensors")
    return {"loaded": sorted(loaded)}


def verified(config: VllmConfig, directory: Path) -> dict[str, object]:
    """Whether the states that the verifier hands to its drafter depend on its final norm."""
    model = build(config, draft=False)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(number))
    silence_experts(model)
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    x = load_file(directory / "inputs.safetensors")
    before = run(config, model, lambda: model(x["tokens"], x["positions"]).clone())
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    after = run(config, model, lambda: model(x["tokens"], x["positions"]).clone())
    return {"verifier_state": "pre-norm" if torch.equal(before, after) else "post-norm"}


def main(root: Path) -> None:
    stand_in()
    Attention.forward, MLAAttention.forward = own_value, own_latent_value
    MLAAttention.process_weights_after_loading = lambda *_: None  # packs for a kernel that is not called
    for number, directory in enumerate(sorted(path for path in root.iterdir() if path.is_dir())):
        settings = dict(skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, dtype="float32")
        speculation = {"method": "mtp", "num_speculative_tokens": 2}
        facts: dict[str, object] = {}
        for draft, part in ((True, drafted), (False, verified)):
            # Layers register in the configuration by name, so each module gets one of its own.
            args = EngineArgs(model=str(directory), speculative_config=dict(speculation), **settings)
            config = args.create_engine_config()
            with set_current_vllm_config(config):
                if draft:
                    meeting = f"file://{root}/meeting-{number}"
                    init_distributed_environment(1, 0, meeting, 0, backend="gloo")
                    initialize_model_parallel(1, 1)
                facts |= part(config, directory)
        (directory / "facts.json").write_text(json.dumps(facts))
        destroy_model_parallel()
        destroy_distributed_environment()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
