"""What is projected: a YAML file like a recipe, strict, with `a.b=value` overrides, each list an axis of the sweep.

`gpus`, `lag`, `rollout.requests`, `drafter.k` and `drafter.acceptance` may hold several values; every combination is a
cell. Left out: schedules of k by hand (the best one is always shown beside the fixed ones).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from draftkit.errors import UserError
from draftkit.project import calibration
from draftkit.project.cost import Server
from draftkit.project.hardware import Engine, find_hardware
from draftkit.project.model_shape import eagle3_shape, find_shape
from draftkit.project.rollout import Lengths, Rollouts
from draftkit.project.step import Cluster, Trainer
from draftkit.recipe import Section, find_shipped, load_settings

DEFAULT = "qwen3-235b-gb200"


class RolloutSection(Section):
    requests: list[int] = [2048]  # of a step: prompts times answers
    mean_tokens: float = Field(4000, gt=0)  # of an answer, as a run's log shows it
    max_tokens: int = Field(8192, gt=0)
    sigma: float = Field(0.7, gt=0, le=3)  # spread of the log length: 0.7 puts the 95th percentile at 3.2 medians
    lengths: str | None = None  # a file of measured answer lengths, one a line, instead of the three above
    prompt_tokens: int = Field(256, ge=0)
    tp: int | Literal["auto"] = "auto"  # GPUs of a replica; auto: the fastest without speculation
    precision: Literal["bf16", "fp8"] = "bf16"
    kv_precision: Literal["bf16", "fp8"] = "bf16"
    max_num_seqs: int | None = Field(None, gt=0)  # default: what fits


class DrafterSection(Section):
    method: Literal["eagle3", "ngram"] = "eagle3"
    k: list[int] = [1, 3, 5, 7]
    acceptance: list[float] = [0.7]  # of a draft whose predecessors were accepted, even along the draft
    survival: list[float] | None = None  # measured [s_1 ..], instead of `acceptance`
    vocab: int = Field(calibration.DRAFT_VOCAB, gt=0)


class EngineSection(Section):
    """profile: whose host times; the others replace single constants of it (`project/hardware.py`)."""

    profile: Literal["vllm", "roofline"] = "vllm"
    hbm_share: float | None = Field(None, gt=0, le=1)
    flops_share: float | None = Field(None, gt=0, le=1)
    step_s: float | None = Field(None, ge=0)
    round_s: float | None = Field(None, ge=0)
    draft_s: float | None = Field(None, ge=0)
    eager_s: float | None = Field(None, ge=0)
    graph_tokens: int | None = Field(None, gt=0)


class TrainerSection(Section):
    train_share: float = Field(calibration.TRAINER.train_share, gt=0, le=1)
    logprob_share: float = Field(calibration.TRAINER.logprob_share, gt=0, le=1)
    padded: bool = True  # every answer costs its longest length
    other_s: float = Field(calibration.TRAINER.other_s, ge=0)
    drafter: bool = False  # trained along
    gpus: int | None = Field(None, gt=0)  # with lag: those that train; default: the best split of each arm


class Scenario(Section):
    name: str = Field(DEFAULT, pattern=r"^\w[\w.-]*$")
    description: str = ""
    model: str = "qwen3-235b-a22b"
    hardware: str = "gb200"
    gpus: list[int] = [512]
    lag: list[int] = [0]
    rollout: RolloutSection = RolloutSection()
    drafter: DrafterSection = DrafterSection()
    engine: EngineSection = EngineSection()
    trainer: TrainerSection = TrainerSection()

    @field_validator("gpus")
    @classmethod
    def _gpus(cls, gpus: list[int]) -> list[int]:
        return _axis(gpus, 1)

    @field_validator("lag")
    @classmethod
    def _lag(cls, lag: list[int]) -> list[int]:
        return _axis(lag, 0)


def _axis(values: list[int], least: int) -> list[int]:
    if not values or min(values) < least:
        raise ValueError(f"should be one or more whole numbers, each at least {least}")
    return sorted(set(values))


def load_scenario(
    name_or_path: str, overrides: list[str] | None, flags: dict[str, Any]
) -> tuple[Scenario, dict[str, str]]:
    path = find_shipped(name_or_path, "scenarios")
    scenario, sources = load_settings(Scenario, path, f"scenario {name_or_path}", overrides, flags)
    _check(scenario)
    return scenario, sources


def _check(scenario: Scenario) -> None:
    """What pydantic sees only one field at a time."""
    rollout, drafter = scenario.rollout, scenario.drafter
    for name, values, least in (("rollout.requests", rollout.requests, 1), ("drafter.k", drafter.k, 1)):
        if not values or min(values) < least:
            raise UserError(f"{name} should be one or more whole numbers, each at least {least}, not {values}.")
    if isinstance(rollout.tp, int) and not 0 < rollout.tp <= min(scenario.gpus):
        raise UserError(
            f"rollout.tp = {rollout.tp} does not fit {min(scenario.gpus)} GPUs.", "Lower it, or leave it at auto."
        )
    if rollout.mean_tokens >= rollout.max_tokens:
        raise UserError(
            f"rollout.mean_tokens ({rollout.mean_tokens:g}) is not below rollout.max_tokens ({rollout.max_tokens}).",
            "Give the mean after the cut, as a run's log shows it.",
        )
    if any(not 0 <= a <= 1 for a in drafter.acceptance) or not drafter.acceptance:
        raise UserError(f"drafter.acceptance should be shares from 0 to 1, not {drafter.acceptance}.")
    if drafter.survival is not None:
        check_survival(drafter.survival, "drafter.survival")
    if max(scenario.lag) and max(scenario.gpus) < 2:
        raise UserError("lag above 0 needs two GPUs or more: some generate while others train.", "Raise gpus.")


def check_survival(survival: list[float], where: str) -> None:
    falling = all(a >= b for a, b in zip([1.0, *survival], survival, strict=False))
    if not survival or not falling or min(survival) < 0:
        raise UserError(
            f"{where} should fall from at most 1 to at least 0, not {survival}.",
            "s_i is the share of rounds in which the first i drafts were all accepted.",
        )


# --- acceptance ----------------------------------------------------------------------------------------------------


def read_acceptance(text: str) -> dict[str, Any]:
    """`--acceptance`: several falling numbers are a survival curve, one number an even acceptance, else a finished
    eval-acceptance run. As scenario keys."""
    path = Path(text).expanduser()
    if path.exists():
        return {"drafter.survival": _of_run(path / "results.json" if path.is_dir() else path)}
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(
            f"--acceptance: {text} is no run and no list of numbers.",
            "Give an eval-acceptance run directory, 0.7, or a survival curve such as 0.8,0.62,0.47.",
        ) from error
    if len(numbers) == 1:
        return {"drafter.acceptance": numbers}
    check_survival(numbers, "--acceptance")
    return {"drafter.survival": numbers}


def _of_run(path: Path) -> list[float]:
    """Survival of the longest draft measured at the run's own temperature, with the fewest requests at once."""
    if not path.is_file():
        raise UserError(f"{path} does not exist.", "Finish `draftkit eval-acceptance` first, or name another run.")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        cells = [c for c in results["cells"] if c["k"] and c["temperature"] == results["temperature"]]
        survival = max(cells, key=lambda c: (c["k"], -c["concurrency"]))["survival"]
        numbers = [float(share) for share in survival]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} holds no cell with drafts (field {error}).", "Is it the results.json of an eval-acceptance run?"
        ) from error
    check_survival(numbers, str(path))
    return numbers


def survival_for(drafter: DrafterSection, acceptance: float) -> list[float]:
    """[s_1 .. s_k] up to the longest draft asked for; beyond what was measured the last ratio goes on."""
    longest = max(drafter.k)
    if drafter.survival is None:
        return [acceptance ** (i + 1) for i in range(longest)]
    curve = list(drafter.survival)
    before = curve[-2] if len(curve) > 1 else 1.0
    ratio = curve[-1] / before if before else 0.0
    while len(curve) < longest:
        curve.append(curve[-1] * ratio)
    return curve


def read_lengths(path: Path) -> Lengths:
    hint = "A text file with the tokens of one answer on each line."
    if not path.is_file():
        raise UserError(f"rollout.lengths: {path} does not exist.", hint)
    sample = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split(), 1):
        if not line.isdigit() or int(line) == 0:
            raise UserError(f"rollout.lengths: {path}, entry {number}: {line!r} is no number of tokens above 0.", hint)
        sample.append(float(line))
    if not sample:
        raise UserError(f"rollout.lengths: {path} is empty.", hint)
    return Lengths(sum(sample) / len(sample), int(max(sample)), sample=tuple(sample))


# --- building what is priced ---------------------------------------------------------------------------------------


def engine_of(section: EngineSection) -> Engine:
    given = {name: value for name, value in section.model_dump(exclude={"profile"}).items() if value is not None}
    return replace(calibration.ENGINES[section.profile], **given)


def cluster_of(scenario: Scenario, gpus: int, lag: int, requests: int) -> Cluster:
    rollout, trainer = scenario.rollout, scenario.trainer
    model = find_shape(scenario.model)
    drafter = eagle3_shape(model, scenario.drafter.vocab) if scenario.drafter.method == "eagle3" else None
    tp = rollout.tp if isinstance(rollout.tp, int) else 1
    server = Server(
        model, drafter, find_hardware(scenario.hardware), engine_of(scenario.engine), tp,
        rollout.precision, rollout.kv_precision,
    )  # fmt: skip
    lengths = Lengths(rollout.mean_tokens, rollout.max_tokens, rollout.sigma)
    if rollout.lengths is not None:
        lengths = read_lengths(Path(rollout.lengths).expanduser())
    batch = Rollouts(server, requests, 1, lengths, rollout.prompt_tokens, rollout.max_num_seqs)
    shares = trainer.model_dump(exclude={"gpus"})
    if trainer.gpus is not None and lag and trainer.gpus >= gpus:
        raise UserError(f"trainer.gpus = {trainer.gpus} leaves none of {gpus} GPUs to generate.", "Lower trainer.gpus.")
    cluster = Cluster(batch, Trainer(**shares), gpus, lag, trainer.gpus)
    if rollout.tp == "auto":
        return cluster.with_fastest_tp()
    server.check()
    return cluster
