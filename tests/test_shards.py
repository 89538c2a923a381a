"""The corpus on disk: what is written is what is read, and whatever is not as the manifest says is refused."""

import json

import pytest

from draftkit.data.prompts import Split, to_jsonl
from draftkit.data.shards import Corpus, describe_file, read_shard, write_manifest, write_shard
from draftkit.errors import UserError
from draftkit.types import Prompt, Rollout

FINGERPRINT = {"weights": "w1", "tokenizer": "t1", "chat_template": "c1"}


def prompt(name: str) -> Prompt:
    return Prompt(name, ({"role": "user", "content": f"{name}?"},), "sums", "4", {"verifier": "none"})


def rollout(prompt_id: str, sample: int = 0) -> Rollout:
    return Rollout(prompt_id, sample, "sums", (1, 2, 3), (40_000, 7), "stop", 0.25 if sample else None, 0.7)


@pytest.fixture
def corpus(tmp_path):
    """A finished corpus with one held-out prompt and two shards of one training prompt each."""
    (tmp_path / "shards").mkdir()
    split = Split([prompt("h")], [prompt("a"), prompt("b")])
    (tmp_path / "prompts.jsonl").write_text("".join(to_jsonl(split)))
    entries = []
    for name, where in (("h", "heldout"), ("a", "train"), ("b", "train")):
        path = tmp_path / "shards" / f"{name}.parquet"
        write_shard(path, [rollout(name, 0), rollout(name, 1)])
        entries.append({**describe_file(tmp_path, path), "split": where})
    prompts = describe_file(tmp_path, tmp_path / "prompts.jsonl")
    write_manifest(tmp_path, {"verifier": {"path": "demo", **FINGERPRINT}, "prompts": prompts, "shards": entries})
    return tmp_path


def refusal(path) -> str:
    with pytest.raises(UserError) as caught:
        Corpus.open(path)
    return str(caught.value)


def test_rollouts_come_back_as_they_were_written(corpus):
    opened = Corpus.open(corpus)
    assert list(opened.rollouts("train")) == [rollout(p, s) for p in "ab" for s in (0, 1)]
    assert list(opened.rollouts("heldout")) == [rollout("h", 0), rollout("h", 1)]
    assert opened.prompts("train") == [prompt("a"), prompt("b")]
    assert opened.prompts("heldout") == [prompt("h")]


def test_equal_rollouts_make_equal_files(tmp_path):
    for name in ("one", "two"):
        write_shard(tmp_path / name, [rollout("a"), rollout("b")], {"verifier_errors": {"E": 1}})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert read_shard(tmp_path / "one") == ([rollout("a"), rollout("b")], {"verifier_errors": {"E": 1}})


@pytest.mark.parametrize("keep", [0, 4, 200])
def test_truncated_shard_is_named(corpus, keep):
    shard = corpus / "shards" / "b.parquet"
    shard.write_bytes(shard.read_bytes()[:keep])
    assert f"{shard} is truncated: {keep} bytes" in refusal(corpus)
    with pytest.raises(UserError, match="truncated or damaged"):
        read_shard(shard)


def test_missing_and_altered_files_are_named(corpus):
    shard = corpus / "shards" / "a.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    assert f"{shard} is not the one in the manifest" in refusal(corpus)
    shard.unlink()
    assert f"{shard} is missing" in refusal(corpus)


def test_what_is_not_a_corpus(corpus, tmp_path):
    assert "does not exist" in refusal(tmp_path / "nowhere")
    (corpus / "manifest.json").unlink()
    assert "it is not finished" in refusal(corpus)
    (tmp_path / "empty").mkdir()
    assert "it is not a corpus" in refusal(tmp_path / "empty")


def test_another_schema_is_refused(corpus):
    manifest = json.loads((corpus / "manifest.json").read_text())
    (corpus / "manifest.json").write_text(json.dumps(manifest | {"schema": "draftkit.corpus/9"}))
    assert "schema 'draftkit.corpus/9'" in refusal(corpus)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tokenizer": "t2"}, "its tokenizer differs"),
        ({"weights": "w2"}, "its weights differs"),
        ({"weights": "w2", "chat_template": "c2"}, "its weights and chat template differ"),
    ],
)
def test_another_verifier_is_refused(corpus, changed, words):
    opened = Corpus.open(corpus)
    opened.check_verifier(FINGERPRINT)
    with pytest.raises(UserError, match=words):
        opened.check_verifier(FINGERPRINT | changed)
