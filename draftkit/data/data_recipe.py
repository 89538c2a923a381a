"""Data recipes: one strict YAML that says where prompts come from, what is where in a row, and who scores answers.

A shipped recipe is named; one of your own is a path, and the paths inside it are relative to it. What a field does to
a prompt is in `prompts.py`; how a source is read is in `sources.py`.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftkit.errors import UserError
from draftkit.recipe import find_shipped, read_yaml

QUESTION = "{question}"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Hub(Strict):
    """A data set on the Hugging Face hub, read through `datasets`."""

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None


class Columns(Strict):
    """Where the fields of a prompt are in a row. A dot enters a struct: `reward_model.ground_truth`."""

    prompt: str | None = None  # a question as text
    messages: str | None = None  # or a list of {role, content}
    answer: str | None = None
    solution: str | None = None  # a worked solution, for the supervised warm-up of an RL run
    id: str | None = None

    @model_validator(mode="after")
    def one_prompt(self) -> Columns:
        if bool(self.prompt) == bool(self.messages):
            raise ValueError("give exactly one of columns.prompt and columns.messages")
        return self


class Task(Strict):
    """One generator of reasoning-gym: `size` questions with indices 0 .. size-1."""

    name: str
    size: int = Field(gt=0)
    seed: int = 0
    config: dict[str, Any] = {}


class DataRecipe(Strict):
    """One YAML of `data_recipes/`. Relative paths are relative to that file."""

    name: str
    description: str = ""
    licence: str  # of the prompts; "unknown" where it is, never left out
    source: Literal["jsonl", "parquet", "hub", "reasoning-gym"]
    path: str | list[str] | None = None
    hub: Hub | None = None
    tasks: list[Task] = []
    heldout: str | None = None  # hub: a split's name; files: a path; none: split by prompt
    columns: Columns = Columns(prompt="prompt")
    answer_format: Literal["plain", "hashes", "boxed"] = "plain"  # hashes: what follows the last `####` (GSM8K)
    system: str | None = None
    template: str = QUESTION  # text around the (last) question
    verifier: Literal["reasoning-gym", "math-verify", "exact", "none"] = "none"
    near_duplicate: float = Field(0.95, gt=0, le=1)  # Jaccard similarity of word 5-grams; see dedup.py
    max_prompt_tokens: int | None = Field(None, gt=0)  # longer prompts are dropped, and counted
    documents: str | None = None  # the text that rl.environment=search looks through: .jsonl, or a text file

    @model_validator(mode="after")
    def source_is_complete(self) -> DataRecipe:
        needs = {"jsonl": "path", "parquet": "path", "hub": "hub", "reasoning-gym": "tasks"}[self.source]
        if not getattr(self, needs):
            raise ValueError(f"source {self.source} needs {needs}")
        if QUESTION not in self.template:
            raise ValueError("template must contain {question}")
        if (self.verifier == "reasoning-gym") != (self.source == "reasoning-gym"):
            raise ValueError("verifier reasoning-gym belongs to source reasoning-gym, and the other way round")
        if self.verifier in ("math-verify", "exact") and not self.columns.answer:
            raise ValueError(f"verifier {self.verifier} needs columns.answer")
        return self


def load_data_recipe(name_or_path: str) -> DataRecipe:
    """A shipped data recipe by name, or one by path."""
    path = find_shipped(name_or_path, "data_recipes")
    try:
        recipe = DataRecipe.model_validate(read_yaml(path))
    except ValidationError as error:
        raise UserError(f"{path}: {_first_problem(error)}", "See data_recipes/ for complete examples.") from error
    files = [recipe.path] if isinstance(recipe.path, str) else recipe.path or []
    moved: dict[str, Any] = {"path": [str(path.parent / f) for f in files] or None}
    if recipe.documents:
        moved["documents"] = str(path.parent / recipe.documents)
    if recipe.source in ("jsonl", "parquet") and recipe.heldout:
        moved["heldout"] = str(path.parent / recipe.heldout)
    return recipe.model_copy(update=moved)


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        return f"{where + ': ' if where else ''}{first['msg']}."
    fields = {*DataRecipe.model_fields, *Columns.model_fields, *Hub.model_fields, *Task.model_fields}
    near = difflib.get_close_matches(str(first["loc"][-1]), fields, n=1)
    return f"unknown key {where!r}{f', did you mean {near[0]!r}' if near else ''}."
