"""Recipes: one YAML, strict pydantic models, `a.b=value` overrides, and where each value came from.

Precedence: defaults < recipe < override < named flag; a flag and an override of the same field is an error.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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


class DrafterSection(Section):
    kind: Literal["eagle3"] = "eagle3"
    init: str | None = None  # directory of an existing drafter to warm-start from; default: from the verifier
    aux_layers: list[int] | None = None  # verifier layer ids as vLLM counts them; default (2, n//2, n-3)
    draft_vocab_size: int | None = Field(None, gt=0)  # default: chosen from the corpus by vocab_coverage
    vocab_coverage: float = Field(0.999, gt=0, le=1)
    num_layers: int = Field(1, ge=1)
    intermediate_size: int | None = Field(None, gt=0)
    norm_before_residual: bool = False


class TrainSection(Section):
    epochs: float = Field(4.0, gt=0)
    max_minutes: float | None = Field(None, gt=0)  # the schedule is stretched over steps, not over time
    tokens_per_batch: int = Field(2048, gt=0)  # slots of one packed batch, before gradient accumulation
    seq_len: int = Field(512, gt=0)  # slots of one packed row; longer documents are cut, and said so
    grad_accum: int = Field(1, gt=0)
    ttt_steps: int = Field(3, ge=1)
    ttt_decay: float = Field(0.8, gt=0, le=1)
    loss: Literal["kl", "ce", "tv", "lk_hybrid"] = "kl"
    lr: float = Field(1e-3, gt=0)
    lr_min_ratio: float = Field(0.05, ge=0, le=1)
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = Field(1.0, gt=0)
    capture: Literal["cache", "stream"] = "cache"
    eval_every: int = Field(100, gt=0)  # steps
    save_every: int = Field(100, gt=0)  # steps
    keep: int = Field(2, ge=1)  # checkpoints kept
    seed: int = 0
    parity: bool = True
    parity_prompts: int = Field(8, gt=0)


class EvalSection(Section):
    k: list[int] = [0, 1, 2, 3, 5]
    concurrency: list[int] = [1, 4, 16]
    temperatures: list[float] | None = None  # default: the rollout temperature, and greedy
    prompts: int = Field(16, gt=0)  # held-out prompts a cell (repeated to fill the concurrency)
    max_tokens: int = Field(96, gt=0)
    repeats: int = Field(3, ge=1)
    warmup_tokens: int = Field(16, ge=0)
    seed: int = 0


class Recipe(Section):
    name: str = "quickstart"
    description: str = ""
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    sampling: SamplingSection = SamplingSection()
    data: DataSection = DataSection()
    drafter: DrafterSection = DrafterSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
