"""Rollouts: conversations of the policy with an environment, many at once, as exact token records.

    prompts x G samples -> active conversations
    one turn: all active ones in one engine call -> the environment answers each -> those that go on are active
    at the end: one Trajectory a conversation

A conversation is the engine's own token ids and, between turns, the tokens that the chat template puts there
(`template.py`); nothing sampled is ever tokenised again. Every turn is a request of its own, never n > 1, so that
acceptance is counted by request, and with a seed of its own made of (seed, step, group, prompt, sample, turn).

A conversation that does not end by itself is truncated: its last turn ran into max_tokens or the context, or its
environment would go on where no turn is left (rl.max_turns, or no room in the context for another). The environment is
then asked for the reward with `last`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol

from draftkit.data.respond import request_seed
from draftkit.recipe import Recipe
from draftkit.rl.envs import Environment
from draftkit.rl.template import ChatTemplate, Message
from draftkit.types import Document, Generation, Prompt, Sampling, SpecCounters, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Answers(Protocol):
    """The part of `engine.Engine` that is used here."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[Generation]: ...


@dataclass(frozen=True, slots=True)
class Collected:
    """Trajectories in the order (prompt, sample), and the wall seconds that the engine and the environment took."""

    trajectories: list[Trajectory]
    generate_s: float
    reward_s: float


@dataclass(slots=True)
class _Conversation:
    prompt: Prompt
    group: int
    sample: int
    messages: list[Message]
    tokens: list[int]
    mask: list[bool]
    logp: list[float]
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    truncated: bool = False

    def grow(self, tokens: Sequence[int], logp: Sequence[float] | None = None) -> None:
        """logp None: tokens that were not sampled."""
        self.tokens += tokens
        self.mask += [logp is not None] * len(tokens)
        self.logp += [0.0] * len(tokens) if logp is None else logp
        assert len(self.tokens) == len(self.mask) == len(self.logp)

    def say(self, generation: Generation, text: str) -> None:
        """Take the policy's turn into the record."""
        assert generation.logprobs is not None and generation.response_ids
        first = len(self.tokens)
        self.grow(generation.response_ids, generation.logprobs)
        self.turns.append(Turn(first, len(self.tokens), generation.finish_reason, generation.spec))
        self.messages.append({"role": "assistant", "content": text})

    def trajectory(self, policy_version: int, draft_version: int, k: int) -> Trajectory:
        return Trajectory(
            prompt_id=self.prompt.id,
            task=self.prompt.task,
            group=self.group,
            sample=self.sample,
            tokens=tuple(self.tokens),
            mask=tuple(self.mask),
            engine_logp=tuple(self.logp),
            turns=tuple(self.turns),
            reward=self.reward,
            truncated=self.truncated,
            policy_version=policy_version,
            draft_version=draft_version,
            k=k,
        )


def collect(
    engine: Answers,
    prompts: Sequence[Prompt],
    environment: Environment,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    *,
    policy_version: int,
    draft_version: int,
    k: int,
    seed: int,
    step: int,
    first_group: int = 0,
    num_samples: int | None = None,
    temperature: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> Collected:
    """Talk about every prompt `sampling.n` times, in turns of all conversations at once.

    k: the draft length in force, for the record. step, first_group: with the order of the prompts they make requests
    unique in a run, also where a step asks for more prompts (first_group: how many it had before) or repeats one.
    num_samples, temperature: in place of the recipe's, for evaluation. progress(n): n more turns are finished.
    """
    template = ChatTemplate(tokenizer, recipe.sampling.thinking)
    settings = recipe.sampling
    num_samples = settings.n if num_samples is None else num_samples
    # Drafters look k + 1 tokens past the last one, and the engine keeps as far from the end of the context.
    context = recipe.engine.max_model_len - (0 if recipe.spec.method == "none" else recipe.spec.k + 1)

    conversations = []
    for number, prompt in enumerate(prompts):
        rendered = template.prompt(prompt.messages)
        for sample in range(num_samples):
            conversation = _Conversation(prompt, first_group + number, sample, list(prompt.messages), [], [], [])
            conversation.grow(rendered)
            conversations.append(conversation)

    def request(c: _Conversation) -> Sampling:
        return Sampling(
            temperature=settings.temperature if temperature is None else temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=settings.max_tokens,
            stop=tuple(settings.stop),
            seed=request_seed(seed, step, c.group, c.prompt.id, c.sample, len(c.turns)),
            logprobs=True,
        )

    def goes_on(c: _Conversation) -> bool:
        """Let the environment answer the turn just taken."""
        c.truncated = c.turns[-1].finish_reason != "stop"
        said = environment(c.prompt, c.messages, c.truncated)
        if isinstance(said, dict):
            between = template.between([*c.messages, said], c.tokens[-1])
            if len(c.turns) < recipe.rl.max_turns and len(c.tokens) + len(between) < context:
                c.messages.append(said)
                c.grow(between)
                return True
            c.truncated = True
            said = environment(c.prompt, c.messages, True)
        c.reward = said
        return False

    active, generate_s, reward_s = conversations, 0.0, 0.0
    while active:
        start = time.perf_counter()
        generations = engine.generate([c.tokens for c in active], [request(c) for c in active], progress=progress)
        generated = time.perf_counter()
        for c, generation in zip(active, generations, strict=True):
            c.say(generation, tokenizer.decode(generation.response_ids, skip_special_tokens=True))
        active = [c for c in active if goes_on(c)]
        generate_s += generated - start
        reward_s += time.perf_counter() - generated
    trajectories = [c.trajectory(policy_version, draft_version, k) for c in conversations]
    return Collected(trajectories, generate_s, reward_s)


def acceptance_by_turn(trajectories: Sequence[Trajectory]) -> list[SpecCounters]:
    """Speculation counters summed over all conversations, for the first turn, the second, ..."""
    by_turn = zip_longest(*([turn.spec or SpecCounters() for turn in t.turns] for t in trajectories))
    return [sum(filter(None, counters), SpecCounters()) for counters in by_turn]


def document(trajectory: Trajectory) -> Document:
    """As the drafter is trained on it: supervised where the policy sampled."""
    return Document(trajectory.tokens, trajectory.mask)
