"""Rewards: finding the final answer, each verifier on right and wrong answers, and verifiers that fail."""

import pytest

from draftkit.data.data_recipe import load_data_recipe
from draftkit.data.prompts import read_prompts
from draftkit.data.rewards import Score, final_answer, require_verifier, score
from draftkit.data.sources import read_rows
from draftkit.errors import UserError
from draftkit.types import Prompt


def prompt(verifier: str, answer: str) -> Prompt:
    return Prompt("p", ({"role": "user", "content": "?"},), "t", answer, {"verifier": verifier})


@pytest.mark.parametrize(
    ("text", "expected", "found"),
    [
        ("I think <answer>4</answer>, no: <answer> 5 </answer> done 7", "5", "5"),
        (r"so \boxed{\frac{1}{2}} holds", "1/2", r"\frac{1}{2}"),
        ("12 legs and 3 more make 1,015. That is all.", "1015", "1015"),
        ("Step 1: 2 + 2.\nAnswer: 4 apples\nChecked 3 times", "4", "4"),
        ("The answer is **Monday**.", "Monday", "Monday"),
        ("first line\nred, green, blue.\n\n", "red, green, blue", "red, green, blue"),
        ("no digits here", "4", ""),
        ("", "Monday", ""),
    ],
)
def test_final_answer(text, expected, found):
    assert final_answer(text, expected) == found


def test_every_shipped_procedural_task_scores_its_own_answer_fully():
    recipe = load_data_recipe("reasoning-gym-mini")
    recipe = recipe.model_copy(update={"tasks": [t.model_copy(update={"size": 3}) for t in recipe.tasks]})
    prompts, _ = read_prompts(read_rows(recipe), recipe)
    assert {p.task for p in prompts} == {t.name for t in recipe.tasks}
    for p in prompts:
        assert score(p, f"Easy. <answer>{p.answer}</answer>") == Score(1.0), p
        assert score(p, "I do not know").value < 0.1, p


def test_a_question_that_reasoning_gym_makes_differently_now_is_an_error():
    recipe = load_data_recipe("reasoning-gym-mini")
    recipe = recipe.model_copy(update={"tasks": recipe.tasks[:1]})
    first, second = read_prompts(read_rows(recipe), recipe)[0][:2]
    stale = Prompt(first.id, second.messages, first.task, first.answer, first.metadata)
    with pytest.raises(UserError, match="another question"):
        score(stale, "4")


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        ("1/2", r"so it is \boxed{0.5}", 1.0),
        (r"\frac{3}{4}", "<answer>3/4</answer>", 1.0),
        ("x^2+1", r"\boxed{1 + x^2}", 1.0),
        ("42", "Answer: 42", 1.0),
        ("42", "It is 43.", 0.0),
        ("42", "", 0.0),
    ],
)
def test_math_verify(gold, text, value):
    assert score(prompt("math-verify", gold), text) == Score(value)


def test_exact_reads_numbers_with_or_without_commas():
    for text in ("1,234", "The answer is 1,234.", "<answer>1234</answer>"):
        assert score(prompt("exact", "1,234"), text).value == 1.0
    assert score(prompt("exact", "1,234"), "1,235").value == 0.0


def test_exact_ignores_case_and_spacing_only():
    assert score(prompt("exact", "New  York"), "<answer>new york</answer>").value == 1.0
    assert score(prompt("exact", "New York"), "<answer>York</answer>").value == 0.0


def test_no_verifier_gives_no_reward():
    assert score(prompt("none", ""), "anything") == Score(None)


def test_a_verifier_that_raises_is_a_zero_and_says_why(monkeypatch):
    def explode(*_, **__):
        raise RecursionError("too deep")

    monkeypatch.setattr("math_verify.verify", explode)
    assert score(prompt("math-verify", "1"), "1") == Score(0.0, "RecursionError: too deep")


def test_a_missing_verifier_package_is_refused_before_any_answer(monkeypatch):
    monkeypatch.setattr("draftkit.data.rewards.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"draftkit\[data\]"):
        require_verifier("math-verify")
    require_verifier("exact")
