"""Exported directories: the same tensors, every flag, two layouts, and one engine's opinion of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from draftkit.data.capture import Verifier
from draftkit.drafters.eagle3 import Eagle3
from draftkit.drafters.layouts import config_of, export, from_drafter
from draftkit.engine import Engine
from draftkit.errors import UserError
from draftkit.types import Sampling, SpecConfig

# Keys that vLLM or a reader of the layout looks up; one that is missing falls back to a default that may not be ours.
PLAIN_KEYS = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_hidden_layers", "vocab_size", "rms_norm_eps", "rope_parameters", "max_position_embeddings",
    "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings", "dtype", "draft_vocab_size",
    "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states",
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
}  # fmt: skip
SPECULATORS_KEYS = {
    "architectures", "speculators_model_type", "speculators_version", "draft_vocab_size", "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
    "transformer_layer_config", "speculators_config", "tie_word_embeddings", "dtype",
}  # fmt: skip


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return tiny.verifier()


@pytest.fixture(scope="module", params=[False, True], ids=["norm_after", "norm_before_residual"])
def drafter(request, verifier) -> Eagle3:
    return tiny.random_drafter(verifier, seed=3, norm_before_residual=request.param)


@pytest.fixture(scope="module")
def exported(drafter, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("export") / "drafter"
    export(drafter, directory, tiny.FINGERPRINT, tiny.card())
    return directory


def read_config(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def test_a_drafter_comes_back_bit_for_bit(drafter, exported, verifier):
    again = from_drafter(exported, verifier.embed_VH)
    assert again.config == drafter.config
    ours, theirs = drafter.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        expected = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(theirs[name], expected), name


def test_the_plain_layout_writes_every_flag(drafter, exported):
    config = read_config(exported)
    assert config.keys() == PLAIN_KEYS
    ids = list(drafter.config.aux_layers)
    assert config["eagle_aux_hidden_state_layer_ids"] == ids
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    assert config["num_aux_hidden_states"] == 3
    assert config["norm_before_residual"] is drafter.config.norm_before_residual
    assert (config["norm_before_fc"], config["fc_norm"], config["norm_output"]) == (False, False, False)
    assert config["rope_parameters"] == tiny.ROPE
    assert config_of(exported) == drafter.config


def test_the_speculators_layout_writes_every_flag(drafter, exported):
    config = read_config(exported.with_name("drafter-speculators"))
    assert config.keys() >= SPECULATORS_KEYS
    assert config["norm_before_residual"] is drafter.config.norm_before_residual
    assert config["transformer_layer_config"]["rope_parameters"] == tiny.ROPE
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == tiny.K


def test_both_layouts_hold_the_same_tensors(exported, verifier):
    plain = load_file(exported / "model.safetensors")
    speculators = load_file(exported.with_name("drafter-speculators") / "model.safetensors")
    assert torch.equal(speculators.pop("embed_tokens.weight"), verifier.embed_VH)
    assert {name.replace("midlayer.", "layers.0."): tensor.shape for name, tensor in plain.items()} == {
        name: tensor.shape for name, tensor in speculators.items()
    }
    for name, tensor in plain.items():
        assert torch.equal(tensor, speculators[name.replace("midlayer.", "layers.0.")]), name


def test_the_two_vocabulary_maps_are_each_others_inverse(exported):
    tensors = load_file(exported / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert len(tensors["t2d"]) == tiny.VOCAB and len(tensors["d2t"]) == tiny.DRAFT_VOCAB
    ids = torch.arange(tiny.DRAFT_VOCAB) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    assert not torch.equal(ids, torch.arange(tiny.DRAFT_VOCAB))  # or the test could not tell ids from offsets


def test_a_directory_says_who_its_verifier_is_and_what_it_measured(exported):
    for directory in (exported, exported.with_name("drafter-speculators")):
        assert json.loads((directory / "draftkit.json").read_text())["verifier"] == tiny.FINGERPRINT
        readme = (directory / "README.md").read_text()
        assert "| 3 | 0.500 | 0.500 | 0.500 |" in readme and '"method": "eagle3"' in readme


def test_an_export_replaces_the_one_before_and_what_a_killed_one_left(drafter, verifier, tmp_path):
    target = tmp_path / "drafter"
    export(tiny.random_drafter(verifier, seed=8), target, tiny.FINGERPRINT, tiny.card())
    (target / "stale.txt").write_text("from the export before")
    (tmp_path / ".drafter.tmp").mkdir()
    (tmp_path / ".drafter.tmp" / "half.safetensors").write_text("a killed export")
    export(drafter, target, tiny.FINGERPRINT, tiny.card())
    assert sorted(p.name for p in target.iterdir()) == [
        "README.md",
        "config.json",
        "draftkit.json",
        "model.safetensors",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter", "drafter-speculators"]
    assert torch.equal(load_file(target / "model.safetensors")["fc.weight"], drafter.fc.weight.bfloat16())


def test_a_directory_with_a_missing_tensor_is_named(exported, verifier, tmp_path):
    from safetensors.torch import save_file

    tensors = load_file(exported / "model.safetensors")
    del tensors["midlayer.self_attn.o_proj.weight"]
    (tmp_path / "config.json").write_text((exported / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="lacks the tensor midlayer.self_attn.o_proj.weight"):
        from_drafter(tmp_path, verifier.embed_VH)


@pytest.mark.engine
def test_vllm_serves_both_layouts_alike(exported):
    """Every proposed token of every round, from two engines that read two different configs."""
    greedy = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
    traces = []
    for directory in (exported, exported.with_name("drafter-speculators")):
        spec = SpecConfig("eagle3", str(directory), tiny.K)
        with Engine(tiny.verifier_dir(), recipe_engine=tiny.SECTION, spec=spec) as engine:
            trace = engine.trace_drafts()
            answers = engine.generate(tiny.prompts(8), greedy)
        rounds = sorted((int(request.split("-")[0]), i, tokens) for i, (request, tokens) in enumerate(trace))
        traces.append(([tokens for *_, tokens in rounds], [g.response_ids for g in answers]))
    assert len({tuple(tokens) for tokens in traces[0][0]}) > 10  # a constant drafter would prove nothing
    assert traces[0] == traces[1]
