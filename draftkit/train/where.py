"""Where a drafter loses: its first greedy draft on held-out answers, by position, answer length, entropy and family.

For the draft of slot p, q is the drafter's distribution of token p+2 and p the verifier's at the rollout temperature:

    accepted   p(argmax q), the probability that the greedy draft is accepted          measures.md (c), formula 8
    ceiling    max p, what the best drafter would have
    lost       ceiling - accepted: what training can still win; the rest is the verifier's own entropy

The tokens that lose most are those where most of `lost` comes together: `wanted` is the verifier's favourite,
`drafted` what the drafter said most often instead. Left out: later drafts of a round, which mix their own errors with
the first's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from draftkit.data.batch import plan_epoch
from draftkit.data.capture import States, Verifier, collate
from draftkit.drafters.base import Drafter
from draftkit.drafters.losses import drafter_loss
from draftkit.run import atomic_write
from draftkit.train.evaluate import TeacherView

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POSITIONS = (0, 8, 32, 128, 512, 2048, 8192)  # borders, tokens into the answer
ENTROPIES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0)  # borders, nats
WORST_TOKENS, WORST_PLACES, CONTEXT = 12, 8, 10
ROWS = 64  # of full-vocabulary logits at once
FILE = "where.md"


@torch.no_grad()
def where(
    drafter: Drafter,
    teacher: TeacherView,
    verifier: Verifier,
    states: States,
    tokens_per_batch: int,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Tables for results.json, over all documents of `states`."""
    documents, ids = states.documents, drafter.draft_to_target_D
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    for members in plan_epoch([len(d.tokens) for d in documents], tokens_per_batch, 0, 0):
        batch = collate(states, members, 1, drafter.device)
        _, found = drafter_loss(drafter(batch), drafter.head_DH, teacher.at(batch), batch.valid_LR, 1.0, 1.0)
        ok, label = batch.valid_LR[0], batch.slot_R + 1
        starts = (batch.pos_N == 0).long().cumsum(0) - 1
        document = torch.tensor(members, device=ok.device)[starts[label]]
        rows = {
            "accepted": found["accept_LR"][0],
            "ceiling": (batch.max_N[label] - batch.lse_N[label]).exp(),
            "entropy": entropies(batch.last_NH[label], verifier),
            "drafted": ids[found["proposal_LR"][0]],
            "wanted": batch.top_N[label],
            "document": document,
            "place": batch.pos_N[label],  # the token before the drafted one
        }
        for name, values in rows.items():
            columns[name].append(values[ok].cpu().numpy())
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    answer_starts = np.array([d.mask.index(True) for d in documents])
    lengths = np.array([sum(d.mask) for d in documents])
    joined["position"] = joined["place"] + 1 - answer_starts[joined["document"]]
    joined["length"] = lengths[joined["document"]]
    quarters = sorted({1, *(int(x) for x in np.quantile(lengths, [0.25, 0.5, 0.75]))})
    families = np.array([d.task for d in documents])[joined["document"]]
    return {
        "by_position": _by_border(joined, "position", POSITIONS),
        "by_answer_length": _by_border(joined, "length", quarters),
        "by_entropy": _by_border(joined, "entropy", ENTROPIES),
        "by_family": [{"family": str(f)} | _means(joined, families == f) for f in sorted(set(families.tolist())) if f],
        "tokens": worst_tokens(joined, tokenizer),
        "places": worst_places(joined, [d.tokens for d in documents], tokenizer),
    }


def entropies(hidden_RH: torch.Tensor, verifier: Verifier) -> torch.Tensor:
    """[R] nats, of the verifier's whole distribution at its temperature."""
    parts = []
    for rows in hidden_RH.split(ROWS):
        logp = ((rows @ verifier.head_VH.T).float() / verifier.temperature).log_softmax(-1)
        parts.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(parts) if parts else hidden_RH.new_zeros(0)


def _means(joined: dict[str, np.ndarray], chosen: np.ndarray) -> dict[str, Any]:
    accepted, ceiling = float(joined["accepted"][chosen].mean()), float(joined["ceiling"][chosen].mean())
    return {"drafts": int(chosen.sum()), "accepted": accepted, "ceiling": ceiling, "lost": ceiling - accepted}


def _by_border(joined: dict[str, np.ndarray], name: str, borders: Sequence[float]) -> list[dict[str, Any]]:
    rows = []
    for low, high in zip(borders, [*borders[1:], np.inf], strict=True):
        chosen = (joined[name] >= low) & (joined[name] < high)
        if chosen.any():
            rows.append({"from": low, "below": None if high == np.inf else high} | _means(joined, chosen))
    return rows


def worst_tokens(joined: dict[str, np.ndarray], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """By the verifier's favourite: share of all that is lost, most first."""
    lost = joined["ceiling"] - joined["accepted"]
    by_token: dict[int, float] = defaultdict(float)
    instead: dict[int, Counter[int]] = defaultdict(Counter)
    for wanted, drafted, loss in zip(joined["wanted"].tolist(), joined["drafted"].tolist(), lost.tolist(), strict=True):
        by_token[wanted] += loss
        if drafted != wanted:
            instead[wanted][drafted] += 1
    total = max(float(lost.sum()), 1e-9)
    text = lambda token: tokenizer.decode([token])  # noqa: E731
    return [
        {
            "wanted": text(token),
            "drafted": text(instead[token].most_common(1)[0][0]) if instead[token] else None,
            "drafts": int((joined["wanted"] == token).sum()),
            "share_of_lost": loss / total,
        }
        for token, loss in sorted(by_token.items(), key=lambda item: -item[1])[:WORST_TOKENS]
    ]


def worst_places(
    joined: dict[str, np.ndarray], tokens: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Where the verifier was surest of what the drafter did not say."""
    lost = joined["ceiling"] - joined["accepted"]
    places = []
    for i in np.argsort(-lost, kind="stable")[:WORST_PLACES]:
        end = int(joined["place"][i]) + 1
        before = tokens[int(joined["document"][i])][max(0, end - CONTEXT) : end]
        places.append(
            {
                "context": tokenizer.decode(list(before)),
                "wanted": tokenizer.decode([int(joined["wanted"][i])]),
                "drafted": tokenizer.decode([int(joined["drafted"][i])]),
                "lost": float(lost[i]),
            }
        )
    return places


# --- as people read it ------------------------------------------------------------------------------------------


def markdown(found: dict[str, Any]) -> str:
    lines = ["# Where the drafter loses", "", "First greedy draft on held-out answers, at the rollout temperature.", ""]
    for key, title in (
        ("by_entropy", "verifier's entropy, nats"),
        ("by_position", "tokens into the answer"),
        ("by_answer_length", "length of the answer, tokens"),
        ("by_family", "prompt family"),
    ):
        if found[key]:
            lines += [f"| {title} | drafts | accepted | ceiling | lost |", "|---|---:|---:|---:|---:|"]
            for row in found[key]:
                shares = " | ".join(f"{row[name]:.3f}" for name in ("accepted", "ceiling", "lost"))
                lines.append(f"| {_bucket(row)} | {row['drafts']} | {shares} |")
            lines.append("")
    lines += ["| the verifier wanted | drafted instead, most often | drafts | share of all that is lost |"]
    lines += ["|---|---|---:|---:|"]
    lines += [
        f"| {_code(t['wanted'])} | {_code(t['drafted'])} | {t['drafts']} | {100 * t['share_of_lost']:.1f} % |"
        for t in found["tokens"]
    ]
    lines += ["", "| after | wanted | drafted | lost |", "|---|---|---|---:|"]
    lines += [
        f"| {_code(p['context'])} | {_code(p['wanted'])} | {_code(p['drafted'])} | {p['lost']:.2f} |"
        for p in found["places"]
    ]
    return "\n".join([*lines, "", "Accepted: p(draft). Ceiling: the verifier's own max p. Lost: their difference.", ""])


def _bucket(row: dict[str, Any]) -> str:
    if "family" in row:
        return row["family"]
    return f"{row['from']:g} and more" if row["below"] is None else f"{row['from']:g} to below {row['below']:g}"


def _code(text: str | None) -> str:
    """As Markdown code in a table cell, control characters spelt out."""
    if text is None:
        return ""
    shown = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return "`" + shown.replace("|", "\\|").replace("`", "'") + "`"


def write(found: dict[str, Any], folder: Path) -> None:
    atomic_write(folder / FILE, markdown(found))
