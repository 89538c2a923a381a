"""Worked examples: written-out solutions of training prompts, for the supervised warm-up of an RL run.

A base model that never earns a reward learns nothing from one. Some steps on solutions in the form that RL will reward
(partial results, one a line, then `<answer>..</answer>`) give it a start. They come from the question's own numbers
for the reasoning-gym tasks below, or from a `columns.solution` of the data recipe; each is scored by the prompt's own
verifier before it is used. For environments with a calculator the solution is a conversation: a turn that calls the
tool, the tool's result, the next turn.

Left out: tasks whose solution is a search (most of reasoning-gym), which no written-out line of steps would teach.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from draftkit import console
from draftkit.data.prompts import last_boxed
from draftkit.data.rewards import TAGGED, gym_entry, score
from draftkit.errors import UserError
from draftkit.types import Prompt

Message = dict[str, str]
Steps = list[tuple[str, int]]  # an expression and its value

SUM = re.compile(r"\d+(?: [+-] \d+)+")
ANNOTATION = re.compile(r"<<[^<>]*>>")  # GSM8K writes its calculator's input and output into the text


def worked_examples(prompts: Iterable[Prompt], tool: bool = False) -> list[tuple[Prompt, tuple[Message, ...]]]:
    """The prompts that have a worked example, each with the messages that answer it. tool: with calculator calls.

    Raises UserError when there are none.
    """
    examples, num_without, num_wrong = [], 0, 0
    for prompt in prompts:
        answer = worked_example(prompt, tool)
        if answer is None:
            num_without += 1
        elif score(prompt, answer[-1]["content"]).value not in (1.0, None):  # None: there is no verifier to ask
            num_wrong += 1
        else:
            examples.append((prompt, answer))
    why = f"{num_without} without one, {num_wrong} whose solution the verifier does not accept"
    if not examples:
        raise UserError(
            f"No prompt has a worked example to warm up on ({why}).",
            f"Tasks that have: {', '.join(CALCULATED if tool else WORKED)}. Set columns.solution in the data recipe, "
            "or warmup.steps=0.",
        )
    if num_without or num_wrong:
        console.say_once(f"{len(examples)} worked examples; {why}")
    return examples


def worked_example(prompt: Prompt, tool: bool = False) -> tuple[Message, ...] | None:
    """The messages that answer a prompt, an assistant's first and last; None where no solution is known."""
    if "solution" in prompt.metadata:
        return None if tool else (_says(_from_solution(prompt.metadata["solution"], prompt.answer)),)
    tasks = CALCULATED if tool else WORKED
    if prompt.metadata["verifier"] != "reasoning-gym" or prompt.task not in tasks:
        return None
    _, entry = gym_entry(prompt)
    worked = tasks[prompt.task](entry["metadata"])
    if worked is None:
        return None
    if tool:
        calls = [m for expression, value in worked for m in (_says(f"<tool>{expression}</tool>"), _told(str(value)))]
        return (*calls, _says(_final(entry["answer"])))
    return (_says("\n".join([*worked, _final(entry["answer"])])),)


def _says(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _told(content: str) -> Message:
    return {"role": "tool", "content": content}


def _final(answer: str) -> str:
    return f"<answer>{answer}</answer>"


def _from_solution(text: str, answer: str | None) -> str:
    """A row's solution with its answer where `rewards.final_answer` finds it."""
    if TAGGED.search(text) or last_boxed(text) is not None:
        return text
    if "####" in text:
        text = text.rpartition("####")[0]
    steps = ANNOTATION.sub("", text).strip()
    return steps if answer is None else f"{steps}\n{_final(answer)}"


# ---------------------------------------------------------------------------------------- reasoning-gym, step by step


def _sum_steps(metadata: dict[str, Any]) -> Steps:
    """'3 + 4 - 2' -> ('3 + 4', 7), ('7 - 2', 5)."""
    first, *rest = metadata["expression"].split()
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        value = total + int(term) if sign == "+" else total - int(term)
        steps.append((f"{total} {sign} {term}", value))
        total = value
    return steps


def _chain_sum(metadata: dict[str, Any]) -> list[str]:
    return [f"{expression} = {value}" for expression, value in _sum_steps(metadata)]


def _basic_arithmetic(metadata: dict[str, Any]) -> list[str] | None:
    """Where the recipe's `operators` leave plain sums; products come before sums, and need another order of steps."""
    return _chain_sum(metadata) if SUM.fullmatch(metadata["expression"]) else None


def _legs(metadata: dict[str, Any]) -> list[tuple[str, int, int]]:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    return [(animal, count, ANIMALS[animal]) for animal, count in metadata["animals"].items()]


def _leg_counting(metadata: dict[str, Any]) -> list[str]:
    total, lines = 0, []
    for animal, count, legs in _legs(metadata):
        total += count * legs
        lines.append(f"{animal}: {count} * {legs} = {count * legs}, total {total}")
    return lines


def _leg_steps(metadata: dict[str, Any]) -> Steps:
    """All animals in one call."""
    legs = _legs(metadata)
    return [(" + ".join(f"{count} * {each}" for _, count, each in legs), sum(count * each for _, count, each in legs))]


def _letter_counting(metadata: dict[str, Any]) -> list[str]:
    total, lines = 0, []
    for word in metadata["span"]:
        total += word.lower().count(metadata["target_letter"])
        lines.append(f"{word}: {total}")
    return lines


def _spell_backward(metadata: dict[str, Any]) -> list[str]:
    return [" ".join(metadata["word"]), " ".join(reversed(metadata["word"]))]


def _product_steps(metadata: dict[str, Any]) -> Steps:
    """One factor after the other."""
    first, *rest = (int(n) for n in metadata["expression"].split(" * "))
    total, steps = first, []
    for factor in rest:
        steps.append((f"{total} * {factor}", total * factor))
        total *= factor
    return steps


WORKED: dict[str, Callable[[dict[str, Any]], list[str] | None]] = {
    "basic_arithmetic": _basic_arithmetic,
    "chain_sum": _chain_sum,
    "leg_counting": _leg_counting,
    "letter_counting": _letter_counting,
    "spell_backward": _spell_backward,
}
CALCULATED: dict[str, Callable[[dict[str, Any]], Steps]] = {
    "chain_sum": _sum_steps,
    "leg_counting": _leg_steps,
    "products": _product_steps,
}
