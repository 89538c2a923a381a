"""The MTP layers that verifiers carry: against the table's reference, against transformers' decoder layers step by
step, through a checkpoint and back, and against stock vLLM."""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import write_tiny_corpus, write_tiny_verifier
from safetensors.torch import load_file, save_file
from test_mtp_families import CONFIGS, HIDDEN, LAYERS, ROPE_DIM, VOCAB, checkpoint, inputs, reference, row_of
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from draftkit.data.capture import Verifier, collate
from draftkit.drafters import mtp, mtp_native
from draftkit.drafters.attention import ttt_attention
from draftkit.drafters.mtp import Mtp, MtpConfig
from draftkit.drafters.mtp_families import FAMILIES, names
from draftkit.drafters.mtp_native import NativeMtp, config_of, native_config
from draftkit.drafters.stitch import SHARD, stitch
from draftkit.errors import RunFailed, UserError
from draftkit.models import model_facts, stored_tensors
from draftkit.recipe import Recipe
from draftkit.run import RunDir
from draftkit.train import loop, mistakes
from draftkit.train.parity import check_parity
from draftkit.train.served import export
from draftkit.train.start import aux_layers, build_drafter, check_start
from draftkit.types import Document, DraftBatch

OWN = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}  # the verifier's
NATIVE = [case for case in CONFIGS if case != "mimo"]


def written(case: str, directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """The case's config.json and random MTP tensors; routers' biases stay float32, as in published checkpoints."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[case] | changes))
    tensors = checkpoint(case)
    kept = {name: t if "correction" in name else t.to(dtype) for name, t in tensors.items()}
    save_file(kept, directory / "model.safetensors")
    return directory


def loaded(case: str, directory: Path) -> Mtp | NativeMtp:
    """The layer with the case's weights, in float64."""
    row, config, tensors = row_of(case), CONFIGS[case], checkpoint(case)
    called = names(row, config, stacked=case.endswith("stacked"))
    embed, head = (tensors[called[role]].double() for role in ("embedding", "head"))
    if case == "mimo":
        sizes = [config[n] for n in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")]
        more = [config[n] for n in ("num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps")]
        drafter = Mtp(MtpConfig("mimo", *sizes, *more, config["rope_parameters"], 256), embed, head)
        mtp.load_init(drafter, directory)
    else:
        drafter = NativeMtp(native_config(directory, row), embed, head)
        mtp_native.load(drafter, directory)
    return drafter.double()


# ---- sequences of one token, against the table's reference --------------------------------------------------------


class Zero(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


@pytest.mark.parametrize("case", CONFIGS)
@torch.no_grad()
def test_on_one_token_it_is_the_reference_that_equals_vllms_module(case, tmp_path):
    """tests/test_mtp_families.py holds `reference` against vLLM. Experts are zero there, and here."""
    drafter, x = loaded(case, written(case, tmp_path)), inputs()
    block = drafter.blocks()[0]
    if getattr(block.mlp, "experts", None) is not None:
        block.mlp = Zero()
    read, residual = drafter.inputs(x["tokens"], x["hidden"].double(), x["positions"])
    rope, alone = drafter.rope(x["positions"]), [(i, i, i + 1) for i in range(len(x["tokens"]))]
    q, (k, v) = block.self_attn.queries(read, rope), block.self_attn.keys(read, rope)
    hidden = residual + block.self_attn.output(ttt_attention(q, k, v, [], [], alone, drafter.scale), read)
    state, fed = drafter.outputs(hidden + block.mlp(block.post_attention_layernorm(hidden)))
    want = reference(row_of(case), case, x)
    torch.testing.assert_close(state @ drafter.head_DH.T, want["logits"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fed, want["feedback"], rtol=1e-6, atol=1e-6)


# ---- text, step by step, against transformers' decoder layers ------------------------------------------------------

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
SMALL = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24, "rms_norm_eps": 1e-3, "head_dim": ROPE_DIM}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie4_5": ("ernie4_5", {}),
    "qwen3_next": ("qwen3_next", {"norm_topk_prob": False, "partial_rotary_factor": 0.25}),
    "qwen3_5": ("qwen3_5", {"partial_rotary_factor": 0.5}),
    "qwen3_5-moe": ("qwen3_5-moe", {}),
    "qwen3_5-stacked": ("qwen3_5-stacked", {}),
    "deepseek_v3": ("deepseek_v3", LATENT | GROUPS | {"rope_parameters": YARN}),
    "deepseek_v3-wide-values": ("deepseek_v3-dense", LATENT | {"q_lora_rank": None, "v_head_dim": 80}),
    "glm4_moe": ("glm4_moe", GROUPS),
    "glm4_moe-plain": ("glm4_moe-plain", {"norm_topk_prob": False, "n_group": 1}),
}
MODULES = {
    "ernie4_5": ("llama", "Llama", 0),  # vLLM's MTP block of Ernie is Llama's, whatever the verifier's layers are
    "qwen3_next": ("qwen3_next", "Qwen3Next", 0),
    "qwen3_5": ("qwen3_5", "Qwen3_5", 0),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3", LAYERS),
    "glm4_moe": ("glm4_moe", "Glm4Moe", LAYERS),
}


def config_for(variant: str) -> Any:
    case, changes = VARIANTS[variant]
    fields = copy.deepcopy(CONFIGS[case] | SMALL | changes)  # transformers adds to the rope's
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def random_layer(variant: str) -> NativeMtp:
    """Of random weights, in float64."""
    made = torch.Generator().manual_seed(5)
    config = config_of(row_of(variant), config_for(variant).to_dict(), variant.endswith("stacked"), "config.json")
    embed, head = (torch.randn(VOCAB, 48, generator=made, dtype=torch.float64) for _ in range(2))
    drafter = NativeMtp(config, embed, head).double()
    for tensor in drafter.state_dict().values():
        tensor.normal_(0.0, 0.3, generator=made)
    return drafter


def text(steps: int) -> DraftBatch:
    """Two documents with random states of the verifier; one begins with a slot at position 0."""
    made = torch.Generator().manual_seed(6)
    docs = [
        Document(tuple(torch.randint(VOCAB, (9,), generator=made).tolist()), (False,) * 3 + (True,) * 6),
        Document(tuple(torch.randint(VOCAB, (8,), generator=made).tolist()), (False,) + (True,) * 7),
    ]

    class States:
        documents = docs

        def document(self, i: int) -> dict[str, torch.Tensor]:
            length = len(docs[i].tokens)
            zeros, last = torch.zeros(length), torch.randn(length, 48, generator=made, dtype=torch.float64)
            return {"aux": last[:, :0], "last": last, "lse": zeros, "max": zeros, "top": zeros.long()}

    return collate(States(), [0, 1], steps)


class Theirs:
    """transformers' decoder layer, run on the drafter's own parameters, and what lies around it, in plain words."""

    def __init__(self, variant: str, drafter: NativeMtp) -> None:
        self.drafter, self.row = drafter, drafter.config.family
        module, prefix, index = MODULES[self.row.name]
        config = config_for(variant)
        if self.row.name == "ernie4_5":
            kept = {name: getattr(config, name) for name in ("rms_norm_eps", "rope_parameters", "vocab_size")}
            config = AutoConfig.for_model("llama", **(SMALL | kept))
        if "moe" in config.model_type and self.row.name == "qwen3_5":
            module, prefix = "qwen3_5_moe", "Qwen3_5Moe"
        config._attn_implementation = config._experts_implementation = "eager"
        source = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        self.layer = getattr(source, f"{prefix}DecoderLayer")(config, index).double()
        rotary = next(n for n in (f"{prefix}RotaryEmbedding", f"{prefix}TextRotaryEmbedding") if hasattr(source, n))
        self.rotary = getattr(source, rotary)(config)
        for name, module in self.layer.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):  # vLLM takes the config's, transformers 1e-6
                module.variance_epsilon = drafter.config.rms_norm_eps

    def tensors(self) -> dict[str, torch.Tensor]:
        """The drafter's block under transformers' names: experts always stacked."""
        own = dict(self.drafter.block.named_parameters()) | dict(self.drafter.block.named_buffers())
        apart = {name for name in own if re.match(r"mlp\.experts\.\d", name)}
        made = {name: tensor for name, tensor in own.items() if name not in apart}
        if apart:
            count = 1 + max(int(name.split(".")[2]) for name in apart)
            of = lambda part: [own[f"mlp.experts.{e}.{part}_proj.weight"] for e in range(count)]  # noqa: E731
            pairs = zip(of("gate"), of("up"), strict=True)
            made["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
            made["mlp.experts.down_proj"] = torch.stack(of("down"))
        assert made.keys() == self.layer.state_dict().keys()
        return made

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scaled = x * (x.square().mean(-1, keepdim=True) + self.drafter.config.rms_norm_eps).rsqrt()
        return scaled * (weight + 1 if self.row.norm_adds_one else weight)

    def fused(self, token: torch.Tensor, hidden: torch.Tensor, position: int) -> torch.Tensor:
        d, e = self.drafter, self.drafter.embed_VH[token]
        e = torch.zeros_like(e) if position == 0 and self.row.zero_first else e
        return d.fuse.weight @ torch.cat([self.norm(e, d.embed_norm.weight), self.norm(hidden, d.hidden_norm.weight)])

    def last(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """What the layer makes of the last of these rows, at positions 0, 1, ..."""
        x, count = torch.stack(rows).unsqueeze(0), len(rows)
        mask = torch.full((count, count), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        rope = self.rotary(x, torch.arange(count).unsqueeze(0))
        out = functional_call(
            self.layer,
            self.tensors(),
            (x,),
            {"attention_mask": mask, "position_embeddings": rope, "position_ids": None},
        )
        return (out[0] if isinstance(out, tuple) else out)[0, -1]

    def states(self, batch: DraftBatch) -> list[torch.Tensor]:
        """[L][R, H]: for every slot the text up to it, then its own steps."""
        d, made = self.drafter, [[] for _ in batch.valid_LR]
        for start, first, last in batch.segments:
            for slot in range(first, last):
                tokens = range(start, slot + 1)
                rows = [self.fused(batch.tokens_N[t + 1], batch.last_NH[t], t - start) for t in tokens]
                fed = batch.last_NH[slot]
                for i in range(len(made)):
                    if i:
                        at = min(slot + 1 + i, len(batch.tokens_N) - 1)
                        rows.append(self.fused(batch.tokens_N[at], fed, slot - start + i))
                    out = self.last(rows)
                    state = out if d.final_norm is None else self.norm(out, d.final_norm.weight)
                    fed = state if self.row.feedback == "post-norm" else out
                    made[i].append(state)
        return [torch.stack(rows) for rows in made]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_step_and_gradient_equals_transformers_layer_run_on_the_whole_text(variant):
    drafter, batch = random_layer(variant), text(4)
    made = torch.Generator().manual_seed(8)
    got, want = drafter(batch), Theirs(variant, drafter).states(batch)
    loss = [torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)]
    for i, ok in enumerate(batch.valid_LR):
        assert ok.any()
        torch.testing.assert_close(got[i][ok], want[i][ok], rtol=1e-4, atol=1e-5, msg=lambda m, i=i: f"step {i}: {m}")
        weights = torch.randn(got[i].shape, generator=made, dtype=torch.float64) * ok.unsqueeze(1)
        loss = [total + (states * weights).sum() for total, states in zip(loss, (got[i], want[i]), strict=True)]
    own, parameters = zip(*drafter.named_parameters(), strict=True)
    ours = torch.autograd.grad(loss[0], parameters)
    theirs = torch.autograd.grad(loss[1], parameters, allow_unused=True)
    for name, a, b in zip(own, ours, theirs, strict=True):
        b = torch.zeros_like(a) if b is None else b  # an expert that nothing chose
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_a_correction_bias_decides_who_is_chosen_and_not_what_they_weigh():
    drafter = random_layer("glm4_moe")
    moe, logits = drafter.block.mlp, torch.randn(20, 8, dtype=torch.float64)
    moe.gate.e_score_correction_bias.zero_()[5] = 10.0
    weights, chosen = moe.route(logits)
    assert (chosen == 5).any(1).all() and chosen.shape == (20, 3)
    scores = logits.sigmoid().gather(1, chosen)
    torch.testing.assert_close(weights, 2.5 * scores / scores.sum(1, keepdim=True))
    group = chosen // 2
    assert all(len(set(row.tolist())) <= 2 for row in group)
    assert "e_score_correction_bias" not in "".join(name for name, _ in drafter.named_parameters())


# ---- a checkpoint, there and back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", NATIVE)
def test_what_was_read_is_served_under_its_names_byte_for_byte(case, tmp_path):
    row, directory = row_of(case), written(case, tmp_path, torch.bfloat16)
    drafter = NativeMtp(native_config(directory, row), torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN))
    mtp_native.load(drafter, directory)
    served, stored = mtp_native.served_tensors(drafter), load_file(directory / "model.safetensors")
    called = names(row, CONFIGS[case], stacked=case.endswith("stacked"))
    assert served.keys() == {name for role, name in called.items() if role not in ("embedding", "head")}
    for name, tensor in served.items():
        assert tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name]), name


@pytest.mark.parametrize("case", ["deepseek_v3-2", "qwen3_5-stacked"])
def test_stitching_replaces_the_first_layer_and_nothing_else(case, tmp_path):
    row, source = row_of(case), written(case, tmp_path / "verifier", torch.bfloat16)
    rest = {"model.layers.0.input_layernorm.weight": torch.ones(HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    save_file(rest, source / "other.safetensors")
    drafter = NativeMtp(native_config(source, row), torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN))
    mtp_native.load(drafter, source)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(1.0)
    changed = mtp_native.served_tensors(drafter)
    stitch(source, changed, {}, tmp_path / "stitched", replace=True)
    before, after = (dict(stored_tensors(path)) for path in (source, tmp_path / "stitched"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in changed if "correction_bias" not in name}
    assert (tmp_path / "stitched" / "config.json").read_text().split() == json.dumps(CONFIGS[case], indent=2).split()


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    directory = written("glm4_moe", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    config = native_config(directory, FAMILIES["glm4_moe"])
    drafter = NativeMtp(config, torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN))
    gone = f"model.layers.{LAYERS}.mlp.experts.2.up_proj.weight"
    save_file({name: t for name, t in tensors.items() if name != gone}, directory / "model.safetensors")
    with pytest.raises(UserError, match=re.escape(f"lacks {gone} and 0 more")):
        mtp_native.load(drafter, directory)
    save_file(tensors | {gone: torch.zeros(3, HIDDEN)}, directory / "model.safetensors")
    with pytest.raises(UserError, match=re.escape(f"{gone} is [3, {HIDDEN}], and config.json says")):
        mtp_native.load(drafter, directory)


@pytest.mark.parametrize(
    ("case", "changes", "field"),
    [
        ("deepseek_v3", {"index_topk": 64}, "index_topk is 64"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"topk_method": None}, "topk_method is None"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("ernie4_5", {"use_bias": True}, "use_bias is True"),
        ("ernie4_5", {"sliding_window": 128}, "sliding_window is 128"),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate is False"),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (
            "glm4_moe",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters.rope_type is 'dynamic'",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_file_and_field(case, changes, field, tmp_path):
    directory = written(case, tmp_path)
    (directory / "config.json").write_text(json.dumps(CONFIGS[case] | changes))
    with pytest.raises(UserError, match=re.escape(f"{directory / 'config.json'}: {field}: ")) as caught:
        native_config(directory, row_of(case))
    assert "EAGLE-3" in caught.value.hint


# ---- verifiers that transformers and vLLM both run ------------------------------------------------------------------

# vLLM's CPU build takes latent attention of one size only, and turns its queries wrongly under plain rope: its kernel
# takes the stride of heads for that of tokens. DeepSeek V3 has yarn, which does not go through that kernel. Qwen3.5 is
# not here because vLLM's file of it wants torchvision.
VERIFIERS: dict[str, dict[str, Any]] = {
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True},
    "ernie4_5": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "head_dim": None,
    },
    "deepseek_v3": {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "num_key_value_heads": 2,
        "rope_parameters": YARN | {"rope_theta": tiny.ROPE["rope_theta"]},
    },
    "qwen3_next": {"layer_types": ["full_attention"] * 3, "partial_rotary_factor": 0.5},
}


def save_verifier(path: Path, family: str, vocab_size: int = tiny.VOCAB, seed: int = 0) -> Path:
    """A random one of three layers with a random MTP layer, whose next token depends on what it reads."""
    made = torch.Generator().manual_seed(seed)
    fields = CONFIGS[family] | {
        "num_hidden_layers": 3,
        "vocab_size": vocab_size,
        "rope_parameters": tiny.ROPE,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": 0 if vocab_size != tiny.VOCAB else None,
        "pad_token_id": None,
    }
    fields = copy.deepcopy(fields | VERIFIERS[family])  # transformers adds to the rope's
    fields = {name: value for name, value in fields.items() if value is not None or "id" in name}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0.0, 1.0)
        model.get_output_embeddings().weight.normal_(0.0, 0.3)
        for name, tensor in model.state_dict().items():
            if name.endswith("correction_bias") and family != "ernie4_5":  # vLLM's CPU build leaves Ernie's out
                tensor.normal_(0.0, 0.1)
    model.to(torch.bfloat16).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (path / "config.json").write_text(json.dumps(config, indent=2))
    row = FAMILIES[family]
    layer = NativeMtp(
        config_of(row, AutoConfig.from_pretrained(path).to_dict(), False, "config.json"),
        model.get_input_embeddings().weight,
        model.get_output_embeddings().weight,
    )
    for tensor in layer.state_dict().values():
        if tensor.dim() > 1:
            tensor.normal_(0.0, 0.12, generator=made)
        else:
            tensor.uniform_(0.6, 1.4, generator=made)
    stored = load_file(path / "model.safetensors")
    stored |= mtp_native.served_tensors(layer)
    if row.embedding is not None:  # copies, as published checkpoints have
        called = names(row, config)
        stored |= {called[role]: stored[OWN[role]].clone() for role in ("embedding", "head")}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory) -> dict[str, Verifier]:
    folder = tmp_path_factory.mktemp("verifiers")
    return {f: Verifier(save_verifier(folder / f, f), (), 1.0, torch.float32) for f in VERIFIERS}


def native(verifier: Verifier) -> NativeMtp:
    """As a run begins."""
    recipe, facts = tiny.recipe(drafter={"kind": "mtp"}), model_facts(Path(verifier.model.name_or_path))
    check_start(recipe, facts, tiny.FINGERPRINT)
    assert aux_layers(recipe, facts) == ()
    return build_drafter(recipe, facts, verifier, Counter(), [], [])


@pytest.mark.parametrize("family", VERIFIERS)
def test_known_mistakes_change_what_is_proposed(verifiers, family):
    drafter = native(verifiers[family])
    batch = text(2)
    wide = torch.randn(len(batch.tokens_N), HIDDEN, generator=torch.Generator().manual_seed(4))
    batch = type(batch)(**{name: getattr(batch, name) for name in batch.__slots__} | {"last_NH": wide})
    with torch.no_grad():
        states = drafter(batch)[0]
        made = dict(mistakes.of_drafter(drafter, verifiers[family]))
        assert "concatenation order: hidden state and embedding are exchanged" in made
        for name, changed in made.items():
            assert not torch.allclose(changed(batch)[0], states, atol=1e-3), name


def parity(directory: Path, drafter: NativeMtp, verifier: Verifier) -> dict:
    path = Path(verifier.model.name_or_path)
    return check_parity(tiny.recipe(), path, directory, drafter, verifier, tiny.prompts(12, seed=7))


@pytest.mark.engine
@pytest.mark.own_process
@pytest.mark.parametrize("family", VERIFIERS)
def test_stock_vllm_proposes_what_pytorch_proposes(verifiers, family, tmp_path):
    drafter = native(verifiers[family])
    path = Path(verifiers[family].model.name_or_path)
    export(drafter, tmp_path / "drafter", path, tiny.FINGERPRINT, tiny.card())
    result = parity(tmp_path / "drafter", drafter, verifiers[family])
    assert result["first_proposal_agreement"] > 0.93
    assert min(result["agreement_per_position"]) > 0.85


def _swap_order(d: NativeMtp, t: dict[str, torch.Tensor]) -> None:
    name = d.config.names["fuse"]
    t[name] = torch.cat(t[name].chunk(2, 1)[::-1], 1).contiguous()


def _swap_norms(d: NativeMtp, t: dict[str, torch.Tensor]) -> None:
    one, other = (d.config.names[role] for role in ("embed_norm", "hidden_norm"))
    t[one], t[other] = t[other], t[one]


@pytest.mark.engine
@pytest.mark.own_process
@pytest.mark.parametrize(
    ("family", "sabotage", "cause"),
    [
        ("glm4_moe", _swap_order, "concatenation order"),
        ("ernie4_5", _swap_norms, "norms: those of the two inputs"),
    ],
)
def test_a_wrong_layer_is_named(verifiers, family, sabotage, cause, tmp_path):
    drafter = native(verifiers[family])
    path = Path(verifiers[family].model.name_or_path)
    export(drafter, tmp_path / "drafter", path, tiny.FINGERPRINT, tiny.card())
    tensors = load_file(tmp_path / "drafter" / SHARD)
    sabotage(drafter, tensors)
    save_file(tensors, tmp_path / "drafter" / SHARD, metadata={"format": "pt"})
    with pytest.raises(RunFailed, match="not the trained one") as caught:
        parity(tmp_path / "drafter", drafter, verifiers[family])
    assert cause in caught.value.hint


@pytest.mark.engine
@pytest.mark.own_process
def test_a_missing_norm_is_seen(verifiers, tmp_path):
    drafter = native(verifiers["glm4_moe"])
    path = Path(verifiers["glm4_moe"].model.name_or_path)
    export(drafter, tmp_path / "drafter", path, tiny.FINGERPRINT, tiny.card())
    drafter.final_norm = None
    with pytest.raises(RunFailed, match="not the trained one"):
        parity(tmp_path / "drafter", drafter, verifiers["glm4_moe"])


@pytest.mark.engine
@pytest.mark.own_process
def test_a_run_fine_tunes_the_layer_that_the_verifier_carries(tmp_path):
    """`train-drafter --method mtp` from corpus to parity check: the loss falls and only the layer changes."""
    path = write_tiny_verifier(tmp_path / "verifier")
    save_verifier(path, "glm4_moe", vocab_size=300)
    corpus = write_tiny_corpus(
        tmp_path / "corpus", path, {"heldout": [16] * 6, "train": [8 + i % 9 for i in range(24)]}
    )
    settings = {
        "model": {"path": str(path)},
        "sampling": {"greedy_n": 1, "max_tokens": 40},
        "engine": tiny.SECTION.model_dump(),
        "drafter": {"kind": "mtp"},
        "eval": {"max_tokens": 32},
        "train": {"epochs": 6.0, "tokens_per_batch": 280, "ttt_steps": 2, "lr": 3e-3},
    }
    recipe = Recipe.model_validate(settings)
    run = RunDir.open(tmp_path / "run", verb="train-drafter", recipe=recipe)
    results = loop.run(recipe, run, corpus)
    run.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "lr" in row]
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert results["parity"]["first_proposal_agreement"] > 0.9
    before, after = (dict(stored_tensors(p)) for p in (path, tmp_path / "run" / "drafter"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    called = names(FAMILIES["glm4_moe"], json.loads((path / "config.json").read_text()))
    own = {name for role, name in called.items() if role not in ("embedding", "head")}
    assert before.keys() == after.keys() and moved <= own and called["fuse"] in moved
    assert not any(name.endswith("correction_bias") for name in moved)
