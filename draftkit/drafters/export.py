"""What vLLM loads of an EAGLE-3 drafter: tensors, and config.json in the plain and in the speculators layout.

Every flag is written, also where vLLM's default would do: its defaults differ between the two layouts
(`norm_before_residual`) and the auxiliary ids are read from different keys by its two runners.
"""

from __future__ import annotations

from typing import Any

import torch

from draftkit.drafters.eagle3 import Eagle3, Eagle3Config
from draftkit.drafters.layers import layer_config


def served_tensors(drafter: Eagle3) -> dict[str, torch.Tensor]:
    """What vLLM loads, on the CPU: bfloat16 weights and the vocabulary map `d2t`, without which its map stays zeros. No
    embedding: an engine then shares the verifier's, and loading one would overwrite that."""
    return {
        name: tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in drafter.state_dict().items()
    }


def plain_config(c: Eagle3Config, ids: list[int], dtype: str) -> dict[str, Any]:
    """ids: the auxiliary layers, as the engine that it is for counts them."""
    return _layer_config(c, dtype) | {
        "architectures": ["Eagle3Qwen3ForCausalLM" if c.qk_norm else "LlamaForCausalLMEagle3"],
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids},
        **_flags(c),
    }


def speculators_config(c: Eagle3Config, dtype: str, verifier_name: str, k: int) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(c.aux_layers),
        **_flags(c),
        "embed_requires_grad": False,
        "transformer_layer_config": _layer_config(c, dtype),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": verifier_name, "architectures": []},
        },
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def _flags(c: Eagle3Config) -> dict[str, bool]:
    return {name: getattr(c, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}


def _layer_config(c: Eagle3Config, dtype: str) -> dict[str, Any]:
    layer = layer_config(c, "qwen3" if c.qk_norm else "llama", c.num_hidden_layers, dtype, c.attention_bias)
    return layer | {"num_aux_hidden_states": len(c.aux_layers)}  # nested, too: vLLM sizes fc by it, else for three
