"""The MTP (multi-token prediction) layers that verifiers carry: how they are recognised, named and computed.

One row a family, as vLLM 0.32's module of that family computes (`vllm/model_executor/models/*_mtp.py`); held against
those modules by tests/test_mtp_families.py. At slot p a layer reads the verifier's state of token p and the embedding
of token p+1 and predicts token p+2:

    x = fuse(cat(embed_norm(e[p+1]), hidden_norm(h[p])))    halves swapped unless embedding_first
    y = block(x)                                            one decoder layer of the verifier's kind
    logits = head(final_norm(y))                            final_norm absent in Ernie

and the next step reads final_norm(y) or y in place of h (`feedback`). Whatever copies of head and embedding a
checkpoint carries, vLLM loads them and then puts the verifier's own in their place. Of several layers the runner that
draftkit drives only ever runs the first, also for the second and later drafts of a round.

Left out: families whose MTP layer is no decoder layer over one fused input (Gemma 4, Qwen4, DeepSeek V4), sparse
attention (DeepSeek V3.2), and those that nobody here has loaded (vLLM 0.32 knows some twenty more).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from draftkit.errors import UserError

T = TypeVar("T")
Norm = Literal["pre-norm", "post-norm"]  # a residual stream before, and after, the final norm that follows it
Block = Literal["qwen2", "llama", "qwen3_next", "qwen3_5", "deepseek_v3", "glm4_moe"]


@dataclass(frozen=True, slots=True)
class Family:
    """One row. In tensor names {i} counts MTP layers from 0 and {n} is i + num_hidden_layers.

    model_types, architectures: what tells the family in config.json, the one or the other, as vLLM goes by.
    count_key: of config.json (or its text_config), how many MTP layers; count_default where it is left out. block:
    what follows it are names of an ordinary decoder layer, of kind block_type. embedding, head: the layer's own copies,
    None where the checkpoint has only the verifier's. verifier_state: which state of the verifier is fed in; feedback:
    which of its own the next step reads. zero_first: the embedding at position 0 counts as zero. norm_adds_one: norms
    scale by 1 + weight.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    count_key: str
    count_default: int
    embed_norm: str
    hidden_norm: str
    fuse: str
    final_norm: str | None
    block: str
    block_type: Block
    embedding: str | None
    head: str | None
    embedding_first: bool
    verifier_state: Norm
    feedback: Norm
    zero_first: bool
    norm_adds_one: bool


_MIMO = Family(
    name="mimo",
    model_types=(),
    architectures=("MiMoForCausalLM",),
    count_key="num_nextn_predict_layers",
    count_default=0,
    embed_norm="model.mtp_layers.{i}.token_layernorm.weight",
    hidden_norm="model.mtp_layers.{i}.hidden_layernorm.weight",
    fuse="model.mtp_layers.{i}.input_proj.weight",
    final_norm="model.mtp_layers.{i}.final_layernorm.weight",
    block="model.mtp_layers.{i}.",
    block_type="qwen2",
    embedding=None,
    head=None,
    embedding_first=False,
    verifier_state="pre-norm",
    feedback="post-norm",
    zero_first=True,
    norm_adds_one=False,
)
_ERNIE = Family(
    name="ernie4_5",
    model_types=("ernie4_5_moe",),
    architectures=(),
    count_key="num_nextn_predict_layers",
    count_default=0,
    embed_norm="model.mtp_emb_norm.{i}.weight",
    hidden_norm="model.mtp_hidden_norm.{i}.weight",
    fuse="model.mtp_linear_proj.{i}.weight",
    final_norm=None,
    block="model.mtp_block.{i}.",
    block_type="llama",
    embedding=None,
    head=None,
    embedding_first=True,
    verifier_state="post-norm",
    feedback="pre-norm",
    zero_first=True,
    norm_adds_one=False,
)
_QWEN3_NEXT = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    architectures=(),
    count_key="num_nextn_predict_layers",
    count_default=1,  # as in vLLM: checkpoints carry the layer without the key
    embed_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    fuse="mtp.fc.weight",
    final_norm="mtp.norm.weight",
    block="mtp.layers.{i}.",
    block_type="qwen3_next",
    embedding=None,
    head=None,
    embedding_first=True,
    verifier_state="post-norm",
    feedback="post-norm",
    zero_first=False,
    norm_adds_one=True,
)
_QWEN3_5 = Family(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    architectures=(),
    count_key="mtp_num_hidden_layers",
    count_default=1,
    embed_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    fuse="mtp.fc.weight",
    final_norm="mtp.norm.weight",
    block="mtp.layers.{i}.",
    block_type="qwen3_5",
    embedding=None,
    head=None,
    embedding_first=True,
    verifier_state="post-norm",
    feedback="post-norm",
    zero_first=False,
    norm_adds_one=True,
)
_DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    architectures=(),
    count_key="num_nextn_predict_layers",
    count_default=0,
    embed_norm="model.layers.{n}.enorm.weight",
    hidden_norm="model.layers.{n}.hnorm.weight",
    fuse="model.layers.{n}.eh_proj.weight",
    final_norm="model.layers.{n}.shared_head.norm.weight",
    block="model.layers.{n}.",
    block_type="deepseek_v3",
    embedding="model.layers.{n}.embed_tokens.weight",
    head="model.layers.{n}.shared_head.head.weight",
    embedding_first=True,
    verifier_state="post-norm",
    feedback="post-norm",
    zero_first=True,
    norm_adds_one=False,
)
_GLM4_MOE = Family(
    name="glm4_moe",
    model_types=(),
    architectures=("Glm4MoeForCausalLM",),
    count_key="num_nextn_predict_layers",
    count_default=0,
    embed_norm="model.layers.{n}.enorm.weight",
    hidden_norm="model.layers.{n}.hnorm.weight",
    fuse="model.layers.{n}.eh_proj.weight",
    final_norm="model.layers.{n}.shared_head.norm.weight",
    block="model.layers.{n}.",
    block_type="glm4_moe",
    embedding="model.layers.{n}.embed_tokens.weight",
    head="model.layers.{n}.shared_head.head.weight",
    embedding_first=True,
    verifier_state="post-norm",
    feedback="pre-norm",
    zero_first=True,
    norm_adds_one=False,
)
FAMILIES = {f.name: f for f in (_MIMO, _ERNIE, _QWEN3_NEXT, _QWEN3_5, _DEEPSEEK_V3, _GLM4_MOE)}


# ------------------------------------------------------------------------------------------------- recognising one


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family of a config.json, None for a verifier without MTP layers."""
    family = _named(config)
    return family if family is not None and num_layers(family, config) else None


def require_family(config: Mapping[str, Any], where: str) -> Family:
    """`family_of`, or a UserError that says what is missing in the file `where`."""
    family = _named(config)
    if family is None:
        raise UserError(
            f"{where}: model_type {config.get('model_type')!r} ({', '.join(config.get('architectures') or [])}) has no "
            "MTP layers that draftkit knows.",
            f"Families with MTP layers: {', '.join(FAMILIES)}.",
        )
    if not num_layers(family, config):
        raise UserError(
            f"{where}: {family.count_key} is {text_of(config).get(family.count_key)!r}, so the verifier has no MTP "
            "layers.",
            f"A {family.name} checkpoint with MTP layers sets it to their number.",
        )
    return family


def _named(config: Mapping[str, Any]) -> Family | None:
    first = (config.get("architectures") or [None])[0]
    found = (f for f in FAMILIES.values() if first in f.architectures or config.get("model_type") in f.model_types)
    return next(found, None)


def num_layers(family: Family, config: Mapping[str, Any]) -> int:
    """How many MTP layers the config announces."""
    found = text_of(config).get(family.count_key)
    return family.count_default if found is None else int(found)


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where sizes stand: multimodal configurations nest them."""
    return config.get("text_config") or config


# ------------------------------------------------------------------------------------------------- names


def names(family: Family, config: Mapping[str, Any], layer: int = 0, *, stacked: bool = False) -> dict[str, str]:
    """Role -> tensor name in the checkpoint of MTP layer `layer`: embed_norm, hidden_norm, fuse, final_norm (where
    there is one), embedding, head, and block.<name> for every tensor of the decoder layer. Embedding and head are the
    layer's own copies, or else the verifier's (the embedding for a tied head).

    stacked: the experts are two tensors, as in Qwen3.6-35B-A3B, not three an expert as in Qwen3.5-35B-A3B; the
    configurations do not tell the two apart."""
    index = {"i": layer, "n": text_of(config)["num_hidden_layers"] + layer}
    made = {
        role: getattr(family, role).format(**index)
        for role in ("embed_norm", "hidden_norm", "fuse", "final_norm", "embedding", "head")
        if getattr(family, role)
    }
    made.setdefault("embedding", "model.language_model.embed_tokens.weight" if "text_config" in config else EMBEDDING)
    tied = config.get("tie_word_embeddings", text_of(config).get("tie_word_embeddings", False))
    made.setdefault("head", made["embedding"] if tied else HEAD)
    prefix = family.block.format(**index)
    block = _block_names(family.block_type, text_of(config), index, stacked)
    return made | {f"block.{name}": prefix + name for name in block}


def is_mtp(family: Family, config: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor of the checkpoint belongs to the MTP layers."""
    return name.startswith(tuple(_prefixes(family, config)))


def split(family: Family, config: Mapping[str, Any], tensors: Mapping[str, T]) -> dict[str, T]:
    """The MTP layers' part of a checkpoint. Raises UserError when a layer that the config announces is not whole."""
    stacked = any(name.endswith(".mlp.experts.gate_up_proj") for name in tensors if is_mtp(family, config, name))
    needed = {
        name
        for layer in range(num_layers(family, config))
        for role, name in names(family, config, layer, stacked=stacked).items()
        if role not in ("embedding", "head")
    }
    missing = sorted(needed - tensors.keys())
    if missing:
        raise UserError(
            f"The checkpoint lacks {len(missing)} tensors of its MTP layers: {', '.join(missing[:4])}"
            f"{', ...' if len(missing) > 4 else ''}.",
            "transformers drops MTP tensors when it saves a model: take the checkpoint as it was published.",
        )
    return {name: tensor for name, tensor in tensors.items() if is_mtp(family, config, name)}


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # of a verifier


def _prefixes(family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    """What MTP tensors' names begin with: a layer's own directory, or the roles one by one."""
    for layer in range(max(1, num_layers(family, config))):
        index = {"i": layer, "n": text_of(config)["num_hidden_layers"] + layer}
        for role in ("block", "embed_norm", "hidden_norm", "fuse", "final_norm"):
            if getattr(family, role):
                yield getattr(family, role).format(**index)


def _block_names(kind: Block, c: Mapping[str, Any], index: Mapping[str, int], stacked: bool) -> Iterator[str]:
    yield from ("input_layernorm.weight", "post_attention_layernorm.weight")
    if kind == "deepseek_v3":
        query = ("q_a_proj", "q_a_layernorm", "q_b_proj") if c.get("q_lora_rank") is not None else ("q_proj",)
        for name in (*query, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"):
            yield f"self_attn.{name}.weight"
    else:
        yield from (f"self_attn.{name}_proj.weight" for name in "qkvo")
    if kind == "qwen2" or kind == "glm4_moe" and c.get("attention_bias"):
        yield from (f"self_attn.{name}_proj.bias" for name in "qkv")
    if kind in ("qwen3_next", "qwen3_5") or kind == "glm4_moe" and c.get("use_qk_norm"):
        yield from ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    if not _is_moe(kind, c, index):
        yield from _mlp("mlp")
        return
    yield "mlp.gate.weight"
    if kind in ("deepseek_v3", "glm4_moe"):
        experts, shared = c["n_routed_experts"], "mlp.shared_experts" if c.get("n_shared_experts") else None
        yield "mlp.gate.e_score_correction_bias"
    else:
        experts, shared = c["num_experts"], "mlp.shared_expert" if c["shared_expert_intermediate_size"] else None
        yield "mlp.shared_expert_gate.weight"
    if shared is not None:
        yield from _mlp(shared)
    if stacked:
        yield from ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
        return
    for expert in range(experts):
        yield from _mlp(f"mlp.experts.{expert}")


def _mlp(prefix: str) -> Iterator[str]:
    yield from (f"{prefix}.{name}_proj.weight" for name in ("gate", "up", "down"))


def _is_moe(kind: Block, c: Mapping[str, Any], index: Mapping[str, int]) -> bool:
    """Whether the MTP layer's MLP is a mixture of experts: by the layer's number, as vLLM decides."""
    if kind == "qwen3_5":
        return "moe" in c["model_type"]
    if kind == "qwen3_next":
        sparse = (index["i"] + 1) % c.get("decoder_sparse_step", 1) == 0
        return bool(c["num_experts"]) and index["i"] not in c.get("mlp_only_layers", []) and sparse
    if kind in ("deepseek_v3", "glm4_moe"):
        sparse = kind == "glm4_moe" or index["n"] % c.get("moe_layer_freq", 1) == 0
        return c.get("n_routed_experts") is not None and index["n"] >= c["first_k_dense_replace"] and sparse
    return False
