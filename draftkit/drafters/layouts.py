"""EAGLE-3 heads as others publish them: read any of three layouts, write any of them, bit for bit.

    vllm          SafeAILab's and SpecForge's: `midlayer.*`, one flat config.json        (`method: eagle3`)
    sglang        the same files; the auxiliary ids follow SGLang's reading of them
    speculators   `layers.0.*`, the decoder layer nested under `transformer_layer_config`

Auxiliary ids have two conventions. draftkit and vLLM count states: id L is the state after L blocks. SpecForge,
TorchSpec and older SGLang count layers: id i is the output of layer i, so that [1, 14, 27] there is [2, 15, 28] here.
Which one a file means does not stand in it, and a wrong guess costs most of the acceptance, so:

    speculators layout, or written by draftkit      states
    flat layout, ids begin with 1                   layers, as SGLang reads it (sglang#25454)
    flat layout, other ids                          states, as vLLM reads it
    flat layout, no ids                             the default of every engine: states (2, n//2, n-3)

`aux_ids` overrides the rule. Written for SGLang, ids that begin with 2 are given as layers, which every SGLang reads
the same way; others as states, which needs one of after sglang#25454 (May 2026). Loading by SGLang has not been run.

Left out: P-EAGLE's mask_hidden; `.bin` files, which would be unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from draftkit.console import say_once
from draftkit.drafters.base import write_directory
from draftkit.drafters.card import model_card
from draftkit.drafters.eagle3 import Eagle3, Eagle3Config, default_aux_layers
from draftkit.drafters.export import plain_config, served_tensors, speculators_config
from draftkit.errors import UserError

Layout = Literal["vllm", "speculators", "sglang"]
AuxIds = Literal["vllm", "sglang"]  # who counts: vLLM states, SGLang (and SpecForge) layers
LAYOUTS: tuple[Layout, ...] = ("vllm", "speculators", "sglang")
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Head:
    """tensors: by draftkit's names (`midlayer.*`, `d2t`), in the file's dtype; an embedding if the file had one."""

    config: Eagle3Config
    tensors: dict[str, torch.Tensor]


def read(directory: Path, aux_ids: AuxIds | None = None, num_layers: int | None = None) -> Head:
    """aux_ids: how the file counts, where the rule above would be wrong. num_layers: of the verifier, for heads whose
    file names no auxiliary ids. Raises UserError, naming file and field, for what is no EAGLE-3 head or not whole."""
    raw = _read_config(directory / "config.json")
    config = _config(raw, directory, aux_ids, num_layers)
    return Head(config, _tensors(directory, config))


def config_of(directory: Path, aux_ids: AuxIds | None = None, num_layers: int | None = None) -> Eagle3Config:
    """The configuration alone."""
    return _config(_read_config(directory / "config.json"), directory, aux_ids, num_layers)


def write(
    head: Head,
    directory: Path,
    layout: Layout,
    verifier: dict[str, str] | None,
    name: str = "",
    k: int = 3,
    readme: str = "",
) -> None:
    """verifier: its fingerprint, None where it is not known; name: what the speculators layout calls it; k: the tokens
    to draft that it suggests."""
    c, tensors = head.config, dict(head.tensors)
    t2d = torch.zeros(c.vocab_size, dtype=torch.bool)
    t2d[tensors["d2t"] + torch.arange(c.draft_vocab_size)] = True
    tensors["t2d"] = t2d
    dtype = str(head.tensors["fc.weight"].dtype).removeprefix("torch.")
    if layout == "speculators":
        config = speculators_config(c, dtype, name, k)
        tensors = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}
    else:
        config = plain_config(c, _for_sglang(c.aux_layers) if layout == "sglang" else list(c.aux_layers), dtype)
    write_directory(directory, config, tensors, verifier, readme)


def head_of(drafter: Eagle3) -> Head:
    """As it is served: bfloat16."""
    return Head(drafter.config, served_tensors(drafter))


def export(drafter: Eagle3, directory: Path, verifier: dict[str, str], card: dict[str, Any]) -> None:
    """Write `directory` for vLLM and `directory`-speculators, which holds the embedding too."""
    head, readme, recipe = head_of(drafter), model_card(drafter, card), card["recipe"]
    name, k = recipe["model"]["path"], recipe["train"]["ttt_steps"]
    write(head, directory, "vllm", verifier, name, k, readme)
    embedding = {EMBEDDING: drafter.embed_VH.detach().to("cpu", torch.bfloat16).clone()}
    beside = directory.with_name(directory.name + "-speculators")
    write(Head(head.config, head.tensors | embedding), beside, "speculators", verifier, name, k, readme)


def from_drafter(
    directory: Path, embed_VH: torch.Tensor, aux_ids: AuxIds | None = None, num_layers: int | None = None
) -> Eagle3:
    """A head to train on. Its draft vocabulary stays: recomputing that would scramble its LM head silently."""
    head = read(directory, aux_ids, num_layers)
    offsets = head.tensors["d2t"]
    drafter = Eagle3(head.config, embed_VH, offsets + torch.arange(len(offsets)))
    weights = {n: t.float() for n, t in head.tensors.items() if n not in ("d2t", EMBEDDING)}
    missing, unexpected = drafter.load_state_dict(weights, strict=False)
    assert set(missing) <= {"d2t"} and not unexpected
    return drafter


# ---- config.json ----------------------------------------------------------------------------------------------------


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"{file.parent} holds no config.json, so it is no drafter.", "Give a drafter's directory.")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}.", "Copy the drafter again.") from error
    if not isinstance(raw, dict) or not (_is_speculators(raw) or _is_plain(raw)):
        found = raw.get("architectures") if isinstance(raw, dict) else type(raw).__name__
        raise UserError(f"{file}: architectures is {found}, not an EAGLE-3 drafter.", "Give an EAGLE-3 head.")
    return raw


def _is_speculators(raw: Mapping[str, Any]) -> bool:
    return raw.get("speculators_model_type") == "eagle3"


def _is_plain(raw: Mapping[str, Any]) -> bool:
    return any("Eagle3" in name for name in raw.get("architectures") or [])


def _config(raw: dict[str, Any], directory: Path, aux_ids: AuxIds | None, num_layers: int | None) -> Eagle3Config:
    file, nested = directory / "config.json", _is_speculators(raw)
    layer = raw.get("transformer_layer_config", {}) if nested else raw
    eagle = raw.get("eagle_config") or {}

    def get(name: str, *default: Any) -> Any:
        if name in layer:
            return layer[name]
        if not default:
            where = f"transformer_layer_config.{name}" if nested else name
            raise UserError(f"{file}: the field {where} is missing.", "Copy the drafter again, or add the field.")
        return default[0]

    for name, harmless in (("mlp_bias", False), ("sliding_window", None), ("logit_scale", 1.0)):
        if get(name, None) not in (None, harmless):
            raise UserError(f"{file}: {name} is set ({get(name)}).", "draftkit's EAGLE-3 layer does not have that.")
    hidden, heads = get("hidden_size"), get("num_attention_heads")
    return Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=raw.get("target_hidden_size") or hidden,
        intermediate_size=get("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=get("num_key_value_heads", heads),
        head_dim=get("head_dim", None) or hidden // heads,
        vocab_size=get("vocab_size"),
        draft_vocab_size=raw.get("draft_vocab_size") or get("vocab_size"),
        aux_layers=_aux_layers(raw, eagle, directory, aux_ids, num_layers),
        rms_norm_eps=get("rms_norm_eps", 1e-6),
        rope_parameters=_rope(layer),
        max_position_embeddings=get("max_position_embeddings", 2048),
        norm_before_residual=bool(raw.get("norm_before_residual", nested)),  # vLLM's defaults differ, too
        norm_before_fc=bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False))),
        fc_norm=bool(raw.get("fc_norm", False)),
        norm_output=bool(raw.get("norm_output", False)),
        num_hidden_layers=get("num_hidden_layers", 1),
        qk_norm=layer.get("model_type") == "qwen3" or "Eagle3Qwen3ForCausalLM" in (raw.get("architectures") or []),
        attention_bias=bool(get("attention_bias", False)),
    )


def _rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers 5 writes it, also from the keys of transformers 4."""
    if layer.get("rope_parameters"):
        return dict(layer["rope_parameters"])
    scaling = dict(layer.get("rope_scaling") or {})
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    return {"rope_type": kind, "rope_theta": layer.get("rope_theta", 10000.0)} | scaling


def _aux_layers(
    raw: Mapping[str, Any], eagle: Mapping[str, Any], directory: Path, aux_ids: AuxIds | None, num_layers: int | None
) -> tuple[int, ...]:
    """By the rule at the head of this file."""
    ids = raw.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        if num_layers is None:
            raise UserError(
                f"{directory / 'config.json'}: eagle_aux_hidden_state_layer_ids is missing, and the verifier's depth, "
                "on which the default depends, is not known.",
                "Name the verifier with --verifier.",
            )
        if num_layers < 8:  # the default would name fewer than three states
            raise UserError(
                f"{directory / 'config.json'}: eagle_aux_hidden_state_layer_ids is missing, and for a verifier of "
                f"{num_layers} layers engines do not agree on a default.",
                "Write the ids into the file.",
            )
        return default_aux_layers(num_layers)
    known = _is_speculators(raw) or (directory / "draftkit.json").is_file()
    as_layers = aux_ids == "sglang" or (aux_ids is None and not known and ids[0] == 1)
    if not known and aux_ids is None:
        how = "outputs of layers, as SGLang and SpecForge count" if as_layers else "states, as vLLM counts"
        say_once(f"{directory}: auxiliary ids {list(ids)} are taken for {how}.")
    return tuple(sorted({i + 1 for i in ids} if as_layers else set(ids)))


def _for_sglang(aux_layers: tuple[int, ...]) -> list[int]:
    return [i - 1 for i in aux_layers] if aux_layers[0] == 2 else list(aux_layers)


# ---- tensors --------------------------------------------------------------------------------------------------------


def _tensors(directory: Path, config: Eagle3Config) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = "pytorch_model.bin" if (directory / "pytorch_model.bin").exists() else "no *.safetensors file"
        raise UserError(
            f"{directory} holds {pickled}; draftkit reads safetensors only.",
            "Convert it: safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors').",
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    tensors = {name.removeprefix("model.").replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    tensors.pop("t2d", None)
    if "d2t" not in tensors:
        if config.draft_vocab_size != config.vocab_size:
            raise UserError(
                f"{files[0]} lacks d2t, the map of its {config.draft_vocab_size} tokens to the verifier's "
                f"{config.vocab_size}: without it every proposal would be another token.",
                "Copy the drafter again.",
            )
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
    _check_complete(tensors, config, files[0])
    ids = tensors["d2t"] + torch.arange(config.draft_vocab_size)
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise UserError(
            f"{files[0]}: d2t names tokens outside the verifier's vocabulary of {config.vocab_size}.",
            "d2t holds offsets (token - draft id); check vocab_size in config.json, or copy the drafter again.",
        )
    return tensors


def _check_complete(tensors: Mapping[str, torch.Tensor], config: Eagle3Config, file: Path) -> None:
    with torch.device("meta"):
        empty = torch.empty(config.vocab_size, config.hidden_size)
        wanted = Eagle3(config, empty, torch.empty(config.draft_vocab_size, dtype=torch.int64)).state_dict()
    found = tensors.keys() - {EMBEDDING}
    missing, unexpected = sorted(wanted.keys() - found), sorted(found - wanted.keys())
    if missing or unexpected:
        problem = f"lacks the tensor {missing[0]}" if missing else f"holds the tensor {unexpected[0]}"
        raise UserError(
            f"{file} {problem} ({len(missing)} missing, {len(unexpected)} unexpected of an EAGLE-3 head with these "
            "settings).",
            "Check num_hidden_layers, fc_norm, norm_before_fc, attention_bias and model_type in its config.json.",
        )
    for name, tensor in wanted.items():
        if tensors[name].shape != tensor.shape:
            raise UserError(
                f"{file}: {name} has shape {list(tensors[name].shape)}, its config.json asks for {list(tensor.shape)}.",
                "Copy the drafter again.",
            )
