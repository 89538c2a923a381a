"""Fixtures that several test files share: the demo verifier, a tiny one, its corpus, draftkit as a real subprocess."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from draftkit.data.prompts import Split, to_jsonl
from draftkit.data.shards import PROMPTS, SHARDS, describe_file, write_manifest, write_shard
from draftkit.engine.process import LAUNCHER
from draftkit.models import fingerprint, resolve_model
from draftkit.types import Prompt, Rollout

if TYPE_CHECKING:
    from draftkit.engine import Engine

ROOT = Path(__file__).resolve().parent.parent
CHILD = "DRAFTKIT_TEST_CHILD"


@pytest.fixture(autouse=True)
def _not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that an earlier test made in this process left LOCAL_RANK: a child would look for its launcher."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test marked own_process runs in a child: vLLM groups a process's ranks when its first engine starts, and for
    experts only if that one has some, so that none with a mixture of experts can follow a dense one."""
    if pyfuncitem.get_closest_marker("own_process") is None or CHILD in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(
        command, cwd=pyfuncitem.config.rootpath, env=os.environ | {CHILD: "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return True


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo verifier in the user's cache, made on first use."""
    return resolve_model("demo")


TINY_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
TINY_VOCAB = 300


def write_tiny_verifier(path: Path, seed: int = 0, hidden_size: int = 64) -> Path:
    """A real Llama of four random layers; its tokenizer knows single characters, and token 0 ends an answer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    characters = [chr(c) for c in range(32, 127)]
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0} | {c: i for i, c in enumerate(characters, 1)}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=TINY_TEMPLATE)
    fast.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB,
        hidden_size=hidden_size,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=2,  # of 32: vLLM's float32 attention on CPUs takes no smaller head
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.1,  # the usual 0.02 makes every next token equally likely: nothing to learn
        eos_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def write_tiny_corpus(path: Path, verifier: Path, lengths: dict[str, list[int]]) -> Path:
    """A finished corpus: per split one prompt for every response length, answered once at temperature 1 and once
    greedily, by tokens that follow from the one before with one surprise in eight."""
    rng = random.Random(0)
    prompts: dict[str, list[Prompt]] = {}
    entries = []
    (path / SHARDS).mkdir(parents=True)
    for split, of_split in lengths.items():
        rollouts = []
        prompts[split] = [
            Prompt(f"{split}-{i}", ({"role": "user", "content": f"{split} {i}"},), "tiny", None, {"verifier": "none"})
            for i in range(len(of_split))
        ]
        for prompt, length in zip(prompts[split], of_split, strict=True):
            for sample, temperature in enumerate((1.0, 0.0)):
                tokens = [rng.randrange(1, 96) for _ in range(10)]
                for _ in range(length):
                    follows = (7 * tokens[-1] + 3) % 91 + 1
                    tokens.append(rng.randrange(1, 96) if rng.random() < 0.125 else follows)
                answer = Rollout(
                    prompt.id, sample, "tiny", tuple(tokens[:10]), tuple(tokens[10:]), "length", None, temperature
                )
                rollouts.append(answer)
        file = path / SHARDS / f"{split}-00000.parquet"
        write_shard(file, rollouts)
        entries.append({**describe_file(path, file), "split": split})
    (path / PROMPTS).write_text("".join(to_jsonl(Split(prompts["heldout"], prompts["train"]))))
    made_by = {"path": str(verifier), **fingerprint(verifier)}
    write_manifest(path, {"verifier": made_by, "prompts": describe_file(path, path / PROMPTS), "shards": entries})
    return path


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_verifier(tmp_path_factory.mktemp("tiny") / "verifier")


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    """24 training and 6 held-out prompts. Read-only: a test that spoils it takes a copy."""
    lengths = {"heldout": [16] * 6, "train": [8 + 3 * (i % 9) for i in range(24)]}
    return write_tiny_corpus(tmp_path_factory.mktemp("tiny") / "corpus", tiny_verifier, lengths)


@pytest.fixture
def draftkit(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`draftkit(*words)` runs the command line in an empty working directory."""

    def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "draftkit", *words]
        environment = os.environ | {"COLUMNS": "200"} | env
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)

    return run


@pytest.fixture(scope="session")
def plain() -> Iterator[Engine]:
    """An engine of `tiny`'s verifier that does not speculate. What a test changes in it, it puts back."""
    import tiny

    from draftkit.engine import Engine

    with Engine(tiny.verifier_dir(), recipe_engine=tiny.SECTION) as engine:
        yield engine


@pytest.fixture(scope="session")
def spec() -> Iterator[Engine]:
    """The same with `tiny`'s trained drafter and greedy drafts."""
    import tiny

    from draftkit.engine import Engine
    from draftkit.types import SpecConfig

    config = SpecConfig("eagle3", str(tiny.drafter_dir()), tiny.K)
    with Engine(tiny.verifier_dir(), recipe_engine=tiny.SECTION, spec=config) as engine:
        yield engine


@pytest.fixture(scope="session")
def sampled_drafts() -> Iterator[Engine]:
    """The same with drafts sampled from q."""
    import tiny

    from draftkit.engine import Engine
    from draftkit.types import SpecConfig

    config = SpecConfig("eagle3", str(tiny.drafter_dir()), tiny.K, draft_sample_method="probabilistic")
    with Engine(tiny.verifier_dir(), recipe_engine=tiny.SECTION, spec=config) as engine:
        yield engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines last: vLLM leaves pinned OpenMP pools in the process, and a child forked after that waits for threads it
    does not have."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)
