"""The corpus on disk: Parquet shards of rollouts, the prompts, and a manifest that is written last.

    manifest.json            schema, the verifier's fingerprint, sampling settings, size and SHA-256 of every file
    prompts.jsonl            one prompt a line, held-out ones first, in ranking order
    shards/train-00000.parquet, shards/heldout-00000.parquet, ...

A shard holds all answers of its prompts as token ids the engine returned. Equal rollouts make equal bytes, so two
corpora are the same when their manifests list the same hashes. Hidden states are no part of it: `capture.py`.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftkit.data.prompts import Split, from_jsonl
from draftkit.errors import UserError
from draftkit.run import atomic_write
from draftkit.types import Prompt, Rollout

SCHEMA = "draftkit.corpus/1"
MANIFEST, PROMPTS, SHARDS = "manifest.json", "prompts.jsonl", "shards"
NOTES = "draftkit"
MEND = "Delete it and the run's results.json, then run the same `draftkit prepare` with --resume."
SplitName = Literal["train", "heldout"]
FINGERPRINTS = {"weights": "weights", "tokenizer": "tokenizer", "chat_template": "chat template"}


def write_shard(path: Path, rollouts: list[Rollout], notes: dict[str, Any] | None = None) -> None:
    """The whole shard or nothing. `notes` (JSON) travel in the file's own metadata, so that they are as safe."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tokens = pa.list_(pa.int32())
    types = {
        "prompt_id": pa.string(),
        "sample": pa.int32(),
        "task": pa.string(),
        "prompt_ids": tokens,
        "response_ids": tokens,
        "finish_reason": pa.string(),
        "reward": pa.float64(),
        "temperature": pa.float64(),
    }
    columns = {name: pa.array([getattr(r, name) for r in rollouts], kind) for name, kind in types.items()}
    buffer = io.BytesIO()
    table = pa.table(columns).replace_schema_metadata({NOTES: json.dumps(notes or {}, sort_keys=True)})
    pq.write_table(table, buffer, compression="zstd")
    atomic_write(path, buffer.getvalue())


def read_shard(path: Path) -> tuple[list[Rollout], dict[str, Any]]:
    """The rollouts and the notes of one shard."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"Shard {path} is truncated or damaged: {str(error).splitlines()[0]}", MEND) from error
    rollouts = [
        Rollout(**{**record, "prompt_ids": tuple(record["prompt_ids"]), "response_ids": tuple(record["response_ids"])})
        for record in table.to_pylist()
    ]
    return rollouts, json.loads(table.schema.metadata[NOTES.encode()])


def describe_file(root: Path, path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"file": path.relative_to(root).as_posix(), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_manifest(root: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps({"schema": SCHEMA, **manifest}, indent=2, ensure_ascii=False, sort_keys=True)
    atomic_write(root / MANIFEST, text + "\n")


@dataclass(frozen=True)
class Corpus:
    """A finished corpus whose files are those its manifest lists."""

    path: Path
    manifest: dict[str, Any]
    split: Split

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """`path`: the run directory of `draftkit prepare`."""
        path = Path(path)
        file = path / MANIFEST
        if not path.is_dir():
            raise UserError(f"Corpus {path} does not exist.", "Make one with `draftkit prepare`.")
        if not file.is_file():
            begun = (path / PROMPTS).exists() or (path / "config.json").exists()
            raise UserError(
                f"{path} has no {MANIFEST}: {'it is not finished' if begun else 'it is not a corpus'}.",
                "Finish it with `draftkit prepare ... --resume`." if begun else "Give a prepare run.",
            )
        try:
            manifest = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise UserError(f"{file} is damaged: {error}.", MEND) from error
        if manifest.get("schema") != SCHEMA:
            raise UserError(
                f"{file} has schema {manifest.get('schema')!r}; this version reads {SCHEMA!r}.",
                "Make the corpus again with this version.",
            )
        for entry in [manifest["prompts"], *manifest["shards"]]:
            _check_file(path, entry)
        return cls(path, manifest, from_jsonl((path / PROMPTS).read_text()))

    def prompts(self, split: SplitName) -> list[Prompt]:
        return list(getattr(self.split, split))

    def rollouts(self, split: SplitName) -> Iterator[Rollout]:
        """In the order of the prompts; of each prompt the sampled answers, then the greedy ones."""
        for entry in self.manifest["shards"]:
            if entry["split"] == split:
                yield from read_shard(self.path / entry["file"])[0]

    def check_verifier(self, fingerprint: dict[str, str]) -> None:
        """Refuse a verifier that is not the one that answered. fingerprint: `models.fingerprint` of the other."""
        mine = self.manifest["verifier"]
        differ = [noun for key, noun in FINGERPRINTS.items() if mine[key] != fingerprint[key]]
        if differ:
            raise UserError(
                f"Corpus {self.path} was made by another verifier ({mine['path']}): its "
                f"{' and '.join(differ)} {'differ' if len(differ) > 1 else 'differs'}.",
                "Give the verifier that made it with --model, or prepare a corpus with this one.",
            )


def _check_file(root: Path, entry: dict[str, Any]) -> None:
    path = root / entry["file"]
    if not path.is_file():
        raise UserError(f"Corpus file {path} is missing.", MEND)
    if path.stat().st_size != entry["bytes"]:
        raise UserError(
            f"Corpus file {path} is truncated: {path.stat().st_size} bytes, the manifest says {entry['bytes']}.", MEND
        )
    if describe_file(root, path)["sha256"] != entry["sha256"]:
        raise UserError(f"Corpus file {path} is not the one in the manifest (SHA-256 differs).", MEND)
