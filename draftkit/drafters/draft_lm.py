"""Small draft model: an ordinary causal LM with the verifier's vocabulary, distilled from it (vLLM's `draft_model`).

    reads     x[0] .. x[p+1]      at step 0 of slot p; then its own proposals
    predicts  x[p+2+i]            the state at position p+1+i

It reads tokens only, so under teacher forcing step i of slot p is step 0 of slot p+i: one pass over the text trains
every step. The student is the verifier with most of its layers left out (`student`), or any small model that shares
its vocabulary. Embedding and LM head of a student made from the verifier stay the verifier's: they are most of its
parameters, and frozen they cost neither a gradient nor optimizer state.

A model with another tokenizer reads the text token by token in its own ids and drafts the tokens that both have, as
vLLM's `use_heterogeneous_vocab` serves it (`shared_vocab`): a reduced draft vocabulary, greedy drafts only.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftkit.drafters.base import Drafter, document_spans, whole_directory
from draftkit.drafters.shared_vocab import SharedVocab, same_tokens, shared_vocab
from draftkit.errors import UserError
from draftkit.models import fingerprint
from draftkit.types import DraftBatch

MODEL_SHARE = 6  # a student has one of so many of the verifier's layers, unless drafter.num_layers says
COPIED = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges.txt", "generation_config.json")


class DraftLM(Drafter):
    """model: a transformers causal LM with float32 parameters, those that do not train frozen. shared: where its
    tokenizer is another one, which is then that of `tokenizer_of`, a model directory."""

    method = "draft_model"
    sees_itself = False

    def __init__(self, model: nn.Module, shared: SharedVocab | None = None, tokenizer_of: Path | None = None) -> None:
        super().__init__()
        self.model, self.config, self.tokenizer_of = model, model.config.get_text_config(), tokenizer_of
        own = torch.arange(model.get_output_embeddings().weight.shape[0])
        self.register_buffer("draft_to_target_D", own if shared is None else shared.verifier_S, persistent=False)
        self.register_buffer("row_D", None if shared is None else shared.draft_S, persistent=False)
        self.register_buffer("to_draft_V", None if shared is None else shared.to_draft_V, persistent=False)

    @property
    def head_DH(self) -> torch.Tensor:
        head = self.model.get_output_embeddings().weight
        return head if self.row_D is None else head[self.row_D]

    @property
    def device(self) -> torch.device:
        return self.draft_to_target_D.device

    def own_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """The verifier's token ids as this model reads them."""
        return tokens if self.to_draft_V is None else self.to_draft_V[tokens]

    def shardable(self) -> list[nn.Module]:
        return list(self.model.base_model.layers)

    def forward(self, batch: DraftBatch, own_tokens: bool = False) -> list[torch.Tensor]:
        num_steps, last = len(batch.valid_LR), len(batch.tokens_N) - 1
        dtype = batch.last_NH.dtype
        with torch.autocast(batch.tokens_N.device.type, dtype, enabled=dtype != torch.float32):
            states_NH = self._read(batch).to(dtype)
            if own_tokens and num_steps > 1:
                return self._follow(batch, states_NH)
        return [states_NH[(batch.slot_R + 1 + i).clamp(max=last)] for i in range(num_steps)]

    def _read(self, batch: DraftBatch) -> torch.Tensor:
        """Final states [N, H] of the documents, padded on the right for the pass."""
        spans = document_spans(batch)
        lengths = [end - start for start, end in spans]
        tokens = batch.tokens_N.new_zeros(len(lengths), max(lengths))
        for row, (start, end) in enumerate(spans):
            tokens[row, : end - start] = batch.tokens_N[start:end]
        hidden = self.model.base_model(input_ids=self.own_ids(tokens), use_cache=False).last_hidden_state
        return torch.cat([hidden[row, :length] for row, length in enumerate(lengths)])

    def _follow(self, batch: DraftBatch, states_NH: torch.Tensor) -> list[torch.Tensor]:
        """States of every step where the model reads its own proposals: they branch off the text at every slot.

        x[0] x[1] .. x[T-1] | d1 of each slot | d2 of each slot | ..     a slot's drafts see the text up to
                                                                         x[p+1] and their own branch
        """
        states = [states_NH[batch.slot_R + 1]]
        proposed: list[torch.Tensor] = [self.propose(states[0])]
        for _ in batch.valid_LR[1:]:
            parts = []
            for start, end in document_spans(batch):
                mine = (batch.slot_R >= start) & (batch.slot_R < end)
                slots, text = batch.slot_R[mine] - start, batch.tokens_N[start:end]
                if len(slots):
                    parts.append(self._branches(text, slots, [tokens[mine] for tokens in proposed]))
            states.append(torch.cat(parts).to(states_NH.dtype))
            proposed.append(self.propose(states[-1]))
        return states

    def _branches(self, text_T: torch.Tensor, slot_R: torch.Tensor, drafts: list[torch.Tensor]) -> torch.Tensor:
        """States [R, H] at the last draft of each branch."""
        length, rows, steps = len(text_T), len(slot_R), len(drafts)
        device = text_T.device
        at = torch.arange(length, device=device)
        seen = torch.zeros(length + rows * steps, length + rows * steps, dtype=torch.bool, device=device)
        seen[:length, :length] = at.unsqueeze(0) <= at.unsqueeze(1)
        position = [at]
        branch = torch.arange(rows, device=device)
        for j in range(steps):
            query = length + j * rows + branch
            seen[query, :length] = at.unsqueeze(0) <= (slot_R + 1).unsqueeze(1)
            for earlier in range(j + 1):
                seen[query, length + earlier * rows + branch] = True
            position.append(slot_R + 2 + j)
        hidden = self.model.base_model(
            input_ids=self.own_ids(torch.cat([text_T, *drafts])).unsqueeze(0),
            position_ids=torch.cat(position).unsqueeze(0),
            attention_mask=_additive(seen, self.model.get_output_embeddings().weight.dtype),
            use_cache=False,
        ).last_hidden_state
        return hidden[0, -rows:]


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(1, 1, *seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


# ---- where one begins ---------------------------------------------------------------------------------------------


def student(verifier: nn.Module, num_layers: int | None) -> DraftLM:
    """The verifier (a transformers causal LM) with `num_layers` of its layers, evenly spaced, its last among them.
    Embedding and LM head frozen. Raises UserError for a number that it does not have."""
    config = verifier.config.get_text_config()
    deep = config.num_hidden_layers
    count = num_layers or max(2, deep // MODEL_SHARE)
    if not 1 <= count <= deep:
        raise UserError(f"drafter.num_layers ({count}): the verifier has {deep} layers.", "Give 1 to that number.")
    kept = [round(j * (deep - 1) / (count - 1)) for j in range(count)] if count > 1 else [deep - 1]
    small = copy.deepcopy(config)
    small.num_hidden_layers = count
    if getattr(small, "layer_types", None):
        small.layer_types = [config.layer_types[j] for j in kept]
    model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    theirs = verifier.state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(theirs[_name_in_verifier(name, kept)])
    for ends in (model.get_input_embeddings(), model.get_output_embeddings()):
        ends.requires_grad_(False)
    return DraftLM(model.eval())


def _name_in_verifier(name: str, kept: list[int]) -> str:
    head, found, rest = name.partition("model.layers.")
    if not found:
        return name
    number, _, leaf = rest.partition(".")
    return f"{head}{found}{kept[int(number)]}.{leaf}"


def from_model(directory: Path, verifier: Path, vocab_size: int) -> DraftLM:
    """A small model to distil into, all of it trained. verifier: its directory. Raises UserError for a tokenizer that
    has nothing to do with the verifier's."""
    size = AutoConfig.from_pretrained(directory).get_text_config().vocab_size
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    shared = shared_with(directory, verifier, size, vocab_size)
    return DraftLM(model) if shared is None else DraftLM(model, shared, directory)


def shared_with(directory: Path, verifier: Path, size: int, vocab_size: int) -> SharedVocab | None:
    """What this draft model's tokenizer shares with the verifier's; None where it is the same one. A model without a
    tokenizer beside it is taken for one of the verifier's if its vocabulary has the same size (UserError if not)."""
    if fingerprint(directory)["tokenizer"] == fingerprint(verifier)["tokenizer"] and size == vocab_size:
        return None
    if not (directory / "tokenizer_config.json").is_file():
        if size == vocab_size:
            return None
        raise UserError(
            f"{directory} has a vocabulary of {size}, the verifier of {vocab_size}, and no tokenizer beside it.",
            "Give a model with the verifier's tokenizer, or copy its own tokenizer files into its directory.",
        )
    theirs, own = (AutoTokenizer.from_pretrained(path) for path in (verifier, directory))
    if size == vocab_size and same_tokens(theirs, own):
        return None
    return shared_vocab(theirs, own, vocab_size, size)


# ---- what is served -------------------------------------------------------------------------------------------------


def export_draft_lm(
    drafter: DraftLM, directory: Path, verifier_path: Path, verifier: dict[str, str], readme: str
) -> None:
    """Write `directory`: a transformers checkpoint in bfloat16 with the verifier's tokenizer, or its own."""
    served = copy.deepcopy(drafter.model).to("cpu", torch.bfloat16)
    with whole_directory(directory, verifier) as aside:
        served.save_pretrained(aside)
        for pattern in COPIED:
            for file in (drafter.tokenizer_of or verifier_path).glob(pattern):
                shutil.copyfile(file, aside / file.name)
        (aside / "README.md").write_text(readme)
