"""Sizes of a decoder-only transformer, from its config.json or a small table, and what they weigh in bytes and FLOPs.

    weights   attention (grouped queries), gated MLP or routed experts with shared ones, embedding, LM head
    drafter   EAGLE-3: one layer over three states, with its own small LM head; MTP and a small model are variants

Left out: biases and norms (below 0.1 %), sliding windows, latent attention (MLA; a config with kv_lora_rank is refused
rather than mispriced), linear-attention layers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftkit.errors import UserError
from draftkit.recipe import nearest


@dataclass(frozen=True, slots=True)
class ModelShape:
    """num_experts 0: a dense MLP. expert_inner: width of one expert; shared_inner: of the experts that always run."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    tied: bool = False
    num_experts: int = 0
    top_k: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    dense_layers: int = 0  # layers with the plain MLP, of a model with experts

    # --- parameters

    @property
    def attention_params(self) -> int:
        """Of one layer: queries and output, keys and values."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.num_experts else 0

    @property
    def expert_params(self) -> int:
        return 3 * self.hidden * self.expert_inner

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab

    @property
    def fixed_params(self) -> int:
        """Read by every pass: everything but routed experts and the embedding table (a pass reads a row a token)."""
        mlp = 3 * self.hidden * self.inner * (self.layers - self.moe_layers)
        routed = self.moe_layers * (3 * self.hidden * self.shared_inner + self.hidden * self.num_experts)
        return self.layers * self.attention_params + mlp + routed + self.head_params

    @property
    def total_params(self) -> int:
        embedding = 0 if self.tied else self.head_params
        return self.fixed_params + self.moe_layers * self.num_experts * self.expert_params + embedding

    @property
    def active_params(self) -> int:
        """Multiplied for one token."""
        return self.fixed_params + self.moe_layers * self.top_k * self.expert_params

    # --- what a pass touches

    def distinct_experts(self, tokens: float) -> float:
        """Expected experts of a layer that `tokens` tokens wake: E (1 - (1 - k/E)^n), routing independent and even.

        Real routing is neither: neighbouring tokens share experts, so this is an upper bound in expectation.
        """
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** tokens) if self.num_experts else 0.0

    def kv_values(self) -> int:
        """Numbers kept for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def attention_flops(self, context: float) -> float:
        """For one token that looks back on `context` others: scores and their weighted sum, all layers."""
        return 4.0 * context * self.layers * self.heads * self.head_dim


def eagle3_shape(target: ModelShape, draft_vocab: int | None = None) -> ModelShape:
    """An EAGLE-3 head as a model of one dense layer: a fusion of three states, attention that reads two states at once.

    A target with experts gets the dense width of four hidden sizes: published heads are dense.
    """
    inner = 4 * target.hidden if target.num_experts else target.inner
    extra = (3 * target.hidden + (target.heads + 2 * target.kv_heads) * target.head_dim) / (3 * target.hidden)
    return ModelShape(
        name=f"eagle3 of {target.name}",
        hidden=target.hidden,
        layers=1,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        inner=round(inner + extra * target.hidden),  # fusion and the wider attention, counted into the MLP's width
        vocab=min(draft_vocab or target.vocab, target.vocab),
        tied=True,
    )


# Published config.json files of these models.
TABLE = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", 576, 30, 9, 3, 64, 1536, 49152, tied=True),
        ModelShape("qwen3-1.7b", 2048, 28, 16, 8, 128, 6144, 151936, tied=True),
        ModelShape("qwen3-8b", 4096, 36, 32, 8, 128, 12288, 151936),
        ModelShape("qwen3-32b", 5120, 64, 64, 8, 128, 25600, 151936),
        ModelShape("llama3.1-8b", 4096, 32, 32, 8, 128, 14336, 128256),
        ModelShape("llama3.1-70b", 8192, 80, 64, 8, 128, 28672, 128256),
        ModelShape("olmoe-1b-7b", 2048, 16, 16, 16, 128, 0, 50304, num_experts=64, top_k=8, expert_inner=1024),
        ModelShape("qwen3-30b-a3b", 2048, 48, 32, 4, 128, 0, 151936, num_experts=128, top_k=8, expert_inner=768),
        ModelShape("qwen3-235b-a22b", 4096, 94, 64, 4, 128, 0, 151936, num_experts=128, top_k=8, expert_inner=1536),
    )
}


def find_shape(name_or_path: str) -> ModelShape:
    """A name of the table, a config.json, or a directory that has one."""
    path = Path(name_or_path).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json" or len(path.parts) > 1:
        if not path.is_file():
            raise UserError(f"The model file {name_or_path} does not exist.", f"Known names: {', '.join(TABLE)}.")
        return read_config(path)
    if name_or_path.lower() not in TABLE:
        raise UserError(
            f"model: {name_or_path!r} is not in the table.",
            f"{nearest(name_or_path, TABLE)}Known: {', '.join(TABLE)}; or give the path of a config.json.",
        )
    return TABLE[name_or_path.lower()]


def read_config(path: Path) -> ModelShape:
    """A Hugging Face config.json of a Llama, Qwen, Mixtral, OLMoE or DeepSeek-MoE type."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is not valid JSON: {error}.", "Give the config.json of a transformers model."
        ) from error
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    if "kv_lora_rank" in config:
        raise UserError(
            f"{path}: kv_lora_rank says latent attention, which the cost model does not have.",
            "Project a model with ordinary or grouped attention.",
        )
    heads = _size(config, path, "num_attention_heads")
    hidden = _size(config, path, "hidden_size")
    experts = _size(config, path, "num_experts", "num_local_experts", "n_routed_experts", default=0)
    inner = _size(config, path, "intermediate_size")
    return ModelShape(
        name=config.get("model_type", path.parent.name or "model"),
        hidden=hidden,
        layers=_size(config, path, "num_hidden_layers"),
        heads=heads,
        kv_heads=_size(config, path, "num_key_value_heads", default=heads),
        head_dim=_size(config, path, "head_dim", default=hidden // heads),
        inner=inner,
        vocab=_size(config, path, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        num_experts=experts,
        top_k=_size(config, path, "num_experts_per_tok") if experts else 0,
        expert_inner=_size(config, path, "moe_intermediate_size", default=inner) if experts else 0,
        shared_inner=_shared(config, path) if experts else 0,
        dense_layers=_size(config, path, "first_k_dense_replace", default=0) if experts else 0,
    )


def _shared(config: dict[str, Any], path: Path) -> int:
    count = _size(config, path, "n_shared_experts", default=0)
    width = _size(config, path, "moe_intermediate_size", default=0)
    return count * width or _size(config, path, "shared_expert_intermediate_size", default=0)


def _size(config: dict[str, Any], path: Path, *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (value == 0 and default is None):
            raise UserError(
                f"{path}: {name} should be a whole number above 0, not {value!r}.", "Is this the right file?"
            )
        return value
    if default is None:
        raise UserError(f"{path}: {names[0]} is missing.", "Give the config.json of a transformers language model.")
    return default
