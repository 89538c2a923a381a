"""The nouns that cross rooms. Frozen, slotted, and free of heavy imports (torch only for annotations).

Shape suffixes used in the whole package: B batch (packed rows), T slots in a row, H hidden size, A auxiliary
layers, V verifier vocabulary, D draft vocabulary, K draft positions of one round, L test-time-training steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Prompt:
    """One RL prompt before rendering. `id` is unique inside a corpus; `task` names the verifier that scores it."""

    id: str
    messages: tuple[dict[str, str], ...]
    task: str
    answer: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled answer, as token ids that the engine itself returned (never re-tokenised text)."""

    prompt_id: str
    sample: int
    task: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    finish_reason: str
    reward: float | None
    temperature: float


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of one generation call. `top_k` 0 means off; `max_tokens` counts response tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """How an engine speculates. `model` is a drafter directory (None for `ngram`); `k` the most tokens drafted a round."""

    method: str
    model: str | None
    k: int
    draft_sample_method: str = "greedy"


@dataclass(frozen=True, slots=True)
class SpecCounters:
    """Speculation counters. Engine counters are cumulative: subtract two snapshots to measure a window.

    `accepted_per_pos[i]` counts rounds in which draft position i (0-based) was accepted, so that
    `accepted_per_pos[i] / num_drafts` is the unconditional survival s_{i+1}.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_per_pos: tuple[int, ...] = ()

    def __neg__(self) -> SpecCounters:
        return SpecCounters(
            -self.num_drafts, -self.num_draft_tokens, -self.num_accepted, tuple(-n for n in self.accepted_per_pos)
        )

    def __sub__(self, other: SpecCounters) -> SpecCounters:
        return self + -other

    def __add__(self, other: SpecCounters) -> SpecCounters:
        width = max(len(self.accepted_per_pos), len(other.accepted_per_pos))
        pad = lambda t: tuple(t) + (0,) * (width - len(t))  # noqa: E731
        return SpecCounters(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted + other.num_accepted,
            tuple(a + b for a, b in zip(pad(self.accepted_per_pos), pad(other.accepted_per_pos), strict=True)),
        )

    @property
    def acceptance_length(self) -> float:
        """tau = 1 + accepted / drafts: tokens a round, the bonus token included; 1.0 when nothing was drafted."""
        return 1.0 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    def survival(self, k: int) -> list[float]:
        """[s_1 .. s_k]: share of rounds in which the first i draft tokens were all accepted."""
        counts = tuple(self.accepted_per_pos) + (0,) * k
        return [counts[i] / self.num_drafts if self.num_drafts else 0.0 for i in range(k)]


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished request. `spec` holds its own counters, None from an engine that does not speculate."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    finish_reason: str
    spec: SpecCounters | None = None


@dataclass(frozen=True, slots=True)
class Capture:
    """What one forward of the verifier leaves for the drafter, for one document of T tokens.

    tokens_T int64; mask_T bool, True on supervised (response) tokens; aux_TAH the auxiliary layers' residual
    streams concatenated, [T, A*H]; last_TH the post-final-norm hidden state, whose product with the LM head is
    the teacher's logits. Both in bfloat16.
    """

    tokens_T: torch.Tensor
    mask_T: torch.Tensor
    aux_TAH: torch.Tensor
    last_TH: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Documents packed into rows for the drafter. Everything is aligned to *slots*: see `data/batch.py`.

    tokens_BT int64: x[p]; doc_BT int64: document number, -1 on padding; pos_BT int64: position inside the document;
    mask_BT bool: supervised token; aux_BTAH and last_BTH as in `Capture`.
    """

    tokens_BT: torch.Tensor
    doc_BT: torch.Tensor
    pos_BT: torch.Tensor
    mask_BT: torch.Tensor
    aux_BTAH: torch.Tensor
    last_BTH: torch.Tensor
