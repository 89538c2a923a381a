"""A draft model whose tokenizer is not the verifier's: which tokens the two share, and how one text is read in both.

vLLM's `use_heterogeneous_vocab` translates token by token. A token of the verifier becomes the draft model's token of
the same spelling, or its unknown token where there is none; drafts are only made of shared tokens. So shared tokens are
the draft vocabulary, in which the verifier's distribution can be distilled as in any reduced one, and the coverage of
the corpus by them bounds what is accepted. The rule is that of vLLM 0.32 (`v1/spec_decode/vocab_mapping.py`; the first
token of a spelling counts, a word's leading space is one space however a tokenizer marks it), and a test holds it
against vLLM's own.

Left out: drafts over several tokens where the spellings are cut differently (2402.13720 and others), which vLLM does
not serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from draftkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKS = ("\u0120", "\u2581")  # of a leading space: byte-level BPE, SentencePiece
LEAST = 0.05  # of the smaller vocabulary has to be shared, or the two have nothing to say to each other


@dataclass(frozen=True, slots=True)
class SharedVocab:
    """to_draft_V int64: the draft id of every verifier id, the draft model's unknown token where it has none.
    verifier_S, draft_S int64: the ids of the S shared tokens, by rising verifier id."""

    to_draft_V: torch.Tensor
    verifier_S: torch.Tensor
    draft_S: torch.Tensor


def shared_vocab(
    verifier: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, verifier_size: int, draft_size: int
) -> SharedVocab:
    """Sizes are those of the models, which may have fewer or more rows than their tokenizers have tokens.

    Raises UserError when hardly anything is shared, or the draft model has no token for what it does not know.
    """
    unknown = draft.unk_token_id if draft.unk_token_id is not None else draft.eos_token_id
    if unknown is None:
        raise UserError(
            f"drafter.init: the tokenizer in {draft.name_or_path} has neither an unknown nor an end token, which stand "
            "for what the verifier's tokenizer alone has.",
            "Set unk_token or eos_token in its tokenizer_config.json.",
        )
    theirs, ours = _by_spelling(verifier), _by_spelling(draft)
    pairs = sorted((theirs[text], ours[text]) for text in theirs.keys() & ours.keys())
    pairs = [(v, d) for v, d in pairs if v < verifier_size and d < draft_size]
    if len(pairs) < LEAST * min(verifier_size, draft_size):
        raise UserError(
            f"drafter.init: the tokenizer in {draft.name_or_path} shares {len(pairs)} tokens with the verifier's.",
            "Give a model whose tokenizer is nearer to it, or leave drafter.init out.",
        )
    verifier_S, draft_S = torch.tensor(pairs).T.contiguous()
    to_draft_V = torch.full((verifier_size,), unknown)
    to_draft_V[verifier_S] = draft_S
    return SharedVocab(to_draft_V, verifier_S, draft_S)


def same_tokens(verifier: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> bool:
    return verifier.get_vocab() == draft.get_vocab()


def _by_spelling(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    marks, found = _marks(tokenizer), {}
    for token, id in tokenizer.get_vocab().items():
        mark = next((m for m in marks if token.startswith(m)), None)
        found.setdefault(token if mark is None else " " + token.removeprefix(mark), id)
    return found


def _marks(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """How this tokenizer marks a leading space."""
    ids = tokenizer.encode(" a", add_special_tokens=False)
    first = tokenizer.convert_ids_to_tokens(ids[0]) if ids else ""
    if isinstance(first, str) and len(first) > 1 and first.endswith("a") and first[0] not in " \t":
        return (first[:-1],)
    return MARKS
