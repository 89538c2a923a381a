"""Acceptance-rejection, enumerated: the joint law of k + 1 tokens after a speculative round equals the policy's own.

Every draft path and every accept pattern is summed in float64; a round that ends early is continued from the policy
itself. Five faults must break the equality. One that is often called a fault does not: drafts that were *sampled* but
are treated as one-hot throughout (accepted with p(draft), replaced from p without it) lose acceptance, not the law.

The last part runs vLLM's own CPU rejection kernels on the same random laws and tests what comes out against it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draftkit.engine import cure_sampling
from draftkit.rl import lossless
from draftkit.rl.lossless import Believed, Law, Prefix, speculative_round

EXACT = 1e-12
ALPHA = 1e-4  # of the sampled tests: seeds are fixed


class Tree:
    """Random logits for every prefix of up to k tokens."""

    def __init__(self, vocab: int, k: int, seed: int, sharpness: float = 1.5) -> None:
        rng = np.random.default_rng(seed)
        self.vocab, self.k = vocab, k
        self.prefixes = [p for n in range(k + 1) for p in itertools.product(range(vocab), repeat=n)]
        self.logits = {prefix: sharpness * rng.standard_normal(vocab) for prefix in self.prefixes}


def softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max())
    return odds / odds.sum()


def one_hot(token: int, size: int) -> np.ndarray:
    return np.eye(size)[token]


def top_p(p: np.ndarray, mass: float) -> np.ndarray:
    """The likeliest tokens until they hold `mass`, renormalised."""
    order = p.argsort()[::-1]
    needed = int((p[order].cumsum() < mass).sum()) + 1
    kept = np.zeros_like(p)
    kept[order[:needed]] = p[order[:needed]]
    return kept / kept.sum()


def sampled(tree: Tree) -> Law:
    return lambda prefix: softmax(tree.logits[prefix])


def greedy(tree: Tree) -> Law:
    return lambda prefix: one_hot(int(tree.logits[prefix].argmax()), tree.vocab)


def truncated(tree: Tree, mass: float) -> Law:
    return lambda prefix: top_p(softmax(tree.logits[prefix]), mass)


def reduced(tree: Tree, draft_to_target: list[int], hot: bool = False) -> Law:
    """A drafter whose head has one row for each of its tokens; draft id d stands for draft_to_target[d]."""

    def law(prefix: Prefix) -> np.ndarray:
        own = tree.logits[prefix][: len(draft_to_target)]
        q = np.zeros(tree.vocab)
        q[draft_to_target] = one_hot(int(own.argmax()), len(own)) if hot else softmax(own)
        return q

    return law


def autoregressive(target: Law, length: int) -> dict[Prefix, float]:
    law = {(): 1.0}
    for _ in range(length):
        law = {(*prefix, x): c * share for prefix, c in law.items() for x, share in enumerate(target(prefix))}
    return law


def error(target: Law, drafter: Law, k: int, vocab: int, believed: Believed | None = None) -> float:
    """Largest difference of the joint over k + 1 tokens, the round's missing tokens drawn from the target."""
    joint = dict.fromkeys(itertools.product(range(vocab), repeat=k + 1), 0.0)
    for tokens, chance in speculative_round(target, drafter, k, believed).items():
        for rest in itertools.product(range(vocab), repeat=k + 1 - len(tokens)):
            share = chance
            for i, token in enumerate(rest):
                share *= target(tokens + rest[:i])[token]
            joint[tokens + rest] += share
    assert sum(joint.values()) == pytest.approx(1, abs=EXACT)
    exact = autoregressive(target, k + 1)
    return max(abs(joint[tokens] - exact[tokens]) for tokens in joint)


SIZES = pytest.mark.parametrize(
    ("vocab", "k", "seed"), [(2, 3, 0), (3, 3, 1), (4, 2, 2), (4, 3, 3), (6, 2, 4), (6, 3, 5)]
)
MAP = [1, 2, 5]  # a draft vocabulary of three tokens of six


@SIZES
def test_sampled_drafts_with_their_full_q(vocab, k, seed):
    target, drafter = Tree(vocab, k, seed), Tree(vocab, k, seed + 100)
    assert error(sampled(target), sampled(drafter), k, vocab) < EXACT


@SIZES
def test_greedy_drafts_as_one_hot(vocab, k, seed):
    target, drafter = Tree(vocab, k, seed), Tree(vocab, k, seed + 100)
    assert error(sampled(target), greedy(drafter), k, vocab) < EXACT


@pytest.mark.parametrize("hot", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_reduced_draft_vocabulary(hot, k):
    target, drafter = Tree(6, k, 6), Tree(6, k, 7)
    assert error(sampled(target), reduced(drafter, MAP, hot), k, 6) < EXACT


@pytest.mark.parametrize("mass", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("drafting", [sampled, greedy])
def test_a_target_cut_to_its_top_p(mass, drafting):
    target, drafter = Tree(5, 3, 8), Tree(5, 3, 9)
    assert error(truncated(target, mass), drafting(drafter), 3, 5) < EXACT
    assert any((truncated(target, mass)(prefix) == 0).any() for prefix in target.prefixes)


@pytest.mark.parametrize("drafting", [sampled, greedy])
def test_temperature_zero(drafting):
    """The target is one-hot: exactly its argmax text comes out, with either kind of draft."""
    target, drafter = Tree(5, 3, 10), Tree(5, 3, 11)
    assert error(greedy(target), drafting(drafter), 3, 5) < EXACT
    agreeing = sum(int(target.logits[p].argmax() == drafter.logits[p].argmax()) for p in target.prefixes)
    assert 0 < agreeing < len(target.prefixes)


def test_a_drafter_equal_to_the_target_is_always_accepted():
    target = Tree(4, 3, 12)
    law = speculative_round(sampled(target), sampled(target), 3)
    assert sum(chance for tokens, chance in law.items() if len(tokens) == 4) == pytest.approx(1, abs=EXACT)


def test_acceptance_is_one_minus_total_variation():
    target, drafter = Tree(6, 1, 13), Tree(6, 1, 14)
    law = speculative_round(sampled(target), sampled(drafter), 1)
    p, q = softmax(target.logits[()]), softmax(drafter.logits[()])
    assert sum(c for tokens, c in law.items() if len(tokens) == 2) == pytest.approx(np.minimum(p, q).sum(), abs=EXACT)


# --- faults -----------------------------------------------------------------------------------------------------

TARGET, DRAFTER = Tree(6, 2, 20), Tree(6, 2, 21)
P, Q = sampled(TARGET), sampled(DRAFTER)
WRONG = 1e-3  # every fault moves some joint probability by more


def fault(believed: Believed | None = None, *, target: Law = P, drafter: Law = Q) -> float:
    return error(target, drafter, 2, 6, believed)


def test_the_setting_of_the_faults_is_right_without_them():
    assert fault() < EXACT


def test_sampled_drafts_taken_as_one_hot_throughout_keep_the_law_and_lose_acceptance():
    """Whatever the draft is, accepting it with p(draft) and else sampling from p without it gives p."""

    def consistent(prefix: Prefix, draft: int) -> tuple[np.ndarray, np.ndarray]:
        return one_hot(draft, 6), one_hot(draft, 6)

    assert fault(consistent) < EXACT
    all_accepted = lambda law: sum(c for tokens, c in law.items() if len(tokens) == 3)  # noqa: E731
    assert all_accepted(speculative_round(P, Q, 2, consistent)) < 0.7 * all_accepted(speculative_round(P, Q, 2))


def test_fault_one_hot_q_with_sampled_drafts():
    """Of acceptance and recovery only one takes the sampled draft as one-hot, or recovery takes off q(draft) alone."""
    assert fault(lambda prefix, draft: (Q(prefix), one_hot(draft, 6))) > WRONG
    assert fault(lambda prefix, draft: (one_hot(draft, 6), Q(prefix))) > WRONG
    assert fault(lambda prefix, draft: (Q(prefix), Q(prefix) * one_hot(draft, 6))) > WRONG


def test_fault_full_q_with_greedy_drafts():
    assert fault(lambda prefix, draft: (Q(prefix), Q(prefix)), drafter=greedy(DRAFTER)) > WRONG


def test_fault_residual_left_out(monkeypatch):
    monkeypatch.setattr(lossless, "recovery", lambda p, q: p)
    assert fault() > WRONG
    assert fault(drafter=greedy(DRAFTER)) > WRONG


def test_fault_bonus_token_from_the_drafter(monkeypatch):
    monkeypatch.setattr(lossless, "bonus", lambda p, q: q)
    assert fault() > WRONG


def test_fault_p_before_top_p(monkeypatch):
    """Drafts are accepted by the whole p; what replaces them, and the bonus, is cut."""
    cut = truncated(TARGET, 0.8)
    whole = {cut(prefix).tobytes(): P(prefix) for prefix in TARGET.prefixes}
    assert fault(target=cut) < EXACT
    honest = lossless.acceptance
    monkeypatch.setattr(lossless, "acceptance", lambda p, q, draft: honest(whole[p.tobytes()], q, draft))
    assert fault(target=cut) > WRONG


def test_fault_draft_vocabulary_off_by_one():
    """q is scattered by the right map, the proposed ids by a wrong one. A map that both share costs acceptance only."""
    right, wrong = reduced(DRAFTER, MAP), reduced(DRAFTER, [token - 1 for token in MAP])
    assert fault(lambda prefix, draft: (right(prefix), right(prefix)), drafter=wrong) > WRONG
    assert fault(drafter=wrong) < EXACT


# --- vLLM's kernels ---------------------------------------------------------------------------------------------

NUM_ROUNDS = 40_000


def vllm_rounds(target: Tree, law: Law, k: int, with_q: bool) -> list[Prefix]:
    """What vLLM's sampler emits in NUM_ROUNDS rounds, drafts drawn from `law`."""
    from vllm.v1.sample.rejection_sampler import rejection_sample

    rng = np.random.default_rng(3)
    torch.manual_seed(4)
    drafts = np.zeros((NUM_ROUNDS, k + 1), dtype=np.int64)
    logits = np.zeros((NUM_ROUNDS, k + 1, target.vocab))
    q = np.zeros((NUM_ROUNDS, k, target.vocab))
    for row in range(NUM_ROUNDS):
        for i in range(k + 1):
            prefix = tuple(drafts[row, :i].tolist())
            logits[row, i] = target.logits[prefix]
            from_law = law(prefix) if i < k else softmax(target.logits[prefix])
            drafts[row, i] = min(int((from_law.cumsum() < rng.random()).sum()), target.vocab - 1)
            if i < k:
                q[row, i] = from_law
    emitted = rejection_sample(
        torch.from_numpy(drafts[:, :k].reshape(-1)).to(torch.int32),
        [k] * NUM_ROUNDS,
        k,
        torch.arange(k, k * NUM_ROUNDS + 1, k, dtype=torch.int32),
        torch.from_numpy(q).reshape(-1, target.vocab).float().contiguous() if with_q else None,
        torch.from_numpy(logits[:, :k]).reshape(-1, target.vocab).float().contiguous(),
        torch.from_numpy(drafts[:, k:]).to(torch.int32).contiguous(),
        SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(NUM_ROUNDS), generators={}),
    )
    return [tuple(token for token in row if token >= 0) for row in emitted.tolist()]


def p_value(seen: list[Prefix], law: dict[Prefix, float]) -> float:
    """Pearson's test; outcomes with under five expected are pooled."""
    counts = Counter(seen)
    if counts.keys() - law.keys():
        return 0.0
    cells = [(counts[tokens], len(seen) * chance) for tokens, chance in law.items()]
    few = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5] + ([tuple(map(sum, zip(*few, strict=True)))] if few else [])
    statistic = sum((n - expected) ** 2 / max(expected, 1e-9) for n, expected in cells)
    half = torch.tensor([len(cells) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*half))


@pytest.mark.engine
@pytest.mark.parametrize(("hot", "with_q"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("k", [1, 3])
def test_vllm_kernels_follow_the_exact_law(hot, with_q, k):
    """Greedy drafts without q, sampled drafts with it, and sampled drafts without it (lossless, as enumerated)."""
    cure_sampling()
    target, drafter = Tree(4, k, 30), Tree(4, k, 31)
    law = greedy(drafter) if hot else sampled(drafter)
    seen = vllm_rounds(target, law, k, with_q)
    as_one_hot: Believed = lambda prefix, draft: (one_hot(draft, 4), one_hot(draft, 4))  # noqa: E731
    exact = speculative_round(sampled(target), law, k, None if with_q else as_one_hot)
    assert p_value(seen, exact) > ALPHA
    wrong = lambda prefix, draft: (law(prefix), one_hot(draft, 4))  # noqa: E731
    if with_q:
        assert p_value(seen, speculative_round(sampled(target), law, k, wrong)) < ALPHA
