"""`draftkit prepare`: RL prompts -> an in-domain drafting corpus, answered by the verifier itself.

    data recipe -> rows -> prompts -> (too long? repeated? held out?) -> prompts.jsonl, plan.json
    prompts -> chat template -> engine -> rewards -> shards/*.parquet, one after the other
    shards -> manifest.json -> summary -> results.json

Every file is written whole, and each arrow's last file proves what stands before it, so a run killed at any moment
resumes: prompts once chosen stay chosen, complete shards stay, the others are answered again with the same seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftkit import console
from draftkit.data.data_recipe import DataRecipe, load_data_recipe
from draftkit.data.prompts import Split, from_jsonl, read_prompts, split_prompts, to_jsonl
from draftkit.data.respond import Shard, answer_shard, is_complete, plan_shards
from draftkit.data.rewards import require_verifier
from draftkit.data.shards import PROMPTS, SHARDS, Corpus, describe_file, read_shard, write_manifest
from draftkit.data.sources import read_heldout_rows, read_rows
from draftkit.data.summary import Summary, show_sample
from draftkit.errors import Interrupted, UserError
from draftkit.models import fingerprint, load_tokenizer, render, resolve_model
from draftkit.recipe import Recipe
from draftkit.run import Interrupt, RunDir, atomic_json, atomic_write, no_space
from draftkit.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAN = "plan.json"
BYTES_PER_TOKEN = 4  # int32 token ids, before compression


def run(recipe: Recipe, run_dir: RunDir) -> dict[str, Any]:
    model = resolve_model(recipe.model.path, recipe.model.revision)
    tokenizer = load_tokenizer(model, recipe.model.trust_remote_code)
    data_recipe = load_data_recipe(recipe.data.recipe)
    require_verifier(data_recipe.verifier)
    made_from = {
        "verifier": {"path": recipe.model.path, "revision": recipe.model.revision, **fingerprint(model)},
        "sampling": recipe.sampling.model_dump(),
        "max_model_len": recipe.engine.max_model_len,
        "data_recipe": data_recipe.model_dump(mode="json"),
    }

    # ---- prompts: chosen once, then read back --------------------------------------------------------------------
    chosen = None if run_dir.fresh else _chosen_before(run_dir.path, made_from)
    if chosen is None:
        console.say(f"reading prompts: {data_recipe.name} ({data_recipe.source}, licence {data_recipe.licence})")
    split, counts = chosen or choose_prompts(recipe, data_recipe, lambda p: len(_render(tokenizer, p, recipe)))
    run_dir.begin()
    (run_dir.path / SHARDS).mkdir(exist_ok=True)
    for half_written in run_dir.path.rglob(".*.tmp-*"):  # kill -9 in the middle of a write leaves one
        half_written.unlink()
    if chosen is None:
        atomic_write(run_dir.path / PROMPTS, "".join(to_jsonl(split)))
        atomic_json(run_dir.path / PLAN, {"made_from": made_from, "counts": counts})
    rendered = {p.id: _render(tokenizer, p, recipe) for p in split.heldout + split.train}
    _say_if_cut(rendered, recipe)

    # ---- answers: shard by shard ---------------------------------------------------------------------------------
    plan = plan_shards(split, recipe.data.shard_size)
    todo = [shard for shard in plan if not is_complete(run_dir.path / shard.file, shard, recipe.sampling)]
    if len(todo) < len(plan):
        console.say(f"resuming: {len(plan) - len(todo)} of {len(plan)} shards are complete")
    if todo:
        _answer(recipe, run_dir, model, todo, rendered, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))

    # ---- manifest last, then the summary -------------------------------------------------------------------------
    summary = Summary(counts, recipe.sampling.n)
    entries = []
    for shard in plan:
        rollouts, notes = read_shard(run_dir.path / shard.file)
        summary.add(shard.split, rollouts, notes["verifier_errors"])
        tokens = sum(len(r.response_ids) for r in rollouts)
        entries.append(
            {
                **describe_file(run_dir.path, run_dir.path / shard.file),
                "split": shard.split,
                "prompts": len(shard.prompts),
                "rollouts": len(rollouts),
                "response_tokens": tokens,
            }
        )
    prompts_entry = describe_file(run_dir.path, run_dir.path / PROMPTS)
    write_manifest(run_dir.path, {**made_from, "counts": counts, "prompts": prompts_entry, "shards": entries})

    corpus = Corpus.open(run_dir.path)
    summary.show()
    show_sample(next(corpus.rollouts("train")), tokenizer)
    results = {"schema": "draftkit.prepare/1", "licence": data_recipe.licence, **summary.results()}
    run_dir.finish(results, summary.headline())
    return results


# ------------------------------------------------------------------------------------------------------- prompts


def _chosen_before(root: Path, made_from: dict[str, Any]) -> tuple[Split, dict[str, int]] | None:
    """The prompts that this run chose when it began; None when it was killed before it had."""
    if not (root / PLAN).exists() or not (root / PROMPTS).exists():
        return None
    plan = json.loads((root / PLAN).read_text())
    changed = [key for key in made_from if json.loads(json.dumps(made_from[key])) != plan["made_from"][key]]
    if changed:
        raise UserError(
            f"{root} was begun with another {' and '.join(changed)}.",
            "Resume with what it was begun with, use --overwrite, or another --out.",
        )
    return from_jsonl((root / PROMPTS).read_text()), plan["counts"]


def choose_prompts(
    recipe: Recipe, data_recipe: DataRecipe, num_tokens: Callable[[Prompt], int]
) -> tuple[Split, dict[str, int]]:
    """Read, measure, drop repeats, split. Returns the split and how many prompts went where."""
    prompts, num_repeats = read_prompts(read_rows(data_recipe), data_recipe)
    heldout_rows = read_heldout_rows(data_recipe)
    heldout: list[Prompt] | None = None
    if heldout_rows is not None:
        heldout, more_repeats = read_prompts(heldout_rows, data_recipe)
        num_repeats += more_repeats
    num_read = len(prompts) + len(heldout or []) + num_repeats

    fits = [_fitting(p, num_tokens, data_recipe, recipe.engine.max_model_len) for p in (prompts, heldout or [])]
    num_long = num_read - num_repeats - len(fits[0]) - len(fits[1])
    split = split_prompts(
        fits[0],
        None if heldout is None else fits[1],
        num_heldout=recipe.data.heldout,
        limit=recipe.data.limit,
        threshold=data_recipe.near_duplicate,
    )
    if len(split.heldout) < recipe.data.heldout:
        console.say_once(
            f"data.heldout asks for {recipe.data.heldout} prompts; the held-out source has {len(split.heldout)}"
        )
    dropped = split.dropped | {"exact_duplicates": split.dropped["exact_duplicates"] + num_repeats}
    counts = {
        "read": num_read,
        "too_long": num_long,
        **dropped,
        "heldout": len(split.heldout),
        "train": len(split.train),
    }
    counts["unused"] = num_read - sum(counts[k] for k in counts if k not in ("read", "unused"))
    return split, counts


def _fitting(
    prompts: Iterable[Prompt], num_tokens: Callable[[Prompt], int], data_recipe: DataRecipe, max_model_len: int
) -> list[Prompt]:
    kept = []
    for prompt in prompts:
        length = num_tokens(prompt)
        if data_recipe.max_prompt_tokens is not None and length > data_recipe.max_prompt_tokens:
            continue
        if length >= max_model_len:
            raise UserError(
                f"Prompt {prompt.id!r} has {length} tokens after rendering, which leaves no room for an "
                f"answer in engine.max_model_len={max_model_len}.",
                "Raise engine.max_model_len, or set max_prompt_tokens in the data recipe to drop such prompts.",
            )
        kept.append(prompt)
    return kept


def _render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, recipe: Recipe) -> list[int]:
    return render(tokenizer, prompt.messages, recipe.sampling.thinking)


def _say_if_cut(rendered: dict[str, list[int]], recipe: Recipe) -> None:
    room = recipe.engine.max_model_len - recipe.sampling.max_tokens
    num_cut = sum(len(ids) > room for ids in rendered.values())
    if num_cut:
        console.say_once(
            f"{num_cut} of {len(rendered)} prompts leave less than sampling.max_tokens="
            f"{recipe.sampling.max_tokens} tokens for the answer: it ends at the context instead"
        )


# ------------------------------------------------------------------------------------------------------- answers


def _answer(
    recipe: Recipe,
    run_dir: RunDir,
    model: Path,
    todo: Sequence[Shard],
    rendered: dict[str, list[int]],
    decode: Callable[[Sequence[int]], str],
) -> None:
    per_prompt = recipe.sampling.n + recipe.sampling.greedy_n
    prompts = [prompt for shard in todo for prompt in shard.prompts]
    most_tokens = sum(per_prompt * (len(rendered[p.id]) + recipe.sampling.max_tokens) for p in prompts)
    no_space(run_dir.path, BYTES_PER_TOKEN * most_tokens, "the corpus")
    console.say(
        f"{len(prompts) * per_prompt} answers to generate, at most {most_tokens:,} tokens, "
        f"{BYTES_PER_TOKEN * most_tokens / 1e6:.2f} MB on disk"
    )

    from draftkit.engine import Engine

    with ExitStack() as stack:
        stop = stack.enter_context(Interrupt())
        engine = stack.enter_context(Engine(model, recipe_engine=recipe.engine, seed=recipe.sampling.seed))
        bar = stack.enter_context(console.progress("answering", total=len(prompts) * per_prompt))
        for shard in todo:
            if stop.requested:
                raise Interrupted("the shards that are complete are kept")
            record = answer_shard(
                engine,
                shard,
                run_dir.path / shard.file,
                settings=recipe.sampling,
                rendered=rendered,
                decode=decode,
                advance=bar.advance,
                stop_requested=lambda: stop.requested,
            )
            run_dir.metrics(record)
            bar.advance(0, f"{record['tokens_per_s']:.0f} tokens/s")
