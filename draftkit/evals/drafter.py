"""Which drafter is being measured, and whether it can serve this verifier at all: questions asked before any engine.

The method follows from the drafter's own `config.json`: an EAGLE-3 head (plain or speculators format), an EAGLE-1 head,
a verifier with MTP layers in its checkpoint, which is then served in the plain one's place, or an ordinary causal
language model of the same vocabulary. A drafter for another verifier would be served without complaint and accept next
to nothing, so what can be checked is checked: the fingerprint that draftkit writes into its exports, and sizes for
drafters from elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftkit.console import say_once
from draftkit.drafters.mtp_families import FAMILIES
from draftkit.errors import UserError
from draftkit.models import ModelFacts
from draftkit.types import SpecConfig

NGRAM = "ngram"
# vLLM overrides the method of a drafter whose *path* contains one of these, unless it is an EAGLE method anyway.
METHOD_BY_PATH = ("eagle-", "eagle3", "dflash", "dspark")
MTP_KEYS = {family.count_key for family in FAMILIES.values()}  # of a config whose checkpoint holds MTP layers


def resolve_drafter(drafter: str | None, verifier: ModelFacts, fingerprint: dict[str, str], k: int) -> SpecConfig:
    """`drafter`: "ngram", a drafter directory, or the directory of a train-drafter run (its export is taken)."""
    if not drafter:
        raise UserError("No drafter to measure was given.", "Pass --drafter DIR, or --drafter ngram.")
    if drafter == NGRAM:
        return SpecConfig(NGRAM, None, k)
    path, config = find_drafter(drafter)
    method = _method(config, path)
    own_vocab = False
    if method == "draft_model":
        from draftkit.drafters.draft_lm import shared_with  # transformers with it, which the other kinds do without

        _check_draft_model(path)
        own_vocab = shared_with(path, verifier.path, config.get("vocab_size"), verifier.vocab_size) is not None
    else:
        _check_sizes(config, path, verifier)
    _check_provenance(path, fingerprint)
    if method == "mtp":
        return SpecConfig(method, None, k, target=str(path))
    return SpecConfig(method, str(path), k, own_vocab=own_vocab)


def find_drafter(drafter: str) -> tuple[Path, dict[str, Any]]:
    """(its directory, its config.json) of a drafter directory or of a train-drafter run."""
    path = Path(drafter).expanduser()
    if (path / "drafter" / "config.json").is_file():
        path = path / "drafter"
    file = path / "config.json"
    if not file.is_file():
        raise UserError(
            f"The drafter {path} is not a directory with a config.json.",
            "Pass the directory that train-drafter exported (<run>/drafter), a causal language model, or ngram.",
        )
    return path, _read_object(file)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{file}, line {error.lineno}: this is not valid JSON: {error.msg}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} holds no JSON object.", "Export the drafter again with `draftkit train-drafter`.")
    return value


def _method(config: dict[str, Any], path: Path) -> str:
    architectures = config.get("architectures") or []
    if config.get("speculators_model_type") == "eagle3" or any("eagle3" in name.lower() for name in architectures):
        return "eagle3"
    if any(name.startswith("Eagle") and name.endswith("ForCausalLM") for name in architectures):
        return "eagle"
    if any(config.get(key) for key in MTP_KEYS):
        return "mtp"
    if "speculators_model_type" not in config and any(
        name.endswith("ForCausalLM") and "eagle" not in name.lower() for name in architectures
    ):
        return "draft_model"
    raise UserError(
        f"{path / 'config.json'}: cannot tell a drafting method from architectures {architectures}.",
        "Served are EAGLE-3 and EAGLE-1 heads, verifiers with MTP layers and causal language models; or pass ngram.",
    )


def _check_sizes(config: dict[str, Any], path: Path, verifier: ModelFacts) -> None:
    layer = config.get("transformer_layer_config") or config  # the speculators format nests the decoder layer
    hidden = config.get("target_hidden_size") or layer.get("hidden_size")
    _same(path, "hidden size", hidden, verifier.hidden_size)
    _same(path, "vocabulary", layer.get("vocab_size"), verifier.vocab_size)
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = config.get("eagle_aux_hidden_state_layer_ids") or ids
    if layer is config and ids and ids[0] == 1 and not (path / "draftkit.json").is_file():
        say_once(
            f"{path}: auxiliary ids {list(ids)} look like SpecForge's, which vLLM reads one layer too early. If so: "
            f"draftkit export {path} --to vllm."
        )


def _check_draft_model(path: Path) -> None:
    if trap := next((part for part in METHOD_BY_PATH if part in str(path).lower()), None):
        raise UserError(
            f"vLLM would take the draft model {path} for another method, because its path contains '{trap}'.",
            "Move or link the directory to a path without that word.",
        )


def _same(path: Path, what: str, drafter: int | None, verifier: int) -> None:
    if drafter != verifier:
        raise UserError(
            f"The drafter {path} was made for another verifier: its {what} is {drafter}, the verifier's is {verifier}.",
            "Use the verifier it was trained for, or train a drafter for this one.",
        )


def _check_provenance(path: Path, fingerprint: dict[str, str]) -> None:
    """draftkit exports say which verifier they were trained on. A changed chat template shifts the prompts but leaves
    the drafter usable, so it is only said; other weights or another tokenizer are refused."""
    file = path / "draftkit.json"
    if not file.is_file():
        say_once(f"{path} does not say which verifier it was trained for; only sizes were compared.")
        return
    trained_on = _read_object(file).get("verifier")
    if not isinstance(trained_on, dict) or not fingerprint.keys() <= trained_on.keys():
        raise UserError(
            f"{file} does not name its verifier.", "Export the drafter again with `draftkit train-drafter`."
        )
    for part in ("tokenizer", "weights"):
        if trained_on[part] != fingerprint[part]:
            raise UserError(
                f"The drafter {path} was trained for another verifier: {part} fingerprint {trained_on[part]} in "
                f"draftkit.json, {fingerprint[part]} in the verifier.",
                "Use the verifier it was trained for, or train a drafter for this one.",
            )
    if trained_on["chat_template"] != fingerprint["chat_template"]:
        say_once(f"{path} was trained on prompts of another chat template; expect a lower acceptance length.")
