"""Behaviour tests of the installed vLLM, for `draftkit doctor`: what is wrong, and whether draftkit mends it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from draftkit.engine import faults, weights
from draftkit.engine.core import Engine, prepare_environment
from draftkit.engine.probe import expected_probe, probe_mismatches
from draftkit.recipe import EngineSection
from draftkit.types import Sampling


def self_tests() -> list[dict[str, Any]]:
    """Behaviour tests of the installed vLLM for `doctor`: [{"name", "ok", "detail", "cure"}], ok after the cure."""
    prepare_environment(EngineSection())
    from vllm.platforms import current_platform

    seeds = ("seeds of sampled drafts", faults.draft_seed_fault, "sampled drafts of a request with a seed repeat")
    if not current_platform.is_cpu():
        absent = {"name": "speculative sampling", "ok": True, "detail": "not the CPU build: fault absent", "cure": ""}
        return [absent, *_function_tests([seeds], faults.cure_draft_seeds)]
    of_cpu = [
        ("speculative sampling at temperature > 0", faults.sampling_fault, "expand_batch_to_tokens is right"),
        ("speculative sampling with top-k", faults.top_k_fault, "apply_top_k_top_p takes a step without drafts"),
    ]
    checks = _function_tests(of_cpu, faults.cure_sampling)
    return [*checks, *_function_tests([seeds], faults.cure_draft_seeds), *reload_tests()]


def _function_tests(
    tests: list[tuple[str, Callable[[], str | None], str]], cure_them: Callable[[], object]
) -> list[dict[str, Any]]:
    found = [find() for _, find, _ in tests]
    cure_them()
    checks = []
    for (name, find, right), fault in zip(tests, found, strict=True):
        ok = find() is None
        cure = "replaced by a function of our own when an engine is built" if fault and ok else ""
        checks.append({"name": name, "ok": ok, "detail": fault or right, "cure": cure})
    return checks


def reload_tests() -> list[dict[str, Any]]:
    """Publish other weights into a running tiny engine and back: outputs must change, then return exactly, and the
    engine must hold what was published. Its LM head is tied to its embedding."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    original = {name: w.clone() for name, w in model.state_dict().items() if name != "lm_head.weight"}
    changed = {name: torch.roll(w, 1, 0) if w.dim() == 2 else w for name, w in original.items()}
    prompts = [[i + 1, 2 * i + 3, 5] for i in range(4)]
    greedy = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        section = EngineSection(max_model_len=128, max_num_seqs=4, kv_cache_gib=1)
        with Engine(directory, recipe_engine=section) as engine:
            answers = lambda: [g.response_ids for g in engine.generate(prompts, greedy)]  # noqa: E731
            first = answers()
            plain_fault = ""
            try:
                engine._runner.model.load_weights(iter(changed.items()))
            except (AssertionError, AttributeError, ValueError, RuntimeError) as error:
                plain_fault = f"plain load_weights fails on a running engine ({str(error).splitlines()[0][:90]})"
            engine.load_verifier(changed.items())
            second = answers()
            wrong = probe_mismatches(engine.probe(), expected_probe(changed.items(), "verifier", engine.dtype))
            settings = engine._llm.llm_engine.vllm_config
            stale = weights.reload(engine._runner.get_model(), settings.model_config, settings, original.items())
            third = answers()
    head = "verifier.lm_head.weight"
    others = [name for name in wrong if name != head]
    ok = first == third and first != second and not others
    detail = plain_fault or "plain load_weights raises no error"
    reload = {
        "name": "weight update of a running engine",
        "ok": ok,
        "detail": f"{detail}; not as published: {', '.join(others)}" if others else detail,
        "cure": "layerwise reload (Engine.load_verifier, Engine.load_drafter)" if ok else "",
    }
    fault = head in wrong or bool(stale)
    tied = {
        "name": "weight update of a tied LM head",
        "ok": head not in wrong,
        "detail": "the reload renews the embedding and leaves the old head" if fault else "the reload renews the head",
        "cure": "packed again after every update" if fault and head not in wrong else "",
    }
    return [reload, tied]
