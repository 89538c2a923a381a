"""Small draft models: what they propose against a naive loop of generation, and what stock vLLM makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftkit.data.capture import StreamedStates, Verifier, collate
from draftkit.drafters import draft_lm
from draftkit.drafters.base import trainable
from draftkit.drafters.losses import drafter_loss
from draftkit.drafters.shared_vocab import shared_vocab
from draftkit.engine import check_lossless
from draftkit.errors import RunFailed, UserError
from draftkit.evals.drafter import resolve_drafter
from draftkit.models import fingerprint, model_facts
from draftkit.train.evaluate import TeacherView
from draftkit.train.parity import check_parity
from draftkit.train.served import export, spec_config
from draftkit.types import Document, DraftBatch, SpecConfig


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Verifier:
    return Verifier(tiny.save_verifier(tmp_path_factory.mktemp("v") / "verifier", seed=4), (), 1.0, torch.float32)


@pytest.fixture(scope="module")
def drafter(verifier) -> draft_lm.DraftLM:
    return draft_lm.student(verifier.model, 2)


def documents() -> list[Document]:
    made = torch.Generator().manual_seed(2)
    lengths = [(5, 9), (3, 1), (4, 14), (7, 6)]
    return [
        Document(tuple(torch.randint(tiny.VOCAB, (a + b,), generator=made).tolist()), (False,) * a + (True,) * b)
        for a, b in lengths
    ]


def batch_of(verifier: Verifier, steps: int) -> DraftBatch:
    docs = documents()
    return collate(StreamedStates(verifier, docs), [2, 0, 1, 3], steps)


# ---- the student --------------------------------------------------------------------------------------------------


def test_a_student_is_the_verifier_with_layers_left_out(verifier):
    small = draft_lm.student(verifier.model, 3)
    theirs, ours = verifier.model.state_dict(), small.model.state_dict()
    for layer, of_verifier in enumerate((0, 2, 3)):  # of four, evenly spaced
        name = "model.layers.{}.mlp.up_proj.weight"
        assert torch.equal(ours[name.format(layer)], theirs[name.format(of_verifier)])
    assert torch.equal(ours["lm_head.weight"], theirs["lm_head.weight"])
    trains = {name for name, p in small.named_parameters() if p.requires_grad}
    assert all("layers" in name or name == "model.model.norm.weight" for name in trains) and len(trains) == 3 * 9 + 1


def test_a_student_of_all_layers_says_what_the_verifier_says(verifier):
    whole, batch = draft_lm.student(verifier.model, tiny.LAYERS), batch_of(verifier, 2)
    states = whole(batch)
    for i in range(2):
        torch.testing.assert_close(states[i], batch.last_NH[(batch.slot_R + 1 + i).clamp(max=len(batch.pos_N) - 1)])


@pytest.mark.parametrize("layers", [0, tiny.LAYERS + 1])
def test_a_number_of_layers_that_the_verifier_does_not_have(verifier, layers):
    with pytest.raises(UserError, match="drafter.num_layers"):
        draft_lm.student(verifier.model, layers or 99)


# ---- states ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_own_tokens_are_what_a_naive_loop_generates(verifier, drafter):
    """At every slot: read the text up to x[p+1], then generate greedily, each time from scratch."""
    steps, batch = 3, batch_of(verifier, 3)
    states = drafter(batch, own_tokens=True)
    docs, row = [documents()[i] for i in (2, 0, 1, 3)], 0
    starts = (batch.pos_N == 0).nonzero().flatten().tolist()
    for document, start in zip(docs, starts, strict=True):
        slots = [int(p) - start for p in batch.slot_R if start <= p < start + len(document.tokens)]
        for p in slots:
            text = list(document.tokens[: p + 2])
            for i in range(steps):
                out = drafter.model(torch.tensor([text]), output_hidden_states=True)
                torch.testing.assert_close(states[i][row], out.hidden_states[-1][0, -1], rtol=1e-4, atol=1e-4)
                text.append(int(out.logits[0, -1].argmax()))
            row += 1
    assert row == len(batch.slot_R) > 20


@torch.no_grad()
def test_a_document_does_not_see_its_neighbours(verifier, drafter):
    batch, alone = batch_of(verifier, 1), StreamedStates(verifier, documents())
    packed, parts = drafter(batch)[0], [drafter(collate(alone, [i], 1))[0] for i in (2, 0, 1, 3)]
    torch.testing.assert_close(packed, torch.cat(parts), rtol=1e-5, atol=1e-5)


# ---- served ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(verifier, drafter, tmp_path_factory) -> tuple[Path, Path]:
    """(verifier, exported drafter)"""
    path = Path(verifier.model.name_or_path)
    directory = tmp_path_factory.mktemp("d") / "drafter"
    export(drafter, directory, path, tiny.FINGERPRINT, tiny.card())
    return path, directory


def test_the_export_is_a_checkpoint_that_transformers_loads(drafter, served):
    _, directory = served
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    text = torch.randint(tiny.VOCAB, (1, 12))
    rounded = drafter.model.to(torch.float32)
    torch.testing.assert_close(loaded(text).logits, rounded(text).logits, rtol=0.1, atol=0.1)
    assert json.loads((directory / "draftkit.json").read_text())["verifier"] == tiny.FINGERPRINT
    assert spec_config(drafter, directory, 3).method == "draft_model"


def parity(served: tuple[Path, Path], drafter: draft_lm.DraftLM, verifier: Verifier) -> dict:
    path, directory = served
    return check_parity(tiny.recipe(), path, directory, drafter, verifier, tiny.prompts(12, seed=7))


@pytest.mark.engine
def test_stock_vllm_proposes_what_pytorch_proposes(verifier, drafter, served):
    result = parity(served, drafter, verifier)
    assert result["first_proposal_agreement"] > 0.95
    assert min(result["agreement_per_position"]) > 0.9
    assert result["greedy_acceptance_length"]["served"] > 1.05


@pytest.mark.engine
def test_another_model_in_its_place_is_found_out(verifier, drafter, served, tmp_path):
    path, directory = served
    other = tmp_path / "drafter"
    export(drafter, other, path, tiny.FINGERPRINT, tiny.card())
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunFailed, match="not the trained one"):
        parity((path, other), drafter, verifier)


# ---- a tokenizer of its own -----------------------------------------------------------------------------------------

WORDS = [f"w{i}" for i in range(tiny.VOCAB - 2)]  # of the verifier, after its two special tokens


def save_tokenizer(path: Path, words: list[str], mark: str) -> None:
    """One token a word; `mark` stands for its leading space."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<eos>": 1} | {mark + word: i for i, word in enumerate(words, 2)}
    made = Tokenizer(models.WordLevel(vocab, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(mark)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{{ messages[0]['content'] }}"
    fast.save_pretrained(path)


@pytest.fixture(scope="module")
def strangers(tmp_path_factory) -> tuple[Path, Path]:
    """(verifier, a small model whose tokenizer marks spaces otherwise, has the words backwards and lacks a fifth)."""
    folder = tmp_path_factory.mktemp("strangers")
    verifier = tiny.save_verifier(folder / "verifier", seed=4)
    save_tokenizer(verifier, WORDS, "\u0120")
    other = tiny.save_verifier(folder / "small", seed=5)
    save_tokenizer(other, [word for i, word in enumerate(WORDS) if i % 5][::-1], "\u2581")
    return verifier, other


def test_shared_tokens_are_those_that_vllm_maps(strangers):
    from transformers import AutoTokenizer
    from vllm.v1.spec_decode.vocab_mapping import VocabMapping

    theirs, own = (AutoTokenizer.from_pretrained(path) for path in strangers)
    sizes = (tiny.VOCAB, tiny.VOCAB)
    ours = shared_vocab(theirs, own, *sizes)
    reference = VocabMapping(theirs, own, *sizes, "cpu")
    tokens = torch.arange(tiny.VOCAB)
    assert torch.equal(ours.to_draft_V, reference.map_target_to_draft_ids(tokens))
    assert set(ours.draft_S.tolist()) == set(reference.intersection_mask_draft.nonzero().flatten().tolist())
    assert torch.equal(ours.verifier_S, reference.map_draft_to_target_ids(ours.draft_S))
    assert len(ours.verifier_S) == 2 + sum(i % 5 > 0 for i in range(len(WORDS)))


def test_the_same_tokenizer_is_no_stranger_and_a_foreign_one_is_refused(strangers, tmp_path):
    verifier, other = strangers
    assert draft_lm.shared_with(verifier, verifier, tiny.VOCAB, tiny.VOCAB) is None
    copy = tiny.save_verifier(tmp_path / "copy", seed=6)
    save_tokenizer(copy, WORDS, "\u0120")
    assert draft_lm.shared_with(copy, verifier, tiny.VOCAB, tiny.VOCAB) is None
    save_tokenizer(copy, [f"x{i}" for i in range(len(WORDS))], "\u0120")
    with pytest.raises(UserError, match="shares 2 tokens"):
        draft_lm.shared_with(copy, verifier, tiny.VOCAB, tiny.VOCAB)


@torch.no_grad()
def test_a_stranger_reads_and_drafts_in_its_own_ids(strangers):
    path, other = strangers
    verifier = Verifier(path, (), 1.0, torch.float32)
    drafter = draft_lm.from_model(other, path, tiny.VOCAB)
    steps, batch = 3, batch_of(verifier, 3)
    states = drafter(batch, own_tokens=True)
    shared = draft_lm.shared_with(other, path, tiny.VOCAB, tiny.VOCAB)
    drafts_of = dict(zip(shared.draft_S.tolist(), shared.verifier_S.tolist(), strict=True))
    start = 0
    document, rows = documents()[2], [int(p) for p in batch.slot_R if p < len(documents()[2].tokens)]
    for row, p in enumerate(rows):
        text = [int(shared.to_draft_V[t]) for t in document.tokens[start : p + 2]]
        for i in range(steps):
            logits = drafter.model(torch.tensor([text])).logits[0, -1]
            allowed = torch.full_like(logits, -torch.inf)
            allowed[shared.draft_S] = logits[shared.draft_S]
            token = int(allowed.argmax())
            assert int(drafter.propose(states[i])[row]) == drafts_of[token]
            text.append(token)


def test_a_stranger_learns(strangers):
    """Distilled over the shared tokens: the loss is that of any reduced draft vocabulary, and it falls."""
    path, other = strangers
    verifier = Verifier(path, (), 1.0, torch.float32)
    drafter = draft_lm.from_model(other, path, tiny.VOCAB)
    teacher, batch = TeacherView(drafter, verifier), batch_of(verifier, 1)
    optimizer, losses = torch.optim.AdamW(trainable(drafter), lr=2e-3), []
    for _ in range(12):
        loss, metrics = drafter_loss(
            drafter(batch), drafter.head_DH, teacher.at(batch), batch.valid_LR, 1.0, len(batch.slot_R)
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert 0 < float(metrics["ceiling"][0] / metrics["count"][0]) < 0.95  # a fifth of the verifier's tokens is missing


@pytest.mark.engine
def test_stock_vllm_proposes_what_a_stranger_proposes(strangers, tmp_path):
    path, other = strangers
    verifier = Verifier(path, (), 1.0, torch.float32)
    drafter = draft_lm.from_model(other, path, tiny.VOCAB)
    export(drafter, tmp_path / "drafter", path, fingerprint(path), tiny.card())
    spec = spec_config(drafter, tmp_path / "drafter", 3)
    found = resolve_drafter(str(tmp_path / "drafter"), model_facts(path), fingerprint(path), 3)
    assert spec.own_vocab and found == spec
    result = check_parity(tiny.recipe(), path, tmp_path / "drafter", drafter, verifier, tiny.prompts(12, seed=7))
    assert result["first_proposal_agreement"] > 0.95 and min(result["agreement_per_position"]) > 0.9


def test_a_stranger_is_served_with_greedy_drafts_only():
    with pytest.raises(UserError, match="drafts greedily only"):
        check_lossless(SpecConfig("draft_model", "d", 3, "probabilistic", own_vocab=True))
