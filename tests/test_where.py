"""Where the drafter loses, against a plain float64 loop over the same documents."""

from __future__ import annotations

import pytest
import tiny
import torch

from draftkit.data.capture import StreamedStates, Verifier, collate
from draftkit.train.evaluate import TeacherView
from draftkit.train.where import markdown, where
from draftkit.types import Document


class Letters:
    """Stands in for a tokenizer where only names of tokens are wanted."""

    def decode(self, ids):
        return "".join(f"<{i}>" for i in ids)


@pytest.fixture(scope="module")
def made():
    verifier = Verifier(tiny.verifier_dir(), tiny.verifier().aux_layers, 0.7, torch.float32)
    drafter = tiny.random_drafter(verifier)
    made = torch.Generator().manual_seed(0)
    documents = []
    for length, task in ((14, "a"), (30, "b"), (9, "a"), (22, "b")):
        tokens = tuple(torch.randint(0, tiny.VOCAB, (length,), generator=made).tolist())
        documents.append(Document(tokens, (False,) * 4 + (True,) * (length - 4), task))
    states = StreamedStates(verifier, documents)
    return verifier, drafter, documents, where(drafter, TeacherView(drafter, verifier), verifier, states, 64, Letters())


def by_hand(verifier, drafter, documents):
    """(document, place, accepted, ceiling, entropy, drafted, wanted) of every first draft, one document at a time."""
    rows = []
    exact = tiny.load_exact(tiny.verifier_dir()).double()
    for number, document in enumerate(documents):
        states = StreamedStates(verifier, [document])
        batch = collate(states, [0], 1)
        q = drafter(batch)[0].double() @ drafter.head_DH.double().T
        with torch.no_grad():
            logits = exact(torch.tensor([document.tokens])).logits[0]
        for r, p in enumerate(batch.slot_R.tolist()):
            law = (logits[p + 1] / 0.7).softmax(-1)
            drafted = int(drafter.draft_to_target_D[q[r].argmax()])
            entropy = float(-(law * law.log()).sum())
            rows.append((number, p + 1, float(law[drafted]), float(law.max()), entropy, drafted, int(law.argmax())))
    return rows


def test_tables_equal_a_plain_loop(made):
    verifier, drafter, documents, found = made
    rows = by_hand(verifier, drafter, documents)
    assert sum(r["drafts"] for r in found["by_position"]) == len(rows)
    for table, value in (("by_position", lambda r: r[1] + 1 - 4), ("by_entropy", lambda r: r[4])):
        for bucket in found[table]:
            mine = [r for r in rows if bucket["from"] <= value(r) < (bucket["below"] or float("inf"))]
            assert bucket["drafts"] == len(mine)
            assert bucket["accepted"] == pytest.approx(sum(r[2] for r in mine) / len(mine), abs=1e-5)
            assert bucket["ceiling"] == pytest.approx(sum(r[3] for r in mine) / len(mine), abs=1e-5)
            assert bucket["lost"] == pytest.approx(bucket["ceiling"] - bucket["accepted"])
    for bucket in found["by_family"]:
        mine = [r for r in rows if documents[r[0]].task == bucket["family"]]
        assert bucket["accepted"] == pytest.approx(sum(r[2] for r in mine) / len(mine), abs=1e-5)
    assert [bucket["family"] for bucket in found["by_family"]] == ["a", "b"]


def test_the_worst_tokens_and_places_are_those_of_the_loop(made):
    verifier, drafter, documents, found = made
    rows = by_hand(verifier, drafter, documents)
    lost: dict[int, float] = {}
    for r in rows:
        lost[r[6]] = lost.get(r[6], 0.0) + r[3] - r[2]
    worst = max(lost, key=lost.get)
    assert found["tokens"][0]["wanted"] == f"<{worst}>"
    assert found["tokens"][0]["share_of_lost"] == pytest.approx(lost[worst] / sum(lost.values()), abs=1e-4)
    place = max(rows, key=lambda r: r[3] - r[2])
    assert found["places"][0]["lost"] == pytest.approx(place[3] - place[2], abs=1e-5)
    end = place[1] + 1
    context = documents[place[0]].tokens[max(0, end - 10) : end]
    assert found["places"][0]["context"] == Letters().decode(context)
    assert found["places"][0]["drafted"] == f"<{place[5]}>"


def test_the_page_holds_every_table(made):
    text = markdown(made[3])
    assert text.count("| drafts | accepted | ceiling | lost |") == 4
    assert "share of all that is lost" in text and "| a | " in text


def test_markdown_of_odd_tokens_stays_a_table(made):
    found = made[3] | {"tokens": [{"wanted": "a|b\n", "drafted": "`", "drafts": 1, "share_of_lost": 1.0}]}
    [line] = [line for line in markdown(found).splitlines() if "a" in line and "b\\n" in line]
    assert line == "| `a\\|b\\n` | `'` | 1 | 100.0 % |"
