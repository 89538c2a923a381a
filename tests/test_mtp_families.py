"""The table of MTP families against vLLM's modules: names, by loading; every other claim, by a forward pass.

`reference` below knows nothing but a row of the table. It agrees with vLLM's module for the row as it stands, and with
any one claim of the row turned round it does not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftkit.drafters.mtp_families import FAMILIES, Family, family_of, is_mtp, names, num_layers, require_family, split
from draftkit.errors import UserError

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, EXPERT, EXPERTS, LAYERS = 64, 128, 2, 1, 64, 192, 64, 4, 2
LATENT, ROPE_DIM, NOPE_DIM, VALUE_DIM = 64, 32, 32, 32
SIZES = dict(
    hidden_size=HIDDEN,
    intermediate_size=MLP,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    vocab_size=VOCAB,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    tie_word_embeddings=False,
    hidden_act="silu",
)
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=EXPERT)
QWEN = SIZES | dict(
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    layer_types=["full_attention"] * LAYERS,
)
QWEN_MOE = QWEN | MOE | dict(num_experts=EXPERTS, shared_expert_intermediate_size=EXPERT)
ROUTED = MOE | dict(
    n_routed_experts=EXPERTS,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    first_k_dense_replace=1,
    routed_scaling_factor=1.0,
)
DEEPSEEK = (
    SIZES
    | ROUTED
    | dict(
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        num_nextn_predict_layers=1,
        q_lora_rank=LATENT,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE_DIM,
        qk_nope_head_dim=NOPE_DIM,
        v_head_dim=VALUE_DIM,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
    )
)
GLM = (
    SIZES
    | ROUTED
    | dict(
        architectures=["Glm4MoeForCausalLM"],
        model_type="glm4_moe",
        num_nextn_predict_layers=1,
        attention_bias=True,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
    )
)
QWEN3_NEXT = QWEN_MOE | dict(
    architectures=["Qwen3NextForCausalLM"],
    model_type="qwen3_next",
    num_nextn_predict_layers=1,
    decoder_sparse_step=1,
    linear_conv_kernel_dim=4,
    mlp_only_layers=[],
)
QWEN3_5_MOE = QWEN_MOE | dict(
    architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text", mtp_num_hidden_layers=1
)
CONFIGS: dict[str, dict[str, Any]] = {
    "mimo": SIZES | dict(architectures=["MiMoForCausalLM"], model_type="qwen2", num_nextn_predict_layers=1),
    "ernie4_5": SIZES
    | dict(
        architectures=["Ernie4_5_MoeForCausalLM"],
        model_type="ernie4_5_moe",
        num_nextn_predict_layers=1,
        moe_num_experts=EXPERTS,
        moe_k=2,
        moe_intermediate_size=EXPERT,
    ),
    "qwen3_next": QWEN3_NEXT,
    "qwen3_next-2": QWEN3_NEXT | dict(num_nextn_predict_layers=2),
    "qwen3_5": QWEN | dict(architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", mtp_num_hidden_layers=1),
    "qwen3_5-moe": QWEN3_5_MOE,
    "qwen3_5-stacked": QWEN3_5_MOE,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3-dense": DEEPSEEK | dict(first_k_dense_replace=LAYERS + 1, q_lora_rank=None),
    "deepseek_v3-2": DEEPSEEK | dict(num_nextn_predict_layers=2),
    "glm4_moe": GLM,
    "glm4_moe-plain": GLM | dict(attention_bias=False, use_qk_norm=False),
}


def row_of(case: str) -> Family:
    return FAMILIES[case.split("-")[0]]


def shape(name: str) -> tuple[int, ...]:
    """Of a tensor of these configurations, by what its name says."""
    part = name.rsplit(".", 2)[-2] if name.endswith((".weight", ".bias")) else name.rsplit(".", 1)[-1]
    mlp = EXPERT if "expert" in name else MLP
    qkv = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    latent_q = HEADS * (NOPE_DIM + ROPE_DIM)
    if name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj")):
        return (EXPERTS, 2 * EXPERT, HIDDEN) if "gate_up" in name else (EXPERTS, HIDDEN, EXPERT)
    if name.endswith(".bias"):
        return (qkv[part],)
    matrices = {
        "input_proj": (HIDDEN, 2 * HIDDEN),
        "eh_proj": (HIDDEN, 2 * HIDDEN),
        "fc": (HIDDEN, 2 * HIDDEN),
        "embed_tokens": (VOCAB, HIDDEN),
        "head": (VOCAB, HIDDEN),
        "lm_head": (VOCAB, HIDDEN),
        "gate_proj": (mlp, HIDDEN),
        "up_proj": (mlp, HIDDEN),
        "down_proj": (HIDDEN, mlp),
        "gate": (EXPERTS, HIDDEN),
        "shared_expert_gate": (1, HIDDEN),
        "e_score_correction_bias": (EXPERTS,),
        "q_norm": (HEAD_DIM,),
        "k_norm": (HEAD_DIM,),
        "q_a_proj": (LATENT, HIDDEN),
        "q_a_layernorm": (LATENT,),
        "q_b_proj": (latent_q, LATENT),
        "kv_a_proj_with_mqa": (LATENT + ROPE_DIM, HIDDEN),
        "kv_a_layernorm": (LATENT,),
        "kv_b_proj": (HEADS * (NOPE_DIM + VALUE_DIM), LATENT),
    }
    if "mtp_linear_proj" in name:
        return (HIDDEN, 2 * HIDDEN)
    return matrices.get(part) or ((qkv[part], HIDDEN) if part in qkv else (HIDDEN,))


def tensor_shape(case: str, name: str) -> tuple[int, ...]:
    if name.endswith("o_proj.weight"):
        return (HIDDEN, HEADS * (VALUE_DIM if "deepseek" in case else HEAD_DIM))
    if name.endswith("self_attn.q_proj.weight") and case.startswith("qwen"):
        return (2 * HEADS * HEAD_DIM, HIDDEN)  # with the output gate
    return shape(name)


def checkpoint(case: str) -> dict[str, torch.Tensor]:
    """Random MTP tensors under the table's names. Layers share the embedding, as published checkpoints do."""
    row, config = row_of(case), CONFIGS[case]
    made = torch.Generator().manual_seed(7)
    tensors: dict[str, torch.Tensor] = {}
    embedding = torch.randn(VOCAB, HIDDEN, generator=made)
    for layer in range(num_layers(row, config)):
        for role, name in names(row, config, layer, stacked=case.endswith("stacked")).items():
            size = tensor_shape(case, name)
            scale = 0.1 if len(size) > 1 else 0.3
            fresh = torch.randn(size, generator=made) * scale + (len(size) == 1)
            tensors[name] = embedding.clone() if role == "embedding" else fresh
    return tensors


def inputs() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return {
        "tokens": torch.randint(VOCAB, (6,), generator=made),
        "positions": torch.tensor([0, 1, 2, 0, 5, 9]),
        "hidden": torch.randn(6, HIDDEN, generator=made),
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory a case, with what vLLM's module held and computed."""
    root = tmp_path_factory.mktemp("families")
    for case, config in CONFIGS.items():
        (root / case).mkdir()
        (root / case / "config.json").write_text(json.dumps(config))
        save_file(checkpoint(case), root / case / "model.safetensors")
        save_file(inputs(), root / case / "inputs.safetensors")
    program = Path(__file__).with_name("mtp_modules.py")
    done = subprocess.run([sys.executable, program, root], capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr[-4000:]
    return root


# ---- names ---------------------------------------------------------------------------------------------------------


def fused(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """What vLLM may hold of a checkpoint: (names, their tensors in one), for every tensor in exactly one group."""
    groups: dict[str, list[str]] = {}
    for name in tensors:
        key = re.sub(r"\b[qkv]_proj\.", "qkv_proj.", name)
        if "kv_a_proj_with_mqa" not in name and any("kv_b_proj" in other for other in tensors):
            key = name  # a latent-attention query stays alone
        key = re.sub(r"\b(gate|up)_proj\.", "gate_up_proj.", key)
        key = re.sub(r"\b(q_a_proj|kv_a_proj_with_mqa)\.", "qkv_a_proj.", key)
        key = re.sub(r"experts\.\d+\.", "experts.", key)
        groups.setdefault(key, []).append(name)
    for members in groups.values():
        if ".experts." in members[0] and members[0].endswith(".weight"):
            experts: dict[str, list[torch.Tensor]] = {}
            for name in members:
                experts.setdefault(re.search(r"experts\.(\d+)\.", name).group(1), []).append(tensors[name])
            yield tuple(members), torch.stack([torch.cat(parts) for parts in experts.values()])
        else:
            yield tuple(members), torch.cat([tensors[name] for name in members])


@pytest.mark.parametrize("case", CONFIGS)
def test_every_tensor_lands_in_vllms_module_and_none_is_missing(case, served):
    """Every parameter of the module holds a tensor of the checkpoint (or several, fused), and every tensor of the
    checkpoint is in a parameter. Parameters were NaN before, and random tensors do not coincide."""
    tensors, params = checkpoint(case), load_file(served / case / "params.safetensors")
    made = list(fused(tensors))
    used: set[str] = set()
    for param, held in params.items():
        found = [members for members, value in made if value.shape == held.shape and torch.equal(value, held)]
        assert found, f"{param} holds nothing of the checkpoint"
        used.update(*found)
    assert used == tensors.keys()
    facts = json.loads((served / case / "facts.json").read_text())
    assert facts["loaded"] == sorted(params), "load_weights reports a parameter too few or too many"


# ---- mathematics ---------------------------------------------------------------------------------------------------


def reference(row: Family, case: str, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The layer in float64, from its row: sequences of one token, experts zero."""
    config, tensors = CONFIGS[case], {name: t.double() for name, t in checkpoint(case).items()}
    t = {role: tensors[name] for role, name in names(row_of(case), config, stacked="stacked" in case).items()}
    block = {role.removeprefix("block."): value for role, value in t.items() if role.startswith("block.")}

    def norm(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scaled = h * (h.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        return scaled * (weight + 1 if row.norm_adds_one else weight)

    e = t["embedding"][x["tokens"]]
    if row.zero_first:
        e = e * (x["positions"] != 0).unsqueeze(-1)
    halves = [norm(e, t["embed_norm"]), norm(x["hidden"].double(), t["hidden_norm"])]
    y = torch.cat(halves if row.embedding_first else halves[::-1], -1) @ t["fuse"].T
    y = y + attention(block, norm(y, block["input_layernorm.weight"]), norm)
    if "mlp.gate_proj.weight" in block:
        z = norm(y, block["post_attention_layernorm.weight"])
        gate, up = (z @ block[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        y = y + (torch.nn.functional.silu(gate) * up) @ block["mlp.down_proj.weight"].T
    final = norm(y, t["final_norm"]) if row.final_norm else y
    return {"logits": final @ t["head"].T, "feedback": final if row.feedback == "post-norm" else y}


def attention(block: dict[str, torch.Tensor], z: torch.Tensor, norm: Any) -> torch.Tensor:
    """Of a token that sees itself alone: its own value, for every query head."""
    out = block["self_attn.o_proj.weight"].T
    if "self_attn.kv_b_proj.weight" in block:
        latent = (z @ block["self_attn.kv_a_proj_with_mqa.weight"].T)[:, :LATENT]
        both = norm(latent, block["self_attn.kv_a_layernorm.weight"]) @ block["self_attn.kv_b_proj.weight"].T
        return both.view(len(z), HEADS, -1)[..., NOPE_DIM:].flatten(1) @ out
    value = z @ block["self_attn.v_proj.weight"].T + block.get("self_attn.v_proj.bias", 0)
    value = value.view(len(z), KV_HEADS, HEAD_DIM).repeat_interleave(HEADS // KV_HEADS, 1)
    query = block["self_attn.q_proj.weight"]
    if len(query) == 2 * HEADS * HEAD_DIM:
        gate = (z @ query.T).view(len(z), HEADS, 2 * HEAD_DIM)[..., HEAD_DIM:]
        value = value * gate.sigmoid()
    return value.flatten(1) @ out


def gap(row: Family, case: str, served: Path) -> float:
    """Largest difference between the reference and vLLM, over the reference's largest value."""
    ours, theirs = reference(row, case, inputs()), load_file(served / case / "outputs.safetensors")
    return max(float((ours[k] - theirs[k]).abs().max() / ours[k].abs().max()) for k in ("logits", "feedback"))


@pytest.mark.parametrize("case", CONFIGS)
def test_vllms_module_computes_what_the_row_says(case, served):
    assert gap(row_of(case), case, served) < 1e-5


# Without a final norm there is none to leave out, and the state before and after it are one.
CLAIMS = [
    (name, claim)
    for name, row in FAMILIES.items()
    for claim in ("embedding_first", "zero_first", "norm_adds_one", "feedback", "final_norm")
    if row.final_norm or claim not in ("feedback", "final_norm")
]


@pytest.mark.parametrize(("case", "claim"), CLAIMS)
def test_a_claim_turned_round_is_seen(case, claim, served):
    row = row_of(case)
    other = {"final_norm": None, "feedback": "pre-norm" if row.feedback == "post-norm" else "post-norm"}
    changed = dataclasses.replace(row, **{claim: other[claim] if claim in other else not getattr(row, claim)})
    assert gap(changed, case, served) > 1e-3


@pytest.mark.parametrize("case", CONFIGS)
def test_the_verifier_hands_over_the_state_that_the_row_says(case, served):
    facts = json.loads((served / case / "facts.json").read_text())
    assert facts["verifier_state"] == row_of(case).verifier_state


# ---- recognising and splitting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CONFIGS)
def test_a_family_is_recognised_and_its_tensors_are_told_from_the_verifiers(case):
    row, config, tensors = row_of(case), CONFIGS[case], checkpoint(case)
    assert family_of(config) is row and require_family(config, "config.json") is row
    assert num_layers(row, config) == (2 if case.endswith("-2") else 1)
    others = {f"model.layers.{LAYERS - 1}.input_layernorm.weight", "model.norm.weight", "model.embed_tokens.weight"}
    mtp = split(row, config, tensors | dict.fromkeys(others, torch.zeros(1)))
    assert mtp.keys() == tensors.keys() - {"model.embed_tokens.weight", "lm_head.weight"}
    assert not any(is_mtp(row, config, name) for name in others)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_checkpoint_without_one_of_the_tensors_is_refused_by_name(case):
    row, config, tensors = row_of(case), CONFIGS[case], checkpoint(case)
    gone = names(row, config, stacked=case.endswith("stacked"))["block.self_attn.o_proj.weight"]
    del tensors[gone]
    with pytest.raises(UserError, match=re.escape(f"lacks 1 tensors of its MTP layers: {gone}")):
        split(row, config, tensors)


def test_sizes_of_a_multimodal_configuration_are_nested():
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": QWEN}
    nested["text_config"] = QWEN | {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}
    assert family_of(nested) is FAMILIES["qwen3_5"]
    roles = names(FAMILIES["qwen3_5"], nested)
    assert roles["embedding"] == "model.language_model.embed_tokens.weight" and roles["head"] == "lm_head.weight"
    assert "block.mlp.up_proj.weight" in roles
    assert names(FAMILIES["qwen3_5"], nested | {"tie_word_embeddings": True})["head"] == roles["embedding"]


def test_a_verifier_without_mtp_layers_is_none_or_refused_where_one_is_needed():
    plain = SIZES | dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    assert family_of(plain) is None
    with pytest.raises(
        UserError, match=r"x/config.json: model_type 'qwen2' \(Qwen2ForCausalLM\) has no MTP layers that"
    ):
        require_family(plain, "x/config.json")
    # Kimi K2 is a DeepSeek V3 by architecture alone: vLLM goes by the model_type and would not look for layers.
    assert family_of(DEEPSEEK | {"model_type": "kimi_k2"}) is None
    stripped = CONFIGS["glm4_moe"] | {"num_nextn_predict_layers": 0}
    assert family_of(stripped) is None
    with pytest.raises(UserError, match="num_nextn_predict_layers is 0, so the verifier has no MTP layers"):
        require_family(stripped, "x/config.json")
    assert family_of({key: value for key, value in QWEN3_NEXT.items() if "nextn" not in key}) is not None
