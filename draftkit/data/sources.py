"""Where rows come from: JSONL and Parquet files, a hub data set, reasoning-gym's generators.

Every source yields `Row(where, values)`, so that whatever is wrong later can name the line. Files are read as they
are asked for; nothing is executed from a data set (`datasets` 5 has no loading scripts any more).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from draftkit.data.data_recipe import DataRecipe, Hub, Task
from draftkit.data.prompts import Row
from draftkit.errors import UserError


def read_rows(recipe: DataRecipe) -> Iterator[Row]:
    match recipe.source:
        case "jsonl":
            for path in recipe.path or []:
                yield from _jsonl(Path(path))
        case "parquet":
            for path in recipe.path or []:
                yield from _parquet(Path(path))
        case "hub":
            assert recipe.hub is not None
            yield from _hub(recipe.hub, recipe.hub.split)
        case "reasoning-gym":
            for task in recipe.tasks:
                yield from _reasoning_gym(task)


def read_heldout_rows(recipe: DataRecipe) -> Iterator[Row] | None:
    """Rows of the data recipe's own held-out source, or None where it has none."""
    if recipe.heldout is None:
        return None
    match recipe.source:
        case "jsonl":
            return _jsonl(Path(recipe.heldout))
        case "parquet":
            return _parquet(Path(recipe.heldout))
        case "hub":
            assert recipe.hub is not None
            return _hub(recipe.hub, recipe.heldout)
    raise UserError(f"data recipe {recipe.name}: source {recipe.source} takes no heldout.", "Delete the key.")


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError(
            f"Prompts file {path} does not exist.", "Mend `path` in the data recipe (it is relative to it)."
        )
    if path.stat().st_size == 0:
        raise UserError(f"Prompts file {path} is empty.", "It needs one prompt a line.")
    return path


def _jsonl(path: Path) -> Iterator[Row]:
    num_rows = 0
    with _existing(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                values = json.loads(line)
            except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
                raise UserError(f"{where} is not valid JSON: {error}.", "Mend or delete that line.") from None
            if not isinstance(values, dict):
                raise UserError(
                    f"{where} is a JSON {type(values).__name__}, not an object.", 'A line looks like {"prompt": "..."}.'
                )
            num_rows += 1
            yield Row(where, values)
    if not num_rows:
        raise UserError(f"Prompts file {path} is empty.", "It needs one prompt a line.")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(_existing(path))
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a Parquet file: {error}.", "Set source: jsonl if it is JSON lines.") from None
    if table.metadata.num_rows == 0:
        raise UserError(f"Prompts file {path} is empty.", "It needs one prompt a row.")
    number = 0
    for batch in table.iter_batches(batch_size=4096):
        for values in batch.to_pylist():
            number += 1
            yield Row(f"{path} row {number}", values)


def _hub(hub: Hub, split: str) -> Iterator[Row]:
    from datasets import load_dataset

    where = f"hub data set {hub.name}" + (f" ({hub.config})" if hub.config else "") + f" {split}"
    try:
        rows = load_dataset(hub.name, hub.config, split=split, revision=hub.revision)
    except (ConnectionError, FileNotFoundError, ValueError) as error:  # unreachable; no such set; no such split
        raise UserError(
            f"{where} cannot be loaded: {str(error).strip()}.",
            "Check the name and the connection, or download it and use source: parquet.",
        ) from None
    if len(rows) == 0:
        raise UserError(f"{where} is empty.", "Check hub.split in the data recipe.")
    for number, values in enumerate(rows, 1):
        yield Row(f"{where} row {number}", values)


# ---------------------------------------------------------------------------------------------- reasoning-gym


@lru_cache(maxsize=64)
def gym_dataset(task: str, config_json: str, seed: int, size: int) -> Any:
    """reasoning-gym makes entry `i` from `seed + i` alone, so the same four values give the same entries anywhere."""
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **json.loads(config_json))
    except (ValueError, TypeError, AssertionError) as error:  # unknown task; unknown field; value out of range
        raise UserError(
            f"reasoning-gym task {task!r} with config {config_json}: {error}.",
            "Mend `tasks` in the data recipe; `reasoning_gym.factory.DATASETS` lists the names.",
        ) from None


def _reasoning_gym(task: Task) -> Iterator[Row]:
    config_json = json.dumps(task.config, sort_keys=True)
    entries = gym_dataset(task.name, config_json, task.seed, task.size)
    for index in range(task.size):
        entry = entries[index]
        origin = {"task": task.name, "config": config_json, "seed": task.seed, "size": task.size, "index": index}
        values = {"prompt": entry["question"].strip(), "answer": entry["answer"]}
        yield Row(f"reasoning-gym {task.name} #{index}", values, origin)
