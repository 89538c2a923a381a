"""Policy and drafter as they were at some steps of a run, as plain directories: `rl.snapshot_every`.

    <run>/snapshots/step-00010/policy, drafter      whole, or not there at all

A snapshot costs the disk a policy; it is what `eval-acceptance --matrix` reads. The drafter is there once it is grown.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftkit.drafters.layouts import head_of, write
from draftkit.errors import UserError
from draftkit.models import fingerprint
from draftkit.recipe import Recipe
from draftkit.rl.start import Actors
from draftkit.rl.world import World

SNAPSHOTS = "snapshots"
NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """drafter None: the run had none of its own at that step."""

    step: int
    policy: Path
    drafter: Path | None


def save_models(directory: Path, recipe: Recipe, world: World, actors: Actors) -> None:
    """policy/ and, where there is one, drafter/ into `directory`. Collective: every rank calls it."""
    actors.policy.save(directory / "policy")
    if world.is_main and actors.drafter is not None:
        readme = drafter_card(recipe, actors.publisher.draft_version, directory / "policy")
        prints = fingerprint(directory / "policy")
        write(head_of(actors.drafter), directory / "drafter", "vllm", prints, readme=readme)


def save(run: Path, step: int, recipe: Recipe, world: World, actors: Actors) -> None:
    directory = run / SNAPSHOTS / f"step-{step:05d}"
    aside = directory.with_name(f".{directory.name}")
    if world.is_main:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    world.gather(None)  # the others write beside it from here on
    save_models(aside, recipe, world, actors)
    if world.is_main:
        if actors.cotrainer is not None and not actors.cotrainer.is_grown:
            shutil.rmtree(aside / "drafter")
        shutil.rmtree(directory, ignore_errors=True)
        aside.rename(directory)


def read(run: Path) -> list[Snapshot]:
    """In the order of steps. Raises UserError where there are none."""
    found = []
    for folder in sorted((run / SNAPSHOTS).glob("step-*")):
        if match := NAME.fullmatch(folder.name):
            drafter = folder / "drafter"
            has = (drafter / "config.json").is_file()
            found.append(Snapshot(int(match[1]), folder / "policy", drafter if has else None))
    if not found:
        raise UserError(
            f"--matrix {run}: there is no folder {SNAPSHOTS} with step-... in it.",
            "Run `draftkit rl` with rl.snapshot_every=5, for example.",
        )
    return found


def drafter_versions(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Those whose drafter has other weights than that of the snapshot before; between two trainings all are alike."""
    found, last = [], None
    for snapshot in snapshots:
        if snapshot.drafter is None:
            continue
        weights = [_tensor_bytes(file) for file in sorted(snapshot.drafter.glob("*.safetensors"))]
        if weights != last:
            found.append(snapshot)
        last = weights
    return found


def _tensor_bytes(file: Path) -> str:
    """Digest of what follows the header, which may hold notes of its own."""
    with file.open("rb") as opened:
        opened.seek(int.from_bytes(opened.read(8), "little"), io.SEEK_CUR)
        return hashlib.file_digest(opened, "sha256").hexdigest()


def drafter_card(recipe: Recipe, version: int, policy: Path) -> str:
    return f"""# EAGLE-3 drafter, trained along with a policy

By `draftkit rl` ({recipe.name}), on rollouts of `{recipe.data.recipe}` prompts at temperature
{recipe.sampling.temperature:g}; version {version}. It drafts for the policy beside it ({policy.name}/).

Serve: `--speculative-config '{{"method": "eagle3", "model": "<this directory>",
"num_speculative_tokens": {recipe.spec.k}, "draft_sample_method": "{recipe.spec.draft_sample_method}"}}'`
"""
