"""What vLLM loads of an EAGLE-3 drafter: tensors, and config.json in the plain and in the speculators layout.

Every flag is written, also where vLLM's default would do: its defaults differ between the two layouts
(`norm_before_residual`) and the auxiliary ids are read from different keys by its two runners.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftkit.drafters.base import whole_directory
from draftkit.drafters.eagle3 import Eagle3, Eagle3Config


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
        **_flags(c),
    }


def speculators_config(c: Eagle3Config, verifier_name: str, k: int) -> dict[str, Any]:
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
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": verifier_name, "architectures": []},
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
        "num_aux_hidden_states": len(c.aux_layers),  # in the nested config too: vLLM sizes fc by it, else for three
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


def write_directory(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    verifier: dict[str, str] | None,
    readme: str,
) -> None:
    with whole_directory(directory, verifier) as aside:
        save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (aside / "README.md").write_text(readme)
