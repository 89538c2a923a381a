"""The reward of one answer, from its prompt's own verifier.

What is scored is the final answer that the text contains: the content of the last `<answer>..</answer>`, else of the
last `\\boxed{..}`, else what follows the last "answer:" or "answer is", else the last number where a number is
expected, else the last line. Scores are the verifier's own, so reasoning-gym's partial credit is kept.

A verifier that raises on some text gives that text a reward of 0 and is counted, as in an RL run. A procedural
question that can no longer be re-created is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from draftkit.data.prompts import last_boxed
from draftkit.data.sources import gym_dataset
from draftkit.errors import UserError
from draftkit.types import Prompt

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
STATED = re.compile(r"answer(?: is)?\s*:?\s*([^\n]+)", re.IGNORECASE)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Score:
    """`value` None: the prompt has no verifier. `error`: why the verifier could not read the answer."""

    value: float | None
    error: str | None = None


def require_verifier(verifier: str) -> None:
    """Refuse early when the package of a verifier is missing: `score` would take that for a wrong answer."""
    package = {"reasoning-gym": "reasoning_gym", "math-verify": "math_verify"}.get(verifier)
    if package and find_spec(package) is None:
        raise UserError(
            f"verifier {verifier} needs the package {verifier}, which is not installed.",
            "Run `pip install 'draftkit[data]'`.",
        )


def score(prompt: Prompt, text: str) -> Score:
    verifier = prompt.metadata["verifier"]
    if verifier == "none":
        return Score(None)
    found = final_answer(text, prompt.answer)
    entry = gym_entry(prompt) if verifier == "reasoning-gym" else None
    try:
        match verifier:
            case "reasoning-gym":
                return Score(float(entry[0].score_answer(found, entry[1])))
            case "math-verify":
                return Score(_math_verify(prompt.answer or "", found))
            case "exact":
                return Score(float(_plain(found) == _plain(prompt.answer or "")))
    except Exception as error:  # third-party code on free text: any failure of it is a failed answer
        return Score(0.0, f"{type(error).__name__}: {error}")
    raise AssertionError(verifier)


def final_answer(text: str, expected: str | None) -> str:
    if tagged := TAGGED.findall(text):
        return tagged[-1].strip()
    if (boxed := last_boxed(text)) is not None:
        return boxed.strip()
    stated = STATED.findall(text)
    tail = stated[-1] if stated else text
    if expected is not None and NUMBER.fullmatch(expected.strip()):
        numbers = NUMBER.findall(tail) or NUMBER.findall(text)
        return numbers[-1].replace(",", "") if numbers else ""
    lines = [line for line in tail.splitlines() if line.strip()]
    return lines[-1].strip().rstrip(".").strip("*$ ") if lines else ""


def _plain(text: str) -> str:
    """Case and spacing do not count, nor do the commas of a number: `final_answer` drops them from what it finds."""
    plain = " ".join(text.split()).casefold()
    return plain.replace(",", "") if NUMBER.fullmatch(plain) else plain


def _math_verify(gold: str, found: str) -> float:
    from math_verify import parse, verify

    expected = parse(f"\\boxed{{{gold}}}", raise_on_error=True)
    return float(verify(expected, parse(f"\\boxed{{{found}}}", raise_on_error=True), raise_on_error=True))


def gym_entry(prompt: Prompt) -> tuple[Any, dict[str, Any]]:
    origin = prompt.metadata
    dataset = gym_dataset(origin["task"], origin["config"], origin["seed"], origin["size"])
    entry = dataset[origin["index"]]
    if entry["question"].strip() not in prompt.messages[-1]["content"]:
        raise UserError(
            f"reasoning-gym now makes another question for prompt {prompt.id} ({origin['task']}).",
            "Install the reasoning-gym version that the prompts were made with.",
        )
    return dataset, entry
