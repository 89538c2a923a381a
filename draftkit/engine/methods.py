"""Speculative methods: what draftkit calls them, which ones the installed vLLM knows, and which acceptance is lossless.

Speculation is only allowed to change how long a rollout takes. vLLM also has acceptance that does more (`synthetic`,
for benchmarks), and its names change between versions, so a name has to be known here *and* to the installed vLLM.
"""

from __future__ import annotations

from typing import Any

from draftkit.errors import UserError
from draftkit.types import SpecConfig

METHODS = {
    "eagle3": "eagle3",
    "eagle": "eagle",
    "mtp": "mtp",
    "draft-lm": "draft_model",
    "draft_model": "draft_model",
    "ngram": "ngram",
}
# What accepts and resamples so that the target's distribution is kept exactly: `standard` (Leviathan et al.) and, of
# versions that call it so, `strict` (the same for one-hot drafts) and `probabilistic` (for sampled drafts).
LOSSLESS = {"standard", "strict", "probabilistic"}
NOT_ALLOWED = {
    "synthetic": "accepts drafts at a rate set beforehand, whatever the verifier says",
    "block": "exists only in vLLM's second model runner; the first, which draftkit drives, would serve `standard` with "
    "greedy drafts in its place",
    "typical_acceptance_sampler": "accepts tokens that the verifier would sample less often",
}
UNKNOWN = "is not known to keep the policy's distribution"
NGRAM_LOOKUP_MAX = 4


def speculative_methods() -> set[str]:
    """The method names that the installed vLLM knows: its own nested Literal, flattened."""
    from vllm.config.speculative import SpeculativeMethod

    return _flatten(SpeculativeMethod)


def acceptance_methods() -> tuple[set[str], str]:
    """(all names of `rejection_sample_method` that the installed vLLM knows, its default)."""
    from vllm.config.speculative import RejectionSampleMethod, SpeculativeConfig

    return _flatten(RejectionSampleMethod), SpeculativeConfig.rejection_sample_method


def _flatten(alias: Any) -> set[str]:
    from typing import get_args

    return {alias} if isinstance(alias, str) else set().union(*map(_flatten, get_args(alias)))


def check_lossless(spec: SpecConfig) -> None:
    """Raises UserError for a method that is not known and for acceptance that is not known to keep the distribution."""
    if spec.method not in METHODS or METHODS[spec.method] not in speculative_methods():
        raise UserError(f"speculative method '{spec.method}' is not known.", f"Use one of {', '.join(METHODS)}.")
    if spec.k < 1:
        raise UserError(f"spec.k is {spec.k}.", "A speculating engine drafts at least one token; `set_k(0)` pauses it.")
    if spec.draft_sample_method not in ("greedy", "probabilistic"):
        raise UserError(
            f"spec.draft_sample_method '{spec.draft_sample_method}' is not known.", "Use greedy or probabilistic."
        )
    if spec.own_vocab and spec.draft_sample_method != "greedy":
        raise UserError(
            "spec.draft_sample_method 'probabilistic': a draft model with a tokenizer of its own drafts greedily only.",
            "Use greedy.",
        )
    known, default = acceptance_methods()
    name = spec.rejection_sample_method or default
    if name not in known & LOSSLESS:
        why = UNKNOWN if name in known else "is not known to the installed vLLM"
        allowed = ", ".join(sorted(known & LOSSLESS)) or "none of this vLLM's"
        raise _refusal(name, why, f"Allowed with the installed vLLM: {allowed}.")


def refuse_by_name(rejection_sample_method: str | None) -> None:
    """What of `check_lossless` needs no vLLM, for a dry run."""
    if rejection_sample_method is not None and rejection_sample_method not in LOSSLESS:
        allowed = f"Lossless are {', '.join(sorted(LOSSLESS))}, as far as the installed vLLM knows them."
        raise _refusal(rejection_sample_method, UNKNOWN, allowed)


def _refusal(name: str, otherwise: str, allowed: str) -> UserError:
    """otherwise: why, where the reason is not a known one."""
    why = NOT_ALLOWED.get(name, otherwise)
    return UserError(f"spec.rejection_sample_method '{name}' is refused: it {why}.", allowed)


def speculative_config(spec: SpecConfig, max_num_seqs: int) -> dict[str, Any]:
    """vLLM's `speculative_config` for a checked spec."""
    config: dict[str, Any] = {"method": METHODS[spec.method], "num_speculative_tokens": spec.k}
    if spec.method == "ngram":
        config["prompt_lookup_max"] = NGRAM_LOOKUP_MAX
    else:
        config["draft_sample_method"] = spec.draft_sample_method
    if spec.model is not None:  # an MTP head may sit in the verifier's own checkpoint
        config["model"] = str(spec.model)
    if spec.own_vocab:
        config["use_heterogeneous_vocab"] = True
    if spec.rejection_sample_method is not None:
        config["rejection_sample_method"] = spec.rejection_sample_method
    # A schedule, even a constant one, is what lets `set_k` change the draft length of a running engine.
    config["num_speculative_tokens_per_batch_size"] = [(1, max_num_seqs, spec.k)]
    return config


def check_served_lossless(served: Any) -> None:
    """The same for what an engine was built with: its own speculative config, read back."""
    known, _ = acceptance_methods()
    lossy = served.rejection_sample_method not in known & LOSSLESS
    lossy |= served.synthetic_acceptance_rates is not None
    assert not lossy, f"this engine would not keep the policy's distribution: {served}"
