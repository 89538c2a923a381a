"""The nouns that cross rooms. Frozen, slotted, and free of heavy imports (torch only for annotations).

Shape suffixes used in the whole package: N tokens of a batch, T tokens of a document, R drafter slots of a batch,
H hidden size, A auxiliary layers, F = A * H, V verifier vocabulary, D draft vocabulary, L test-time-training steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
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
    min_tokens: int = 0  # an answer cannot end before
    logprobs: bool = False  # ask for the log-probability of every sampled token


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """How an engine speculates. model: a drafter directory, None for `ngram`; k: the most tokens drafted a round.

    target: a directory to serve in place of the verifier's own, the verifier with its MTP layers stitched in.
    rejection_sample_method None is the installed vLLM's default; only lossless ones are served (`engine`). own_vocab:
    the draft model has another tokenizer than the verifier.
    """

    method: str
    model: str | None
    k: int
    draft_sample_method: str = "greedy"
    rejection_sample_method: str | None = None
    target: str | None = None
    own_vocab: bool = False


@dataclass(frozen=True, slots=True)
class SpecCounters:
    """Speculation counters. Engine counters are cumulative: subtract two snapshots to measure a window.

    `accepted_per_pos[i]` counts rounds in which draft position i (0-based) was accepted, `drafted_per_pos[i]` those in
    which it was drafted, so that their quotient is the unconditional survival s_{i+1}, also where k varies. Empty:
    every position was drafted in every round.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    drafted_per_pos: tuple[int, ...] = ()

    def __neg__(self) -> SpecCounters:
        per_pos = (tuple(-n for n in counts) for counts in (self.accepted_per_pos, self.drafted_per_pos))
        return SpecCounters(-self.num_drafts, -self.num_draft_tokens, -self.num_accepted, *per_pos)

    def __sub__(self, other: SpecCounters) -> SpecCounters:
        return self + -other

    def __add__(self, other: SpecCounters) -> SpecCounters:
        return SpecCounters(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted + other.num_accepted,
            _sums(self.accepted_per_pos, other.accepted_per_pos),
            _sums(self.drafted_per_pos, other.drafted_per_pos),
        )

    @property
    def acceptance_length(self) -> float:
        """tau = 1 + accepted / drafts: tokens a round, the bonus token included; 1.0 when nothing was drafted."""
        return 1.0 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    def survival(self, k: int) -> list[float]:
        """[s_1 .. s_k]: share of rounds in which the first i draft tokens were all accepted."""
        counts = tuple(self.accepted_per_pos) + (0,) * k
        return [counts[i] / self.rounds_at(i) if self.rounds_at(i) else 0.0 for i in range(k)]

    @classmethod
    def read(cls, raw: dict[str, Any]) -> SpecCounters:
        """From what `dataclasses.asdict` made and JSON kept."""
        per_pos = {name: tuple(raw[name]) for name in ("accepted_per_pos", "drafted_per_pos")}
        return cls(**raw | per_pos)

    def rounds_at(self, i: int) -> int:
        """Rounds in which position i (0-based) was drafted."""
        if not self.drafted_per_pos:
            return self.num_drafts
        return self.drafted_per_pos[i] if i < len(self.drafted_per_pos) else 0


def _sums(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished request. `spec` holds its own counters, None from an engine that does not speculate.

    logprobs: of the sampled tokens under the distribution that was sampled from (temperature, top-p and top-k
    applied), None unless asked for. num_cached: prompt tokens that came from the prefix cache.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    finish_reason: str
    spec: SpecCounters | None = None
    logprobs: tuple[float, ...] | None = None
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One engine step as measured: requests running, draft length in force, tokens that came out, wall seconds, and
    the part of them spent in the drafter. prompt: tokens of prompts processed in it; context: tokens that all its
    requests had in the cache before it."""

    running: int
    k: int
    tokens: int
    seconds: float
    draft_seconds: float
    prompt: int = 0
    context: int = 0

    @property
    def prefill(self) -> bool:
        return self.prompt > 0


@dataclass(frozen=True, slots=True)
class Turn:
    """tokens[first:last] of a trajectory, sampled in one engine call."""

    first: int
    last: int
    finish_reason: str
    spec: SpecCounters | None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One conversation of an RL batch: T tokens as the engine saw them, never re-tokenised.

    mask[t]: token t was sampled by the policy (prompt, user and tool tokens are not). engine_logp[t]: its
    log-probability as the engine sampled it, 0.0 where not masked. group: number of its prompt in the batch, whose
    samples are compared with each other. truncated: it ran into a length limit instead of ending by itself.
    policy_version, draft_version: of the weights that sampled it; k: the draft length in force.
    """

    prompt_id: str
    task: str
    group: int
    sample: int
    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    engine_logp: tuple[float, ...]
    turns: tuple[Turn, ...]
    reward: float
    truncated: bool
    policy_version: int
    draft_version: int
    k: int


@dataclass(frozen=True, slots=True)
class Document:
    """One rollout as the drafter sees it: prompt and response in one sequence of T tokens.

    mask[t] is True where token t is supervised (sampled by the verifier). task: the family of its prompt.
    """

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    task: str = ""


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Documents laid end to end (no padding), with the verifier's states. N tokens, R slots (rows the drafter is
    trained on), F = A * Ht.

    tokens_N int64; pos_N int64, position inside the document; aux_NF, the auxiliary layers' residual streams
    concatenated; last_NH, the final-normed hidden state, whose product with the LM head is the teacher's logits;
    lse_N and max_N float32: log-sum-exp and maximum of the teacher's full-vocabulary logits over the sampling
    temperature; top_N int64: the teacher's argmax. segments: runs of slots (start, first, last): the slots
    first <= p < last attend to the tokens start <= t <= p. slot_R int64: all those p in order.
    valid_LR bool: slot r is supervised at TTT step i (its tokens p+1 .. p+2+i are all supervised).
    """

    tokens_N: torch.Tensor
    pos_N: torch.Tensor
    aux_NF: torch.Tensor
    last_NH: torch.Tensor
    lse_N: torch.Tensor
    max_N: torch.Tensor
    top_N: torch.Tensor
    segments: tuple[tuple[int, int, int], ...]
    slot_R: torch.Tensor
    valid_LR: torch.Tensor
