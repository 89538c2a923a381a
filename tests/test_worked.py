"""Worked examples: their verifiers accept every one, its steps are right, and the calculator says what it holds."""

import json
import re

import pytest

from draftkit.data.data_recipe import load_data_recipe
from draftkit.data.prompts import Row, read_prompts, to_prompt
from draftkit.data.rewards import score
from draftkit.data.sources import read_rows
from draftkit.data.worked import CALCULATED, WORKED, worked_example, worked_examples
from draftkit.errors import UserError
from draftkit.rl.envs import tool_environment
from draftkit.rl.tools import calculate

NUM = 300
PLAIN = {"allow_parentheses": False, "allow_negation": False}
CONFIGS = {
    "basic_arithmetic": [PLAIN | {"operators": ["+"]}, PLAIN | {"operators": ["+", "-"], "max_digits": 2}],
    "chain_sum": [{}, {"min_terms": 1, "max_terms": 3}, {"allow_negation": True}],
    "leg_counting": [{}, {"min_animals": 1}],
    "letter_counting": [{}, {"min_words": 1, "max_words": 4}],
    "spell_backward": [{}],
    "products": [{"max_terms": 4, "max_digits": 3}],
}


def questions(task: str):
    recipe = load_data_recipe("reasoning-gym-mini")
    tasks = [
        recipe.tasks[0].model_copy(update={"name": task, "size": NUM, "seed": 5 + i, "config": config})
        for i, config in enumerate(CONFIGS[task])
    ]
    prompts, _ = read_prompts(read_rows(recipe.model_copy(update={"tasks": tasks})), recipe)
    assert len(prompts) > 0.9 * NUM * len(tasks)
    return prompts


@pytest.mark.parametrize("task", sorted(WORKED))
def test_every_worked_answer_scores_fully(task):
    prompts = questions(task)
    examples = worked_examples(prompts)
    assert [p.id for p, _ in examples] == [p.id for p in prompts]
    for prompt, (message,) in examples:
        assert message["role"] == "assistant"
        assert score(prompt, message["content"]).value == 1.0
        assert message["content"].endswith(f"<answer>{prompt.answer}</answer>")


def test_arithmetic_that_is_no_plain_sum_has_no_worked_example(monkeypatch):
    for config in ({}, PLAIN | {"operators": ["*"]}, {"operators": ["+"], "allow_parentheses": True}):
        monkeypatch.setitem(CONFIGS, "basic_arithmetic", [config])
        prompts = questions("basic_arithmetic")
        examples = [worked_example(prompt) for prompt in prompts]
        assert None in examples
        for prompt, answer in zip(prompts, examples, strict=True):
            assert answer is None or score(prompt, answer[-1]["content"]).value == 1.0


@pytest.mark.parametrize("task", sorted(CALCULATED))
def test_the_environment_answers_as_the_worked_conversation_says(task):
    environment = tool_environment(lambda prompt, text: score(prompt, text).value, calculate)
    prompts = questions(task)
    examples = worked_examples(prompts, tool=True)
    assert len(examples) == len(prompts)
    for prompt, answer in examples:
        conversation = list(prompt.messages)
        for message, reply in zip(answer[::2], [*answer[1::2], 1.0], strict=True):
            conversation.append(message)
            assert environment(prompt, conversation, False) == reply
            conversation.append(reply)


def test_every_step_of_a_sum_is_true():
    for prompt, (message,) in worked_examples(questions("chain_sum")):
        *lines, final = message["content"].splitlines()
        total = None
        for line in lines:
            left, result = line.split(" = ")
            assert calculate(left) == result
            assert total is None or left.split()[0] == total
            total = result
        assert final == f"<answer>{total if lines else prompt.answer}</answer>"
        asked = re.search(r"problem: (.*) =", prompt.messages[0]["content"]).group(1)
        assert [t for line in lines for t in line.split(" = ")[0].split()[1:]] == asked.split()[1:]


def test_every_line_of_the_other_tasks_is_true():
    for _, (message,) in worked_examples(questions("leg_counting")):
        total = 0
        for line in message["content"].splitlines()[:-1]:
            count, legs, product, said = map(
                int, re.fullmatch(r".*: (\d+) \* (\d+) = (\d+), total (\d+)", line).groups()
            )
            total += product
            assert (product, said) == (count * legs, total)
    for prompt, (message,) in worked_examples(questions("letter_counting")):
        letter = re.search(r'letter "(.)"', prompt.messages[0]["content"]).group(1)
        seen = ""
        for line in message["content"].splitlines()[:-1]:
            word, count = line.split(": ")
            seen += word.lower()
            assert seen.count(letter) == int(count)
    for prompt, (message,) in worked_examples(questions("spell_backward")):
        forth, back, _ = message["content"].splitlines()
        assert forth.replace(" ", "") == back.replace(" ", "")[::-1] == prompt.answer[::-1]


@pytest.mark.parametrize(("name", "tool"), [("addition-steps", False), ("calculator", True)])
def test_every_prompt_of_the_shipped_recipes_has_one(name, tool):
    recipe = load_data_recipe(name)
    recipe = recipe.model_copy(update={"tasks": [t.model_copy(update={"size": 60}) for t in recipe.tasks]})
    prompts, _ = read_prompts(read_rows(recipe), recipe)
    examples = worked_examples(prompts, tool)
    assert len(examples) == len(prompts)
    num_turns = {sum(m["role"] == "assistant" for m in answer) for _, answer in examples}
    assert num_turns == ({2, 3, 4} if tool else {1})


# ------------------------------------------------------------------------------------------------ solutions of rows


def solved(text: str, recipe: str = "gsm8k", **columns: str):
    recipe = load_data_recipe(recipe)
    recipe = recipe.model_copy(update={"columns": recipe.columns.model_copy(update=columns)})
    return to_prompt(
        Row("row 1", {"question": "How many?", "answer": text, "problem": "Find x.", "solution": text}), recipe
    )


def test_a_gsm8k_solution():
    prompt = solved("Half: 48/2 = <<48/2=24>>24 clips.\nBoth: 72.\n#### 1,072", solution="answer")
    (message,) = worked_example(prompt)
    assert message["content"] == "Half: 48/2 = 24 clips.\nBoth: 72.\n<answer>1,072</answer>"
    assert worked_examples([prompt]) == [(prompt, (message,))]
    assert json.loads(json.dumps(prompt.metadata)) == prompt.metadata  # it travels in prompts.jsonl


def test_a_boxed_solution_stays_as_it_is():
    prompt = solved(r"So $x = \boxed{\frac{1}{2}}$.", "math", solution="solution")
    assert worked_example(prompt)[0]["content"] == r"So $x = \boxed{\frac{1}{2}}$."
    assert len(worked_examples([prompt])) == 1


def test_solutions_that_the_verifier_refuses_are_left_out(capsys):
    right, wrong = (solved(f"It is {n}.\n#### {n}", solution="answer") for n in (4, 5))
    wrong.metadata["solution"] = "It is <answer>6</answer>"
    assert [p for p, _ in worked_examples([right, wrong])] == [right]
    assert "1 worked examples; 0 without one, 1 whose solution the verifier does not accept" in capsys.readouterr().err


def test_no_worked_example_at_all_is_an_error():
    with pytest.raises(UserError, match="No prompt has a worked example.*1 without one.*chain_sum"):
        worked_examples([solved("#### 4")])
    with pytest.raises(UserError, match="1 without one"):
        worked_examples([solved("#### 4", solution="answer")], tool=True)
