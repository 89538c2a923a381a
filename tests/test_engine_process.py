"""An engine in a process of its own: the same answers, weights, errors and cancellation, and how either side's death
shows on the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from draftkit.engine import EngineProcess, expected_probe, probe_mismatches, process
from draftkit.errors import RunFailed, UserError
from draftkit.types import Sampling, SpecConfig, SpecCounters

pytestmark = pytest.mark.engine

GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=True)


@pytest.fixture(scope="module")
def child() -> Iterator[EngineProcess]:
    config = SpecConfig("eagle3", str(tiny.drafter_dir()), tiny.K)
    env = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "nowhere", "HOME": None}
    with EngineProcess(tiny.verifier_dir(), recipe_engine=tiny.SECTION, spec=config, env=env) as engine:
        yield engine


def test_the_child_answers_as_an_engine_here_does(child, spec):
    asked = tiny.prompts(12)
    seen: list[int] = []
    theirs = child.generate(asked, GREEDY, max_concurrency=5, progress=seen.append)
    ours = spec.generate(asked, GREEDY)
    assert [g.response_ids for g in theirs] == [g.response_ids for g in ours]
    assert [g.spec for g in theirs] == [g.spec for g in ours]
    assert sum(seen) == 12
    assert child.dtype == spec.dtype and child.device == spec.device
    assert child.counters() == sum((g.spec for g in theirs), SpecCounters())
    assert child.aux_layers() == spec.aux_layers()
    child.set_k(1)
    child.step_log()
    child.generate(asked[:2], GREEDY)
    assert {step.k for step in child.step_log()} == {1}
    child.set_schedule([[1, 256, tiny.K]])
    child.sleep()
    child.wake()


def test_weights_reach_the_child(child, spec, monkeypatch):
    """Through a buffer smaller than a tensor, from a generator; the drafter too."""
    monkeypatch.setattr(child, "_buffer", child._buffer[:10_000])
    asked = tiny.prompts(12)
    verifier, drafter = (load_file(d / "model.safetensors") for d in (tiny.verifier_dir(), tiny.drafter_dir()))
    before = child.generate(asked, GREEDY)
    changed = {n: w.roll(1, 0) if w.dim() == 2 else w for n, w in verifier.items()}
    child.load_verifier((n, w) for n, w in changed.items())
    assert child.generate(asked, GREEDY) != before
    right = expected_probe(changed.items(), "verifier", child.dtype)
    assert probe_mismatches(child.probe(), right | expected_probe(drafter.items(), "drafter", child.dtype)) == []
    child.load_verifier(verifier.items())
    child.load_drafter({n: w.roll(1, 0) if w.dim() == 2 else w for n, w in drafter.items()}.items())
    assert sum((g.spec for g in child.generate(asked, GREEDY)), SpecCounters()).acceptance_length < 1.2
    child.load_drafter(drafter.items())
    assert child.generate(asked, GREEDY) == before


def test_the_child_has_its_own_environment(child):
    told = Path(f"/proc/{child._process.pid}/environ").read_bytes().decode().split("\0")
    assert "OMP_NUM_THREADS=1" in told and "MASTER_ADDR=nowhere" in told
    assert not [entry for entry in told if entry.startswith(("HOME=", "RANK=", "WORLD_SIZE="))]
    assert "HOME" in os.environ


def test_errors_keep_their_type(child, tmp_path):
    with pytest.raises(UserError, match="leaves no room") as refused:
        child.generate([[5] * 128], GREEDY)
    assert refused.value.hint == "Raise engine.max_model_len or drop the prompt."
    with pytest.raises(AssertionError):
        child.set_k(tiny.K + 1)
    with pytest.raises(UserError, match="cannot be tensor-parallel"):
        section = tiny.SECTION.model_copy(update={"tensor_parallel_size": 2})
        EngineProcess(tmp_path, recipe_engine=section)
    assert len(child.generate(tiny.prompts(2), GREEDY)) == 2


def test_what_fails_on_this_side_leaves_the_child_idle(child):
    """Ctrl-C in the middle of a call, and weights that cannot be made: the next call is as if nothing had been."""
    expected = child.generate(tiny.prompts(4), GREEDY)

    def stop(_finished: int) -> None:
        raise KeyboardInterrupt

    start = time.perf_counter()
    hundreds = [Sampling(temperature=1.0, max_tokens=5 if i == 0 else 100, ignore_eos=True) for i in range(400)]
    with pytest.raises(KeyboardInterrupt):
        child.generate(tiny.prompts(400), hundreds, max_concurrency=2, progress=stop)
    stopped = time.perf_counter() - start

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(load_file(tiny.verifier_dir() / "model.safetensors").items()))
        raise OSError("the trainer is gone")

    with pytest.raises(OSError, match="the trainer is gone"):
        child.load_verifier(broken())
    assert child.generate(tiny.prompts(4), GREEDY) == expected
    assert child._process.is_alive() and stopped < process.CLOSE_SECONDS


def test_a_child_that_dies_is_reported_and_stays_dead():
    section = tiny.SECTION.model_copy(update={"max_num_seqs": 4})
    engine = EngineProcess(tiny.verifier_dir(), recipe_engine=section)

    def kill(_finished: int) -> None:
        os.kill(engine._process.pid, signal.SIGKILL)

    for _ in range(2):
        with pytest.raises(RunFailed, match="process was killed by signal 9"):
            engine.generate(tiny.prompts(40), GREEDY, max_concurrency=1, progress=kill)
    engine.close()
    engine.close()


PARENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from draftkit.engine import EngineProcess
from draftkit.recipe import EngineSection
from draftkit.types import Sampling

if __name__ == "__main__":
    section = EngineSection(max_model_len=128, max_num_seqs=4, kv_cache_gib=1)
    engine = EngineProcess(sys.argv[2], recipe_engine=section)
    greedy = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
    print("child", engine._process.pid, flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print("answers", len(engine.generate([[1, 2, 3]], greedy)), flush=True)
    time.sleep(60)
"""


def test_ctrl_c_is_the_parents_and_its_death_is_the_childs(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), str(Path(__file__).parent), str(tiny.verifier_dir())]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    child = int(parent.stdout.readline().split()[1])
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.stdout.readline() == "answers 1\n"
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "State:\tZ" in Path(f"/proc/{child}/status").read_text():
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        pytest.fail("the child outlived its parent")


SHARED = """
import sys
sys.path.insert(0, sys.argv[1])
import tiny, torch
import torch.distributed as dist
from draftkit.engine import Engine
from draftkit.types import Sampling

def works():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item() == 1.0

dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=0, world_size=1)
greedy = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
for _ in range(2):
    with Engine(sys.argv[2], recipe_engine=tiny.SECTION) as engine:
        assert len(engine.generate([[1, 2, 3]], greedy)) == 1 and works()
    assert dist.is_initialized() and works()
print("ok")
"""


def test_a_trainers_torch_distributed_is_used_and_left_alone(tmp_path):
    """A group of one process that was there before: two engines come and go, and it works all along."""
    places = [str(Path(__file__).parent), str(tiny.verifier_dir()), str(tmp_path / "store")]
    done = subprocess.run([sys.executable, "-c", SHARED, *places], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("ok"), done.stderr[-3000:]
