from __future__ import annotations

from pathlib import Path

import pytest

from draftkit.errors import UserError
from draftkit.recipe import Recipe, flat_values, load_recipe, shipped


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ntrain:\n  lr: 1e-4\n  epochs: 2\neval:\n  k: [3, 1]\n")
    return path


@pytest.mark.parametrize("name", shipped("recipes"))
def test_every_shipped_recipe_parses_and_names_a_shipped_data_recipe(name: str) -> None:
    recipe, sources = load_recipe(name)
    assert recipe.name == name and recipe.description
    assert recipe.data.recipe in shipped("data_recipes")
    assert sources["name"] == f"recipe {name}" and set(sources) == set(flat_values(recipe))


def test_shipped_recipes_tell_hardware_time_and_numbers() -> None:
    for path in shipped("recipes").values():
        head = path.read_text().split("name:")[0]
        assert all(word in head for word in ("# Hardware:", "# Time:", "# Expect:")), path.name


def test_precedence_and_sources(recipe_file: Path) -> None:
    recipe, sources = load_recipe(recipe_file, ["train.epochs=3", "drafter.aux_layers=[1, 2]"], {"sampling.n": 8})
    assert recipe.train.lr == 1e-4 and sources["train.lr"] == f"recipe {recipe_file}"
    assert recipe.train.epochs == 3 and sources["train.epochs"] == "override"
    assert recipe.drafter.aux_layers == [1, 2]
    assert recipe.sampling.n == 8 and sources["sampling.n"] == "flag"
    assert recipe.train.grad_clip == 1.0 and sources["train.grad_clip"] == "default"


def test_k_zero_is_always_measured(recipe_file: Path) -> None:
    assert load_recipe(recipe_file)[0].eval.k == [0, 1, 3]


@pytest.mark.parametrize(
    ("overrides", "flags", "words"),
    [
        (["train.lrr=1"], {}, ["'train.lrr'", "Did you mean train.lr?"]),
        (["temperature=1"], {}, ["Did you mean sampling.temperature?"]),
        (["trian.lr=1"], {}, ["'trian'", "train"]),
        (["train.lr=-1"], {}, ["train.lr (override)", "greater than 0", "-1"]),
        (["train.lr=fast"], {}, ["train.lr", "valid number", "'fast'"]),
        (["train=1"], {}, ["train is a section"]),
        (["train.lr"], {}, ["not an override"]),
        (["train.lr=1", "train.lr=2"], {}, ["train.lr is overridden twice"]),
        (["train.lr=1"], {"train.lr": 2.0}, ["train.lr is set both by a named flag (2.0) and by an override (1)"]),
        (["eval.k=[0]"], {}, ["eval.k", "k = 0 alone"]),
        ([], {"eval.k": [3, -2]}, ["eval.k (flag)", "negative draft length -2"]),
        (["eval.concurrency=[]"], {}, ["eval.concurrency"]),
        (["sampling.max_tokens=4096"], {}, ["sampling.max_tokens (4096)", "engine.max_model_len (1024)"]),
    ],
)
def test_bad_settings_are_one_sentence(recipe_file: Path, overrides: list[str], flags: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(recipe_file, overrides, flags)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train:\n  learning_rate: 1\n", ["mine.yaml", "'train.learning_rate'"]),
        ("train:\n  lr: 1\n  lr: 2\n", ["mine.yaml, line 3", "'lr' stands twice"]),
        ("train: [\n", ["mine.yaml, line"]),
        ("", ["mine.yaml is empty"]),
        ("- 1\n", ["not a mapping"]),
    ],
)
def test_bad_files_are_named(recipe_file: Path, text: str, words: list[str]) -> None:
    recipe_file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_recipe(recipe_file)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_unknown_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean quickstart"):
        load_recipe("quikstart")
    with pytest.raises(UserError, match="does not exist"):
        load_recipe(tmp_path / "absent.yaml")


def test_a_dumped_recipe_loads_to_itself(tmp_path: Path) -> None:
    import yaml

    recipe = load_recipe("quickstart", ["sampling.stop=[a, b]"])[0]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    assert load_recipe(path)[0] == recipe
    assert isinstance(recipe, Recipe)
