"""A few responses of a run with every draft in them, token by token: `samples.jsonl`, which `draftkit report` colours.

One object a response:

    {"step": rl step or null, "temperature": float, "k": int, "prompt": text, "finish": reason, "tokens": int,
     "first": text of the token that the prompt's own forward gave,
     "rounds": [{"drafted": [text, ..], "accepted": n, "own": text | null}, ..]}

own: the verifier's token of the round: the correction of the first rejected draft, or the bonus after all accepted
ones; null where the response ended among the drafts. Generated outside timed windows, at the sampling settings of the
run with seeds of its own, so nothing else that the run draws changes.

How many drafts of a round were accepted follows from the response: a rejected draft x had p(x) < q(x), so the
residual (p - q)^+ that the correction is drawn from gives it no chance, and the first token that differs from the
draft is the first rejected one (Leviathan et al., arXiv 2211.17192, 2.3). Left out: drafts at k = 0, several turns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from draftkit.run import RunDir, atomic_write
from draftkit.types import Generation, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "samples.jsonl"
RESPONSES = 4  # of one temperature, or of one evaluation
CONTEXT = 8  # tokens that a piece of text is decoded behind: some tokenizers write a space only between words

Row = dict[str, Any]


class Traces(Protocol):
    """The part of `engine.Engine` that is used here."""

    def generate_traced(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]
    ) -> tuple[list[Generation], list[list[list[int]]]]: ...


def record(
    engine: Traces,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[Sampling],
    k: int,
    step: int | None = None,
) -> list[Row]:
    """Answer the prompts with the draft length in force, k, and return a row for each."""
    answers, proposed = engine.generate_traced(prompts, sampling)
    rows = []
    for answer, drafts, settings in zip(answers, proposed, sampling, strict=True):
        found = rounds(answer.response_ids, drafts)
        if not answer.response_ids or not _as_counted(found, answer, k):
            continue
        rows.append(
            {
                "step": step,
                "temperature": settings.temperature,
                "k": k,
                "prompt": tokenizer.decode(answer.prompt_ids),
                "finish": answer.finish_reason,
                "tokens": len(answer.response_ids),
                **_as_text(tokenizer, answer.response_ids, found),
            }
        )
    return rows


def rounds(response: Sequence[int], proposed: Sequence[Sequence[int]]) -> list[tuple[list[int], int]]:
    """(drafts, how many of them were accepted) of each verify round, the last one possibly cut by the response's end.

    response[0] came from the prompt's forward. A proposal that the response ended before is not a round.
    """
    found, at = [], 1
    for drafts in proposed:
        if at >= len(response):
            break
        accepted = 0
        while accepted < len(drafts) and at + accepted < len(response) and response[at + accepted] == drafts[accepted]:
            accepted += 1
        found.append((list(drafts), accepted))
        at += accepted + 1
    return found


def _as_counted(found: Sequence[tuple[list[int], int]], answer: Generation, k: int) -> bool:
    """Whether this is what the engine counted; only the cut of the last round may differ. Otherwise the proposals were
    not those that were verified (an engine that splits prompts proposes between the parts), and the row would lie."""
    if answer.spec is None:
        return False
    accepted = sum(n for _, n in found)
    return accepted <= answer.spec.num_accepted <= accepted + k


def _as_text(tokenizer: PreTrainedTokenizerBase, response: Sequence[int], found: list[tuple[list[int], int]]) -> Row:
    def piece(before: Sequence[int], token: int) -> str:
        """The token's text where it stands; alone where it completes a character that the tokens before began."""
        left = list(before[-CONTEXT:])
        start, whole = tokenizer.decode(left), tokenizer.decode([*left, token])
        return whole[len(start) :] if whole.startswith(start) else tokenizer.decode([token])

    rows, at = [], 1
    for drafts, accepted in found:
        texts = [piece([*response[:at], *drafts[:i]], draft) for i, draft in enumerate(drafts)]
        end = at + accepted
        own = piece(response[:end], response[end]) if end < len(response) else None
        rows.append({"drafted": texts, "accepted": accepted, "own": own})
        at = end + 1
    return {"first": piece([], response[0]), "rounds": rows}


def keep(run: RunDir, rows: Sequence[Row]) -> None:
    """Put the rows into the run's file: of the steps before, only the first recorded one stays, so that the file shows
    the beginning and the present and never grows."""
    if not rows or not run.writes:
        return
    file = run.path / FILE
    before = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    first = min((row["step"] for row in before if row["step"] is not None), default=None)
    now = {row["step"] for row in rows}
    kept = [row for row in before if row["step"] == first and row["step"] not in now]
    atomic_write(file, "".join(json.dumps(row) + "\n" for row in [*kept, *rows]))
