"""What becomes of a trained drafter: the directory that vLLM serves, and how it is asked to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftkit.drafters import layouts, mtp_native
from draftkit.drafters.base import Drafter
from draftkit.drafters.card import model_card
from draftkit.drafters.draft_lm import DraftLM, export_draft_lm
from draftkit.drafters.eagle3 import Eagle3
from draftkit.drafters.mtp import Mtp, export_eagle, mimo_config, served_tensors
from draftkit.drafters.mtp_native import NativeMtp
from draftkit.drafters.stitch import stitch
from draftkit.train.start import native_mtp
from draftkit.types import SpecConfig


def export(
    drafter: Drafter, directory: Path, verifier_path: Path, verifier: dict[str, str], card: dict[str, Any]
) -> None:
    """Write `directory`. verifier: its fingerprint; card: the recipe and held-out figures, for README.md. An MTP layer
    of the verifier's own, or in MiMo's layout, becomes a copy of the verifier's directory with the layer stitched in;
    shards that hold none of it are linked."""
    if isinstance(drafter, Eagle3):
        layouts.export(drafter, directory, verifier, card)
        return
    readme = model_card(drafter, card)
    if isinstance(drafter, DraftLM):
        export_draft_lm(drafter, directory, verifier_path, verifier, readme)
    elif isinstance(drafter, NativeMtp):
        tensors = mtp_native.served_tensors(drafter)
        stitch(verifier_path, tensors, {}, directory, verifier, readme, replace=True)
    elif isinstance(drafter, Mtp) and drafter.config.layout == "eagle":
        export_eagle(drafter, directory, verifier, readme)
    else:
        tensors, own = served_tensors(drafter), native_mtp(verifier_path) is not None
        stitch(verifier_path, tensors, mimo_config(), directory, verifier, readme, replace=own)


def spec_config(drafter: Drafter, directory: Path, k: int) -> SpecConfig:
    """How an engine is asked to draft with what `export` wrote."""
    if drafter.method == "mtp":
        return SpecConfig("mtp", None, k, target=str(directory))
    own_vocab = isinstance(drafter, DraftLM) and drafter.tokenizer_of is not None
    return SpecConfig(drafter.method, str(directory), k, own_vocab=own_vocab)
