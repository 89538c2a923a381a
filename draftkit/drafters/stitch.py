"""MTP tensors into a verifier's checkpoint, where vLLM looks for them: a new directory, or the old one in place.

vLLM 0.32 asks the index only which *files* to read and then takes every tensor of each, in the order of the file names:
of two copies of a tensor the later file's wins (`model.safetensors` sorts after `model-mtp.safetensors`). So no file of
a stitched checkpoint holds a replaced copy: a shard that held one is written anew without it. All other shards are hard
links to the verifier's (copies on another file system), and config.json and the index are written anew.

A directory is built aside and renamed. In place it is exchanged with the old one in one system call, so that a kill at
any moment leaves one of the two whole, and the old one stays beside it under a hidden name until `unstitch` exchanges
them back. Left out: file systems that cannot exchange (stitch into a new directory there).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draftkit.drafters.base import whole_directory
from draftkit.drafters.mtp_families import is_mtp, require_family, split
from draftkit.errors import UserError
from draftkit.run import no_space

INDEX, SHARD, MARK = "model.safetensors.index.json", "model-mtp.safetensors", "draftkit-stitch.json"
SCHEMA = "draftkit.stitch/1"
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def stitch(
    verifier: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    directory: Path,
    prints: dict[str, str] | None = None,
    readme: str | None = None,
    *,
    replace: bool = False,
) -> None:
    """Write `directory`: `verifier` with `tensors` (checkpoint names) and `config` over its own config.json.

    prints: the verifier's fingerprint; readme: in place of its README.md. replace: these are the verifier's own MTP
    layers, trained on; otherwise every name must be new. Raises UserError.
    """
    if directory.exists() and verifier.resolve().is_relative_to(directory.resolve()):
        raise UserError(f"{directory} holds the verifier.", "Name a new directory for the stitched checkpoint.")
    plan = _plan(verifier, tensors, config, directory, replace)
    with whole_directory(directory, prints) as aside:
        _fill(aside, plan, tensors)
        if readme is not None:
            (aside / "README.md").write_text(readme)


def stitch_in_place(
    verifier: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], *, replace: bool = False
) -> None:
    """The same, the stitched checkpoint in the place of the verifier's. A stitched one is stitched anew from its
    original."""
    directory = verifier.resolve()
    backup, aside = _backup(directory), _aside(directory)
    if is_stitched(directory):
        _build(_check_backup(directory), tensors, config, aside, replace)
        _exchange(aside, directory)
        shutil.rmtree(aside)
        return
    if backup.exists():  # left by a stitching that ended before the exchange, or by an unstitching after it
        if not is_stitched(backup):
            raise UserError(
                f"{backup} exists, and the verifier beside it is not the stitched one that belongs to it.",
                "It holds a verifier from before an earlier stitching: move it away.",
            )
        _discard(backup, directory)
    _build(directory, tensors, config, aside, replace)
    os.rename(aside, backup)
    _exchange(backup, directory)


def unstitch(verifier: Path) -> None:
    """Put the verifier back that `stitch_in_place` replaced, every file as it was."""
    directory = verifier.resolve()
    if not is_stitched(directory):
        raise UserError(f"{directory} was not stitched in place.", "There is nothing to put back.")
    backup = _check_backup(directory)
    _exchange(backup, directory)
    _discard(backup, directory)


def is_stitched(directory: Path) -> bool:
    """Whether it took a verifier's place; the original then lies beside it."""
    return (directory / MARK).exists()


# ------------------------------------------------------------------------------------------------- one directory


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a stitched checkpoint will be. thinned: shards that cannot be linked, with their tensors' names."""

    source: Path
    config: dict[str, Any]
    index: dict[str, Any]
    thinned: dict[str, list[str]]


def _plan(
    source: Path, tensors: Mapping[str, torch.Tensor], patch: Mapping[str, Any], where: Path, replace: bool
) -> _Plan:
    """Everything that can be refused is refused here, before anything is written."""
    file = source / "config.json"
    if not file.is_file():
        raise UserError(f"{source} holds no config.json, so it is no verifier.", "Give a transformers model directory.")
    config = json.loads(file.read_text(encoding="utf-8")) | dict(patch)
    index = _index(source)
    shards = {name: _header(source / name) for name in sorted(set(index["weight_map"].values()))}
    held = {name: shape for shapes in shards.values() for name, shape in shapes.items()}
    _check(config, held, tensors, file)
    if not replace and (taken := sorted(tensors.keys() & held.keys())):
        raise UserError(
            f"{source} already holds {taken[0]} and {len(taken) - 1} more tensors of the MTP layer.",
            "Start from a verifier without MTP layers.",
        )
    thinned = {
        shard: list(shapes) for shard, shapes in shards.items() if shapes.keys() & tensors.keys() or shard == SHARD
    }
    no_space(where, _need(source, where, tensors, thinned), f"the stitched checkpoint {where}")
    return _Plan(source, config, index, thinned)


def _build(
    source: Path, tensors: Mapping[str, torch.Tensor], patch: Mapping[str, Any], aside: Path, replace: bool
) -> None:
    """Make `aside`, marked as one that takes a verifier's place."""
    plan = _plan(source, tensors, patch, aside, replace)
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir()
    (aside / MARK).write_text(json.dumps({"schema": SCHEMA, "tensors": sorted(tensors)}, indent=2) + "\n")
    _fill(aside, plan, tensors)


def _fill(aside: Path, plan: _Plan, tensors: Mapping[str, torch.Tensor]) -> None:
    """The stitched checkpoint, whole and on the disk."""
    ours = shutil.ignore_patterns(MARK, INDEX, SHARD, "config.json", *plan.thinned)
    shutil.copytree(plan.source, aside, copy_function=_link, ignore=ours, dirs_exist_ok=True)
    mtp = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for shard, held in plan.thinned.items():
        with safe_open(plan.source / shard, framework="pt") as old:
            rest = {name: old.get_tensor(name) for name in held if name not in tensors}
            if shard == SHARD:
                mtp |= rest
            elif rest:
                save_file(rest, aside / shard, metadata=old.metadata())
    save_file(mtp, aside / SHARD, metadata={"format": "pt"})
    weight_map = dict(sorted((plan.index["weight_map"] | dict.fromkeys(tensors, SHARD)).items()))
    total = sum(_data_bytes(aside / name) for name in set(weight_map.values()))
    metadata = plan.index["metadata"] | {"total_size": total}
    index = plan.index | {"metadata": metadata, "weight_map": weight_map}
    (aside / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (aside / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n")
    for path in (*aside.rglob("*"), aside):
        _sync(path)


def _check(
    config: dict[str, Any], held: dict[str, list[int]], tensors: Mapping[str, torch.Tensor], where: Path
) -> None:
    """Only the family's MTP tensors, in the shapes of those that they replace, and none missing afterwards."""
    family = require_family(config, f"{where}, patched")
    foreign = sorted(name for name in tensors if not is_mtp(family, config, name))
    if foreign:
        raise UserError(
            f"{len(foreign)} of the tensors are not MTP tensors of {family.name}: {', '.join(foreign[:4])}.",
            "Stitching adds or replaces MTP layers and leaves the verifier as it is.",
        )
    for name, tensor in tensors.items():
        if name in held and list(tensor.shape) != held[name]:
            raise UserError(
                f"{name} is {list(tensor.shape)}, and the tensor that it replaces is {held[name]}.",
                "It was trained for another verifier.",
            )
    split(family, config, dict.fromkeys((*held, *tensors)))


def _index(source: Path) -> dict[str, Any]:
    """The checkpoint's index; of one without, what it would say."""
    file = source / INDEX
    if file.is_file():
        index = json.loads(file.read_text(encoding="utf-8"))
        missing = sorted({name for name in index["weight_map"].values() if not (source / name).is_file()})
        if missing:
            raise UserError(f"{file} names {', '.join(missing[:4])}, which is missing.", "Copy the model again.")
        return {**index, "metadata": dict(index.get("metadata") or {})}
    found = {name: path.name for path in sorted(source.glob("*.safetensors")) for name in _header(path)}
    if not found:
        raise UserError(f"{source} holds no *.safetensors file.", "Stitching reads and writes safetensors only.")
    return {"metadata": {}, "weight_map": found}


def _header(path: Path) -> dict[str, list[int]]:
    """Tensor name -> shape of one file, the weights unread."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def _data_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def _need(source: Path, where: Path, tensors: Mapping[str, torch.Tensor], thinned: Mapping[str, Any]) -> int:
    """Bytes that will be written: links cost nothing."""
    near = next(parent for parent in (where.resolve(), *where.resolve().parents) if parent.exists())
    copied = 0
    for path in source.rglob("*"):
        if path.is_file():
            link = path.suffix == ".safetensors" and path.name not in thinned
            link &= path.resolve().stat().st_dev == near.stat().st_dev
            copied += 0 if link else path.stat().st_size
    return copied + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _link(source: str, target: str) -> None:
    """Weights as hard links where one file system holds both; small files are copied, for people edit them."""
    if source.endswith(".safetensors"):
        try:
            os.link(os.path.realpath(source), target)
            return
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise
    shutil.copy2(source, target)


# ------------------------------------------------------------------------------------------------- two directories


def _backup(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.before-stitch")


def _check_backup(directory: Path) -> Path:
    """Where the original lies."""
    backup = _backup(directory)
    if not backup.is_dir() or is_stitched(backup):
        raise UserError(
            f"{directory} was stitched, and its original is not at {backup}.",
            "Take the verifier from where it came from; a checkpoint that `stitch` wrote beside it has no original.",
        )
    return backup


def _aside(directory: Path) -> Path:
    """Where a directory is built, and where one is removed: what lies there is never needed."""
    return directory.with_name(f".{directory.name}.stitch-tmp")


def _discard(backup: Path, directory: Path) -> None:
    """Remove a stitched directory from the original's place. It leaves that place whole, mark and all: half removed
    there it could pass for an original."""
    aside = _aside(directory)
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(backup, aside)
    shutil.rmtree(aside)


def _exchange(a: Path, b: Path) -> None:
    """Each takes the other's name, at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) != 0:
        error = ctypes.get_errno()
        if error in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise UserError(
                f"The file system of {b} cannot exchange two directories.", "Stitch into a new directory instead."
            )
        raise OSError(error, os.strerror(error), str(b))
    _sync(b.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
