"""The demo verifier written as a Qwen2-type model: the same function, in the type for which stock vLLM serves MTP.

    python scripts/demo_as_qwen2.py OUT          then: draftkit prepare --model OUT, draftkit train-drafter --method mtp

A Qwen2 block is a Llama block with biases on q, k and v; with biases of zero it computes the same. So the embedded
model, trained on real text, serves as the small Qwen2-type verifier that MTP training needs, and drafters of every kind
can be compared on one function.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from draftkit.models import make_demo_model


def convert(source: Path, out: Path) -> None:
    llama = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    c = llama.config
    assert c.model_type == "llama" and c.head_dim * c.num_attention_heads == c.hidden_size
    config = Qwen2Config(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=c.rope_parameters,
        tie_word_embeddings=c.tie_word_embeddings,
        bos_token_id=c.bos_token_id,
        eos_token_id=c.eos_token_id,
        pad_token_id=c.pad_token_id,
    )
    qwen = Qwen2ForCausalLM(config).eval()
    weights = llama.state_dict()
    with torch.no_grad():
        for name, parameter in qwen.state_dict().items():
            parameter.copy_(torch.zeros_like(parameter) if name.endswith("_proj.bias") else weights[name])
    text = torch.randint(c.vocab_size, (1, 32))
    with torch.no_grad():  # in float32: a bias of zero may still round a bfloat16 product another way
        torch.testing.assert_close(qwen(text).logits, llama(text).logits)
    qwen.to(torch.bfloat16)
    qwen.generation_config = llama.generation_config
    qwen.save_pretrained(out)
    for pattern in ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt"):
        for file in source.glob(pattern):
            shutil.copyfile(file, out / file.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    convert(make_demo_model(), parser.parse_args().out)
