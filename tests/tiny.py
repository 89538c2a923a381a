"""A verifier and a drafter small enough for an engine to load in seconds, and the exact odds of what they may say.

The verifier is a random Llama whose next token depends on the whole prefix but most on the last token, so that a
drafter learns it in a hundred steps: acceptance and rejection both happen often, which is what the tests are about.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from draftkit.data.batch import plan_epoch
from draftkit.data.capture import StreamedStates, Verifier, collate, state_dtype
from draftkit.drafters.eagle3 import Eagle3, Eagle3Config, default_aux_layers
from draftkit.drafters.layouts import export
from draftkit.drafters.losses import drafter_loss
from draftkit.recipe import EngineSection, Recipe
from draftkit.train.evaluate import TeacherView
from draftkit.types import Document

VOCAB, DRAFT_VOCAB, HIDDEN, HEAD_DIM, LAYERS = 64, 48, 128, 64, 4
ROPE = {"rope_type": "default", "rope_theta": 500.0}  # far from 10000, also at the few positions of a test
K = 3
SECTION = EngineSection(max_model_len=128, max_num_seqs=256, kv_cache_gib=1)
FINGERPRINT = {"weights": "w", "tokenizer": "t", "chat_template": "c"}


def recipe(**sections: dict[str, Any]) -> Recipe:
    """Settings of a training run on this verifier, as the parity check reads them."""
    small = {
        "sampling": {"max_tokens": 48},
        "engine": SECTION.model_dump(),
        "train": {"ttt_steps": K},
        "eval": {"max_tokens": 48},
    }
    return Recipe.model_validate(small | sections)


def save_verifier(path: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        rope_parameters=ROPE,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, 1.0)
        model.lm_head.weight.normal_(0.0, 0.3)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def save_qwen2(path: Path, num_layers: int = LAYERS, shard_size: str = "10GB", seed: int = 0) -> Path:
    """The same as a Qwen2, with biases that matter."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        rope_parameters=ROPE,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, 1.0)
        model.lm_head.weight.normal_(0.0, 0.3)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            if "norm" in name:
                parameter.uniform_(0.7, 1.3)
    model.to(torch.bfloat16).save_pretrained(path, max_shard_size=shard_size)
    return path


def load_exact(path: Path) -> LlamaForCausalLM:
    """The saved bfloat16 weights, computed with in float32: the law that an engine has to follow."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def prompts(num: int, length: int = 6, seed: int = 0) -> list[list[int]]:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (num, length), generator=made).tolist()


def random_drafter(verifier: Verifier, seed: int = 0, **changes: Any) -> Eagle3:
    """A drafter with weights so large that its proposals depend on everything it reads."""
    config = Eagle3Config(
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        aux_layers=default_aux_layers(LAYERS),
        rms_norm_eps=1e-6,
        rope_parameters=ROPE,
        max_position_embeddings=256,
    )
    made = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB, generator=made)[:DRAFT_VOCAB].sort().values
    drafter = Eagle3(dataclasses.replace(config, **changes), verifier.embed_VH, ids)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.12, generator=made)
            else:
                parameter.uniform_(0.7, 1.3, generator=made)
    return drafter


def sample_documents(path: Path, num: int, length: int, seed: int = 0) -> list[Document]:
    """Answers of the verifier itself at temperature 1."""
    model = load_exact(path)
    torch.manual_seed(seed)
    tokens = torch.tensor(prompts(num, seed=seed + 1))
    prompt_length = tokens.shape[1]
    with torch.no_grad():
        while tokens.shape[1] < prompt_length + length:
            odds = model(tokens, use_cache=False).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(odds, 1)], 1)
    mask = (False,) * prompt_length + (True,) * length
    return [Document(tuple(row), mask) for row in tokens.tolist()]


def train_drafter(verifier: Verifier, documents: Sequence[Document], steps: int = 60) -> Eagle3:
    """The real loss and the real batches, without the loop around them."""
    drafter = random_drafter(verifier)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.4)
    states, teacher = StreamedStates(verifier, documents), TeacherView(drafter, verifier)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=6e-3)
    lengths, epoch, done = [len(d.tokens) for d in documents], 0, 0
    while done < steps:
        for members in plan_epoch(lengths, 1024, 0, epoch):
            batch = collate(states, members, K)
            loss, _ = drafter_loss(
                drafter(batch), drafter.lm_head.weight, teacher.at(batch), batch.valid_LR, 0.8, len(batch.slot_R), True
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = 6e-3 * (1 - done / steps) + 1e-5
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        epoch += 1
    return drafter


def card() -> dict[str, Any]:
    rate = [0.5] * K
    held = {
        "cond_acc": rate,
        "expected_acceptance_greedy": rate,
        "expected_acceptance_sampled": rate,
        "walk_acceptance_length": 1.9,
        "vocab_ceiling": 0.9,
        "verifier_max_p": 0.6,
    }
    return {"recipe": recipe().settled().model_dump(mode="json"), "heldout": held}


# ---- made once for all test files -------------------------------------------------------------------------------

_DIRECTORY = tempfile.TemporaryDirectory(prefix="draftkit-tests-")  # removed when the process ends


@functools.cache
def verifier_dir() -> Path:
    return save_verifier(Path(_DIRECTORY.name) / "verifier")


@functools.cache
def verifier() -> Verifier:
    return Verifier(verifier_dir(), default_aux_layers(LAYERS), 1.0, state_dtype("cpu"))


@functools.cache
def trained_drafter() -> Eagle3:
    return train_drafter(verifier(), sample_documents(verifier_dir(), 256, 32))


@functools.cache
def drafter_dir() -> Path:
    """The trained drafter as vLLM serves it."""
    directory = Path(_DIRECTORY.name) / "drafter"
    export(trained_drafter(), directory, FINGERPRINT, card())
    return directory


# ---- what a faithful engine says, and how often -----------------------------------------------------------------


@torch.no_grad()
def exact_joint(model: LlamaForCausalLM, prompt: Sequence[int], temperature: float, top_k: int = 0) -> torch.Tensor:
    """[V, V, V] probabilities of the first three tokens, by enumeration."""

    def law(contexts: torch.Tensor) -> torch.Tensor:
        logits = model(contexts, use_cache=False).logits[:, -1].double() / temperature
        if top_k:
            logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
        return logits.softmax(-1)

    start = torch.tensor([list(prompt)])
    one = torch.arange(VOCAB).unsqueeze(1)
    two = torch.cartesian_prod(one.flatten(), one.flatten())
    first = law(start)
    second = law(torch.cat([start.expand(len(one), -1), one], 1))
    third = law(torch.cat([start.expand(len(two), -1), two], 1)).view(VOCAB, VOCAB, VOCAB)
    return first.view(VOCAB, 1, 1) * second.unsqueeze(-1) * third


def draw(joint: torch.Tensor, num: int) -> torch.Tensor:
    """[num, 3] independent continuations."""
    size = joint.shape[0]
    cells = torch.searchsorted(joint.flatten().cumsum(0), torch.rand(num, dtype=torch.float64)).clamp_(max=size**3 - 1)
    return torch.stack([cells // size**2, cells // size % size, cells % size], 1)


def goodness_of_fit(samples: torch.Tensor, joint: torch.Tensor) -> float:
    """p-value of Pearson's test that rows of samples [n, 3] follow joint; cells with under five expected are pooled."""
    size = joint.shape[0]
    cells = (samples[:, 0] * size + samples[:, 1]) * size + samples[:, 2]
    expected = joint.flatten().double() * len(samples)
    observed = torch.bincount(cells, minlength=len(expected)).double()
    own = expected >= 5
    expected = torch.cat([expected[own], expected[~own].sum().view(1)])
    observed = torch.cat([observed[own], observed[~own].sum().view(1)])
    if expected[-1] < 5:  # hardly anything is left over: count it with the last cell
        expected[-2] += expected[-1]
        observed[-2] += observed[-1]
        expected, observed = expected[:-1], observed[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor(len(expected) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


@torch.no_grad()
def greedy_regret(model: LlamaForCausalLM, prompt: Sequence[int], response: Sequence[int]) -> float:
    """How far below the best logit the worst token of a greedy response lies; 0 when every token is the argmax."""
    tokens = torch.tensor([[*prompt, *response]])
    logits = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)
    return float((logits.max(-1).values - chosen).max())


# ---- a policy in training, without the training -----------------------------------------------------------------


class TinyPolicy:
    """The saved verifier's weights in bfloat16, to be changed and published, and the states that scoring captures."""

    dtype = torch.bfloat16

    def __init__(self, path: Path) -> None:
        self.tensors = {name: t.clone() for name, t in AutoModelForCausalLM.from_pretrained(path).state_dict().items()}
        self._verifier = Verifier(path, default_aux_layers(LAYERS), 1.0, state_dtype("cpu"))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()

    def scale(self, factor: float) -> None:
        """Another policy."""
        for name, tensor in self.tensors.items():
            if tensor.dim() == 2:
                self.tensors[name] = tensor * factor
        self._verifier.model.load_state_dict(self.tensors)

    def rescore(self, documents: Sequence[Document]) -> StreamedStates:
        return StreamedStates(self._verifier, documents, keep=len(documents))
