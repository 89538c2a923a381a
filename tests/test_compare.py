"""Kinds of drafters side by side: the table, and the real command on a tiny verifier."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from draftkit.evals import compare


def cell(k: int, concurrency: int = 1, speedup: float | None = 1.5, temperature: float = 1.0) -> dict[str, Any]:
    return {
        "k": k, "concurrency": concurrency, "temperature": temperature, "acceptance_length": 1 + k / 4,
        "acceptance_length_ci": [1.1, 1.9], "round_cost": 1.2, "speedup": speedup, "speedup_ci": [1.4, 1.6],
        "verdict": "faster",
    }  # fmt: skip


def result(kind: str, method: str, cells: list[dict[str, Any]], trained: int = 0) -> dict[str, Any]:
    return {
        "kind": kind, "method": method, "cells": cells, "trained_parameters": trained, "train_s": 60.0,
        "heldout_acceptance_length": 1.7 if trained else None, "directory": f"runs/{kind}/drafter",
    }  # fmt: skip


def results() -> dict[str, Any]:
    drafters = [
        result("eagle3", "eagle3", [cell(0), cell(1), cell(3, speedup=2.25), cell(3, 16)], 9_000_000),
        result("mtp", "mtp", [cell(0), cell(1), cell(3, speedup=None), cell(3, 16)], 4_000_000),
        result("ngram", "ngram", [cell(0), cell(1, speedup=0.9)]),
    ]
    return {"verifier": "demo", "corpus": "c", "drafters": drafters}


def test_the_drafters_of_a_cell_stand_side_by_side():
    rows = compare.table_rows(results())
    assert [(row[1], row[2], row[3]) for row in rows] == [
        ("1", "1", "eagle3"), ("1", "1", "mtp"), ("1", "1", "ngram"), ("1", "3", "eagle3"), ("1", "3", "mtp"),
        ("16", "3", "eagle3"), ("16", "3", "mtp"),
    ]  # fmt: skip
    assert rows[0][4:] == ["1.25", "1.10-1.90", "1.20", "1.50", "1.40-1.60", "faster"]
    assert rows[4][7] == ""  # a speedup that could not be measured is left open


def test_the_fastest_is_named_and_the_report_holds_every_cell():
    assert compare.headline(results()).startswith("fastest: eagle3, 2.25x at k = 3, concurrency 1, T = 1 (faster)")
    text = compare.markdown(results())
    assert text.count("| eagle3 |") == 1 + 3 and "9.0" in text and "| ngram | ngram | 0.0 |" in text


@pytest.mark.engine
def test_two_kinds_are_trained_and_measured_and_nothing_is_done_twice(tmp_path, tiny_verifier, tiny_corpus, draftkit):
    recipe = {
        "name": "tiny",
        "model": {"path": str(tiny_verifier)},
        "engine": {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_gib": 1},
        "sampling": {"greedy_n": 1, "max_tokens": 40},
        "train": {"epochs": 2, "tokens_per_batch": 280, "ttt_steps": 2, "parity_prompts": 2},
        "eval": {"k": [2], "concurrency": [2], "temperatures": [1.0], "prompts": 4, "max_tokens": 12, "repeats": 1},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = ["train-drafter", "--compare", "eagle3,draft-lm", "-r", "recipe.yaml", "--corpus", str(tiny_corpus)]
    done = draftkit(*words, "--out", "cmp", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "cmp" / "results.json").read_text())
    assert [d["kind"] for d in found["drafters"]] == ["eagle3", "draft-lm", "ngram"]
    assert [d["method"] for d in found["drafters"]] == ["eagle3", "draft_model", "ngram"]
    for drafter in found["drafters"]:
        assert [c["k"] for c in drafter["cells"]] == [0, 2]
    assert all(d["trained_parameters"] > 0 and d["train_s"] > 0 for d in found["drafters"][:2])
    assert (tmp_path / "cmp" / "README.md").read_text().count("| draft-lm |") >= 2
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "cmp").rglob("metrics.jsonl")}
    assert len(before) == 5
    (tmp_path / "cmp" / "results.json").unlink()  # as if the last step had been interrupted
    again = draftkit(*words, "--out", "cmp", "--resume")
    assert again.returncode == 0, again.stderr
    assert {file: file.stat().st_mtime_ns for file in before} == before
