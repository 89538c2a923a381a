"""README.md of an exported drafter: what it was trained on, how, what it measured, how to serve it."""

from __future__ import annotations

from typing import Any

from draftkit import __version__
from draftkit.drafters.base import Drafter

TITLES = {"eagle3": "EAGLE-3 drafter", "eagle": "EAGLE-1 head", "mtp": "MTP layer", "draft_model": "Small draft model"}


def model_card(drafter: Drafter, card: dict[str, Any]) -> str:
    """card: {"recipe": the recipe as JSON, "heldout": what `evaluate` measured}."""
    recipe, held = card["recipe"], card["heldout"]
    k, sampling, train = recipe["train"]["ttt_steps"], recipe["sampling"], recipe["train"]
    loss = " + ".join(f"{weight:g} {name}" for name, weight in train["loss"].items())
    rows = "\n".join(
        f"| {i + 1} | {a:.3f} | {g:.3f} | {s:.3f} |"
        for i, (a, g, s) in enumerate(
            zip(held["cond_acc"], held["expected_acceptance_greedy"], held["expected_acceptance_sampled"], strict=True)
        )
    )
    model = "" if drafter.method == "mtp" else '"model": "<this directory>", '
    if getattr(drafter, "tokenizer_of", None) is not None:
        model += '"use_heterogeneous_vocab": true, '
    serve = f'{{"method": "{drafter.method}", {model}"num_speculative_tokens": {k}}}'
    where = "`vllm serve <this directory>` with" if drafter.method == "mtp" else "Serve:"
    return f"""# {TITLES[drafter.method]} for {recipe["model"]["path"]}

Trained by draftkit {__version__} on answers of the verifier itself to `{recipe["data"]["recipe"]}` prompts, sampled at
temperature {sampling["temperature"]:g}, top-p {sampling["top_p"]:g}, at most {sampling["max_tokens"]} tokens
({sampling["n"]} sampled and {sampling["greedy_n"]} greedy answers a prompt). {train["epochs"]:g} epochs,
{train["ttt_steps"]} TTT steps (decay {train["ttt_decay"]:g}), loss {loss}, AdamW, peak learning rate {train["lr"]:g}.
Draft vocabulary {len(drafter.draft_to_target_D):,}.

Held-out prompts, at temperature {sampling["temperature"] or 1:g} against the full vocabulary:

| TTT step | cond. accuracy | greedy acceptance | sampled acceptance |
|---|---|---|---|
{rows}

Acceptance length of greedy drafts {held["walk_acceptance_length"]:.2f} at k = {k};
vocabulary ceiling {held["vocab_ceiling"]:.3f};
verifier's own E(max p) {held["verifier_max_p"]:.3f}.

{where} `--speculative-config '{serve}'`
"""
