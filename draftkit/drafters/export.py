"""Drafter directories that others serve: the plain layout (vLLM, `method: eagle3`) and the speculators layout.

Every flag is written, also where vLLM's default would do: its defaults differ between the two layouts
(`norm_before_residual`) and the auxiliary ids are read from different keys by its two runners.

Left out: the SGLang layout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftkit.drafters.base import whole_directory
from draftkit.drafters.card import model_card
from draftkit.drafters.eagle3 import Eagle3, Eagle3Config


def export(drafter: Eagle3, directory: Path, verifier: dict[str, str], card: dict[str, Any]) -> None:
    """Write `directory` (plain layout) and `directory`-speculators. verifier: its fingerprint; card: for README.md."""
    readme = model_card(drafter, card)
    tensors = export_plain(drafter, directory, verifier, readme)
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    renamed["embed_tokens.weight"] = drafter.embed_VH.detach().to("cpu", torch.bfloat16).clone()
    speculators = directory.with_name(directory.name + "-speculators")
    _write(speculators, speculators_config(drafter.config, card), renamed, verifier, readme)


def export_plain(drafter: Eagle3, directory: Path, verifier: dict[str, str], readme: str) -> dict[str, torch.Tensor]:
    """Write `directory` in the plain layout alone; returns its tensors."""
    t2d = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
    t2d[drafter.draft_to_target_D.cpu()] = True
    tensors = served_tensors(drafter) | {"t2d": t2d}
    _write(directory, plain_config(drafter.config), tensors, verifier, readme)
    return tensors


def served_tensors(drafter: Eagle3) -> dict[str, torch.Tensor]:
    """What vLLM loads, on the CPU: bfloat16 weights and the vocabulary map `d2t`, without which its map stays zeros. No
    embedding: an engine then shares the verifier's, and loading one would overwrite that."""
    return {
        name: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in drafter.state_dict().items()
    }


def plain_config(c: Eagle3Config) -> dict[str, Any]:
    ids = list(c.aux_layers)
    return _layer_config(c) | {
        "architectures": ["Eagle3Qwen3ForCausalLM" if c.qk_norm else "LlamaForCausalLMEagle3"],
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids},
        "num_aux_hidden_states": len(ids),
        **_flags(c),
    }


def speculators_config(c: Eagle3Config, card: dict[str, Any]) -> dict[str, Any]:
    recipe = card["recipe"]
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(c.aux_layers),
        **_flags(c),
        "embed_requires_grad": False,
        "transformer_layer_config": _layer_config(c),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": recipe["train"]["ttt_steps"], "verifier_accept_k": 1}
            ],
            "verifier": {"name_or_path": recipe["model"]["path"], "architectures": []},
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _flags(c: Eagle3Config) -> dict[str, bool]:
    return {name: getattr(c, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}


def _layer_config(c: Eagle3Config) -> dict[str, Any]:
    return {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "num_hidden_layers": c.num_hidden_layers,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_parameters": c.rope_parameters,
        "max_position_embeddings": c.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _write(
    directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], verifier: dict[str, str], readme: str
) -> None:
    with whole_directory(directory, verifier) as aside:
        save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (aside / "README.md").write_text(readme)
