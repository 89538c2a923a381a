"""The bench: which measurements, in which order, what is refused before an engine starts, and one real tiny run."""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import yaml

from draftkit.data.prompts import Split, to_jsonl
from draftkit.data.shards import PROMPTS, describe_file, write_manifest
from draftkit.errors import RunFailed, UserError
from draftkit.evals import bench
from draftkit.evals.drafter import resolve_drafter
from draftkit.models import ModelFacts, fingerprint
from draftkit.recipe import Recipe
from draftkit.run import RunDir
from draftkit.types import Prompt, SpecConfig

QUESTIONS = ("What is 3 + 4?", "Count from 1 to 9.", "Say the word blue three times.", "List two colours.", "Say hi.")


def small_recipe(**fields) -> Recipe:
    wanted = {"k": [0, 2], "concurrency": [1, 2], "prompts": 5, "max_tokens": 12, "repeats": 1, "warmup_tokens": 2}
    engine = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_gib": 1.0}
    return Recipe.model_validate(
        {"sampling": {"max_tokens": 16}, "engine": engine, "eval": wanted | fields}
    )  # fmt: skip


# --- order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num", "concurrency"), [(16, 1), (16, 4), (16, 16), (5, 1), (64, 16), (18, 4)])
def test_blocks_are_even_and_use_every_prompt_once(num, concurrency):
    ids = [str(i) for i in range(num)]
    parts = bench.split_prompts(ids, concurrency)
    assert [id for part in parts for id in part] == ids
    assert min(map(len, parts)) >= min(num, max(concurrency, bench.MIN_BLOCK))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_prompts_repeat_only_to_fill_the_concurrency():
    (part,) = bench.split_prompts(["a", "b", "c"], 8)
    assert Counter(part) == {"a": 3, "b": 3, "c": 2}


def test_arms_of_a_block_stand_together_and_none_always_comes_last():
    recipe = small_recipe(k=[0, 1, 3], repeats=6, prompts=16, concurrency=[1])
    plan = list(bench.blocks(recipe, [str(i) for i in range(16)]))
    assert all({p.k for p in block.points} == {0, 1, 3} for block in plan)
    assert all(len({p.of_block for p in block.points}) == 1 for block in plan)
    assert len({p for block in plan for p in block.points}) == 6 * 2 * 4 * 3  # repeats, temperatures, blocks, arms
    for place in range(3):
        at_place = Counter(block.points[place].k for block in plan)
        assert set(at_place) == {0, 1, 3} and max(at_place.values()) <= len(plan) / 2


def test_the_rollout_temperature_comes_first_and_greedy_is_not_measured_twice():
    assert bench.temperatures(Recipe.model_validate({"sampling": {"temperature": 0.7}})) == [0.7, 0.0]
    assert bench.temperatures(Recipe.model_validate({"sampling": {"temperature": 0.0}})) == [0.0]


def test_a_draft_length_that_did_not_take_effect_fails_the_run():
    rows = [{"drafts": 10, "draft_tokens": 50}]
    bench.check_draft_length(rows, "eagle3", 5)
    with pytest.raises(RunFailed, match="drafted 5.00 tokens a round where k = 3"):
        bench.check_draft_length(rows, "eagle3", 3)
    with pytest.raises(RunFailed):
        bench.check_draft_length([{"drafts": 10, "draft_tokens": 20}], "eagle3", 3)
    bench.check_draft_length([{"drafts": 10, "draft_tokens": 20}], "ngram", 3)
    bench.check_draft_length([{"drafts": 0, "draft_tokens": 0}], "eagle3", 3)


# --- drafters ---------------------------------------------------------------------------------------------------

NO_DRAFTS = {"drafts": 0, "draft_tokens": 0, "accepted": 0, "per_pos": []}
MINE = {"weights": "w1", "tokenizer": "t1", "chat_template": "c1"}
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 576, "vocab_size": 49152}


@pytest.fixture
def facts(tmp_path) -> ModelFacts:
    return ModelFacts(
        path=tmp_path, architecture="LlamaForCausalLM", model_type="llama", num_layers=30, hidden_size=576,
        vocab_size=49152, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536, rms_norm_eps=1e-5,
        rope_parameters={}, max_position_embeddings=8192, tie_word_embeddings=True, eos_token_ids=(2,),
    )  # fmt: skip


def drafter_dir(path, config: dict, verifier: dict | None = None) -> str:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    if verifier is not None:
        (path / "draftkit.json").write_text(json.dumps({"verifier": verifier}))
    return str(path)


def test_method_follows_from_the_drafter(tmp_path, facts):
    speculators = {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"], "target_hidden_size": 576,
                   "transformer_layer_config": {"hidden_size": 576, "vocab_size": 49152}}  # fmt: skip
    plain = {"architectures": ["LlamaForCausalLM"], "vocab_size": 49152}
    for name, config, method in (("a", EAGLE3, "eagle3"), ("b", speculators, "eagle3"), ("c", plain, "draft_model")):
        path = drafter_dir(tmp_path / name, config, MINE)
        assert resolve_drafter(path, facts, MINE, 5) == SpecConfig(method, path, 5)
    eagle = drafter_dir(tmp_path / "e", {**EAGLE3, "architectures": ["EagleLlamaForCausalLM"]}, MINE)
    assert resolve_drafter(eagle, facts, MINE, 5) == SpecConfig("eagle", eagle, 5)
    stitched = {**EAGLE3, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    mtp = drafter_dir(tmp_path / "m", stitched, MINE)
    assert resolve_drafter(mtp, facts, MINE, 5) == SpecConfig("mtp", None, 5, target=mtp)
    assert resolve_drafter("ngram", facts, MINE, 3) == SpecConfig("ngram", None, 3)


def test_a_training_run_stands_for_its_export(tmp_path, facts):
    exported = drafter_dir(tmp_path / "run" / "drafter", EAGLE3, MINE)
    assert resolve_drafter(str(tmp_path / "run"), facts, MINE, 3).model == exported


@pytest.mark.parametrize(
    ("config", "verifier", "complaint"),
    [
        (EAGLE3, MINE | {"weights": "w2"}, "trained for another verifier: weights"),
        (EAGLE3, MINE | {"tokenizer": "t2"}, "trained for another verifier: tokenizer"),
        (EAGLE3 | {"hidden_size": 64}, None, "its hidden size is 64, the verifier's is 576"),
        (EAGLE3 | {"vocab_size": 32000}, None, "its vocabulary is 32000"),
        ({"architectures": ["LlamaForCausalLM"], "vocab_size": 32000}, None, "49152, and no tokenizer beside"),
        ({"architectures": ["EagleLlamaForCausalLM"], "hidden_size": 64}, None, "its hidden size is 64"),
        ({"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "hidden_size": 64}, None, "size is 64"),
        ({"architectures": ["BertModel"]}, None, "cannot tell a drafting method"),
    ],
)
def test_drafters_that_do_not_belong_to_the_verifier_are_refused(tmp_path, facts, config, verifier, complaint):
    with pytest.raises(UserError, match=complaint):
        resolve_drafter(drafter_dir(tmp_path / "d", config, verifier), facts, MINE, 3)


def test_refusals_name_the_file_and_the_way_out(tmp_path, facts):
    with pytest.raises(UserError, match="No drafter"):
        resolve_drafter(None, facts, MINE, 3)
    with pytest.raises(UserError, match=r"config\.json.*or ngram"):
        resolve_drafter(str(tmp_path / "nothing"), facts, MINE, 3)
    (tmp_path / "config.json").write_text('{"a":\n oops')
    with pytest.raises(UserError, match="line 2"):
        resolve_drafter(str(tmp_path), facts, MINE, 3)
    trapped = drafter_dir(
        tmp_path / "eagle3-against-small", {"architectures": ["LlamaForCausalLM"], "vocab_size": 49152}
    )
    with pytest.raises(UserError, match="another method"):
        resolve_drafter(trapped, facts, MINE, 3)


# --- the real engine --------------------------------------------------------------------------------------------


def make_corpus(folder, verifier) -> None:
    prompts = [Prompt(str(i), ({"role": "user", "content": text},), "chat") for i, text in enumerate(QUESTIONS)]
    (folder / "shards").mkdir(parents=True)
    (folder / PROMPTS).write_text("".join(to_jsonl(Split(prompts, []))))
    entry = describe_file(folder, folder / PROMPTS)
    write_manifest(folder, {"verifier": {"path": "demo"} | fingerprint(verifier), "prompts": entry, "shards": []})


@pytest.mark.engine
def test_real_bench_is_interrupted_and_resumes_to_a_whole_table(tmp_path, demo_model, draftkit):
    """n-gram drafts on the demo verifier, as the real command: Ctrl-C after the third measurement, then --resume."""
    make_corpus(tmp_path / "corpus", demo_model)
    recipe = small_recipe()
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    words = ["eval-acceptance", "-r", "recipe.yaml", "--corpus", "corpus", "--drafter", "ngram", "--out", "run"]
    metrics = tmp_path / "run" / "metrics.jsonl"

    first = subprocess.Popen(
        [sys.executable, "-m", "draftkit", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    while first.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < 4):
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=120)[1]
    assert first.returncode == 130, said
    before = metrics.read_text()
    assert not (tmp_path / "run" / "results.json").exists()

    second = draftkit(*words, "--resume")
    assert second.returncode == 0, second.stderr
    assert metrics.read_text().startswith(before)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["schema"] == "draftkit.eval-acceptance/1" and results["env"]["cores"] >= 1
    assert results["cells"] == bench.results_from_rows(rows)["cells"]
    assert [(c["temperature"], c["concurrency"], c["k"]) for c in results["cells"]] == [
        (t, c, k) for t in (1.0, 0.0) for c in (1, 2) for k in (0, 2)
    ]
    for cell in results["cells"]:
        assert cell["tokens_per_s"] > 0 and 1 <= cell["acceptance_length"] <= 1 + cell["k"]
        assert cell["break_even"] == cell["round_cost"] and 0 < cell["mean_running"] <= cell["concurrency"]
        assert cell["acceptance_length"] == pytest.approx(1 + sum(cell["survival"]))
        assert cell["num_prompts"] == len(QUESTIONS)
    assert (tmp_path / "run" / "acceptance.png").stat().st_size > 10_000
    assert "T = 0" in second.stdout
    shown = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {row["temperature"] for row in shown} == {1.0, 0.0} and all(row["k"] == 2 for row in shown)
    assert any(r["drafted"] for row in shown for r in row["rounds"])
    reported = draftkit("report", "run")
    assert reported.returncode == 0, reported.stderr
    assert "Every cell" in (tmp_path / "run/report/index.html").read_text()


@pytest.mark.engine
def test_what_does_not_fit_is_refused_before_an_engine_starts(tmp_path, demo_model):
    make_corpus(tmp_path / "corpus", demo_model)
    with pytest.raises(UserError, match=r"max_model_len 128"):
        bench.heldout_prompts(small_recipe(max_tokens=110), tmp_path / "corpus", demo_model, 2)
    with pytest.raises(UserError, match=r"eval\.concurrency 9 is more than engine\.max_num_seqs 4"):
        bench.heldout_prompts(small_recipe(concurrency=[9]), tmp_path / "corpus", demo_model, 2)
    prompts = bench.heldout_prompts(small_recipe(prompts=64), tmp_path / "corpus", demo_model, 2)
    assert list(prompts) == [str(i) for i in range(len(QUESTIONS))]


def test_a_resumed_run_refuses_another_drafter_under_the_same_name(tmp_path):
    recipe = small_recipe()
    run = RunDir.open(tmp_path / "run", verb="eval-acceptance", recipe=recipe)
    plan = {"event": "plan", "drafter": "d", "drafter_weights": "aa"}
    assert bench.finished_points(run, plan) == set()
    assert bench.finished_points(run, plan) == set()
    with pytest.raises(UserError, match="drafter_weights changed"):
        bench.finished_points(run, plan | {"drafter_weights": "bb"})


def test_the_table_does_not_depend_on_the_order_of_arms_in_the_file():
    rng = random.Random(0)
    plan = {"event": "plan", "seed": 0, "max_num_seqs": 8, "temperature": 1.0, "verifier": "demo", "drafter": None,
            "method": "ngram", "draft_sample_method": "greedy", "verifier_fingerprint": MINE}  # fmt: skip
    rows = []
    for block, k in [(block, k) for block in range(3) for k in (0, 2)]:
        counts = {"drafts": 12, "draft_tokens": 24, "accepted": 8, "per_pos": [6, 2]} if k else dict(NO_DRAFTS)
        requests = [{"prompt": str(4 * block + i), "tokens": 21} | counts for i in range(4)]
        point = {"repeat": 0, "temperature": 1.0, "concurrency": 1, "block": block, "k": k}
        wall = {"wall_s": rng.uniform(1, 2), "parts_s": None}
        rows.append({"event": "measured"} | point | wall | {"requests": requests})
    shuffled = rng.sample(rows, len(rows))
    assert bench.results_from_rows([plan, *rows]) == bench.results_from_rows([plan, *shuffled])
