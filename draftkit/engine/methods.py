"""Speculative methods: which ones the installed vLLM knows."""

from __future__ import annotations

from typing import Any


def speculative_methods() -> set[str]:
    """The method names that the installed vLLM knows: its own nested Literal, flattened."""
    from typing import get_args

    from vllm.config.speculative import SpeculativeMethod

    def flatten(alias: Any) -> set[str]:
        return {alias} if isinstance(alias, str) else set().union(*map(flatten, get_args(alias)))

    return flatten(SpeculativeMethod)
