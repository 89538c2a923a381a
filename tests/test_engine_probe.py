"""The probe: what a right engine shows, and every way in which published weights can go wrong, each named.

Read-back of bfloat16 kernels is tested on an engine that computes in bfloat16 whatever the machine prefers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from draftkit.drafters.layouts import export
from draftkit.engine import Engine, core, expected_probe, probe, probe_mismatches, weights
from draftkit.errors import UserError
from draftkit.types import SpecConfig

pytestmark = pytest.mark.engine

Tensors = dict[str, torch.Tensor]


def tensors(directory: Path) -> Tensors:
    return load_file(directory / "model.safetensors")


def expected(verifier: Tensors, drafter: Tensors, engine: Engine, columns: int | None = None) -> Tensors:
    of_verifier = expected_probe(verifier.items(), "verifier", engine.dtype, columns)
    return of_verifier | expected_probe(drafter.items(), "drafter", engine.dtype, columns)


@pytest.fixture(scope="module")
def right(spec) -> Tensors:
    return expected(tensors(tiny.verifier_dir()), tensors(tiny.drafter_dir()), spec)


@pytest.fixture
def restored(spec):
    """The engine whose weights a test spoils."""
    yield spec
    spec.load_verifier(tensors(tiny.verifier_dir()).items())
    spec.load_drafter(tensors(tiny.drafter_dir()).items())


# ---- a right engine -------------------------------------------------------------------------------------------------


def test_a_right_engine_holds_every_tensor_of_both_checkpoints(spec, plain, right):
    held = spec.probe()
    assert probe_mismatches(held, right) == []
    assert held.keys() == right.keys()
    checkpoint = tensors(tiny.drafter_dir())
    assert torch.equal(held["drafter.d2t"], checkpoint["d2t"])
    assert len(held) == len(tensors(tiny.verifier_dir())) + len(checkpoint) - 1  # t2d is not served
    assert probe_mismatches(plain.probe(), {n: t for n, t in right.items() if n.startswith("verifier")}) == []


def test_products_are_those_of_the_tensor_as_it_is_in_the_checkpoint(spec):
    """By definition, in float64, for a part of a fused layer."""
    name = "model.layers.1.self_attn.k_proj.weight"
    w = tensors(tiny.verifier_dir())[name].to(spec.dtype).double()
    v, _ = probe.direction(w.shape[1])
    product = torch.tensor([sum(float(a) * float(b) for a, b in zip(row, v, strict=True)) for row in w])
    torch.testing.assert_close(spec.probe()[f"verifier.{name}"], product, rtol=1e-4, atol=1e-4)


def test_an_engine_in_bfloat16_is_read_back_exactly(monkeypatch):
    monkeypatch.setattr(core, "native_bf16", lambda: True)
    config = SpecConfig("eagle3", str(tiny.drafter_dir()), tiny.K)
    with Engine(tiny.verifier_dir(), recipe_engine=tiny.SECTION, spec=config) as engine:
        verifier, drafter = tensors(tiny.verifier_dir()), tensors(tiny.drafter_dir())
        assert engine.dtype == torch.bfloat16
        held, right = engine.probe(), expected(verifier, drafter, engine)
        assert probe_mismatches(held, right) == []
        for name, product in right.items():
            torch.testing.assert_close(held[name], product, rtol=1e-6, atol=1e-6)
        # float32 weights are published: what the engine rounds them to is what is compared
        changed = {n: w.float() * 1.01 for n, w in verifier.items()}
        engine.load_verifier(changed.items())
        assert probe_mismatches(engine.probe(), expected(changed, drafter, engine)) == []
        moved = [n for n in verifier if (changed[n].bfloat16() != verifier[n]).any()]
        assert moved and len(probe_mismatches(engine.probe(), right)) == len(moved)
        assert probe_mismatches(engine.probe(columns=7), expected(changed, drafter, engine, columns=7)) == []


def test_a_drafter_of_two_layers_is_read_back_without_a_false_alarm(tmp_path):
    """vLLM gives its second layer a norm that no checkpoint has and no forward uses."""
    drafter = tiny.random_drafter(tiny.verifier(), num_hidden_layers=2, fc_norm=True, norm_output=True)
    export(drafter, tmp_path / "drafter", tiny.FINGERPRINT, tiny.card())
    config = SpecConfig("eagle3", str(tmp_path / "drafter"), tiny.K)
    with Engine(tiny.verifier_dir(), recipe_engine=tiny.SECTION, spec=config) as engine:
        served = tensors(tmp_path / "drafter")
        right = expected(tensors(tiny.verifier_dir()), served, engine)
        assert probe_mismatches(engine.probe(), right) == []
        served["layers.1.mlp.up_proj.weight"] = served["layers.1.mlp.up_proj.weight"].flip(0)
        wrong = expected(tensors(tiny.verifier_dir()), served, engine)
        assert probe_mismatches(engine.probe(), wrong) == ["drafter.layers.1.mlp.up_proj.weight"]


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def swapped(a: str, b: str) -> Callable[[Tensors], None]:
    def edit(w: Tensors) -> None:
        w[f"midlayer.{a}.weight"], w[f"midlayer.{b}.weight"] = w[f"midlayer.{b}.weight"], w[f"midlayer.{a}.weight"]

    return edit


def zero(name: str) -> Callable[[Tensors], None]:
    return lambda w: w[name].zero_()


def permuted_columns(w: Tensors) -> None:
    w["fc.weight"] = w["fc.weight"].roll(1, 1)


def last_bit_of_one_weight(w: Tensors) -> None:
    flat = w["fc.weight"].view(-1)
    flat.view(torch.int16)[flat.abs().argmax()] ^= 1


SPOILED = {
    "gate and up swapped": (
        swapped("mlp.gate_proj", "mlp.up_proj"),
        ["layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"],
    ),
    "k and v swapped": (
        swapped("self_attn.k_proj", "self_attn.v_proj"),
        ["layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"],
    ),
    "norms swapped": (
        swapped("hidden_norm", "input_layernorm"),
        ["layers.0.hidden_norm", "layers.0.input_layernorm"],
    ),
    "zeroed vocabulary map": (zero("d2t"), ["d2t"]),
    "zeroed head": (zero("lm_head.weight"), ["lm_head"]),
    "columns permuted": (permuted_columns, ["fc"]),
    "one bit": (last_bit_of_one_weight, ["fc"]),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_drafter_is_named(restored, right, name):
    edit, culprits = SPOILED[name]
    spoiled = {n: w.clone() for n, w in tensors(tiny.drafter_dir()).items()}
    edit(spoiled)
    restored.load_drafter(spoiled.items())
    found = probe_mismatches(restored.probe(), right)
    assert [n.removeprefix("drafter.").removesuffix(".weight") for n in found] == culprits


def test_a_drafter_that_was_not_published_is_named(spec, right):
    """A drafter one small optimizer step away, of which the engine heard nothing."""
    step = {n: w + 1e-3 * w.sign() * (w != 0) if w.dim() == 2 else w for n, w in tensors(tiny.drafter_dir()).items()}
    step = expected_probe(step.items(), "drafter", spec.dtype)
    matrices = [n for n in step if n.startswith("drafter") and "norm" not in n and "d2t" not in n]
    assert probe_mismatches(spec.probe(), step) == sorted(matrices)


def test_a_drafter_dropped_in_sleep_is_named(restored, right):
    """Level 2 leaves memory as it finds it: zeros, or not numbers."""
    drafter = tensors(tiny.drafter_dir())
    for garbage in (0.0, float("nan")):
        restored.load_drafter({n: torch.full_like(w, garbage) for n, w in drafter.items() if w.dim() == 2}.items())
        found = probe_mismatches(restored.probe(), right)
        assert {n for n in found if n.startswith("verifier")} == set()
        assert len(found) == sum(w.dim() == 2 for w in drafter.values())


def test_one_changed_layer_of_the_verifier_is_named(restored, right):
    changed = {n: w.clone() for n, w in tensors(tiny.verifier_dir()).items()}
    changed["model.layers.2.mlp.down_proj.weight"].mul_(1.01)
    restored.load_verifier(changed.items())
    assert probe_mismatches(restored.probe(), right) == ["verifier.model.layers.2.mlp.down_proj.weight"]


def test_an_overwritten_embedding_is_named(restored, right):
    restored._runner.get_draft_model().model.embed_tokens.weight.data.add_(0.01)  # the verifier's own, shared
    assert probe_mismatches(restored.probe(), right) == ["verifier.model.embed_tokens.weight"]


def test_a_drafter_checkpoint_with_an_embedding_does_not_overwrite_the_verifiers(restored, right):
    """The speculators layout repeats the verifier's embedding, of the day on which the drafter was written."""
    stale = tensors(tiny.drafter_dir()) | {"embed_tokens.weight": torch.ones(tiny.VOCAB, tiny.HIDDEN)}
    restored.load_drafter(stale.items())
    assert probe_mismatches(restored.probe(), right) == []


def test_both_layouts_of_a_drafter_are_expected_alike(spec, right):
    speculators = tensors(tiny.drafter_dir().with_name("drafter-speculators"))
    assert any(name.startswith("layers.0.") for name in speculators) and "embed_tokens.weight" in speculators
    verifier = {n: t for n, t in right.items() if n.startswith("verifier")}
    assert probe_mismatches(spec.probe(), verifier | expected_probe(speculators.items(), "drafter", spec.dtype)) == []


def test_weights_that_fail_to_arrive_leave_an_engine_that_works(restored, right):
    def broken():
        yield next(iter(tensors(tiny.verifier_dir()).items()))
        raise OSError("the trainer is gone")

    with pytest.raises(OSError, match="the trainer is gone"):
        restored.load_verifier(broken())
    assert probe_mismatches(restored.probe(), right) == []


# ---- the comparison -------------------------------------------------------------------------------------------------


def test_missing_and_surplus_tensors_are_mismatches():
    a, b = torch.ones(3), torch.ones(3)
    assert probe_mismatches({"drafter.a": a}, {"drafter.a": a, "drafter.b": b}) == ["drafter.b"]
    assert probe_mismatches({"drafter.a": a, "drafter.b": b}, {"drafter.a": a}) == ["drafter.b"]
    assert probe_mismatches({"drafter.a": a, "verifier.b": b}, {"drafter.a": a}) == []
    assert probe_mismatches({"drafter.a": torch.ones(4)}, {"drafter.a": a}) == ["drafter.a"]


def test_experts_in_one_tensor_are_refused_by_name():
    with pytest.raises(UserError, match="mlp.experts.w2 holds the weights of several experts"):
        expected_probe([("mlp.experts.w2", torch.ones(2, 3, 4))], "verifier")


# ---- a tied head ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied_dir(tmp_path_factory) -> Path:
    """Like the demo verifier: the LM head is the embedding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tied")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("change", ["all", "last bits"])
def test_a_tied_head_is_published_with_its_embedding(tied_dir, monkeypatch, change):
    """Without the cure vLLM goes on with the old head, which the probe names, also after a step as small as RL's."""
    old = tensors(tied_dir)
    assert "lm_head.weight" not in old
    new = {n: (w.roll(1, 0) if change == "all" else w * 1.004) if w.dim() == 2 else w for n, w in old.items()}
    with Engine(tied_dir, recipe_engine=tiny.SECTION) as engine:
        assert probe_mismatches(engine.probe(), expected_probe(old.items(), "verifier", engine.dtype)) == []
        engine.load_verifier(new.items())
        assert probe_mismatches(engine.probe(), expected_probe(new.items(), "verifier", engine.dtype)) == []
        monkeypatch.setattr(weights, "repack_tied_heads", lambda module: [])
        engine.load_verifier(old.items())
        found = probe_mismatches(engine.probe(), expected_probe(old.items(), "verifier", engine.dtype))
        assert found == ["verifier.lm_head.weight"]
