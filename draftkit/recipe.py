"""Recipes: one YAML, strict pydantic models, `a.b=value` overrides, and where each value came from.

Precedence: defaults < recipe < override < named flag; a flag and an override of the same field is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from draftkit.errors import UserError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class ModelSection(Section):
    path: str = "demo"  # local directory, hub name, or "demo" for the embedded 135M verifier
    revision: str | None = None
    trust_remote_code: bool = False


class EngineSection(Section):
    max_model_len: int = Field(1024, gt=0)
    max_num_seqs: int = Field(64, gt=0)
    compiled: bool = False  # torch.compile inside vLLM: faster steps, a slow first start
    kv_cache_gib: float = Field(2.0, gt=0)  # CPU only
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    prefix_caching: bool = False  # off where arms are compared: no arm may profit from another's prompts
    tensor_parallel_size: int = Field(1, gt=0)


class SamplingSection(Section):
    """The RL run's own rollout settings."""

    n: int = Field(1, gt=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_tokens: int = Field(192, gt=0)
    stop: list[str] = []
    thinking: bool | None = None  # passed to the chat template as enable_thinking when set
    seed: int = 0
    greedy_n: int = Field(0, ge=0)  # further answers a prompt at temperature 0, as the RL run's evaluation samples


class DataSection(Section):
    recipe: str = "reasoning-gym-mini"  # a shipped data recipe's name or a path to one
    limit: int | None = Field(None, gt=0)  # at most so many training prompts
    heldout: int = Field(64, ge=1)  # prompts kept for evaluation, never trained on
    shard_size: int = Field(256, gt=0)  # prompts in one shard: what a kill can cost


LR = {"eagle3": 1e-3, "mtp": 1e-3, "draft-lm": 3e-4}
KINDS = tuple(LR)  # of drafters that train


class DrafterSection(Section):
    kind: Literal[KINDS] = "eagle3"
    num_layers: int | None = Field(None, gt=0)  # default: 1 of EAGLE-3, a sixth of the verifier's of a draft-lm
    init: str | None = None  # directory of an existing drafter to warm-start from; default: from the verifier
    aux_ids: Literal["vllm", "sglang"] | None = None  # how `init` counts; default: drafters/layouts.py
    aux_layers: list[int] | None = None  # verifier layer ids as vLLM counts them; default (2, n//2, n-3)
    draft_vocab_size: int | None = Field(None, gt=0)  # default: chosen from the corpus by vocab_coverage
    vocab_coverage: float = Field(0.999, gt=0, le=1)
    intermediate_size: int | None = Field(None, gt=0)
    # of an EAGLE-3 drafter: what `drafters/eagle3.py` calls its variants
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    attention_bias: bool = False


class TrainSection(Section):
    epochs: float = Field(4.0, gt=0)
    tokens_per_batch: int = Field(2048, gt=0)  # tokens of one batch, prompts included, before gradient accumulation
    seq_len: int = Field(4096, gt=0)  # tokens of one document; longer ones are cut, and said so
    grad_accum: int = Field(1, gt=0)
    shard: bool = False  # over several processes: FSDP2 in place of a whole drafter in each
    ttt_steps: int = Field(3, ge=1)
    ttt_decay: float = Field(0.8, gt=0, le=1)
    loss: dict[Literal["kl", "ce", "tv", "lk-alpha", "lk-hybrid", "tv-chain"], float] = {"kl": 1.0}  # name: weight
    lr: float | None = Field(None, gt=0)  # default: 1e-3, and 3e-4 for a draft-lm
    lr_min_ratio: float = Field(0.05, ge=0, le=1)
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = Field(1.0, gt=0)
    capture: Literal["cache", "stream"] = "cache"
    server: str | None = None  # http://host:port of a vLLM that gives the verifier's states (train/server.py)
    cache_form: Literal["exact", "int8"] = "exact"  # int8: half the disk, states rounded to 1.5 % (data/forms.py)
    eval_every: int = Field(100, gt=0)  # steps
    save_every: int = Field(100, gt=0)  # steps
    keep: int = Field(2, ge=1)  # checkpoints kept
    seed: int = 0
    parity: bool = True
    parity_prompts: int = Field(8, gt=0)

    @field_validator("loss", mode="before")
    @classmethod
    def _by_name(cls, loss: Any) -> Any:
        return {loss: 1.0} if isinstance(loss, str) else loss

    @field_validator("loss")
    @classmethod
    def _weights(cls, loss: dict[str, float]) -> dict[str, float]:
        if not loss or min(loss.values()) < 0 or max(loss.values()) == 0:
            raise ValueError("should give each loss a weight of 0 or more, and one of them more than 0")
        return loss


class EvalSection(Section):
    k: list[int] = [0, 1, 2, 3, 5]
    concurrency: list[int] = [1, 4, 16]
    temperatures: list[float] | None = None  # default: the rollout temperature, and greedy
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"  # one-hot drafts, or drafts sampled from q
    prompts: int = Field(16, gt=0)  # held-out prompts a cell (repeated to fill the concurrency)
    max_tokens: int = Field(96, gt=0)
    repeats: int = Field(3, ge=1)
    warmup_tokens: int = Field(16, ge=0)
    batches: int = Field(2, gt=0)  # of --replay: the last ones of the run
    batch_prompts: int = Field(8, gt=0)  # of --replay, prompts a batch where the run is a corpus, which has no batches
    margin: float = Field(0.03, ge=0)  # of --replay: a predicted gain over k = 0 that is smaller does not count
    seed: int = 0

    @field_validator("k")
    @classmethod
    def _k(cls, k: list[int]) -> list[int]:
        if any(value < 0 for value in k):
            raise ValueError(f"holds the negative draft length {min(k)}; draft lengths are 0 (no speculation) or more")
        if not any(k):
            raise ValueError("asks for k = 0 alone, which leaves nothing to compare; add a draft length such as 3")
        return sorted({0, *k})  # the baseline is always measured

    @field_validator("concurrency")
    @classmethod
    def _concurrency(cls, concurrency: list[int]) -> list[int]:
        if not concurrency or min(concurrency) < 1:
            raise ValueError("should be one or more numbers of requests, each at least 1")
        return sorted(set(concurrency))

    @field_validator("temperatures")
    @classmethod
    def _temperatures(cls, temperatures: list[float] | None) -> list[float] | None:
        if temperatures is not None and (not temperatures or min(temperatures) < 0):
            raise ValueError("should be one or more temperatures, each at least 0")
        return temperatures if temperatures is None else list(dict.fromkeys(temperatures))


class SpecSection(Section):
    """How rollouts of an RL run speculate."""

    method: Literal["eagle3", "mtp", "draft-lm", "ngram", "none"] = "eagle3"
    k: int = Field(3, ge=1)
    drafter: str | None = None  # directory to start from; default: begin from the verifier's own layers and grow
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    rejection_sample_method: str | None = None  # default: the installed vLLM's; only lossless ones are allowed
    schedule: list[tuple[int, int, int]] | None = None  # [lo, hi, k] by running requests; default: k throughout
    adapt: bool = False  # find the schedule, up to k drafts, while the run goes on (rl/tuner.py)
    explore: float = Field(0.05, gt=0, le=1)  # of adapt: rollout time that finding it may cost, as a share of the run's


class RLSection(Section):
    """The loop: prompts, environment, loss."""

    steps: int = Field(40, gt=0)
    prompts_per_step: int = Field(16, gt=0)  # sampling.n responses each
    environment: str = "single-turn"  # or calculator, search, or your own module:factory
    max_turns: int = Field(4, ge=1)  # of a multi-turn environment
    reward: str | None = None  # your own module:function; default: the data recipe's verifier
    loss: Literal["grpo", "dr-grpo", "dapo", "gspo"] = "grpo"
    clip_low: float | None = Field(None, gt=0)  # default: the loss's own
    clip_high: float | None = Field(None, gt=0)
    kl_coef: float = Field(0.0, ge=0)  # to the policy that the run began with
    tis_clip: float | None = Field(2.0, gt=0)  # cap of trainer / engine importance weights; null: off
    dynamic_sampling: bool | None = None  # drop groups of equal rewards and sample on; default: the loss's own
    max_resamples: int = Field(3, ge=0)  # further batches of prompts that dynamic sampling may ask for in a step
    overlong_buffer: int = Field(0, ge=0)  # tokens before max_tokens over which the length penalty grows to 1
    updates: int = Field(1, gt=0)  # optimizer steps for each batch of rollouts
    lag: int = Field(0, ge=0)  # policy versions that rollouts may be behind
    eval_every: int = Field(10, gt=0)  # steps
    eval_prompts: int = Field(32, gt=0)
    probe_every: int = Field(10, ge=0)  # every so many steps roll out without speculation, to compare; 0: never
    save_every: int = Field(10, gt=0)
    keep: int = Field(2, ge=1)
    snapshot_every: int = Field(0, ge=0)  # steps between plain copies of policy and drafter that are kept; 0: none
    keep_rollouts: int = Field(4, ge=0)  # steps whose responses stay on disk, for `eval-acceptance --replay`
    track: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = []
    seed: int = 0


class PolicySection(Section):
    """The policy's optimizer and its DeepSpeed engine."""

    lr: float = Field(1e-5, gt=0)
    lr_warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = Field(1.0, gt=0)
    tokens_per_batch: int = Field(4096, gt=0)  # padded tokens of one forward
    zero_stage: Literal[0, 1, 2, 3] = 2
    offload_optimizer: bool = False
    gradient_checkpointing: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


class WarmupSection(Section):
    """Supervised steps on the data recipe's worked examples before RL; 0 leaves it out."""

    steps: int = Field(0, ge=0)
    examples_per_step: int = Field(32, gt=0)
    lr: float = Field(2e-5, gt=0)


class CotrainSection(Section):
    """Drafter updates from the trainer's own log-probability forward."""

    mode: Literal["off", "every-n", "triggered"] = "triggered"
    every: int = Field(1, gt=0)  # of every-n: RL steps between two trainings
    lr: float = Field(5e-4, gt=0)
    grad_clip: float = Field(1.0, gt=0)
    batches: int = Field(2, gt=0)  # drafter steps of one training
    tokens_per_batch: int = Field(2048, gt=0)
    replay: int = Field(64, ge=0)  # trajectories of earlier steps kept against forgetting
    replay_share: float = Field(0.25, ge=0, lt=1)  # of each batch
    grow_batches: int = Field(40, ge=0)  # drafter steps on the first rollouts of a run that begins without a drafter
    horizon: int = Field(20, gt=0)  # steps over which a training must earn back its time (triggered)

    @field_validator("mode", mode="before")
    @classmethod
    def _mode(cls, mode: Any) -> Any:
        return "off" if mode is False else mode  # YAML reads a bare `off` as a truth value


class CanarySection(Section):
    """Checks after every publish."""

    prompts: int = Field(4, gt=0)
    max_tokens: int = Field(24, gt=0)
    min_acceptance: float = Field(1.05, ge=1)  # acceptance length under which the drafter counts as collapsed
    columns: int | None = Field(64, gt=0)  # inputs of each matrix that its fingerprint covers; null: all, and slower


class Recipe(Section):
    name: str = Field("quickstart", pattern=r"^\w[\w.-]*$")  # it names the run directory
    description: str = ""
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    sampling: SamplingSection = SamplingSection()
    data: DataSection = DataSection()
    drafter: DrafterSection = DrafterSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    spec: SpecSection = SpecSection()
    rl: RLSection = RLSection()
    policy: PolicySection = PolicySection()
    warmup: WarmupSection = WarmupSection()
    cotrain: CotrainSection = CotrainSection()
    canary: CanarySection = CanarySection()

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        if self.sampling.max_tokens >= self.engine.max_model_len:
            raise ValueError(
                f"sampling.max_tokens ({self.sampling.max_tokens}) leaves no room for a prompt in "
                f"engine.max_model_len ({self.engine.max_model_len})"
            )
        return self

    def settled(self) -> Recipe:
        """With what this kind of drafter is trained with where the recipe leaves it open."""
        lr = self.train.lr or LR[self.drafter.kind]
        return self.model_copy(update={"train": self.train.model_copy(update={"lr": lr})})


# --------------------------------------------------------------------------------------------------------------
# Loading
# --------------------------------------------------------------------------------------------------------------

QUICKSTART, RL_QUICKSTART = "quickstart", "rl-quickstart"


Kind = Literal["recipes", "data_recipes", "scenarios"]


def shipped(kind: Kind) -> dict[str, Path]:
    """Name -> file of what ships with the package: `draftkit/_shipped/` in a wheel, the top level in a checkout;
    scenarios lie in the room that reads them."""
    package = Path(__file__).resolve().parent
    folder = package / "project" / kind if kind == "scenarios" else package / "_shipped" / kind
    if not folder.is_dir():
        folder = package.parent / kind
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def nearest(word: str, known: Iterable[str]) -> str:
    """`Did you mean ...? `, or nothing where no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {near[0]}? " if near else ""


def find_shipped(name_or_path: str, kind: Kind) -> Path:
    """A path (it has a separator or a YAML suffix) or the name of a shipped file."""
    what = kind.replace("_", " ").removesuffix("s")
    path = Path(name_or_path).expanduser()
    if path.suffix in {".yaml", ".yml"} or len(path.parts) > 1:
        if not path.is_file():
            raise UserError(f"The {what} file {name_or_path} does not exist.", f"Shipped: {', '.join(shipped(kind))}.")
        return path
    known = shipped(kind)
    if name_or_path not in known:
        hint = f"{nearest(name_or_path, known)}Shipped: {', '.join(known)}; or give a path."
        raise UserError(f"No {what} is called {name_or_path!r}.", hint)
    return known[name_or_path]


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML lets the second of two equal keys win in silence; here it is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """One mapping from a YAML file; anything else is a `UserError` naming the file and, where known, the line."""
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(f"{path}{line}: this is not valid YAML: {problem}.") from error
    if not isinstance(loaded, dict):
        raise UserError(
            f"{path} is empty or not a mapping of keys to values.", "A recipe is a YAML file of `key: value`."
        )
    return loaded


def _sections(model: type[Section]) -> dict[str, type[Section]]:
    return {
        name: field.annotation
        for name, field in model.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


def _leaves(model: type[Section], prefix: str = "") -> list[str]:
    """Every settable dotted key, in the order of the schema."""
    nested = _sections(model)
    keys = []
    for name in model.model_fields:
        keys += _leaves(nested[name], f"{prefix}{name}.") if name in nested else [prefix + name]
    return keys


def _unknown(key: str, where: str, root: type[Section]) -> UserError:
    valid = _leaves(root)
    same_leaf = [v for v in valid if v.rpartition(".")[2] == key.rpartition(".")[2]]
    near = same_leaf or difflib.get_close_matches(key, valid + list(_sections(root)), n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Sections: {', '.join(_sections(root))}."
    return UserError(f"{where}: there is no {root.__name__.lower()} key {key!r}.", hint)


def _flatten(
    tree: dict[str, Any],
    where: str,
    root: type[Section] = Recipe,
    model: type[Section] | None = None,
    prefix: str = "",
) -> dict[str, Any]:
    """Nested mapping -> {dotted leaf: value}, refusing keys that the schema `root` does not have."""
    model = model or root
    nested = _sections(model)
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in model.model_fields:
            raise _unknown(f"{prefix}{key}", where, root)
        if key not in nested:
            flat[prefix + key] = value
        elif value is None:  # a section whose every line is commented out
            continue
        elif not isinstance(value, dict):
            raise UserError(f"{where}: {prefix}{key} is a section of settings, not the value {value!r}.")
        else:
            flat |= _flatten(value, where, root, nested[key], f"{prefix}{key}.")
    return flat


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for dotted, value in flat.items():
        *sections, leaf = dotted.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return tree


def _parse_override(text: str, root: type[Section]) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{text!r} is not an override.", "Overrides read section.key=value, for example train.lr=5e-4.")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"The value of the override {text!r} is not valid YAML.") from error
    return _flatten(_nest({key.strip(): parsed}), f"override {text!r}", root)


def _one_sentence(error: ValidationError, sources: dict[str, str], root: type[Section]) -> UserError:
    """The first complaint of pydantic as `key (source) should be ..., not value.`"""
    first = error.errors()[0]
    names = [str(part) for part in first["loc"]]
    dotted = ".".join(names[:2] if names and names[0] in _sections(root) else names[:1])
    problem = first["msg"].removeprefix("Value error, ").removeprefix("Input ").partition(", unable to parse")[0]
    problem = "has too few values" if first["type"] == "missing" else problem
    shown = repr(first["input"])
    tail = "" if not dotted or len(shown) > 60 or first["type"] in {"value_error", "missing"} else f", not {shown}"
    named = f"{dotted} ({sources[dotted]}) " if dotted in sources else ""
    more = f"{error.error_count() - 1} more problem(s) after this one." if error.error_count() > 1 else ""
    return UserError(f"{named}{problem}{tail}.", more)


def load_recipe(
    name_or_path: str | Path = QUICKSTART, overrides: list[str] | None = None, flags: dict[str, Any] | None = None
) -> tuple[Recipe, dict[str, str]]:
    """Returns the recipe and, for every dotted key, where its value came from."""
    path = find_shipped(str(name_or_path), "recipes")
    return load_settings(Recipe, path, f"recipe {name_or_path}", overrides, flags)


Settings = TypeVar("Settings", bound=Section)


def load_settings(
    root: type[Settings],
    path: Path,
    named: str,
    overrides: list[str] | None = None,
    flags: dict[str, Any] | None = None,
) -> tuple[Settings, dict[str, str]]:
    """Settings of the schema `root` from a YAML file, and for every dotted key where its value came from.

    `overrides` are `a.b=value` strings whose values are YAML; `flags` maps dotted keys to values given as named
    command-line flags (None = not given). named: what the file is called as a source.
    """
    layers = [(named, _flatten(read_yaml(path), str(path), root))]
    given: dict[str, Any] = {}
    for text in overrides or []:
        parsed = _parse_override(text, root)
        if twice := sorted(parsed.keys() & given.keys()):
            raise UserError(f"{twice[0]} is overridden twice on the command line.", "Keep one of the two.")
        given |= parsed
    layers.append(("override", given))
    by_flag = {key: value for key, value in (flags or {}).items() if value is not None}
    if clash := sorted(by_flag.keys() & given.keys()):
        raise UserError(
            f"{clash[0]} is set both by a named flag ({by_flag[clash[0]]!r}) and by an override ({given[clash[0]]!r}).",
            "Keep one of the two.",
        )
    layers.append(("flag", by_flag))

    sources = dict.fromkeys(_leaves(root), "default")
    flat: dict[str, Any] = {}
    for source, layer in layers:
        flat |= layer
        sources |= dict.fromkeys(layer, source)
    try:
        return root.model_validate(_nest(flat)), sources
    except ValidationError as error:
        raise _one_sentence(error, sources, root) from error


def flat_values(recipe: Section) -> dict[str, Any]:
    """{dotted key: value}, for `--print-config` and for naming the fields in which two recipes differ."""
    return _flatten(recipe.model_dump(mode="json"), "settings", type(recipe))
