from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftkit.errors import UserError
from draftkit.models import fingerprint, load_tokenizer, make_demo_model, model_facts, render, resolve_model

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def copy(demo_model: Path, tmp_path: Path) -> Path:
    """The demo verifier with files that a test may change; its weights are a link."""
    path = tmp_path / "copy"
    path.mkdir()
    for file in demo_model.iterdir():
        if file.suffix == ".safetensors":
            (path / file.name).symlink_to(file)
        else:
            shutil.copy(file, path)
    return path


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_demo_model_facts(demo_model: Path) -> None:
    facts = model_facts(demo_model)
    assert (facts.architecture, facts.num_layers, facts.hidden_size, facts.vocab_size) == (
        "LlamaForCausalLM", 30, 576, 49152)  # fmt: skip
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.intermediate_size) == (9, 3, 64, 1536)
    assert facts.rope_parameters["rope_theta"] == 100000.0 and facts.tie_word_embeddings
    assert facts.eos_token_ids == (2,)
    assert "_model_name_or_path" not in json.loads((demo_model / "config.json").read_text())


def test_render_is_the_chat_template_and_a_turn_ends_with_eos(demo_model: Path) -> None:
    tokenizer = load_tokenizer(demo_model)
    ids = render(tokenizer, HELLO)
    assert tokenizer.decode(ids).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in model_facts(demo_model).eos_token_ids


def test_render_passes_the_thinking_mode_to_the_template(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ 'on' if enable_thinking else 'off' }}")
    tokenizer = load_tokenizer(copy)
    assert tokenizer.decode(render(tokenizer, HELLO, thinking=True)) == "on"
    assert tokenizer.decode(render(tokenizer, HELLO, thinking=False)) == "off"


def test_fingerprint_sees_each_part(demo_model: Path, copy: Path) -> None:
    original = fingerprint(demo_model)
    assert fingerprint(copy) == original
    (copy / "chat_template.jinja").write_text("x")
    (copy / "tokenizer.json").write_text("{}")
    changed = fingerprint(copy)
    assert changed["weights"] == original["weights"]
    assert changed["chat_template"] != original["chat_template"] and changed["tokenizer"] != original["tokenizer"]


def test_fingerprint_sees_other_weights_of_the_same_shape(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    digests = set()
    for seed in range(2):
        torch.manual_seed(seed)
        save_file({"w": torch.randn(64, 64)}, tmp_path / "model.safetensors")
        digests.add(fingerprint(tmp_path)["weights"])
    assert len(digests) == 2


def test_the_demo_model_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("draftkit.models._write_demo", dies)
    with pytest.raises(KeyboardInterrupt):
        make_demo_model(tmp_path / "demo")
    assert list(tmp_path.iterdir()) == []


def test_the_demo_model_is_not_written_over_other_files(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(UserError, match="is not the demo model"):
        make_demo_model(tmp_path)


def test_a_missing_path_and_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        resolve_model(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        resolve_model(tmp_path / "file")


def test_a_directory_without_config_or_safetensors_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(UserError, match="no \\*.safetensors"):
        resolve_model(copy)
    (copy / "config.json").unlink()
    with pytest.raises(UserError, match="config.json does not exist"):
        resolve_model(copy)


def test_a_model_that_is_not_causal_is_refused(copy: Path) -> None:
    edit(copy / "config.json", architectures=["BertForMaskedLM"])
    with pytest.raises(UserError, match="architectures names BertForMaskedLM"):
        resolve_model(copy)


def test_an_architecture_unknown_to_transformers_is_refused(copy: Path) -> None:
    edit(copy / "config.json", model_type="tomorrow")
    with pytest.raises(UserError, match="transformers does not know this model"):
        model_facts(copy)


def test_a_tokenizer_without_chat_template_is_refused(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template"):
        load_tokenizer(copy)


def test_offline_the_hub_error_names_the_file_and_local_paths_still_work(copy: Path) -> None:
    code = "import sys; from draftkit.models import resolve_model; print(resolve_model(sys.argv[1]))"
    words = [sys.executable, "-c", code]
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(copy.parent / "hf"), "PATH": ""}
    absent = subprocess.run([*words, "nosuch/model"], env=environment, capture_output=True, text=True)
    assert "config.json of nosuch/model is missing" in absent.stderr and "HF_HUB_OFFLINE is set" in absent.stderr
    local = subprocess.run([*words, str(copy)], env=environment, capture_output=True, text=True)
    assert local.stdout.strip() == str(copy)
