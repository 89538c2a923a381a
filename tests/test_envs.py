"""Environments and rewards: calculator, search, the tool loop, and whatever a user's own function does amiss."""

import math
import random
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from draftkit.data.data_recipe import load_data_recipe
from draftkit.errors import Interrupted, UserError
from draftkit.recipe import Recipe
from draftkit.rl.envs import VerifierReward, load_by_path, load_environment, load_reward, tool_environment
from draftkit.rl.tools import MAX_BITS, Search, calculate, read_passages
from draftkit.types import Prompt

PROMPT = Prompt("p-7", ({"role": "user", "content": "What is 6 * 7?"},), "sums", "42", {"verifier": "exact"})


def said(text: str) -> list[dict[str, str]]:
    return [*PROMPT.messages, {"role": "assistant", "content": text}]


# ------------------------------------------------------------------------------------------------------ calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12*7", "84"),
        (" 12 * 7 = ", "84"),
        ("1,000 + 23,456,789", "23457789"),
        ("2 ^ 10", "1024"),
        ("2 ** -2", "0.25"),
        ("-(3 - 10) // 2", "3"),
        ("17 % 5", "2"),
        ("6 × 7 − 84 ÷ 2", "0"),
        ("1 / 3", "0.3333333333"),
        ("1 / 3 * 3", "1"),
        ("0.1 + 0.2", "0.3"),
        ("1e3", "1000"),
        ("(-1) ** 1000001", "-1"),
        ("0 ** 0", "1"),
    ],
)
def test_calculate(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "nothing"),
        ("  = ", "nothing"),
        ("2 +", "not an arithmetic expression"),
        ("(" * 150 + "1", "not an arithmetic expression"),
        ("1/0", "division by zero"),
        ("5 % (2 - 2)", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("9 ** 9999999", "too large"),
        ("(1/3) ** 99999999", "too large"),
        ("1e999", "too large"),
        ("2 ** 0.5", "whole exponents"),
        ("1 + " * 60 + "1", "longer than 200 characters"),
        ("__import__('os').system('true')", "only numbers"),
        ("x + 1", "only numbers"),
        ("max(1, 2)", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("True + 1", "only numbers"),
        ("1j", "only numbers"),
        ("[1][0]", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("1 < 2", "only numbers"),
        ("~1", "only numbers"),
        ("1 << 9", "only numbers"),
        ("a := 1", "not an arithmetic expression"),
        ("1\0", "not an arithmetic expression"),
    ],
)
def test_what_cannot_be_calculated_is_answered_in_words(expression, why):
    result = calculate(expression)
    assert result.startswith("error: ") and why in result


def test_the_calculator_agrees_with_exact_arithmetic():
    rng = random.Random(0)

    def expression(depth: int) -> str:
        if depth == 0 or rng.random() < 0.2:
            return str(rng.randrange(50))
        inner = f"{expression(depth - 1)} {rng.choice('+-*/')} {expression(depth - 1)}"
        return f"({inner})" if rng.random() < 0.6 else inner

    num_checked = 0
    for _ in range(400):
        text = expression(4)
        if len(text) > 200:
            continue
        try:
            exact = eval(re.sub(r"\d+", r"Fraction(\g<0>)", text), {"Fraction": Fraction})
        except ZeroDivisionError:
            assert calculate(text) == "error: division by zero"
            continue
        assert exact.numerator.bit_length() < MAX_BITS
        shown = str(exact) if exact.denominator == 1 else None
        assert calculate(text) == shown or math.isclose(float(calculate(text)), float(exact), rel_tol=1e-9)
        num_checked += 1
    assert num_checked > 200


# ---------------------------------------------------------------------------------------------------------- search

PASSAGES = [
    "The red fox lives in the forest.",
    "A fox, a fox, and one more fox: foxes everywhere, says the fox.",
    "Forests burn in summer.",
    "The sea is deep.",
    "The forest near the sea is red in autumn, and in winter the red of the forest is gone again for a long time.",
]


def bm25(query: str, passage: str, k1: float = 1.2, b: float = 0.75) -> float:
    """The textbook sum, term by term."""
    words = {p: re.findall(r"\w+", p.lower()) for p in PASSAGES}
    mean = sum(len(w) for w in words.values()) / len(PASSAGES)
    total = 0.0
    for term in set(re.findall(r"\w+", query.lower())):
        n = sum(term in w for w in words.values())
        f = words[passage].count(term)
        idf = math.log(1 + (len(PASSAGES) - n + 0.5) / (n + 0.5))
        total += idf * f * (k1 + 1) / (f + k1 * (1 - b + b * len(words[passage]) / mean))
    return total


@pytest.mark.parametrize("query", ["fox", "red forest", "The SEA, the sea!", "forest fox sea deep summer"])
def test_search_ranks_by_bm25(query):
    found = Search(PASSAGES, num_results=3)(query).split("\n\n")
    ranked = sorted(PASSAGES, key=lambda p: -bm25(query, p))
    assert found == [p for p in ranked if bm25(query, p) > 0][:3]


def test_search_that_finds_nothing_and_long_passages():
    assert Search(PASSAGES)("zebra").startswith("error: ")
    assert Search(["word " * 100], max_chars=20)("word") == "word word word word "


def test_passages_of_both_kinds_of_file(tmp_path):
    (tmp_path / "a.txt").write_text("One\nline.\n\n \nTwo.\n")
    (tmp_path / "a.jsonl").write_text('{"title": "T", "text": "one"}\n\n{"text": "two\u2028still two"}\n')
    assert read_passages(tmp_path / "a.txt") == ["One line.", "Two."]
    assert read_passages(tmp_path / "a.jsonl") == ["T: one", "two\u2028still two"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"text": "fine"}\n{"txt": "x"}\n', "line 2 is not a JSON object"),
        ("a.jsonl", '{"text": "fine"}\n[1]\n', "line 2"),
        ("a.jsonl", "{half\n", "line 1"),
        ("a.txt", " \n\n", "is empty"),
        ("a.txt", None, "does not exist"),
    ],
)
def test_unreadable_passages(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        read_passages(tmp_path / name)


# --------------------------------------------------------------------------------------------------- the tool loop


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("<tool>6 * 7</tool>", {"role": "tool", "content": "42"}),
        ("first <tool>6 * 7</tool> and <tool>1/0</tool>", {"role": "tool", "content": "42\nerror: division by zero"}),
        ("<tool>6\n* 7</tool>", {"role": "tool", "content": "error: not an arithmetic expression"}),
        ("<tool>6 * 7", ("scored", "<tool>6 * 7")),
        ("It is 42.", ("scored", "It is 42.")),
        ("<tool>1</tool> <answer>42</answer>", ("scored", "<tool>1</tool> <answer>42</answer>")),
    ],
)
def test_a_tool_answers_calls_until_there_is_an_answer(text, reply):
    environment = tool_environment(lambda prompt, text: ("scored", text), calculate)
    assert environment(PROMPT, said(text), False) == reply
    assert environment(PROMPT, said(text), True) == ("scored", text)


# ------------------------------------------------------------------------------------------- by name and import path


def loaded(**rl):
    recipe = Recipe.model_validate({"rl": rl})
    data_recipe = load_data_recipe("reasoning-gym-mini")
    return load_environment(recipe, data_recipe, load_reward(recipe, data_recipe))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module `mine_<n>` in the working directory with that source; returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p])
    number = iter(range(100))

    def write(source: str) -> str:
        name = f"mine_{tmp_path.name.replace('-', '_')}_{next(number)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def test_the_users_reward_is_asked_with_prompt_and_text(mine):
    name = mine("def reward(prompt, text):\n    return 0.5 if (prompt.answer, text) == ('42', 'six') else 0.0\n")
    environment = loaded(reward=f"{name}:reward")
    assert environment(PROMPT, said("six"), False) == 0.5
    assert environment(PROMPT, said("seven"), True) == 0.0


@pytest.mark.parametrize("value", [1, True, np.float32(0.25), np.int64(3), np.bool_(True), torch.tensor(0.5)])
def test_whatever_is_a_number_is_a_reward(monkeypatch, value):
    monkeypatch.setattr("draftkit.rl.envs.load_by_path", lambda path, field: lambda prompt, text: value)
    result = loaded(reward="any:thing")(PROMPT, said("x"), False)
    assert type(result) is float and result == float(value)


NO_NUMBERS = ["None", "'0.5'", "b'0.5'", "float('nan')", "float('inf')", "[1.0]", "{}", "1j"] + [
    "__import__('numpy').ones(2)",
    "__import__('torch').ones(2)",
]


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_a_reward_that_is_no_finite_number_names_function_and_prompt(mine, value):
    name = mine(f"def reward(prompt, text):\n    return {value}\n")
    with pytest.raises(UserError, match="no finite number") as caught:
        loaded(reward=f"{name}:reward")(PROMPT, said("x"), False)
    assert f"{name}:reward" in str(caught.value) and "'p-7'" in str(caught.value)


def test_a_reward_that_raises_stops_the_run_and_is_named(mine):
    name = mine("def reward(prompt, text):\n    return {}['k']\n")
    with pytest.raises(UserError, match=rf"rl.reward: {name}:reward failed on prompt 'p-7': KeyError: 'k'") as caught:
        loaded(reward=f"{name}:reward")(PROMPT, said("x"), False)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_reward_with_other_arguments(mine):
    name = mine("def reward(text):\n    return 1.0\n")
    with pytest.raises(UserError, match="takes 1 positional argument"):
        loaded(reward=f"{name}:reward")(PROMPT, said("x"), False)


def test_an_interrupt_inside_a_reward_is_no_fault_of_it(monkeypatch):
    def stop(prompt, text):
        raise Interrupted("now")

    monkeypatch.setattr("draftkit.rl.envs.load_by_path", lambda path, field: stop)
    with pytest.raises(Interrupted):
        loaded(reward="any:thing")(PROMPT, said("x"), False)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("rewards.score", "no import path. Write module:name"),
        (":score", "no import path"),
        ("rewards:", "no import path"),
        ("no_such_module:score", "there is no module 'no_such_module'"),
        ("math.no_such:score", "there is no module"),
        ("math:sqr", "module math has no 'sqr'. Did you mean sqrt?"),
        ("math:pi", "is 3.14159"),
    ],
)
def test_an_import_path_that_leads_nowhere(path, words):
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        loaded(reward=path)
    assert str(caught.value).startswith("rl.reward: ")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_package\n", "No module named 'no_such_package'"),
        ("def reward(:\n", "SyntaxError"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_fails_while_it_is_imported(mine, source, words):
    name = mine(source)
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        load_by_path(f"{name}:reward", "rl.reward")
    assert f"importing {name} failed" in str(caught.value)


ENVIRONMENT = """
def make(recipe, reward):
    def environment(prompt, messages, last):
        {body}
    return environment
"""


def test_the_users_environment(mine):
    body = """
        messages[-1]["content"] = "changed"
        return reward(prompt, "42") + recipe.rl.max_turns if last else {"role": "user", "content": "go on", "x": 1}
    """
    name = mine(ENVIRONMENT.replace("{body}", body.strip()))
    recipe = Recipe.model_validate({"rl": {"environment": f"{name}:make", "max_turns": 3}})
    environment = load_environment(recipe, load_data_recipe("reasoning-gym-mini"), lambda prompt, text: 0.5)
    conversation = said("six")
    assert environment(PROMPT, conversation, False) == {"role": "user", "content": "go on"}
    assert environment(PROMPT, conversation, True) == 3.5
    assert conversation == said("six")


@pytest.mark.parametrize(
    ("body", "last", "words"),
    [
        ("return {'role': 'assistant', 'content': 'x'}", False, "A message is"),
        ("return {'role': 'tool'}", False, "A message is"),
        ("return {'role': 'tool', 'content': 4}", False, "A message is"),
        ("return {'role': 'tool', 'content': 'x'}", True, "no turn is left"),
        ("return None", False, "no finite number"),
        ("return 'more'", False, "no finite number"),
        ("raise ValueError", False, "failed on prompt 'p-7': ValueError"),
    ],
)
def test_an_environment_that_answers_amiss(mine, body, last, words):
    name = mine(ENVIRONMENT.replace("{body}", body))
    environment = loaded(environment=f"{name}:make")
    with pytest.raises(UserError, match=words) as caught:
        environment(PROMPT, said("x"), last)
    assert f"{name}:make" in str(caught.value) and "p-7" in str(caught.value)


def test_factories_that_make_no_environment(mine):
    name = mine("def make(recipe, reward):\n    return 4\ndef bad(recipe):\n    return None\n")
    with pytest.raises(UserError, match="returned 4, which is no environment"):
        loaded(environment=f"{name}:make")
    with pytest.raises(UserError, match=f"rl.environment: {name}:bad failed: TypeError"):
        loaded(environment=f"{name}:bad")


def test_unknown_and_incomplete_environments():
    with pytest.raises(UserError, match="no environment 'calculater'"):
        loaded(environment="calculater")
    with pytest.raises(UserError, match="needs a text to search"):
        loaded(environment="search")
    silent = load_data_recipe("reasoning-gym-mini").model_copy(update={"verifier": "none"})
    with pytest.raises(UserError, match="no answer could earn anything"):
        load_reward(Recipe(), silent)


def test_search_reads_the_documents_of_the_data_recipe(tmp_path):
    (tmp_path / "facts.txt").write_text("The fox is red.\n\nThe sea is deep.\n")
    (tmp_path / "mine.yaml").write_text(
        "{name: m, licence: CC0, source: jsonl, path: p.jsonl, documents: facts.txt, verifier: exact,"
        " columns: {prompt: q, answer: a}}"
    )
    data_recipe = load_data_recipe(str(tmp_path / "mine.yaml"))
    recipe = Recipe.model_validate({"rl": {"environment": "search"}})
    environment = load_environment(recipe, data_recipe, load_reward(recipe, data_recipe))
    assert environment(PROMPT, said("<tool>sea</tool>"), False)["content"] == "The sea is deep."
    assert environment(PROMPT, said("<answer>42</answer>"), False) == 1.0


def test_the_verifiers_reward_counts_what_its_verifier_raised(monkeypatch):
    def explode(*_, **__):
        raise RecursionError("too deep")

    reward = VerifierReward(load_data_recipe("gsm8k"))
    hard = Prompt("p", PROMPT.messages, "gsm8k", "1", {"verifier": "math-verify"})
    assert reward(PROMPT, "42") == 1.0
    monkeypatch.setattr("math_verify.verify", explode)
    assert reward(hard, "1") == reward(hard, "2") == 0.0
    assert reward.errors == {"RecursionError: too deep": 2}
