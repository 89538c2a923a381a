"""Behaviour tests of the installed vLLM, for `draftkit doctor`: what is wrong, and whether draftkit mends it."""

from __future__ import annotations

from typing import Any

from draftkit.engine import faults
from draftkit.engine.core import Engine, prepare_environment
from draftkit.recipe import EngineSection
from draftkit.types import Sampling


def self_tests() -> list[dict[str, Any]]:
    """Behaviour tests of the installed vLLM for `doctor`: [{"name", "ok", "detail", "cure"}], ok after the cure."""
    prepare_environment(EngineSection())
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return [{"name": "speculative sampling", "ok": True, "detail": "not the CPU build: fault absent", "cure": ""}]
    tests = (
        ("speculative sampling at temperature > 0", faults.sampling_fault, "expand_batch_to_tokens is right"),
        ("speculative sampling with top-k", faults.top_k_fault, "apply_top_k_top_p takes a step without drafts"),
    )
    found = [find() for _, find, _ in tests]
    faults.cure_sampling()
    checks = []
    for (name, find, right), fault in zip(tests, found, strict=True):
        ok = find() is None
        cure = "replaced by a torch version when an engine is built" if fault and ok else ""
        checks.append({"name": name, "ok": ok, "detail": fault or right, "cure": cure})
    return [*checks, reload_test()]


def reload_test() -> dict[str, Any]:
    """Publish perturbed weights into a running tiny engine and back: outputs must change, then return exactly."""
    import tempfile

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
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed = {name: torch.roll(tensor, 1, 0) if tensor.dim() == 2 else tensor for name, tensor in original.items()}
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
            engine.load_verifier(original.items())
            third = answers()
    ok = first == third and first != second
    return {
        "name": "weight update of a running engine",
        "ok": ok,
        "detail": plain_fault or "plain load_weights raises no error",
        "cure": "layerwise reload (Engine.load_verifier, Engine.load_drafter)" if ok else "",
    }
