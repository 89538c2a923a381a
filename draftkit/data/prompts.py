"""RL prompts: one row -> one `Prompt`, identities, repeats, and the split by prompt.

Rules that other rooms and later runs may rely on:

- Identity. A prompt's id is the recipe's `columns.id`, else the first 16 hex digits of the SHA-256 of its messages.
- Order. Prompts are ranked by SHA-256("draftkit-split-1:" + id). Nothing depends on their order in the source.
- Split. Where the data recipe names no held-out source, the first `data.heldout` prompts of that ranking that repeat
  no earlier one are held out, the following `data.limit` are trained on. A larger limit only adds prompts, and
  re-running or re-ordering the source changes nothing. Where it names one, the held-out prompts come from there.
- Duplicates. A prompt that repeats an earlier one of that ranking, held-out ones first, is dropped. Whatever repeats
  a prompt of the held-out source counts as contaminated, whether or not that prompt is among the `data.heldout` used.

What stays out: reading files (`sources.py`), what a duplicate is (`dedup.py`), scoring (`rewards.py`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from draftkit.data.data_recipe import QUESTION, DataRecipe
from draftkit.data.dedup import find_repeats
from draftkit.errors import UserError
from draftkit.types import Prompt

SPLIT_SALT = "draftkit-split-1"


# ---------------------------------------------------------------------------------------------- rows -> prompts


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a source. `where` is how an error names it: `prompts.jsonl line 7`.

    `origin` is what re-creates a procedural question, for its verifier.
    """

    where: str
    values: dict[str, Any]
    origin: dict[str, Any] = field(default_factory=dict)


def content_id(messages: Iterable[dict[str, str]]) -> str:
    canonical = json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def read_prompts(rows: Iterable[Row], recipe: DataRecipe) -> tuple[list[Prompt], int]:
    """Every distinct prompt of the rows, and how many rows repeated one word for word.

    A repeated id is an error where the source gave the ids. Ids made from the content repeat exactly where a row
    repeats, which is ordinary (DAPO-Math-17k holds each of its prompts a hundred times).
    """
    prompts: dict[str, Prompt] = {}
    first_seen: dict[str, str] = {}
    num_repeats = 0
    for row in rows:
        prompt = to_prompt(row, recipe)
        if prompt.id not in prompts:
            prompts[prompt.id], first_seen[prompt.id] = prompt, row.where
        elif recipe.columns.id:
            raise UserError(
                f"id {prompt.id!r} occurs twice: {first_seen[prompt.id]} and {row.where}.",
                f"Make column {recipe.columns.id!r} unique, or leave columns.id out of the data recipe.",
            )
        else:
            num_repeats += 1
    return list(prompts.values()), num_repeats


def to_prompt(row: Row, recipe: DataRecipe) -> Prompt:
    columns = recipe.columns
    if columns.messages:
        messages = _messages(_column(row, columns.messages), row.where, columns.messages)
    else:
        messages = [{"role": "user", "content": _text(row, columns.prompt or "")}]
    question = messages[-1]["content"]
    messages[-1] = {**messages[-1], "content": recipe.template.replace(QUESTION, question)}
    if recipe.system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": recipe.system})
    answer = _answer(_text(row, columns.answer), recipe.answer_format, row.where) if columns.answer else None
    metadata = {"verifier": recipe.verifier, **row.origin}
    if columns.solution:
        metadata["solution"] = _text(row, columns.solution)
    task = row.origin.get("task", recipe.name)
    prompt_id = _text(row, columns.id) if columns.id else content_id(messages)
    return Prompt(prompt_id, tuple(messages), task, answer, metadata)


def _column(row: Row, dotted: str) -> Any:
    value: Any = row.values
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            have = list(value if isinstance(value, dict) else row.values)
            near = difflib.get_close_matches(part, have, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise UserError(
                f"{row.where} has no column {dotted!r}.",
                f"{hint}It has: {', '.join(have)}. Set columns.* in the data recipe.",
            )
        value = value[part]
    return value


def _text(row: Row, dotted: str) -> str:
    value = _column(row, dotted)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or str(value).strip() == "":
        raise UserError(
            f"{row.where}: column {dotted!r} is {value!r}, not text.", "Every prompt needs it: mend or delete the row."
        )
    return _unicode(str(value), row.where, dotted)


def _unicode(text: str, where: str, column: str) -> str:
    """JSON can escape half of a surrogate pair, which no tokenizer and no file takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: column {column!r} holds half a surrogate pair, {text[error.start]!r}, which is no character.",
            "Mend or delete the row.",
        ) from None
    return text


def _messages(value: Any, where: str, column: str) -> list[dict[str, str]]:
    ok = (
        isinstance(value, list)
        and value
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
    )
    if not ok or value[-1]["role"] != "user":
        raise UserError(
            f"{where}: column {column!r} is not a list of {{role, content}} that ends with the user.",
            "For a question as plain text set columns.prompt.",
        )
    return [{"role": m["role"], "content": _unicode(m["content"], where, column)} for m in value]


def _answer(text: str, answer_format: str, where: str) -> str:
    if answer_format == "plain":
        return text.strip()
    found = text.rpartition("####")[2] if answer_format == "hashes" and "####" in text else None
    if answer_format == "boxed":
        found = last_boxed(text)
    if not found or not found.strip():
        raise UserError(
            f"{where}: no answer in the {answer_format!r} format in {text[-60:]!r}.",
            "Set answer_format in the data recipe to what the answers look like.",
        )
    return found.strip()


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...}, braces nested."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start, depth = start + len("\\boxed{"), 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


# -------------------------------------------------------------------------------------------- duplicates, split


@dataclass(frozen=True, slots=True)
class Split:
    """What is answered, in ranking order, and what was dropped on the way."""

    heldout: list[Prompt]
    train: list[Prompt]
    dropped: dict[str, int] = field(default_factory=dict)


def rank(prompts: Iterable[Prompt]) -> list[Prompt]:
    return sorted(prompts, key=lambda p: hashlib.sha256(f"{SPLIT_SALT}:{p.id}".encode()).digest())


def question_text(prompt: Prompt) -> str:
    return "\n".join(m["content"] for m in prompt.messages if m["role"] != "system")


def split_prompts(
    prompts: list[Prompt],
    heldout_source: list[Prompt] | None,
    *,
    num_heldout: int,
    limit: int | None,
    threshold: float,
) -> Split:
    """Drop repeats and split, by the rules at the head of this file."""
    fenced = rank(heldout_source or [])
    ranked = fenced + rank(prompts)
    repeats = find_repeats([question_text(p) for p in ranked], threshold)

    dropped = {"exact_duplicates": 0, "near_duplicates": 0, "contaminated": 0}
    heldout: list[Prompt] = []
    train: list[Prompt] = []
    heldout_ranks: set[int] = set(range(len(fenced)))
    for i, (prompt, repeat) in enumerate(zip(ranked, repeats, strict=True)):
        if repeat is None:
            room = len(heldout) < num_heldout
            if i < len(fenced):
                heldout += [prompt] if room else []
            elif room and heldout_source is None:
                heldout.append(prompt)
                heldout_ranks.add(i)
            else:
                train.append(prompt)
        elif i >= len(fenced) and repeat.of in heldout_ranks:
            dropped["contaminated"] += 1
        else:
            dropped["exact_duplicates" if repeat.exact else "near_duplicates"] += 1
    if not train or not heldout:
        raise UserError(
            f"No prompts left for {'training' if not train else 'evaluation'}: {len(ranked)} read, {dropped} dropped, "
            f"{len(heldout)} held out.",
            "Give more prompts, or lower data.heldout.",
        )
    if clash := {p.id for p in heldout} & {p.id for p in train}:
        raise UserError(
            f"id {min(clash)!r} names a held-out and a training prompt of different text.",
            "Make the ids unique over both, or leave columns.id out of the data recipe.",
        )
    return Split(heldout, train[:limit], dropped)


def to_jsonl(split: Split) -> Iterator[str]:
    for name, prompts in (("heldout", split.heldout), ("train", split.train)):
        for p in prompts:
            yield (
                json.dumps(
                    {
                        "split": name,
                        "id": p.id,
                        "task": p.task,
                        "answer": p.answer,
                        "messages": list(p.messages),
                        "metadata": p.metadata,
                    },
                    ensure_ascii=False,
                )
                + "\n"
            )


def from_jsonl(text: str) -> Split:
    split = Split([], [])
    for line in text.removesuffix("\n").split("\n"):  # splitlines would also cut at U+2028 inside a prompt
        r = json.loads(line)
        prompt = Prompt(r["id"], tuple(r["messages"]), r["task"], r["answer"], r["metadata"])
        (split.heldout if r["split"] == "heldout" else split.train).append(prompt)
    return split
