"""The parity check on a tiny verifier: it passes for an honest export, and names what was done to a sabotaged one.

The drafter is random with large weights, so that what it proposes depends on everything it reads: each sabotage
changes most proposals, and none of them looks like another.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from draftkit.data.capture import Verifier, state_dtype
from draftkit.drafters.eagle3 import Eagle3
from draftkit.drafters.layouts import export, from_drafter
from draftkit.errors import RunFailed
from draftkit.train import parity
from draftkit.train.parity import check_parity

pytestmark = pytest.mark.engine
NUM_PROMPTS = 16


@pytest.fixture(scope="module")
def drafter() -> Eagle3:
    return tiny.random_drafter(tiny.verifier(), seed=1)


@pytest.fixture(scope="module")
def honest(drafter, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("parity") / "drafter"
    export(drafter, directory, tiny.FINGERPRINT, tiny.card())
    return directory


def check(directory: Path, drafter: Eagle3) -> dict:
    prompts = tiny.prompts(NUM_PROMPTS, seed=7)
    return check_parity(tiny.recipe(), tiny.verifier_dir(), directory, drafter, tiny.verifier(), prompts)


def test_a_trained_drafter_is_served_as_predicted():
    result = check(tiny.drafter_dir(), tiny.trained_drafter())
    assert result["prompts"] == NUM_PROMPTS
    assert result["first_proposal_agreement"] > 0.95
    assert min(result["agreement_per_position"]) > 0.9
    length = result["greedy_acceptance_length"]
    assert length["served"] > 1.3 and length["served"] == pytest.approx(length["predicted"], abs=0.1)
    assert result["greedy_survival"]["served"] == pytest.approx(result["greedy_survival"]["predicted"], abs=0.07)
    assert abs(result["sampled_first_acceptance"]["z"]) < 4
    assert 0.2 < result["sampled_first_acceptance"]["served"] < 0.8


def test_a_drafter_that_is_never_accepted_is_served_as_predicted(honest, drafter):
    result = check(honest, drafter)
    assert result["first_proposal_agreement"] > 0.95
    assert result["greedy_acceptance_length"]["served"] < 1.2


@pytest.mark.parametrize(
    "variant",
    [
        {"num_hidden_layers": 2, "aux_layers": (1, 3)},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True, "norm_before_residual": True, "num_hidden_layers": 2},
        {"qk_norm": True, "aux_layers": (1, 2, 3, 4)},
        {"attention_bias": True, "num_hidden_layers": 2},
        {"attention_bias": True, "qk_norm": True},
    ],
    ids=lambda v: "+".join(v),
)
def test_every_variant_is_served_as_it_was_trained(variant, tmp_path):
    layers = variant.get("aux_layers", tiny.default_aux_layers(tiny.LAYERS))
    verifier = Verifier(tiny.verifier_dir(), layers, 1.0, state_dtype("cpu"))
    drafter = tiny.random_drafter(verifier, seed=2, **variant)
    export(drafter, tmp_path / "drafter", tiny.FINGERPRINT, tiny.card())
    prompts = tiny.prompts(NUM_PROMPTS, seed=7)
    result = check_parity(tiny.recipe(), tiny.verifier_dir(), tmp_path / "drafter", drafter, verifier, prompts)
    assert result["first_proposal_agreement"] > 0.95
    again = from_drafter(tmp_path / "drafter", verifier.embed_VH)  # and is read back as it was
    assert again.config == drafter.config
    for (name, one), (_, other) in zip(drafter.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one.bfloat16().float(), other), name


# ---- sabotage ----------------------------------------------------------------------------------------------------


def edit_config(directory: Path, **changes) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def without_vocabulary_map(directory: Path) -> None:
    edit_tensors(directory, lambda t: t["d2t"].zero_())


def with_aux_layers_one_later(directory: Path) -> None:
    ids = [layer + 1 for layer in tiny.default_aux_layers(tiny.LAYERS)]
    eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    edit_config(directory, eagle_aux_hidden_state_layer_ids=ids, eagle_config=eagle)


def with_aux_layers_one_earlier(directory: Path) -> None:
    ids = [layer - 1 for layer in tiny.default_aux_layers(tiny.LAYERS)]
    eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    edit_config(directory, eagle_aux_hidden_state_layer_ids=ids, eagle_config=eagle)


def with_default_rope(directory: Path) -> None:
    edit_config(directory, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


def with_the_other_norm_order(directory: Path) -> None:
    edit_config(directory, norm_before_residual=True)


def with_the_verifiers_head(directory: Path) -> None:
    def share(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"].copy_(tiny.verifier().head_VH[tensors["t2d"]])

    edit_tensors(directory, share)


def with_another_mlp(directory: Path) -> None:
    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors["midlayer.mlp.down_proj.weight"] = tensors["midlayer.mlp.down_proj.weight"].flip(0).contiguous()

    edit_tensors(directory, flip)


@pytest.mark.parametrize(
    ("sabotage", "cause"),
    [
        (without_vocabulary_map, "vocabulary map"),
        (with_aux_layers_one_later, r"auxiliary layers: served as \[2, 3, 4\]"),
        (with_aux_layers_one_earlier, r"auxiliary layers: served as \[0, 1, 2\]"),
        (with_default_rope, "rope"),
        (with_the_other_norm_order, "norm flags: norm_before_residual"),
        (with_the_verifiers_head, "shared head"),
        (with_another_mlp, "none of the known ones"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_sabotaged_export_fails_and_the_cause_is_named(honest, drafter, tmp_path, sabotage, cause):
    directory = shutil.copytree(honest, tmp_path / "drafter")
    sabotage(directory)
    with pytest.raises(RunFailed, match="The served drafter is not the trained one") as error:
        check(directory, drafter)
    assert error.match(f"Likely cause: {cause}")


def test_a_mistake_that_hardly_shows_is_found_all_the_same(drafter, tmp_path, monkeypatch):
    """Thresholds alone would let it pass: most proposals agree. It is the known mistake that agrees better."""
    close = dict(tiny.ROPE, rope_theta=8000.0)
    other = tiny.random_drafter(tiny.verifier(), seed=1, rope_parameters=close)
    export(other, tmp_path / "drafter", tiny.FINGERPRINT, tiny.card())
    with_default_rope(tmp_path / "drafter")
    monkeypatch.setattr(parity, "MIN_AGREEMENT", 0.5)
    with pytest.raises(RunFailed, match=r"Likely cause: rope: another base frequency") as error:
        check(tmp_path / "drafter", other)
    assert int(error.value.message.split(": ")[1].split("%")[0]) > 80


@pytest.mark.parametrize(
    ("gained", "lost", "better"), [(9, 0, False), (10, 0, True), (20, 1, True), (30, 20, False), (0, 40, False)]
)
def test_a_rival_must_explain_more_rounds_than_chance_would(gained, lost, better):
    both, neither = [2] * 200, [0] * 3
    rival = torch.tensor(both + neither + [1] * gained + [0] * lost)
    leading = torch.tensor(both + neither + [0] * gained + [3] * lost)
    assert parity._explains_better(rival, leading) is better
