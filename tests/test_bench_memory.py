"""The textbook step that `scripts/bench_memory.py` measures beside ours is the same step."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import torch
from conftest import ROOT

from draftkit.drafters import recurrent
from draftkit.drafters.eagle3 import Eagle3
from draftkit.drafters.losses import drafter_loss

SCRIPT = ROOT / "scripts" / "bench_memory.py"
spec = importlib.util.spec_from_file_location("bench_memory", SCRIPT)
bench = importlib.util.module_from_spec(spec)
sys.modules["bench_memory"] = bench
spec.loader.exec_module(bench)


def test_dense_and_ours_give_the_same_gradients(monkeypatch):
    torch.manual_seed(0)
    batch, teacher = bench.make_batch(48, 3)
    drafter = Eagle3(bench.config(), torch.randn(bench.VERIFIER_VOCAB, bench.HIDDEN) * 0.02, torch.arange(4096))
    count = float(len(batch.slot_R))
    loss, _ = drafter_loss(drafter(batch), drafter.lm_head.weight, teacher, batch.valid_LR, 0.8, count)
    ours = torch.autograd.grad(loss, list(drafter.parameters()))
    monkeypatch.setattr(recurrent, "ttt_attention", bench.dense_attention)
    states = drafter(batch)
    dense = bench.dense_loss(states, drafter.lm_head.weight, teacher, batch.valid_LR, 0.8, count)
    theirs = torch.autograd.grad(dense, list(drafter.parameters()))
    torch.testing.assert_close(loss, dense, rtol=1e-2, atol=0)
    for a, b in zip(ours, theirs, strict=True):  # bfloat16 products, rounded at other places
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.99


def test_a_cell_reports_memory_and_speed():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--cell", "ours", "64", "2"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mib"] > 0 and found["slots_per_s"] > 0 and found["loss"] > 0
