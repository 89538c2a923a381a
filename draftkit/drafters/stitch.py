"""MTP tensors into a verifier's checkpoint: a directory of its own whose shards are the verifier's, and one more.

    model-00001-of-00002.safetensors ..   the verifier's own files, hard links where the disk allows, else copies
    model-mtp.safetensors                 the MTP layer
    model.safetensors.index.json          names both
    config.json                           the verifier's, with what makes vLLM look for the layer

The verifier's directory is only read, so taking the layer out again is deleting the new one. Written aside and renamed:
it exists whole or not at all. Left out: replacing MTP layers that a verifier already has.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from draftkit.drafters.base import whole_directory
from draftkit.errors import UserError

SHARD, INDEX = "model-mtp.safetensors", "model.safetensors.index.json"


def stitch(
    verifier: Path,
    tensors: Mapping[str, torch.Tensor],
    config: dict[str, Any],
    directory: Path,
    prints: dict[str, str],
    readme: str,
) -> None:
    """Write `directory`: `verifier` with `tensors` (checkpoint names) and `config` over its own config.json.

    prints: the verifier's fingerprint. Raises UserError when the verifier already has a tensor of that name.
    """
    index = _index(verifier)
    if taken := sorted(tensors.keys() & index["weight_map"].keys()):
        raise UserError(
            f"{verifier} already holds {taken[0]} and {len(taken) - 1} more tensors of the MTP layer.",
            "Start from a verifier without MTP layers.",
        )
    with whole_directory(directory, prints) as aside:
        for file in sorted(verifier.iterdir()):
            if file.is_file() and file.name not in ("config.json", INDEX, "README.md"):
                _link(file.resolve(), aside / file.name)
        save_file(dict(tensors), aside / SHARD, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(sorted(tensors), SHARD)
        total = sum((aside / name).stat().st_size for name in set(index["weight_map"].values()))
        index["metadata"] = index.get("metadata", {}) | {"total_size": total}
        (aside / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        own = json.loads((verifier / "config.json").read_text())
        (aside / "config.json").write_text(json.dumps(own | config, indent=2) + "\n")
        (aside / "README.md").write_text(readme)


def _index(verifier: Path) -> dict[str, Any]:
    """Its index, or the one that it would have."""
    if (verifier / INDEX).is_file():
        return json.loads((verifier / INDEX).read_text())
    where: dict[str, str] = {}
    for file in sorted(verifier.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            where |= dict.fromkeys(opened.keys(), file.name)
    return {"metadata": {}, "weight_map": where}


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another filesystem, or one without links
        shutil.copyfile(source, target)
