"""EAGLE-3 heads of every published layout: read, trained on, written back, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftkit.cli import app
from draftkit.drafters import layouts
from draftkit.drafters.eagle3 import Eagle3, Eagle3Config
from draftkit.errors import UserError

V, D, H, TARGET = 50, 20, 12, 16
CONFIG = Eagle3Config(
    hidden_size=H,
    target_hidden_size=TARGET,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    vocab_size=V,
    draft_vocab_size=D,
    aux_layers=(2, 14, 25),
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    max_position_embeddings=64,
)
VERIFIER = {"weights": "w", "tokenizer": "t", "chat_template": "c"}


def tensors(dtype: torch.dtype, layer: str) -> dict[str, torch.Tensor]:
    """As a published file holds them, random."""
    made = torch.Generator().manual_seed(1)
    ids = torch.randperm(V, generator=made)[:D].sort().values
    head = Eagle3(CONFIG, torch.empty(V, H), ids)
    found = {
        name.replace("midlayer.", layer): t if name == "d2t" else torch.randn(t.shape, generator=made).to(dtype)
        for name, t in head.state_dict().items()
    }
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[ids] = True
    return found | {"t2d": t2d}


FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": H,
    "target_hidden_size": TARGET,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "draft_vocab_size": D,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,  # as transformers 4 wrote it
    "rope_scaling": None,
    "max_position_embeddings": 64,
}
SPECFORGE = FLAT | {
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 13, 24], "use_aux_hidden_state": True},
}
NESTED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": D,
    "target_hidden_size": TARGET,
    "eagle_aux_hidden_state_layer_ids": [2, 14, 25],
    "norm_before_residual": False,
    "transformer_layer_config": {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": CONFIG.rope_parameters,
        "max_position_embeddings": 64,
        **{name: FLAT[name] for name in NESTED},
    },
}
PUBLISHED = {  # layout: (config.json, beginning of the layer's names, verifier's depth where the file does not say)
    "safeai": (FLAT, "midlayer.", 28),
    "specforge": (SPECFORGE, "midlayer.", None),
    "speculators": (SPECULATORS, "layers.0.", None),
}


def publish(directory: Path, kind: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    config, layer, _ = PUBLISHED[kind]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors(dtype, layer), directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_head_is_read_as_it_is(kind, dtype, tmp_path):
    source = publish(tmp_path / "head", kind, dtype)
    head = layouts.read(source, num_layers=PUBLISHED[kind][2])
    assert head.config == CONFIG
    want = tensors(dtype, "midlayer.")
    assert head.tensors.keys() == want.keys() - {"t2d"}
    assert all(torch.equal(t, want[name]) and t.dtype == want[name].dtype for name, t in head.tensors.items())


@pytest.mark.parametrize("to", layouts.LAYOUTS)
@pytest.mark.parametrize("kind", PUBLISHED)
def test_every_conversion_comes_back_bit_for_bit(kind, to, tmp_path):
    source = publish(tmp_path / "head", kind)
    head = layouts.read(source, num_layers=PUBLISHED[kind][2])
    layouts.write(head, tmp_path / "out", to, None)
    written = load_file(tmp_path / "out" / "model.safetensors")
    want = tensors(torch.bfloat16, "layers.0." if to == "speculators" else "midlayer.")
    assert written.keys() == want.keys()
    assert all(torch.equal(t, want[name]) and t.dtype == want[name].dtype for name, t in written.items())
    again = layouts.read(tmp_path / "out")
    assert again.config == head.config
    assert all(torch.equal(t, head.tensors[name]) for name, t in again.tensors.items())


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_warm_start_holds_the_published_weights(kind, tmp_path):
    source = publish(tmp_path / "head", kind)
    drafter = layouts.from_drafter(source, torch.randn(V, H), num_layers=PUBLISHED[kind][2])
    want = tensors(torch.bfloat16, "midlayer.")
    for name, parameter in drafter.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, want[name].float()), name
    assert drafter.draft_to_target_D.tolist() == (want["d2t"] + torch.arange(D)).tolist()
    served = layouts.head_of(drafter)  # and it exports what it was
    assert all(torch.equal(t, want[name]) for name, t in served.tensors.items())


# ---- auxiliary layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ids", "aux_ids", "states"),
    [
        ("specforge", [1, 13, 24], None, (2, 14, 25)),
        ("specforge", [2, 14, 25], None, (2, 14, 25)),
        ("specforge", [2, 14, 25], "sglang", (3, 15, 26)),
        ("specforge", [1, 13, 24], "vllm", (1, 13, 24)),
        ("speculators", [1, 13, 24], None, (1, 13, 24)),
        ("speculators", [1, 13, 24], "sglang", (2, 14, 25)),
    ],
)
def test_auxiliary_ids_of_both_conventions(kind, ids, aux_ids, states, tmp_path):
    eagle = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    changes = {"eagle_config": eagle} if kind == "specforge" else {"eagle_aux_hidden_state_layer_ids": ids}
    assert layouts.read(publish(tmp_path / "head", kind, **changes), aux_ids).config.aux_layers == states


def test_without_ids_the_default_follows_from_the_verifier(tmp_path):
    source = publish(tmp_path / "head", "safeai")
    assert layouts.read(source, num_layers=32).config.aux_layers == (2, 16, 29)
    with pytest.raises(UserError, match="a verifier of 7 layers"):
        layouts.read(source, num_layers=7)
    with pytest.raises(UserError, match="eagle_aux_hidden_state_layer_ids is missing") as caught:
        layouts.read(source)
    assert "--verifier" in caught.value.hint


@pytest.mark.parametrize(("states", "written"), [((2, 14, 25), [1, 13, 24]), ((3, 14, 25), [3, 14, 25])])
def test_sglang_counts_layers_where_the_first_id_is_one(states, written, tmp_path):
    """sglang#25454: ids that begin with 1 get one added, others none."""
    import dataclasses

    head = layouts.read(publish(tmp_path / "head", "specforge"))
    moved = layouts.Head(dataclasses.replace(head.config, aux_layers=states), head.tensors)
    layouts.write(moved, tmp_path / "out", "sglang", None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == written
    as_read = [i + 1 for i in written] if written[0] == 1 else written
    assert as_read == list(states)


# ---- what is not whole ---------------------------------------------------------------------------------------------


def edited(directory: Path, edit) -> Path:
    found = load_file(directory / "model.safetensors")
    edit(found)
    save_file(found, directory / "model.safetensors")
    return directory


def test_a_head_without_its_vocabulary_map_is_refused(tmp_path):
    source = edited(publish(tmp_path / "head", "specforge"), lambda t: t.pop("d2t"))
    with pytest.raises(UserError, match="lacks d2t"):
        layouts.read(source)


@pytest.mark.parametrize("aux_layers", [(1, 3), (1, 2, 3, 4)])
def test_vllm_reads_the_number_of_auxiliary_states_from_every_layout(aux_layers, tmp_path):
    """It sizes fc by it, and takes three where it finds none."""
    import dataclasses

    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    head = layouts.read(publish(tmp_path / "head", "specforge"))
    head = layouts.Head(dataclasses.replace(head.config, aux_layers=aux_layers), head.tensors)
    layouts.write(head, tmp_path / "nested", "speculators", None, name="v")
    layouts.write(head, tmp_path / "flat", "vllm", None)
    raw = json.loads((tmp_path / "nested" / "config.json").read_text())
    assert SpeculatorsConfig.extract_transformers_pre_trained_config(raw)["num_aux_hidden_states"] == len(aux_layers)
    assert json.loads((tmp_path / "flat" / "config.json").read_text())["num_aux_hidden_states"] == len(aux_layers)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda t: t["d2t"].add_(40), "d2t names tokens outside"),
        (lambda t: t.pop("fc.weight"), "lacks the tensor fc.weight"),
        (lambda t: t.update({"fc_norm.0.weight": torch.ones(TARGET)}), "holds the tensor fc_norm.0.weight"),
        (lambda t: t.update({"norm.weight": torch.ones(3)}), r"norm.weight has shape \[3\]"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(edit, complaint, tmp_path):
    with pytest.raises(UserError, match=complaint):
        layouts.read(edited(publish(tmp_path / "head", "specforge"), edit))


def test_pickled_weights_are_refused_with_the_way_out(tmp_path):
    source = publish(tmp_path / "head", "specforge")
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="pytorch_model.bin") as caught:
        layouts.read(source)
    assert "save_file" in caught.value.hint


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "not an EAGLE-3 drafter"),
        ({"mlp_bias": True}, "mlp_bias is set"),
        ({"sliding_window": 4096}, "sliding_window is set"),
        ({"logit_scale": 0.25}, "logit_scale is set"),
        ({"num_attention_heads": None}, None),
    ],
)
def test_a_config_that_is_no_head_is_refused(config, complaint, tmp_path):
    source = publish(tmp_path / "head", "specforge", **{k: v for k, v in config.items() if v is not None})
    if complaint is None:
        raw = json.loads((source / "config.json").read_text())
        raw.pop("num_attention_heads")
        (source / "config.json").write_text(json.dumps(raw))
        complaint = "the field num_attention_heads is missing"
    with pytest.raises(UserError, match=complaint):
        layouts.read(source)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_export_writes_the_layout_and_says_so(tmp_path):
    source = publish(tmp_path / "head", "specforge")
    result = CliRunner().invoke(app, ["export", str(source), "--to", "vllm", "--out", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["aux_layers"] == [2, 14, 25]
    assert layouts.read(tmp_path / "out", "vllm").config == CONFIG


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--to", "tensorrt"], "'tensorrt' is not known"),
        (["--to", "vllm", "--aux-ids", "hf"], "'hf' is not known"),
    ],
)
def test_export_refuses_names_that_it_does_not_know(arguments, complaint, tmp_path):
    result = CliRunner().invoke(app, ["export", str(tmp_path), "--out", str(tmp_path / "o"), *arguments])
    assert result.exit_code == 2 and complaint in result.output


def test_export_does_not_overwrite_unasked(tmp_path):
    source = publish(tmp_path / "head", "specforge")
    for out in (source, tmp_path / "there"):
        (tmp_path / "there").mkdir(exist_ok=True)
        result = CliRunner().invoke(app, ["export", str(source), "--to", "vllm", "--out", str(out)])
        assert result.exit_code == 2 and "exists" in result.output
    result = CliRunner().invoke(app, ["export", str(source), "--to", "vllm", "--out", str(source), "--overwrite"])
    assert result.exit_code == 2 and "the drafter itself" in result.output
    assert (source / "model.safetensors").exists()
