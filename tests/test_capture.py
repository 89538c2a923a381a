"""Verifier states against transformers' own, alone and padded, streamed and cached."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from draftkit.data import capture
from draftkit.data.capture import CachedStates, StreamedStates, Verifier, chunks, collate
from draftkit.errors import UserError
from draftkit.types import Document

NUM_LAYERS, VOCAB, HIDDEN = 4, 67, 16
FINGERPRINT = {"weights": "w", "tokenizer": "t"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        initializer_range=0.4,  # far from the residual's identity, so that layers differ
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("verifier")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    rng = random.Random(4)
    made = []
    for _ in range(12):
        prompt, response = rng.randint(2, 9), rng.randint(2, 30)
        tokens = tuple(rng.randrange(VOCAB) for _ in range(prompt + response))
        made.append(Document(tokens, (False,) * prompt + (True,) * response))
    return made


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    """Several chunks from a dozen documents."""
    plan = capture.chunks
    monkeypatch.setattr(capture, "chunks", lambda lengths: plan(lengths, 80))


@pytest.mark.parametrize("aux_layers", [(1, 2, 3), (0, 2, 4), (4,)])
def test_states_are_those_of_transformers(model_dir, documents, aux_layers):
    """Id L is the state after L blocks: id 0 the embedding, id n the last block *before* the final norm."""
    verifier = Verifier(model_dir, aux_layers, temperature=0.7, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    document = documents[0]
    (states,) = verifier.states([document])
    with torch.no_grad():
        out = model(torch.tensor([document.tokens]), output_hidden_states=True)
    assert len(out.hidden_states) == NUM_LAYERS + 1
    for number, layer in enumerate(aux_layers):
        part = states["aux"][:, number * HIDDEN : (number + 1) * HIDDEN]
        if layer == NUM_LAYERS:  # transformers applies the final norm to its last entry
            part = model.model.norm(part)
        torch.testing.assert_close(part, out.hidden_states[layer][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states["last"], out.hidden_states[-1][0], rtol=1e-5, atol=1e-5)
    labels = torch.tensor(document.mask)  # the teacher's numbers stand where slots have their labels, zeros elsewhere
    logits = out.logits[0] / 0.7
    torch.testing.assert_close(states["lse"], logits.logsumexp(-1) * labels, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states["max"], logits.amax(-1) * labels, rtol=1e-5, atol=1e-5)
    assert states["top"].equal(logits.argmax(-1) * labels)


def test_padded_documents_equal_single_ones(model_dir, documents, monkeypatch):
    monkeypatch.setattr(capture, "LOGIT_ROWS", 7)  # logits cross the border of a part
    verifier = Verifier(model_dir, (1, 2, 3), temperature=1.0, dtype=torch.float32)
    for document, padded in zip(documents, verifier.states(documents), strict=True):
        (alone,) = verifier.states([document])
        assert alone.keys() == padded.keys()
        for name in ("aux", "last", "lse", "max"):
            assert len(padded[name]) == len(document.tokens)
            torch.testing.assert_close(padded[name], alone[name], rtol=1e-4, atol=1e-4)


def test_labels_of_every_slot_have_a_teacher(model_dir, documents):
    """Slot p reads the teacher at p + 1: a zero there would train towards token 0."""
    states = StreamedStates(Verifier(model_dir, (1, 2, 3), temperature=1.0), documents)
    batch = collate(states, range(len(documents)), 3)
    label = batch.slot_R + 1
    logits = (batch.last_NH[label] @ states.verifier.head_VH.T).float()
    torch.testing.assert_close(batch.lse_N[label], logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert batch.top_N[label].equal(logits.argmax(-1))


def test_shifted_taps_see_the_next_layer(model_dir, documents):
    verifier = Verifier(model_dir, (1, 2, 3), temperature=1.0, dtype=torch.float32)
    (own,) = verifier.states(documents[:1])
    later = Verifier.shifted(verifier, 1)
    assert later.aux_layers == (2, 3, 4)
    (states,) = later.states(documents[:1])
    assert states["aux"][:, : 2 * HIDDEN].equal(own["aux"][:, HIDDEN:])
    assert Verifier.shifted(verifier, 9).aux_layers == (4, 4, 4)
    (again,) = verifier.states(documents[:1])
    assert again["aux"].equal(own["aux"])


def test_greedy_rollouts_have_a_teacher_at_temperature_one(model_dir):
    assert Verifier(model_dir, (1,), temperature=0.0).temperature == 1.0


def test_a_layer_that_is_not_there(model_dir):
    with pytest.raises(UserError, match=r"drafter\.aux_layers: the verifier has layers 0 to 4, not 5"):
        Verifier(model_dir, (1, 5), temperature=1.0)


def test_chunks_hold_every_document_once_and_fit():
    rng = random.Random(0)
    lengths = [rng.randint(1, 90) for _ in range(200)] + [500]
    plan = chunks(lengths, 256)
    assert sorted(i for members in plan for i in members) == list(range(201))
    assert all(len(m) * max(lengths[i] for i in m) <= 256 for m in plan if len(m) > 1)


def _assert_same_batches(left, right, members) -> None:
    ours, theirs = collate(left, members, 3), collate(right, members, 3)
    for field in fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        assert (a.dtype == b.dtype and a.equal(b)) if isinstance(a, torch.Tensor) else a == b, field.name


@pytest.mark.parametrize("form", ["exact", "int8"])
@pytest.mark.parametrize("aux_layers", [(1, 2, 3), ()])
def test_cached_equals_streamed_bit_for_bit(model_dir, documents, tmp_path, small_chunks, form, aux_layers):
    verifier = Verifier(model_dir, aux_layers, temperature=0.9, form=form)
    streamed = StreamedStates(verifier, documents, keep=2)  # chunks fall out of memory and are captured again
    done: list[int] = []
    cached = CachedStates.fill(tmp_path / "states", verifier, FINGERPRINT, documents, done.append)
    assert len(streamed.chunks) > 3
    assert sum(done) == sum(len(d.tokens) for d in documents)
    for members in ([0, 1, 2, 3], [11, 5, 8], [7], list(range(12))[::-1]):
        _assert_same_batches(streamed, cached, members)


def test_states_of_eight_bits_are_near_and_their_teacher_is_a_distribution(model_dir, documents):
    exact, small = (Verifier(model_dir, (1, 2, 3), 0.9, torch.float32, form=form) for form in ("exact", "int8"))
    a, b = (StreamedStates(v, documents, keep=len(documents)) for v in (exact, small))
    for i, document in enumerate(documents):
        one, other = a.document(i), b.document(i)
        for name in ("aux", "last"):
            groups = one[name].unflatten(1, (-1, HIDDEN))  # 16 channels: one group
            bound = groups.abs().amax(-1, keepdim=True) * (0.51 / 127 + 2**-8)
            assert ((other[name].unflatten(1, (-1, HIDDEN)) - groups).abs() <= bound).all()
            assert not other[name].equal(one[name])
        rows = torch.tensor(document.mask)
        logits = other["last"][rows] @ small.head_VH.T / 0.9
        torch.testing.assert_close(logits.logsumexp(-1), other["lse"][rows])
        assert other["top"][rows].equal(logits.argmax(-1))


def test_collate_lays_documents_end_to_end(model_dir, documents):
    verifier = Verifier(model_dir, (1, 2, 3), temperature=1.0)
    states = StreamedStates(verifier, documents)
    batch = collate(states, [3, 0], 2)
    first, second = documents[3], documents[0]
    assert batch.tokens_N.tolist() == [*first.tokens, *second.tokens]
    assert batch.aux_NF.shape == (len(batch.tokens_N), 3 * HIDDEN) and batch.aux_NF.dtype == torch.bfloat16
    assert batch.aux_NF[: len(first.tokens)].equal(states.document(3)["aux"])
    assert batch.top_N[len(first.tokens) :].equal(states.document(0)["top"])
    assert batch.valid_LR.shape == (2, len(batch.slot_R)) and batch.valid_LR[0].all()


def test_a_killed_fill_goes_on_where_it_was(model_dir, documents, tmp_path, small_chunks):
    verifier = Verifier(model_dir, (1, 2, 3), temperature=1.0)
    whole = CachedStates.fill(tmp_path / "whole", verifier, FINGERPRINT, documents, lambda n: None)

    class Killed(Exception):
        pass

    def die(_tokens: int) -> None:
        if len(list((tmp_path / "killed").glob("*.safetensors"))) == 2:
            raise Killed

    with pytest.raises(Killed):
        CachedStates.fill(tmp_path / "killed", verifier, FINGERPRINT, documents, die)
    (tmp_path / "killed" / "00002.tmp").write_bytes(b"half a shard")
    kept = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "killed").glob("*.safetensors")}
    resumed = CachedStates.fill(tmp_path / "killed", verifier, FINGERPRINT, documents, lambda n: None)
    assert {name: (tmp_path / "killed" / name).stat().st_mtime_ns for name in kept} == kept
    _assert_same_batches(whole, resumed, range(12))
    assert not list((tmp_path / "killed").glob("*.tmp"))


@pytest.mark.parametrize("changed", ["verifier", "aux_layers", "temperature", "documents", "form"])
def test_a_cache_of_something_else_is_emptied(model_dir, documents, tmp_path, small_chunks, changed):
    directory = tmp_path / "states"
    CachedStates.fill(directory, Verifier(model_dir, (1, 2, 3), 1.0), FINGERPRINT, documents, lambda n: None)
    key = json.loads((directory / "key.json").read_text())
    before = {p.name: p.stat().st_mtime_ns for p in directory.glob("*.safetensors")}

    layers = (1, 2, 4) if changed == "aux_layers" else (1, 2, 3)
    form = "int8" if changed == "form" else "exact"
    verifier = Verifier(model_dir, layers, 0.5 if changed == "temperature" else 1.0, form=form)
    fingerprint = FINGERPRINT | ({"weights": "other"} if changed == "verifier" else {})
    corpus = documents[:-1] if changed == "documents" else documents
    cached = CachedStates.fill(directory, verifier, fingerprint, corpus, lambda n: None)
    now = json.loads((directory / "key.json").read_text())
    assert [name for name in now if now[name] != key[name]] == [changed]
    after = {p.name: p.stat().st_mtime_ns for p in directory.glob("*.safetensors")}
    assert not set(before.items()) & set(after.items())
    _assert_same_batches(StreamedStates(verifier, corpus), cached, range(len(corpus)))


def test_disk_that_is_too_small_is_refused_before_anything_is_written(model_dir, documents, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    verifier = Verifier(model_dir, (1, 2, 3), temperature=1.0)
    with pytest.raises(UserError, match="hidden states"):
        CachedStates.fill(tmp_path / "states", verifier, FINGERPRINT, documents, lambda n: None)
    assert not list((tmp_path / "states").glob("*.safetensors"))


@pytest.mark.parametrize("form", ["exact", "int8"])
def test_the_disk_estimate_is_what_gets_written(model_dir, documents, tmp_path, form):
    verifier = Verifier(model_dir, (1, 2, 3), temperature=1.0, form=form)
    CachedStates.fill(tmp_path, verifier, FINGERPRINT, documents, lambda n: None)
    tokens = sum(len(d.tokens) for d in documents)
    written = sum(t.nbytes for p in tmp_path.glob("*.safetensors") for t in _tensors(p))
    assert written == tokens * CachedStates.bytes_per_token(verifier)


def _tensors(path: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(path).values())
