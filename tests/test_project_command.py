"""`draftkit project` as a person types it: what it writes, what it refuses and how it says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from draftkit.cli import app
from draftkit.project.scenario import load_scenario
from draftkit.recipe import shipped


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, ["project", *words])

    return run


SMALL = ("-r", "qwen3-8b-gb200", "rollout.requests=[128]", "--k", "1,3")


def test_the_command_as_a_subprocess(draftkit, tmp_path):
    done = draftkit("project", *SMALL, "--lag", "0,1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-3] == "projection: outputs/project/qwen3-8b-gb200" and lines[-1].startswith("next: draftkit project")
    assert "x rollout" in lines[-2] and "host time" in done.stdout and "log-normal" in done.stdout
    folder = tmp_path / "outputs/project/qwen3-8b-gb200"
    results = json.loads((folder / "results.json").read_text())
    assert (folder / "speedup.png").read_bytes().startswith(b"\x89PNG")
    assert [(c["lag"], c["k"]) for c in results["cells"]] == [(lag, k) for lag in (0, 1) for k in (1, 3, "schedule")]
    text = (folder / "README.md").read_text()
    assert all(line in text for line in results["assumptions"]) and results["headline"] in text
    assert results["best"]["step_speedup"] == max(c["step_speedup"] for c in results["cells"] if c["k"] != "schedule")


def test_an_existing_projection_is_replaced_only_on_demand(invoke):
    assert invoke(*SMALL).exit_code == 0
    refused = invoke(*SMALL)
    assert refused.exit_code == 2 and "--overwrite" in refused.stderr
    assert invoke(*SMALL, "--overwrite").exit_code == 0
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years")
    refused = invoke(*SMALL, "--out", "mine", "--overwrite")
    assert refused.exit_code == 2 and [path.name for path in Path("mine").iterdir()] == ["thesis.txt"]


def test_json_is_one_document_and_dry_run_writes_nothing(invoke):
    document = json.loads(invoke(*SMALL, "--json", "--dry-run").stdout)
    assert "3 cells" in document["dry_run"] and not Path("outputs").exists()
    document = json.loads(invoke(*SMALL, "--json", "--out", "p").stdout)
    assert document["schema"] == "draftkit.project/1" and document["out"] == "p"


def test_print_config_says_where_values_come_from(invoke):
    document = json.loads(invoke(*SMALL, "--gpus", "64", "--print-config", "--json").stdout)
    assert document["gpus"] == {"value": [64], "source": "flag"}
    assert document["rollout.requests"]["source"] == "override"
    assert document["model"]["source"] == "scenario qwen3-8b-gb200"
    assert document["engine.profile"]["source"] == "default"


def write_run(folder: Path, cells: list[dict]) -> Path:
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({"temperature": 1.0, "cells": cells}))
    return folder


def test_a_measured_drafter_is_projected_from_its_run(invoke):
    cell = {"k": 3, "concurrency": 1, "temperature": 1.0, "survival": [0.8, 0.6, 0.5]}
    others = [cell | {"k": 1, "survival": [0.1]}, cell | {"temperature": 0.0, "k": 5, "survival": [0.9] * 5}]
    run = write_run(Path("run"), [*others, cell | {"concurrency": 8, "survival": [0.3, 0.2, 0.1]}, cell])
    document = json.loads(invoke(*SMALL[:-1], "3,5", "--acceptance", str(run), "--json").stdout)
    assert document["scenario"]["drafter"]["survival"] == [0.8, 0.6, 0.5]
    taus = {c["k"]: c["acceptance_length"] for c in document["cells"]}
    assert taus[3] == pytest.approx(2.9)
    assert taus[5] == pytest.approx(2.9 + 0.5 * 5 / 6 + 0.5 * 25 / 36)  # the last ratio goes on, and it says so
    assert any("the last ratio goes on" in line for line in document["assumptions"])


def test_acceptance_as_numbers(invoke):
    document = json.loads(invoke(*SMALL, "--acceptance", "0.8,0.4,0.2", "--print-config", "--json").stdout)
    assert document["drafter.survival"]["value"] == [0.8, 0.4, 0.2]
    document = json.loads(invoke("--acceptance", "0.5", "--k", "1,2", "--json").stdout)
    assert {c["k"]: c["acceptance_length"] for c in document["cells"]} == {1: 1.5, 2: 1.75, "schedule": None}


def test_own_hardware_and_model_by_file(invoke):
    Path("mine.yaml").write_text("like: h100\nhbm_bytes_s: 5e12\n")
    Path("config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
        "intermediate_size": 8192, "vocab_size": 32000,
    }))  # fmt: skip
    words = ["--model", "./config.json", "--hardware", "mine.yaml", "--gpus", "8", "--batch", "64", "--json"]
    done = invoke(*words)
    assert done.exit_code == 0, done.stderr
    assumed = json.loads(done.stdout)["assumptions"]
    assert "model llama: 1.2 B parameters" in assumed[0] and "mine" in assumed[1] and "5.00 TB/s" in assumed[1]


def test_measured_lengths_by_file(invoke):
    Path("lengths.txt").write_text("100\n200\n900\n")
    document = json.loads(invoke(*SMALL, "rollout.lengths=lengths.txt", "--json").stdout)
    assert any("measured, mean 400, longest 900" in line for line in document["assumptions"])


@pytest.mark.parametrize(
    ("words", "sentence", "hint"),
    [
        (["--model", "qwen3-8bb"], "model: 'qwen3-8bb' is not in the table", "Did you mean qwen3-8b?"),
        (["--model", "./absent/config.json"], "./absent/config.json does not exist", "Known names"),
        (["--hardware", "h1000"], "hardware: 'h1000' is not in the table", "Did you mean h100?"),
        (["--hardware", "absent.yaml"], "absent.yaml does not exist", "gb200"),
        (["--hardware", "odd.yaml"], "odd.yaml: there is no hardware field 'hbm_byte_s'", "Did you mean hbm_bytes"),
        (["--hardware", "low.yaml"], "low.yaml: hbm_bytes_s should be a number above 0, not 'fast'", "Units"),
        (["--hardware", "bare.yaml"], "bare.yaml: fp8_flops is missing", "like: h100"),
        (["--gpus", "0"], "gpus (flag) should be one or more whole numbers, each at least 1", ""),
        (["--gpus", "many"], "--gpus wants whole numbers", "--gpus 0,1,3"),
        (["--gpus", "1", "--lag", "1", "--model", "qwen3-8b"], "lag above 0 needs two GPUs", "Raise gpus"),
        (["--lag", "-1"], "lag (flag) should be", ""),
        (["--k", "0"], "drafter.k should be one or more whole numbers, each at least 1", ""),
        (["--batch", "0"], "rollout.requests should be", ""),
        (["--acceptance", "often"], "--acceptance: often is no run and no list of numbers", "eval-acceptance"),
        (["--acceptance", "0.4,0.6"], "--acceptance should fall", "share of rounds"),
        (["--acceptance", "1.4"], "drafter.acceptance should be shares from 0 to 1", ""),
        (["--acceptance", "empty"], "empty/results.json does not exist", "Finish"),
        (["--acceptance", "broken"], "broken/results.json holds no cell with drafts", "eval-acceptance run"),
        (["rollout.mean_tokens=9000"], "rollout.mean_tokens (9000) is not below rollout.max_tokens (8192)", "cut"),
        (["rollout.tp=1", "--gpus", "8"], "takes 236 GB on each of 1 GPUs", "Raise rollout.tp"),
        (["rollout.tp=1024"], "rollout.tp = 1024 does not fit 512 GPUs", "auto"),
        (["rollout.lengths=absent.txt"], "rollout.lengths: absent.txt does not exist", "each line"),
        (["rollout.meantokens=3"], "there is no scenario key 'rollout.meantokens'", "rollout.mean_tokens"),
        (["engine.profile=fast"], "engine.profile (override)", ""),
        (["--k", "1", "drafter.k=[3]"], "drafter.k is set both by a named flag", "Keep one"),
        (["-r", "absent"], "No scenario is called 'absent'", "qwen3-235b-gb200"),
        (["--validate", "--gpus", "8"], "--validate has its own points", "Leave"),
        (["trainer.gpus=512", "--lag", "1"], "trainer.gpus = 512 leaves none of 512 GPUs", "Lower"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(invoke, words, sentence, hint):
    Path("odd.yaml").write_text("like: h100\nhbm_byte_s: 1e12\n")
    Path("low.yaml").write_text("like: h100\nhbm_bytes_s: fast\n")
    Path("bare.yaml").write_text("bf16_flops: 1e15\n")
    Path("empty").mkdir()
    write_run(Path("broken"), [])
    refused = invoke(*words, "--out", "p") if "--validate" not in words else invoke(*words)
    assert refused.exit_code == 2, refused.stdout
    assert sentence in refused.stderr and hint in refused.stderr and "Traceback" not in refused.stderr
    assert not Path("p").exists()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("{", "is not valid JSON"),
        ("[]", "num_attention_heads is missing"),
        ('{"num_attention_heads": 4, "hidden_size": "wide"}', "hidden_size should be a whole number above 0"),
        ('{"kv_lora_rank": 512}', "latent attention"),
    ],
)
def test_a_config_that_cannot_be_priced_is_refused(invoke, config, sentence):
    Path("config.json").write_text(config)
    refused = invoke("--model", "./config.json")
    assert refused.exit_code == 2 and sentence in refused.stderr and "config.json" in refused.stderr


@pytest.mark.parametrize("name", shipped("scenarios"))
def test_shipped_scenarios_load_and_say_what_to_expect(name):
    scenario, sources = load_scenario(name, None, {})
    assert scenario.name == name and sources["model"] == f"scenario {name}"
    text = shipped("scenarios")[name].read_text()
    assert "# Hardware:" in text and "# Expect:" in text


def test_validate_prints_every_point_and_the_score(draftkit):
    done = draftkit("project", "--validate", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["points"]) == 55 and document["constants"]
    for point in document["points"]:
        assert point["error"] == pytest.approx(point["said"] / point["known"] - 1)
        assert point["source"][0] == "["
    assert all(p["error_left_out"] is not None for p in document["points"] if p["set"] == "fitted")
    assert "within the target" in document["headline"] and "within the target" in done.stderr
