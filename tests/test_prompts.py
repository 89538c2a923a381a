"""Data recipes and prompts: shipped recipes on rows shaped like their data sets, bad input, and the split by prompt."""

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from draftkit.data.data_recipe import DataRecipe, load_data_recipe
from draftkit.data.prompts import Row, from_jsonl, read_prompts, split_prompts, to_jsonl, to_prompt
from draftkit.data.sources import read_heldout_rows, read_rows
from draftkit.errors import UserError
from draftkit.recipe import shipped

TOPICS = ["river", "stone", "apple", "garden", "window", "market", "farmer", "bridge", "winter", "candle"]


@pytest.fixture
def write_recipe(tmp_path):
    """write_recipe(lines, **fields) -> a data recipe on a JSONL file with those lines."""

    def write(lines: list[str], **fields) -> DataRecipe:
        (tmp_path / "prompts.jsonl").write_text("".join(line + "\n" for line in lines))
        keys = {"name": "mine", "licence": "CC0", "source": "jsonl", "path": "prompts.jsonl"} | fields
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(keys))
        return load_data_recipe(str(tmp_path / "mine.yaml"))

    return write


def questions(n: int) -> list[str]:
    return [json.dumps({"prompt": f"What is {i} plus {i * i} {TOPICS[i % 10]}s?"}) for i in range(n)]


def split(recipe: DataRecipe, num_heldout: int = 4, limit: int | None = None):
    heldout = read_heldout_rows(recipe)
    return split_prompts(
        read_prompts(read_rows(recipe), recipe)[0],
        None if heldout is None else read_prompts(heldout, recipe)[0],
        num_heldout=num_heldout,
        limit=limit,
        threshold=recipe.near_duplicate,
    )


# ---------------------------------------------------------------------------------------------- shipped recipes


@pytest.mark.parametrize("name", sorted(shipped("data_recipes")))
def test_shipped_recipe_parses_and_says_its_licence(name):
    recipe = load_data_recipe(name)
    assert recipe.name == name
    assert recipe.licence not in ("", "unknown")


def test_gsm8k_row():
    row = {"question": "Natalia sold 48 clips. How many?", "answer": "48/2 = <<48/2=24>>24 clips.\n#### 1,072"}
    made = to_prompt(Row("row 1", row), load_data_recipe("gsm8k"))
    assert made.answer == "1,072"
    assert made.messages[0]["content"].startswith("Natalia sold 48 clips. How many?\nThink step by step")


def test_math_row():
    row = {
        "problem": "Compute $1/2$.",
        "level": "Level 1",
        "type": "Algebra",
        "solution": r"First \boxed{3}, then $\boxed{\frac{1}{2}}$.",
    }
    made = to_prompt(Row("row 1", row), load_data_recipe("math"))
    assert made.answer == r"\frac{1}{2}"
    assert made.messages[0]["content"].endswith(r"\boxed{}.")


def test_dapo_row_in_parquet(tmp_path):
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "Solve ... In triangle $ABC$ ..."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    }
    pq.write_table(pa.Table.from_pylist([row] * 100), tmp_path / "d.parquet")
    fields = {"source": "parquet", "path": [str(tmp_path / "d.parquet")], "hub": None}
    recipe = load_data_recipe("dapo-math-17k").model_copy(update=fields)
    prompts, num_repeats = read_prompts(read_rows(recipe), recipe)
    assert num_repeats == 99
    assert [(p.answer, p.messages) for p in prompts] == [("34", tuple(row["prompt"]))]


def test_reasoning_gym_prompts_are_the_same_every_time():
    recipe = load_data_recipe("reasoning-gym-mini")
    recipe = recipe.model_copy(update={"tasks": [t.model_copy(update={"size": 2}) for t in recipe.tasks]})
    once, again = (read_prompts(read_rows(recipe), recipe)[0] for _ in range(2))
    assert once == again
    assert all("<answer>" in p.messages[0]["content"] for p in once)


# -------------------------------------------------------------------------------------------------- bad input


def complaint(recipe: DataRecipe) -> str:
    with pytest.raises(UserError) as caught:
        split(recipe)
    return str(caught.value)


def test_broken_line_is_named(write_recipe):
    lines = questions(3)
    recipe = write_recipe([lines[0], '{"prompt": "half', lines[2]])
    assert "prompts.jsonl line 2 is not valid JSON" in complaint(recipe)


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_empty_file(write_recipe, lines):
    assert "prompts.jsonl is empty" in complaint(write_recipe(lines))


def test_missing_file(write_recipe):
    assert "does not exist" in complaint(write_recipe([], path="prompt.jsonl"))


def test_missing_column_names_the_nearest(write_recipe):
    recipe = write_recipe(['{"promt": "x"}', '{"prompt": "x"}'])
    message = complaint(recipe)
    assert "line 1 has no column 'prompt'" in message
    assert "Did you mean 'promt'?" in message


def test_missing_field_of_a_struct(write_recipe):
    recipe = write_recipe(['{"q": {"text": "x"}}'], columns={"prompt": "q.txt"})
    assert "no column 'q.txt'. Did you mean 'text'?" in complaint(recipe)


def test_duplicate_id_names_both_lines(write_recipe):
    lines = [json.dumps({"prompt": f"{t}?", "id": i}) for t, i in zip(TOPICS, [1, 2, 3, 2], strict=False)]
    recipe = write_recipe(lines, columns={"prompt": "prompt", "id": "id"})
    message = complaint(recipe)
    assert "id '2' occurs twice" in message
    assert "line 2 and" in message and "line 4." in message


@pytest.mark.parametrize("value", ["", None, ["a"], True])
def test_a_prompt_that_is_no_text(write_recipe, value):
    assert "line 1: column 'prompt' is" in complaint(write_recipe([json.dumps({"prompt": value})]))


def test_messages_must_end_with_the_user(write_recipe):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    recipe = write_recipe([json.dumps({"chat": turns})], columns={"messages": "chat"})
    assert "ends with the user" in complaint(recipe)


def test_no_prompts_left(write_recipe):
    assert "No prompts left for training" in complaint(write_recipe(questions(3)))


def test_answer_in_another_format(write_recipe):
    fields = {"columns": {"prompt": "prompt", "answer": "a"}, "answer_format": "hashes"}
    assert "no answer in the 'hashes' format" in complaint(write_recipe(['{"prompt": "x", "a": "just 4"}'], **fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"verifer": "none"}, "did you mean 'verifier'"),
        ({"columns": {"promt": "x"}}, "did you mean 'prompt'"),
        ({"columns": {"prompt": "a", "messages": "b"}}, "exactly one of"),
        ({"source": "hub"}, "source hub needs hub"),
        ({"template": "no placeholder"}, "template must contain"),
        ({"verifier": "exact"}, "needs columns.answer"),
    ],
)
def test_bad_data_recipe(write_recipe, fields, words):
    with pytest.raises(UserError, match=words):
        write_recipe(questions(2), **fields)


# ------------------------------------------------------------------------------------------------------- split


def test_split_does_not_depend_on_the_order_of_the_file(write_recipe):
    lines = questions(40)
    first = split(write_recipe(lines))
    random.Random(0).shuffle(lines)
    assert split(write_recipe(lines)) == first
    assert (len(first.heldout), len(first.train)) == (4, 36)


def test_a_larger_limit_only_adds_prompts(write_recipe):
    recipe = write_recipe(questions(40))
    small, large = split(recipe, limit=10), split(recipe, limit=20)
    assert small.train == large.train[:10]
    assert small.heldout == large.heldout


def test_new_prompts_move_few_others(write_recipe):
    before = split(write_recipe(questions(200)), num_heldout=20)
    after = split(write_recipe(questions(220)), num_heldout=20)
    assert len({p.id for p in before.heldout} & {p.id for p in after.heldout}) >= 14


def test_no_training_prompt_repeats_a_heldout_one(write_recipe, tmp_path):
    held = "A farmer with a red hat walks along the long river to the old market and counts every stone on the way home"
    (tmp_path / "test.jsonl").write_text(json.dumps({"prompt": held}) + "\n")
    lines = [json.dumps({"prompt": text}) for text in (held.upper(), held + " again", "Something else entirely?")]
    result = split(write_recipe(lines, heldout="test.jsonl", near_duplicate=0.8))
    assert [p.messages[0]["content"] for p in result.train] == ["Something else entirely?"]
    assert [p.messages[0]["content"] for p in result.heldout] == [held]
    assert result.dropped["contaminated"] == 2


def test_unused_heldout_prompts_are_fenced_off_too(write_recipe, tmp_path):
    (tmp_path / "test.jsonl").write_text("".join(line + "\n" for line in questions(10)))
    result = split(write_recipe(questions(15), heldout="test.jsonl"), num_heldout=2)
    assert (len(result.heldout), len(result.train), result.dropped["contaminated"]) == (2, 5, 10)


def test_prompts_survive_being_written(write_recipe):
    recipe = write_recipe(questions(10), system="Be brief.", template="Q: {question}\u2028A:")
    result = split(recipe)
    read = from_jsonl("".join(to_jsonl(result)))
    assert (read.heldout, read.train) == (result.heldout, result.train)
    assert result.train[0].messages[0] == {"role": "system", "content": "Be brief."}
