"""What answers a policy: environments and rewards.

An environment is a function of the conversation so far:

    environment(prompt, messages, last) -> {"role": "user" | "tool", "content": ...}   the conversation goes on
                                        -> a number                                    it ends with this reward

`prompt` is the `Prompt`; `messages` begin with its messages and end with the assistant's newest. `last` says that the
policy gets no further turn (a length limit, or rl.max_turns): only a reward will do. A turn may be asked about twice,
the second time with `last`, so an environment should keep no state; then it is also exact under resume.

A reward is a function of a prompt and of the text of the last turn: `reward(prompt, text) -> number`. Either may be the
user's own, by import path `module:name`; the working directory is searched too. What a user's function raises or
returns amiss stops the run and is named: a reward of 0 in its place would be trained on.
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftkit.data.data_recipe import DataRecipe
from draftkit.data.rewards import require_verifier, score
from draftkit.errors import Interrupted, UserError
from draftkit.recipe import Recipe
from draftkit.rl.template import Message
from draftkit.rl.tools import Search, calculate, read_passages
from draftkit.types import Prompt

Reward = Callable[[Prompt, str], float]
Environment = Callable[[Prompt, Sequence[Message], bool], Message | float]

SINGLE_TURN = "single-turn"
CALL = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)
ANSWER = re.compile(r"<answer>.*?</answer>", re.DOTALL | re.IGNORECASE)


# --------------------------------------------------------------------------------------------------------- rewards


class VerifierReward:
    """The data recipe's verifier. `errors` counts the answers that got 0 because it raised, by what it raised."""

    def __init__(self, data_recipe: DataRecipe) -> None:
        if data_recipe.verifier == "none":
            raise UserError(
                f"data recipe {data_recipe.name} has verifier: none, so no answer could earn anything.",
                "Set a verifier there, or your own function with rl.reward=module:function.",
            )
        require_verifier(data_recipe.verifier)
        self.errors: Counter[str] = Counter()

    def __call__(self, prompt: Prompt, text: str) -> float:
        scored = score(prompt, text)
        if scored.error:
            self.errors[scored.error] += 1
        assert scored.value is not None
        return scored.value


def load_reward(recipe: Recipe, data_recipe: DataRecipe) -> Reward:
    """`rl.reward`, checked at every call, else the data recipe's verifier."""
    if recipe.rl.reward is None:
        return VerifierReward(data_recipe)
    name = recipe.rl.reward
    function = load_by_path(name, "rl.reward")

    def reward(prompt: Prompt, text: str) -> float:
        return _number(_call(function, name, "rl.reward", prompt, text), f"The reward {name}", prompt)

    return reward


# ---------------------------------------------------------------------------------------------------- environments


def load_environment(recipe: Recipe, data_recipe: DataRecipe, reward: Reward) -> Environment:
    """`rl.environment`: a built-in one, or what the user's factory makes of (recipe, reward)."""
    name = recipe.rl.environment
    match name:
        case "single-turn":
            return single_turn(reward)
        case "calculator":
            return tool_environment(reward, calculate)
        case "search":
            if data_recipe.documents is None:
                raise UserError(
                    f"rl.environment=search needs a text to search; data recipe {data_recipe.name} names none.",
                    "Set `documents` there: a .jsonl file with a `text` a line, or a text file.",
                )
            return tool_environment(reward, Search(read_passages(Path(data_recipe.documents))))
    if ":" not in name:
        raise UserError(
            f"rl.environment: there is no environment {name!r}.",
            "Use single-turn, calculator, search, or your own module:factory.",
        )
    environment = _call(load_by_path(name, "rl.environment"), name, "rl.environment", None, recipe, reward)
    if not callable(environment):
        raise UserError(
            f"rl.environment: {name} returned {_shown(environment)}, which is no environment.",
            "The factory is called with (recipe, reward) and returns a function of (prompt, messages, last).",
        )
    return _checked(environment, name)


def single_turn(reward: Reward) -> Environment:
    return lambda prompt, messages, last: reward(prompt, messages[-1]["content"])


def tool_environment(reward: Reward, tool: Callable[[str], str]) -> Environment:
    """Answers `<tool>...</tool>`, one line a call, until the policy gives an `<answer>` or calls nothing."""

    def environment(prompt: Prompt, messages: Sequence[Message], last: bool) -> Message | float:
        text = messages[-1]["content"]
        calls = CALL.findall(text)
        if last or not calls or ANSWER.search(text):
            return reward(prompt, text)
        return {"role": "tool", "content": "\n".join(tool(call) for call in calls)}

    return environment


# ------------------------------------------------------------------------------------------- the user's own functions


def load_by_path(path: str, field: str) -> Callable[..., Any]:
    """'module:name' -> that callable. field: the recipe's, for messages."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise UserError(f"{field}: {path!r} is no import path.", "Write module:name, for example my_rewards:score.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a file lying there hides no package
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's code runs here: whatever it raises is theirs to mend
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{field}: there is no module {error.name!r} (of {path}).",
                "It is looked for in the working directory and among the installed packages.",
            ) from error
        raise UserError(f"{field}: importing {module_name} failed: {_named(error)}", "--debug shows where.") from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")], n=1)
        hint = f"Did you mean {near[0]}?" if near else f"It is read from {module.__file__}."
        raise UserError(f"{field}: module {module_name} has no {name!r}.", hint)
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"{field}: {path} is {_shown(function)}, which cannot be called.", "Name a function.")
    return function


def _checked(environment: Environment, name: str) -> Environment:
    def checked(prompt: Prompt, messages: Sequence[Message], last: bool) -> Message | float:
        # Copies: a function that changes its input must not change the conversation.
        said = _call(environment, name, "rl.environment", prompt, [dict(m) for m in messages], last)
        if not isinstance(said, dict):
            return _number(said, f"The environment {name}", prompt)
        if last:
            raise UserError(
                f"The environment {name} answered prompt {prompt.id!r} with a message although no turn is left.",
                "Where `last` is true, return the reward.",
            )
        well_formed = said.get("role") in ("user", "tool") and isinstance(said.get("content"), str)
        if not well_formed:
            raise UserError(
                f"The environment {name} answered prompt {prompt.id!r} with {_shown(said)}.",
                'A message is {"role": "user" or "tool", "content": text}; a number ends the conversation.',
            )
        return {"role": said["role"], "content": said["content"]}

    return checked


def _call(function: Callable[..., Any], name: str, field: str, prompt: Prompt | None, *rest: Any) -> Any:
    given = rest if prompt is None else (prompt, *rest)
    at = f" on prompt {prompt.id!r}" if prompt else ""
    try:
        return function(*given)
    except (UserError, Interrupted):
        raise
    except Exception as error:  # the user's code: whatever it raises is theirs to mend
        raise UserError(f"{field}: {name} failed{at}: {_named(error)}", "--debug shows where.") from error


def _number(value: Any, who: str, prompt: Prompt) -> float:
    """A finite float of what is one: Python's, NumPy's and PyTorch's numbers, and truth values."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        number = math.nan
    if not math.isfinite(number):
        raise UserError(
            f"{who} gave prompt {prompt.id!r} {_shown(value)}, which is no finite number.", "Return a float."
        )
    return number


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
