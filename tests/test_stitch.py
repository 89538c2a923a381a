"""Stitched checkpoints: read as vLLM reads them, killed at every step, put back byte for byte, and served."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from draftkit.drafters import stitch as room
from draftkit.drafters.mtp_families import FAMILIES, names, split
from draftkit.drafters.stitch import INDEX, MARK, SHARD, is_stitched, stitch, stitch_in_place, unstitch
from draftkit.engine import Engine
from draftkit.errors import UserError
from draftkit.types import Sampling, SpecConfig

HIDDEN, LAYERS = tiny.HIDDEN, 2
MIMO = FAMILIES["mimo"]
PATCH = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}


def mtp_tensors(verifier: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random MiMo layer: the block is the verifier's own last one, so the shapes are its."""
    made = torch.Generator().manual_seed(seed)
    config = json.loads((verifier / "config.json").read_text()) | PATCH
    last = {k: t for k, t in read(verifier).items() if k.startswith(f"model.layers.{LAYERS - 1}.")}
    tensors = {}
    for role, name in names(MIMO, config).items():
        if role in ("embedding", "head"):
            continue
        block = last.get(f"model.layers.{LAYERS - 1}.{role.removeprefix('block.')}")
        size = block.shape if block is not None else (HIDDEN, 2 * HIDDEN) if role == "fuse" else (HIDDEN,)
        fresh = torch.randn(size, generator=made) * 0.1 + (len(size) == 1 and not name.endswith("bias"))
        tensors[name] = fresh.to(torch.bfloat16)
    return tensors


def read(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor that vLLM would read, by its own loader; none may come twice."""
    from vllm.model_executor.model_loader.weight_utils import (
        filter_duplicate_safetensors_files,
        safetensors_weights_iterator,
    )

    files = [str(path) for path in directory.glob("*.safetensors")]
    files = filter_duplicate_safetensors_files(files, str(directory), INDEX)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in safetensors_weights_iterator(files, False):
        assert name not in found, f"{name} comes twice"
        found[name] = tensor
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(t.dtype == b[k].dtype and torch.equal(t, b[k]) for k, t in a.items())


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


@pytest.fixture(scope="module", params=["10GB", "200KB"], ids=["one-file", "shards"])
def original(request, tmp_path_factory) -> Path:
    path = tiny.save_qwen2(tmp_path_factory.mktemp("stitch") / "verifier", LAYERS, request.param)
    (path / "nested").mkdir()
    (path / "nested" / "note.txt").write_text("kept")
    assert (path / INDEX).exists() == (request.param == "200KB")
    return path


@pytest.fixture
def verifier(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "verifier"))


# ---- a new directory -----------------------------------------------------------------------------------------------


def test_a_new_directory_holds_the_verifier_and_the_layer(verifier, tmp_path):
    before, old, mtp = files(verifier), read(verifier), mtp_tensors(verifier)
    stitch(verifier, mtp, PATCH, tmp_path / "new")
    assert files(verifier) == before
    assert same(read(tmp_path / "new"), old | mtp)
    assert config_of(tmp_path / "new") == config_of(verifier) | PATCH
    after = files(tmp_path / "new")
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {SHARD, INDEX, "config.json"} and before.keys() - after.keys() == set()
    for shard in verifier.glob("*.safetensors"):
        assert os.path.samefile(shard, tmp_path / "new" / shard.name)
    index = json.loads((tmp_path / "new" / INDEX).read_text())
    assert index["weight_map"].keys() == (old | mtp).keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in (old | mtp).values())
    assert same(split(MIMO, config_of(tmp_path / "new"), read(tmp_path / "new")), mtp)


def test_across_file_systems_weights_are_copied(verifier, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    old, mtp = read(verifier), mtp_tensors(verifier)
    stitch(verifier, mtp, PATCH, tmp_path / "new")
    assert same(read(tmp_path / "new"), old | mtp)


def test_a_snapshot_of_symbolic_links_becomes_real_files(verifier, tmp_path):
    (tmp_path / "snapshot").mkdir()
    for path in verifier.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(os.path.relpath(path, tmp_path / "snapshot"))
    mtp = mtp_tensors(verifier)
    stitch(tmp_path / "snapshot", mtp, PATCH, tmp_path / "new")
    assert not any(path.is_symlink() for path in (tmp_path / "new").rglob("*"))
    assert same(read(tmp_path / "new"), read(verifier) | mtp)


def test_a_fine_tuned_layer_takes_the_place_of_the_old_one(verifier, tmp_path):
    """vLLM reads whole files, and `model.safetensors` after `model-mtp.safetensors`: an old copy there would win."""
    native = tmp_path / "native"
    old, first, second = read(verifier), mtp_tensors(verifier, 1), mtp_tensors(verifier, 2)
    shutil.copytree(verifier, native)
    last = sorted(native.glob("*.safetensors"))[-1]
    save_file(load_file(last) | first, last, metadata={"format": "pt"})
    (native / "config.json").write_text(json.dumps(config_of(verifier) | PATCH))
    if (native / INDEX).exists():
        index = json.loads((native / INDEX).read_text())
        index["weight_map"] |= dict.fromkeys(first, last.name)
        (native / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="already holds model.mtp_layers.0.* and 15 more tensors of the MTP layer"):
        stitch(native, second, {}, tmp_path / "new")
    stitch(native, second, {}, tmp_path / "new", replace=True)
    assert same(read(tmp_path / "new"), old | second)
    assert same(read(native), old | first)
    some = dict(list(mtp_tensors(verifier, 3).items())[:3])  # a part of the layer, and over a stitched directory
    stitch(tmp_path / "new", some, {}, tmp_path / "newer", replace=True)
    assert same(read(tmp_path / "newer"), old | second | some)


def test_why_no_listed_file_may_hold_an_old_copy(tmp_path):
    """What `stitch` is built on: vLLM takes both copies, whatever the index says of the tensor, the old one last."""
    from vllm.model_executor.model_loader.weight_utils import (
        filter_duplicate_safetensors_files,
        safetensors_weights_iterator,
    )

    save_file({"w": torch.zeros(1), "v": torch.zeros(1)}, tmp_path / "model.safetensors")
    save_file({"w": torch.ones(1)}, tmp_path / SHARD)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": SHARD, "v": "model.safetensors"}}))
    paths = [str(path) for path in tmp_path.glob("*.safetensors")]
    paths = filter_duplicate_safetensors_files(paths, str(tmp_path), INDEX)
    assert [float(t) for name, t in safetensors_weights_iterator(paths, False) if name == "w"] == [1.0, 0.0]


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "patch", "message"),
    [
        (lambda t: t | {"model.norm.weight": torch.ones(HIDDEN)}, PATCH, "not MTP tensors of mimo: model.norm.weight"),
        (lambda t: dict(list(t.items())[1:]), PATCH, "lacks 1 tensors of its MTP layers"),
        (lambda t: t, {}, "model_type 'qwen2' .* has no MTP layers"),
        (lambda t: t, PATCH | {"num_nextn_predict_layers": 2}, "lacks .* tensors of its MTP layers"),
    ],
)
def test_what_would_not_be_served_is_refused_and_nothing_is_written(verifier, tmp_path, change, patch, message):
    before, tensors = files(tmp_path), change(mtp_tensors(verifier))
    with pytest.raises(UserError, match=message):
        stitch(verifier, tensors, patch, tmp_path / "new")
    with pytest.raises(UserError, match=message):
        stitch_in_place(verifier, tensors, patch)
    assert files(tmp_path) == before


def test_another_shape_is_refused(verifier, tmp_path):
    mtp = mtp_tensors(verifier)
    stitch(verifier, mtp, PATCH, tmp_path / "new")
    name = names(MIMO, config_of(tmp_path / "new"))["fuse"]
    with pytest.raises(UserError, match=r"input_proj.weight is \[2\], and the tensor that it replaces is \[128, 256\]"):
        stitch(tmp_path / "new", mtp | {name: torch.ones(2)}, {}, tmp_path / "newer", replace=True)


def test_the_verifiers_own_directory_and_a_full_disk_are_refused(verifier, tmp_path, monkeypatch):
    mtp = mtp_tensors(verifier)
    with pytest.raises(UserError, match="holds the verifier"):
        stitch(verifier, mtp, PATCH, verifier)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    before = files(tmp_path)
    with pytest.raises(UserError, match="No space left for the stitched checkpoint"):
        stitch_in_place(verifier, mtp, PATCH)
    assert files(tmp_path) == before


# ---- in place ------------------------------------------------------------------------------------------------------


def test_in_place_and_back_again_byte_for_byte(verifier):
    before, old = files(verifier), read(verifier)
    first, second = mtp_tensors(verifier, 1), mtp_tensors(verifier, 2)
    stitch_in_place(verifier, first, PATCH)
    assert is_stitched(verifier) and same(read(verifier), old | first)
    stitch_in_place(verifier, second, PATCH)
    assert same(read(verifier), old | second)
    unstitch(verifier)
    assert files(verifier) == before and sorted(p.name for p in verifier.parent.iterdir()) == ["verifier"]
    with pytest.raises(UserError, match="was not stitched in place"):
        unstitch(verifier)


def test_an_original_that_is_gone_or_in_the_way_is_never_guessed_at(verifier, tmp_path):
    mtp = mtp_tensors(verifier)
    copy = Path(shutil.copytree(verifier, tmp_path / "copy"))
    stitch_in_place(verifier, mtp, PATCH)
    backup = tmp_path / ".verifier.before-stitch"
    backup.rename(tmp_path / "moved")
    for call in (unstitch, lambda path: stitch_in_place(path, mtp, PATCH)):
        with pytest.raises(UserError, match="its original is not at"):
            call(verifier)
    (tmp_path / "moved").rename(tmp_path / ".copy.before-stitch")
    with pytest.raises(UserError, match="move it away"):
        stitch_in_place(copy, mtp, PATCH)
    assert not is_stitched(copy)


class Killed(BaseException):
    """Nothing catches it, like a kill."""


OPERATIONS = (
    (os, "link"), (os, "rename"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"), (os, "fsync"),
    (shutil, "copy2"), (Path, "write_text"), (room, "save_file"), (room, "_exchange"),
)  # fmt: skip


def killed_before(number: int, act: Callable[[], None]) -> bool:
    """Run `act` up to its file operation `number` and no further; False when it had fewer."""
    done = 0

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done > number:
                raise Killed
            return operation(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            act()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("verb", ["stitch", "stitch_in_place", "again", "unstitch"])
def test_a_kill_between_any_two_file_operations_leaves_the_old_or_the_new(original, tmp_path, verb):
    old, first, second = read(original), mtp_tensors(original, 1), mtp_tensors(original, 2)
    plain = config_of(original)
    seen, number = set(), 0
    while True:
        root = tmp_path / str(number)
        verifier, new = Path(shutil.copytree(original, root / "verifier")), root / "new"
        if verb in ("again", "unstitch"):
            stitch_in_place(verifier, first, PATCH)
        act = {
            "stitch": lambda v=verifier, n=new: stitch(v, first, PATCH, n),
            "stitch_in_place": lambda v=verifier: stitch_in_place(v, first, PATCH),
            "again": lambda v=verifier: stitch_in_place(v, second, PATCH),
            "unstitch": lambda v=verifier: unstitch(v),
        }[verb]
        alive = not killed_before(number, act)
        whole = {
            "old": same(read(verifier), old) and config_of(verifier) == plain,
            "first": same(read(verifier), old | first) and config_of(verifier) == plain | PATCH,
            "second": same(read(verifier), old | second) and config_of(verifier) == plain | PATCH,
        }
        state = next((name for name, is_it in whole.items() if is_it), "torn")
        allowed = {
            "stitch": {"old"}, "stitch_in_place": {"old", "first"}, "again": {"first", "second"},
            "unstitch": {"first", "old"},
        }[verb]  # fmt: skip
        assert state in allowed, f"killed before operation {number + 1}: {state}"
        seen.add(state)
        if verb == "stitch":
            assert not new.exists() or same(read(new), old | first)
        elif not alive:  # whatever was left lying about, the verifier can still be stitched and put back
            stitch_in_place(verifier, second, PATCH)
            assert same(read(verifier), old | second)
            unstitch(verifier)
            assert files(verifier) == files(original)
            assert sorted(p.name for p in root.iterdir()) == ["verifier"]
        shutil.rmtree(root)
        if alive:
            break
        number += 1
    assert seen == allowed and number > (3 if verb == "unstitch" else 10)


# ---- served --------------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_a_stitched_layer_drafts_in_vllm_and_the_answers_stay_the_verifiers(tmp_path):
    verifier = tiny.save_qwen2(tmp_path / "verifier", LAYERS)
    exact = Qwen2ForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    stitch_in_place(verifier, mtp_tensors(verifier), PATCH)
    prompts = tiny.prompts(8)
    with Engine(verifier, recipe_engine=tiny.SECTION, spec=SpecConfig("mtp", None, 2)) as engine:
        answers = engine.generate(prompts, Sampling(temperature=0.0, max_tokens=16, ignore_eos=True))
        counters = engine.counters()
        held = {name: p.clone() for name, p in engine._draft_model.named_parameters()}
    assert counters.num_drafts > 0 and counters.num_draft_tokens == 2 * counters.num_drafts
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.response_ids) == 16
        assert tiny.greedy_regret(exact, prompt, answer.response_ids) < 0.1
    fuse = next(p for name, p in held.items() if name.endswith("input_proj.weight"))
    stitched = load_file(verifier / SHARD)["model.mtp_layers.0.input_proj.weight"]
    assert torch.equal(fuse.to(torch.bfloat16).cpu(), stitched)
    assert (verifier / MARK).exists()
