"""The command line: parses, wires a stage to its run directory, prints, exits. Knows no torch, vllm or transformers.

draftkit <verb> [-r RECIPE] [named flags] [a.b=value ...] [--dry-run] [--print-config] [--out DIR] [--resume]
                [--overwrite] [--json | -q] [--debug]

Each verb maps its named flags to recipe keys and hands a `Stage` to `_go`, which is the whole life of a command.
`project` reads a scenario instead of a recipe and is done in seconds: no run to resume.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from draftkit import __version__
from draftkit import console as screen
from draftkit.errors import UserError, explain
from draftkit.recipe import (
    KINDS,
    QUICKSTART,
    RL_QUICKSTART,
    Recipe,
    Section,
    find_shipped,
    flat_values,
    load_recipe,
    read_yaml,
    shipped,
)
from draftkit.run import RunDir, is_main, refuse

OUTPUTS = Path("outputs")

app = typer.Typer(
    help="Faster RL rollouts by speculative decoding: a drafting corpus, a drafter, and what it really buys.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# ------------------------------------------------------------------------------------------------- shared options

RecipeOption = Annotated[str, typer.Option("-r", "--recipe", help="Name of a shipped recipe, or a path.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="a.b=value", help="Recipe keys to override.")]
Model = Annotated[str | None, typer.Option(help="Verifier: a directory, a hub name, or demo.")]
CorpusOption = Annotated[Path | None, typer.Option(help="A `prepare` run. Default: outputs/prepare/<recipe name>.")]
Out = Annotated[Path | None, typer.Option(help="Run directory. Default: outputs/<verb>/<recipe name>.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with this run; start it if there is none.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace this run.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, write nothing.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Show every setting and where it came from.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Closing lines and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass
class Stage:
    """One verb: its recipe, the paths it reads beside the recipe, and where it writes."""

    verb: str
    recipe: Recipe
    recipe_name: str
    sources: dict[str, str]
    out: Path
    inputs: dict[str, str] = field(default_factory=dict)

    @property
    def default_out(self) -> Path:
        return default_dir(self.verb, self.recipe)


def default_dir(verb: str, recipe: Recipe) -> Path:
    return OUTPUTS / verb / recipe.name


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Exceptions to exit codes (`errors.explain`) and one sentence on stderr; a bug keeps its traceback, exit 1."""

    @functools.wraps(command)
    def wrapper(*args: Any, **options: Any) -> None:
        if not Path("/dev/nvidiactl").exists():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or deepspeed, when anything imports it, warns on stdout
        screen.set_mode(json=options.get("as_json", False), quiet=options.get("quiet", False) or not is_main())
        with screen.own_stdout():
            try:
                command(*args, **options)
            except (typer.Exit, typer.Abort):
                raise
            except (Exception, KeyboardInterrupt) as error:
                known = explain(error)
                if known is None:
                    raise
                code, message, hint = known
                if options.get("debug"):
                    traceback.print_exception(error)
                screen.error(message, hint)
                screen.emit_json({"error": message, "hint": hint, "exit_code": code})
                raise typer.Exit(code) from error

    return wrapper


def _stage(verb: str, recipe_name: str, overrides: list[str] | None, flags: dict[str, Any], out: Path | None) -> Stage:
    recipe, sources = load_recipe(recipe_name, overrides, flags)
    return Stage(verb, recipe, recipe_name, sources, out or default_dir(verb, recipe))


def _numbers(flag: str, text: str | None, kind: type[int] | type[float]) -> list[Any] | None:
    """`0,1,2,3` -> [0, 1, 2, 3]"""
    try:
        return None if text is None else [kind(part) for part in text.split(",")]
    except ValueError as error:
        what = "whole numbers" if kind is int else "numbers"
        raise UserError(
            f"{flag} wants {what} separated by commas, not {text!r}.", f"For example {flag} 0,1,3."
        ) from error


def _go(
    stage: Stage,
    work: Callable[[RunDir], dict[str, Any]],
    check: Callable[[], list[str]],
    next_command: Callable[[dict[str, Any]], str],
    *,
    dry_run: bool,
    print_config: bool,
    resume: bool,
    overwrite: bool,
) -> None:
    """Show, check, or do: open the run, let the stage work and finish it, close with where, what, and what next."""
    if print_config:
        return _show_config(stage)
    # Resolved, so that the same corpus by another path, or from another directory, is the same input.
    inputs = {name: str(Path(path).resolve()) if Path(path).exists() else path for name, path in stage.inputs.items()}
    options = dict(verb=stage.verb, recipe=stage.recipe, resume=resume, overwrite=overwrite, inputs=inputs)
    if dry_run:
        refuse(stage.out, **options)
        lines = [f"would run {stage.verb} with recipe {stage.recipe_name}", *check(), f"out: {stage.out}"]
        screen.closing(*map(escape, lines))
        return screen.emit_json({"dry_run": lines})
    run = RunDir.open(stage.out, sources=stage.sources, provisional=True, **options)
    try:
        if resume and run.finished:
            screen.say(f"{escape(str(run.path))} is finished already")
        else:
            work(run)
        if not is_main():
            return
        results = run.results()
        screen.closing(f"run:  {escape(str(run.path))}", escape(results["headline"]))
        screen.closing(f"next: {escape(next_command(results))}")
        screen.emit_json({"run": str(run.path)} | results)
    finally:
        run.close()


def _show_config(stage: Stage) -> None:
    _show_settings(stage.recipe, stage.sources)


def _show_settings(settings: Section, sources: dict[str, str]) -> None:
    values = flat_values(settings)
    shown = {key: f"{key}: {json.dumps(value)}" for key, value in values.items()}
    width = max(len(text) for text in shown.values() if len(text) < 50)
    screen.closing(*(escape(f"{text:<{width}}  # {sources[key]}") for key, text in shown.items()))
    screen.emit_json({key: {"value": value, "source": sources[key]} for key, value in values.items()})


def _check_model(recipe: Recipe) -> str:
    """What `--dry-run` can say about the verifier without fetching or making it."""
    from draftkit.models import DEMO, HUB_NAME, demo_dir, resolve_model

    name = recipe.model.path
    if name == DEMO and not Path(name).exists():
        there = (demo_dir() / "config.json").is_file()
        return f"verifier: {demo_dir()} (the demo model, {'there' if there else 'to be made'})"
    if not Path(name).expanduser().exists() and HUB_NAME.fullmatch(name):
        return f"verifier: {name} (a hub name, fetched when the run starts)"
    return f"verifier: {resolve_model(name, recipe.model.revision)}"


def _check_corpus(recipe: Recipe, corpus: Path) -> str:
    from draftkit.data.shards import Corpus
    from draftkit.models import fingerprint

    opened = Corpus.open(corpus)
    verifier = Path(recipe.model.path).expanduser()
    if verifier.is_dir():
        opened.check_verifier(fingerprint(verifier))
    return f"corpus: {corpus} ({len(opened.prompts('train'))} prompts, {len(opened.prompts('heldout'))} held out)"


def _local_verifier(recipe: Recipe) -> Path | None:
    """The verifier's directory, None where it is yet to be fetched or made: a dry run does neither."""
    from draftkit.models import DEMO, demo_dir

    path = Path(recipe.model.path).expanduser()
    if recipe.model.path == DEMO and not path.exists():
        path = demo_dir()
    return path if (path / "config.json").is_file() else None


def _check_drafter(recipe: Recipe, drafter: str) -> str:
    """Against the verifier where that is at hand."""
    from draftkit.evals.drafter import NGRAM, find_drafter, resolve_drafter
    from draftkit.models import fingerprint, model_facts

    if verifier := _local_verifier(recipe):
        resolve_drafter(drafter, model_facts(verifier), fingerprint(verifier), max(recipe.eval.k))
    elif drafter != NGRAM:
        find_drafter(drafter)
    return f"drafter: {drafter}"


def _check_start(recipe: Recipe, drafter: str) -> str:
    """The drafter that an rl run begins with: as the run itself, it takes one made for other weights of the policy."""
    from draftkit.evals.drafter import find_drafter
    from draftkit.models import fingerprint, model_facts
    from draftkit.train.start import check_init

    find_drafter(drafter)
    verifier = _local_verifier(recipe)
    if verifier and recipe.spec.method == "eagle3":
        check_init(Path(drafter), model_facts(verifier), fingerprint(verifier), recipe.drafter.aux_ids)
    return f"drafter: {drafter}"


def _command(stage: Stage, verb: str, **paths: Path | str | None) -> str:
    """The command to type next: same recipe and model, and the paths that are not where the next verb looks."""
    words = ["draftkit", verb]
    words += ["-r", stage.recipe_name] if stage.recipe_name != QUICKSTART else []
    words += ["--model", stage.recipe.model.path] if stage.sources["model.path"] in {"flag", "override"} else []
    for flag, path in paths.items():
        words += [f"--{flag}", str(path)] if path is not None else []
    return shlex.join(words)


# ------------------------------------------------------------------------------------------------- verbs


@app.command()
@guarded
def prepare(
    overrides: Overrides = None,
    recipe: RecipeOption = QUICKSTART,
    model: Model = None,
    data: Annotated[str | None, typer.Option(help="Data recipe: a shipped name, or a path.")] = None,
    n: Annotated[int | None, typer.Option(help="Answers a prompt.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Rollout temperature.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most so many training prompts.")] = None,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """RL prompts -> in-domain drafting corpus: the verifier answers them at the RL run's own settings."""
    flags = {
        "model.path": model,
        "data.recipe": data,
        "sampling.n": n,
        "sampling.temperature": temperature,
        "sampling.max_tokens": max_tokens,
        "data.limit": limit,
    }
    stage = _stage("prepare", recipe, overrides, flags, out)

    def work(run: RunDir) -> dict[str, Any]:
        from draftkit.data import prepare as prepare_stage

        return prepare_stage.run(stage.recipe, run)

    def check() -> list[str]:
        from draftkit.data.data_recipe import load_data_recipe
        from draftkit.data.prompts import to_prompt
        from draftkit.data.sources import read_rows

        data_recipe = load_data_recipe(stage.recipe.data.recipe)
        if data_recipe.source in ("jsonl", "parquet"):  # cheap to look at; the others are fetched or generated
            to_prompt(next(read_rows(data_recipe)), data_recipe)
        return [_check_model(stage.recipe), f"data: {data_recipe.name}"]

    def next_command(results: dict[str, Any]) -> str:
        return _command(stage, "train-drafter", corpus=None if stage.out == stage.default_out else stage.out)

    _go(stage, work, check, next_command, **_mode(dry_run, print_config, resume, overwrite))


@app.command("train-drafter")
@guarded
def train_drafter(
    overrides: Overrides = None,
    recipe: RecipeOption = QUICKSTART,
    method: Annotated[str | None, typer.Option(help="eagle3, mtp or draft-lm.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="Train and measure several kinds side by side, for example eagle3,mtp,draft-lm.")
    ] = None,
    corpus: CorpusOption = None,
    model: Model = None,
    ttt_steps: Annotated[int | None, typer.Option(help="Test-time-training steps.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the corpus.")] = None,
    init: Annotated[str | None, typer.Option(help="Drafter directory to warm-start from.")] = None,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Corpus -> drafter that stock vLLM serves, checked against vLLM before the run calls itself finished."""
    flags = {
        "model.path": model,
        "train.ttt_steps": ttt_steps,
        "train.lr": lr,
        "train.epochs": epochs,
        "drafter.kind": method,
        "drafter.init": init,
    }
    stage = _stage("train-drafter", recipe, overrides, flags, out)
    corpus = corpus or default_dir("prepare", stage.recipe)
    stage.inputs = {"corpus": str(corpus)}
    if compare is not None:
        if method is not None:
            raise UserError("--compare and --method are both given.", "Keep one: --compare trains every kind it names.")
        kinds = _kinds(compare)
        stage.inputs["compare"] = compare
        stage.out = out or stage.out.with_name(f"{stage.out.name}-compare")

    def work(run: RunDir) -> dict[str, Any]:
        from draftkit.evals import compare as comparison
        from draftkit.train import loop

        if compare is not None:
            return comparison.run(stage.recipe, run, corpus, kinds)
        return loop.run(stage.recipe, run, corpus)

    def check() -> list[str]:
        return [_check_model(stage.recipe), _check_corpus(stage.recipe, corpus)]

    def next_command(results: dict[str, Any]) -> str:
        if compare is not None:
            drafter = _fastest(results["drafters"])
        else:
            drafter = None if stage.out == stage.default_out else stage.out / "drafter"
        other_corpus = None if corpus == default_dir("prepare", stage.recipe) else corpus
        return _command(stage, "eval-acceptance", corpus=other_corpus, drafter=drafter)

    _go(stage, work, check, next_command, **_mode(dry_run, print_config, resume, overwrite))


def _kinds(text: str) -> list[str]:
    """`eagle3,mtp` -> its parts."""
    kinds = [part.strip() for part in text.split(",")]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UserError(f"--compare: {unknown[0]!r} is no kind of drafter.", f"Kinds: {', '.join(KINDS)}.")
    if len(set(kinds)) < len(kinds):
        raise UserError(f"--compare names a kind twice: {text}.", "Name each once; n-gram is always in.")
    return kinds


def _fastest(drafters: list[dict[str, Any]]) -> str:
    """Of a comparison: what `--drafter` takes for the one that was fastest in any cell."""
    best = max(drafters, key=lambda drafter: max((cell["speedup"] or 0.0) for cell in drafter["cells"]))
    return best.get("directory", best["kind"])  # n-gram has none


@app.command("eval-acceptance")
@guarded
def eval_acceptance(
    overrides: Overrides = None,
    recipe: RecipeOption = QUICKSTART,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Drafter directory, small draft model, or ngram. Default: outputs/train-drafter/<recipe name>."
        ),
    ] = None,
    corpus: CorpusOption = None,
    model: Model = None,
    k: Annotated[str | None, typer.Option(help="Draft lengths, for example 0,1,2,3,5; 0 is always in.")] = None,
    concurrency: Annotated[str | None, typer.Option(help="Requests at a time, for example 1,4,16.")] = None,
    temperature: Annotated[str | None, typer.Option(help="Temperatures, for example 0,1.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Measurements of every cell.")] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="An rl or prepare run: time its rollouts as they drained, with each k and a schedule."),
    ] = None,
    matrix: Annotated[
        Path | None, typer.Option(help="An rl run with snapshots: every drafter version against every policy version.")
    ] = None,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Drafter -> acceptance length, speedup and verdict for every k x concurrency, in the real engine."""
    flags = {
        "model.path": model,
        "eval.k": _numbers("--k", k, int),
        "eval.concurrency": _numbers("--concurrency", concurrency, int),
        "eval.temperatures": _numbers("--temperature", temperature, float),
        "eval.repeats": repeats,
    }
    source = replay or matrix
    if source is not None and recipe == QUICKSTART and (source / "recipe.yaml").is_file():
        recipe = str(source / "recipe.yaml")  # sampled as it was, in the engine it was sampled in
    stage = _stage("eval-acceptance", recipe, overrides, flags, out)
    if matrix is not None:
        others = {"replay": replay, "corpus": corpus, "drafter": drafter, "model": model}
        if given := next((name for name, value in others.items() if value is not None), None):
            raise UserError(f"--matrix and --{given}: a matrix takes all from the run.", f"Leave --{given} out.")
        stage.out = out or stage.default_out.with_name(f"{stage.recipe.name}-matrix")
        _matrix(stage, matrix, _mode(dry_run, print_config, resume, overwrite))
        return
    if replay is not None:
        stage.out = out or stage.default_out.with_name(f"{stage.recipe.name}-replay")
        _replay(stage, replay, corpus, drafter, model is not None, _mode(dry_run, print_config, resume, overwrite))
        return
    corpus = corpus or default_dir("prepare", stage.recipe)
    drafter = drafter or str(default_dir("train-drafter", stage.recipe) / "drafter")
    stage.inputs = {"corpus": str(corpus), "drafter": drafter}

    def work(run: RunDir) -> dict[str, Any]:
        from draftkit.evals import bench

        return bench.run(stage.recipe, run, corpus=corpus, drafter=drafter)

    def check() -> list[str]:
        cells = f"cells: k {stage.recipe.eval.k} x concurrency {stage.recipe.eval.concurrency}"
        lines = [_check_model(stage.recipe), _check_drafter(stage.recipe, drafter)]
        return [*lines, _check_corpus(stage.recipe, corpus), cells]

    _go(stage, work, check, functools.partial(_serve, stage), **_mode(dry_run, print_config, resume, overwrite))


def _replay(
    stage: Stage, source: Path, corpus: Path | None, drafter: str | None, model_given: bool, mode: dict[str, bool]
) -> None:
    """An rl run brings its own policy and drafter; a corpus takes the recipe's verifier and its trained drafter."""
    from draftkit.evals import replay

    if corpus is not None:
        raise UserError("--corpus and --replay: a replay reads its prompts from the run.", "Leave --corpus out.")
    own_policy, own_drafter = source / "policy", source / "drafter"
    if (own_policy / "config.json").is_file() and not model_given:
        stage.recipe.model.path, stage.sources["model.path"] = str(own_policy), f"--replay {source}"
    if (source / "rollouts").is_dir() and str(source) in stage.sources["eval.draft_sample_method"]:
        stage.recipe.eval.draft_sample_method = stage.recipe.spec.draft_sample_method  # drafted as it was in that run
        stage.sources["eval.draft_sample_method"] = f"spec.draft_sample_method of {source}"
    if drafter is None:
        own = (own_drafter / "config.json").is_file()
        drafter = str(own_drafter if own else default_dir("train-drafter", stage.recipe) / "drafter")
    stage.inputs = {"replay": str(source), "drafter": drafter}

    def work(run: RunDir) -> dict[str, Any]:
        return replay.run(stage.recipe, run, source=source, drafter=drafter)

    def check() -> list[str]:
        from draftkit.data.rollouts import read_batches

        recipe = stage.recipe
        batches = read_batches(source, recipe.eval.batches, recipe.eval.batch_prompts)
        replay.check(recipe, source, batches, max(recipe.eval.k))
        lines = [f"{b.name}: {len(b.lengths)} requests, {sum(b.lengths)} tokens" for b in batches]
        return [_check_model(recipe), _check_drafter(recipe, drafter), *lines]

    _go(stage, work, check, lambda results: f"cat {stage.out / 'README.md'}", **mode)


def _matrix(stage: Stage, source: Path, mode: dict[str, bool]) -> None:
    stage.inputs = {"matrix": str(source)}

    def work(run: RunDir) -> dict[str, Any]:
        from draftkit.rl import matrix

        return matrix.run(stage.recipe, run, source=source)

    def check() -> list[str]:
        from draftkit.rl import snapshots

        found = snapshots.read(source)
        drafters = sum(s.drafter is not None for s in found)
        return [f"{len(found)} policies x {drafters} drafters, steps {', '.join(str(s.step) for s in found)}"]

    _go(stage, work, check, lambda results: f"cat {stage.out / 'README.md'}", **mode)


def _serve(stage: Stage, results: dict[str, Any]) -> str:
    """How to serve with what was measured to pay; where nothing did, what to try instead."""
    from draftkit.evals.report import serving_config
    from draftkit.models import resolve_model

    config = serving_config(results)
    if config is None:
        return f"{_command(stage, 'train-drafter')}  # longer, or on more data: no draft length paid here"
    if results["method"] == "mtp":  # it sits in a copy of the verifier, which is served in its place
        verifier = results["drafter"]
    else:
        verifier = str(resolve_model(results["verifier"], stage.recipe.model.revision))
    return shlex.join(["vllm", "serve", verifier, "--speculative-config", json.dumps(config)])


@app.command()
@guarded
def rl(
    overrides: Overrides = None,
    recipe: RecipeOption = RL_QUICKSTART,
    spec: Annotated[str | None, typer.Option(help="eagle3, mtp, draft-lm, ngram or none.")] = None,
    k: Annotated[int | None, typer.Option(help="Tokens drafted a round.")] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter directory to start from. Default: grow one from the policy.")
    ] = None,
    cotrain: Annotated[str | None, typer.Option(help="off, every-n or triggered.")] = None,
    model: Model = None,
    data: Annotated[str | None, typer.Option(help="Data recipe: a shipped name, or a path.")] = None,
    steps: Annotated[int | None, typer.Option(help="RL steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of prompts and sampling.")] = None,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """GRPO with speculative rollouts; the drafter is trained along from the trainer's own forward."""
    flags = {
        "spec.method": spec,
        "spec.k": k,
        "spec.drafter": drafter,
        "cotrain.mode": cotrain,
        "model.path": model,
        "data.recipe": data,
        "rl.steps": steps,
        "rl.seed": seed,
    }
    stage = _stage("rl", recipe, overrides, flags, out)
    if stage.recipe.spec.drafter:
        stage.inputs = {"drafter": stage.recipe.spec.drafter}

    def work(run: RunDir) -> dict[str, Any]:
        from draftkit.rl import loop

        return loop.run(stage.recipe, run)

    def check() -> list[str]:
        from draftkit.data.data_recipe import load_data_recipe
        from draftkit.rl import envs, start

        r = stage.recipe
        speculation = "none" if r.spec.method == "none" else f"{r.spec.method}, k = {r.spec.k}"
        prompts = f"{r.rl.prompts_per_step} prompts x {r.sampling.n} responses a step, {r.rl.steps} steps"
        data_recipe = load_data_recipe(r.data.recipe)
        start.check(r)
        envs.load_environment(r, data_recipe, envs.load_reward(r, data_recipe))
        lines = [_check_model(r), f"data: {data_recipe.name}", prompts, f"speculation: {speculation}"]
        return lines if r.spec.drafter is None else [*lines, _check_start(r, r.spec.drafter)]

    def next_command(results: dict[str, Any]) -> str:
        policy = stage.out / "policy"
        return shlex.join(["draftkit", "prepare", "--model", str(policy)]) + "  # a corpus of the trained policy"

    _go(stage, work, check, next_command, **_mode(dry_run, print_config, resume, overwrite))


@app.command()
@guarded
def project(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="a.b=value", help="Scenario keys.")] = None,
    scenario: Annotated[
        str, typer.Option("-r", "--scenario", help="Name of a shipped scenario, or a path.")
    ] = "qwen3-235b-gb200",
    model: Annotated[str | None, typer.Option(help="A known model, a config.json, or its directory.")] = None,
    hardware: Annotated[str | None, typer.Option(help="A known GPU, or a YAML file with your own.")] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs, for example 64,512.")] = None,
    k: Annotated[str | None, typer.Option(help="Draft lengths, for example 1,3,5.")] = None,
    batch: Annotated[str | None, typer.Option(help="Rollouts of a step, for example 1024,4096.")] = None,
    lag: Annotated[str | None, typer.Option(help="Policy versions that rollouts may lag, for example 0,1,2.")] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(help="A finished eval-acceptance run, a survival curve such as 0.8,0.62,0.47, or one number."),
    ] = None,
    validate: Annotated[bool, typer.Option("--validate", help="Every public number against what is said.")] = False,
    out: Annotated[Path | None, typer.Option(help="Directory. Default: outputs/project/<scenario name>.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the directory's projection.")] = False,
    dry_run: DryRun = False,
    print_config: PrintConfig = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """What speculation would bring for a model, a cluster and a schedule that one does not have."""
    from draftkit.project import report
    from draftkit.project.scenario import load_scenario, read_acceptance

    flags: dict[str, Any] = {
        "model": model,
        "hardware": hardware,
        "gpus": _numbers("--gpus", gpus, int),
        "drafter.k": _numbers("--k", k, int),
        "rollout.requests": _numbers("--batch", batch, int),
        "lag": _numbers("--lag", lag, int),
    } | ({} if acceptance is None else read_acceptance(acceptance))
    if validate:
        if overrides or out or any(value is not None for value in flags.values()):
            raise UserError("--validate has its own points and takes no scenario.", "Leave the other flags out.")
        document = report.validation()
        report.show_validation(document)
        screen.closing(escape(document["headline"]), "next: draftkit project --model qwen3-8b --gpus 32 --lag 0,1")
        return screen.emit_json({key: value for key, value in document.items() if key != "rows"})
    settings, sources = load_scenario(scenario, overrides, flags)
    folder = out or OUTPUTS / "project" / settings.name
    if print_config:
        return _show_settings(settings, sources)
    if folder.exists() and not overwrite:
        raise UserError(f"{folder} exists.", "Use --overwrite, or another --out.")
    if folder.exists() and not (folder.is_dir() and (not any(folder.iterdir()) or report.is_projection(folder))):
        raise UserError(f"{folder} is no projection, so it is not replaced.", "Name another --out.")
    results = report.project(settings)
    if dry_run:
        screen.closing(f"would write {len(results['cells'])} cells", f"out: {escape(str(folder))}")
        return screen.emit_json({"dry_run": [f"{len(results['cells'])} cells", f"out: {folder}"]})
    report.show(results)
    report.write(results, folder)
    screen.closing(f"projection: {escape(str(folder))}", escape(results["headline"]))
    screen.closing("next: draftkit project --validate  # how far such numbers were off where we know the truth")
    screen.emit_json({"out": str(folder)} | results)


def _mode(dry_run: bool, print_config: bool, resume: bool, overwrite: bool) -> dict[str, bool]:
    return dict(dry_run=dry_run, print_config=print_config, resume=resume, overwrite=overwrite)


# ------------------------------------------------------------------------------------------------- helpers


@app.command("demo-model")
@guarded
def demo_model(
    out: Annotated[Path | None, typer.Option(help="Directory. Default: the cache (DRAFTKIT_CACHE).")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write the embedded 135M verifier as a transformers checkpoint, whole or not at all."""
    from draftkit.models import make_demo_model

    path = make_demo_model(out)
    size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    screen.closing(f"model: {escape(str(path))}", f"{size:.0f} MB, SmolLM2-135M-Instruct in bfloat16")
    screen.closing("next: draftkit prepare" + (f" --model {escape(shlex.quote(str(path)))}" if out else ""))
    screen.emit_json({"model": str(path), "megabytes": round(size)})


@app.command()
@guarded
def export(
    drafter: Annotated[Path, typer.Argument(help="EAGLE-3 drafter directory, of any layout.")],
    to: Annotated[str, typer.Option(help="vllm, speculators or sglang.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    aux_ids: Annotated[
        str | None,
        typer.Option(help="How the drafter's file counts auxiliary layers: vllm or sglang. Default: by layout."),
    ] = None,
    verifier: Annotated[
        str | None, typer.Option(help="Its verifier, for a drafter that names no auxiliary layers.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the directory.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """An EAGLE-3 drafter in the layout of another engine, bit for bit."""
    for flag, value, known in (
        ("--to", to, ("vllm", "speculators", "sglang")),
        ("--aux-ids", aux_ids, ("vllm", "sglang")),
    ):
        if value is not None and value not in known:
            raise UserError(f"{flag}: {value!r} is not known.", f"Give {', '.join(known[:-1])} or {known[-1]}.")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists.", "Use --overwrite, or another --out.")
    if out.resolve() == drafter.resolve():
        raise UserError(f"--out is the drafter itself: {out}.", "Name another directory.")
    from draftkit.drafters import layouts
    from draftkit.drafters.init import verifier_of
    from draftkit.models import fingerprint, model_facts, resolve_model

    path = None if verifier is None else resolve_model(verifier)
    head = layouts.read(drafter, aux_ids, None if path is None else model_facts(path).num_layers)
    prints = verifier_of(drafter) or (None if path is None else fingerprint(path))
    layouts.write(head, out, to, prints, name=verifier or "", readme=f"# EAGLE-3 drafter\n\nFrom {drafter}.\n")
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    screen.closing(
        f"drafter: {escape(str(out))}", f"{size:.0f} MB, auxiliary layers {list(head.config.aux_layers)} as vLLM counts"
    )
    screen.emit_json({"drafter": str(out), "layout": to, "aux_layers": list(head.config.aux_layers)})


@app.command("report")
@guarded
def report_runs(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, compared where several.")],
    out: Annotated[Path | None, typer.Option(help="Directory. Default: <first run>/report.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the report.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Runs -> one HTML page, and the same as Markdown with PNGs, from their files alone."""
    from draftkit.report.build import build

    made = build(runs, out, overwrite=overwrite)
    for note in made["notes"]:
        screen.say(f"[yellow]note:[/yellow] {escape(note)}")
    screen.closing(f"report: {escape(made['report'])}", escape(made["headline"]))
    screen.closing(f"next: open it in a browser; for Markdown: {escape(made['markdown'])}")
    screen.emit_json(made)


@app.command()
@guarded
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """This machine, the installed versions, which methods its vLLM serves, known faults and their cure."""
    from draftkit import doctor as checks

    report = checks.examine()
    checks.show(report)
    screen.emit_json(report)
    raise typer.Exit(0 if report["ok"] else 1)


@app.command()
@guarded
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the shipped recipes, or print one."""
    if name is not None:
        path = find_shipped(name, "recipes")
        screen.closing(escape(path.read_text(encoding="utf-8").rstrip()))
        return screen.emit_json(read_yaml(path))
    found = {stem: read_yaml(path).get("description", "") for stem, path in shipped("recipes").items()}
    screen.table(
        "recipes", ["name", "description"], [[escape(stem), escape(text)] for stem, text in found.items()], left=2
    )
    data, scenarios = list(shipped("data_recipes")), list(shipped("scenarios"))
    screen.closing(f"data recipes: {', '.join(data)}", f"scenarios of `project`: {', '.join(scenarios)}")
    screen.closing("next: draftkit prepare -r NAME --dry-run")
    screen.emit_json({"recipes": found, "data_recipes": data, "scenarios": scenarios})


def _version(asked: bool) -> None:
    if asked:
        print(f"draftkit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Faster RL rollouts by speculative decoding: a drafting corpus, a drafter, and what it really buys."""


def main() -> None:
    # Outside the saving sections (`run.Interrupt`), SIGTERM ends a command as Ctrl-C does: exit 130, files closed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(app())
