"""Drafter directories that others serve: the plain layout (vLLM, `method: eagle3`) and the speculators layout.

Every flag is written, also where vLLM's default would do: its defaults differ between the two layouts
(`norm_before_residual`) and the auxiliary ids are read from different keys by its two runners. Written aside and
renamed, `draftkit.json` (who the verifier is) inside, so a directory that exists is whole.

Left out: the SGLang layout.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftkit import __version__
from draftkit.drafters.eagle3 import Eagle3, Eagle3Config

SCHEMA = "draftkit.drafter/1"


def export(drafter: Eagle3, directory: Path, verifier: dict[str, str], card: dict[str, Any]) -> None:
    """Write `directory` (plain layout) and `directory`-speculators. verifier: its fingerprint; card: for README.md."""
    tensors = export_plain(drafter, directory, verifier, model_card(plain_config(drafter.config), card))
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    renamed["embed_tokens.weight"] = drafter.embed_VH.detach().to("cpu", torch.bfloat16).clone()
    speculators = directory.with_name(directory.name + "-speculators")
    config = speculators_config(drafter.config, card)
    _write(speculators, config, renamed, verifier, model_card(config, card))


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
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids},
        "num_aux_hidden_states": len(ids),
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
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
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
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


def _layer_config(c: Eagle3Config) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "num_hidden_layers": 1,
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
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    verifier: dict[str, str],
    readme: str,
) -> None:
    aside = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
    (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (aside / "draftkit.json").write_text(
        json.dumps({"schema": SCHEMA, "draftkit": __version__, "verifier": verifier}, indent=2) + "\n"
    )
    (aside / "README.md").write_text(readme)
    shutil.rmtree(directory, ignore_errors=True)
    aside.rename(directory)


def model_card(config: dict[str, Any], card: dict[str, Any]) -> str:
    """What it was trained on, how, what it measured, how to serve it."""
    recipe, held = card["recipe"], card["heldout"]
    k = recipe["train"]["ttt_steps"]
    sampling, train = recipe["sampling"], recipe["train"]
    rows = "\n".join(
        f"| {i + 1} | {a:.3f} | {g:.3f} | {s:.3f} |"
        for i, (a, g, s) in enumerate(
            zip(held["cond_acc"], held["expected_acceptance_greedy"], held["expected_acceptance_sampled"], strict=True)
        )
    )
    return f"""# EAGLE-3 drafter for {recipe["model"]["path"]}

Trained by draftkit {__version__} on answers of the verifier itself to `{recipe["data"]["recipe"]}` prompts, sampled at
temperature {sampling["temperature"]:g}, top-p {sampling["top_p"]:g}, at most {sampling["max_tokens"]} tokens
({sampling["n"]} sampled and {sampling["greedy_n"]} greedy answers a prompt). {train["epochs"]:g} epochs,
{train["ttt_steps"]} TTT steps (decay {train["ttt_decay"]:g}), AdamW, peak learning rate {train["lr"]:g}.
Draft vocabulary {config["draft_vocab_size"]:,}.

Held-out prompts, at temperature {sampling["temperature"] or 1:g} against the full vocabulary:

| TTT step | cond. accuracy | greedy acceptance | sampled acceptance |
|---|---|---|---|
{rows}

Acceptance length of greedy drafts {held["walk_acceptance_length"]:.2f} at k = {k};
vocabulary ceiling {held["vocab_ceiling"]:.3f};
verifier's own E(max p) {held["verifier_max_p"]:.3f}.

Serve: `--speculative-config '{{"method": "eagle3", "model": "<this directory>", "num_speculative_tokens": {k}}}'`
"""
