"""What training, prediction and parity ask of a drafter, whatever its kind; and directories that are whole or absent.

All kinds share the slots of `DraftBatch`: at slot p, having read x[p+1], step i of a round proposes x[p+2+i].
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from draftkit import __version__
from draftkit.types import DraftBatch

SCHEMA = "draftkit.drafter/1"


class Drafter(nn.Module):
    """A drafter. Parameters that train are float32 masters; products run in the dtype of the batch's states.

    method: what vLLM calls it. aux_layers: verifier layers whose states it reads, as vLLM counts them. sees_itself:
    step i depends on the drafter's own states of earlier steps, so that training must run every step (test-time
    training); otherwise a text read once trains them all.
    """

    method: str
    aux_layers: tuple[int, ...] = ()
    sees_itself = True
    draft_to_target_D: torch.Tensor  # int64: verifier ids that it can propose

    @property
    def head_DH(self) -> torch.Tensor:
        """Its LM head; without a gradient where it is the verifier's."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return self.head_DH.device

    def shardable(self) -> list[nn.Module]:
        """Parts that run by their own `forward` only, which may therefore be gathered one at a time (FSDP2)."""
        return []

    def forward(self, batch: DraftBatch, own_tokens: bool = False) -> list[torch.Tensor]:
        """States [R, H] of every step of the batch (L = len(valid_LR)); `head_DH` makes them logits.

        own_tokens: read its own greedy proposals at steps i >= 1, as a serving engine does, not the document's tokens.
        """
        raise NotImplementedError

    def propose(self, state_RH: torch.Tensor) -> torch.Tensor:
        """Greedy proposals [R] as verifier token ids."""
        return self.draft_to_target_D[F.linear(state_RH, self.head_DH.to(state_RH.dtype)).argmax(-1)]


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """The part of its state that training changes, and its buffers: what a checkpoint of a run needs."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def document_spans(batch: DraftBatch) -> list[tuple[int, int]]:
    """(first, last) token of each document of the batch."""
    starts = (batch.pos_N == 0).nonzero().flatten().tolist()
    return list(zip(starts, [*starts[1:], len(batch.pos_N)], strict=True))


@contextmanager
def whole_directory(directory: Path, verifier: dict[str, str] | None) -> Iterator[Path]:
    """`with whole_directory(...) as aside:` fill `aside`; it takes the place of `directory` when the block ends without
    an error. verifier: the fingerprint of the verifier that the drafter is for, kept in its draftkit.json; None: it is
    not known, and there is no such file."""
    aside = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    if verifier is not None:
        note: dict[str, Any] = {"schema": SCHEMA, "draftkit": __version__, "verifier": verifier}
        (aside / "draftkit.json").write_text(json.dumps(note, indent=2) + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    aside.rename(directory)


def write_directory(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    verifier: dict[str, str] | None,
    readme: str,
) -> None:
    with whole_directory(directory, verifier) as aside:
        save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (aside / "README.md").write_text(readme)
