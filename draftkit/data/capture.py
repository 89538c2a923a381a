"""Verifier hidden states for the drafter: captured while training (stream) or once, to disk (cache).

One transformers forward over the documents yields the auxiliary layers' residual streams and the final-normed state,
both bfloat16, and three numbers a token about the teacher's full-vocabulary distribution (log-sum-exp, maximum,
argmax), so that training never multiplies by the full LM head. Layer ids are vLLM's: id L is the state after L blocks,
id 0 the embedding, id n the last block's output *before* the final norm. Right padding needs no mask under causal
attention. A streamed and a cached corpus give the same batches, bit for bit: both capture the same chunks of documents
in the same order, and bfloat16 and float32 survive safetensors.

Left out: vLLM's `extract_hidden_states` connector, which needs CUDA streams.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from draftkit.data.batch import layout
from draftkit.data.forms import Form, bytes_of, decode, encode, fields, read_back
from draftkit.errors import UserError
from draftkit.models import native_bf16
from draftkit.run import atomic_json, no_space
from draftkit.types import Document, DraftBatch

SCHEMA = "draftkit.states/1"
CHUNK_TOKENS = 4096  # padded tokens of one verifier forward
LOGIT_ROWS = 64  # rows of full-vocabulary logits held at once: few enough to stay near the cache


def state_dtype(device: str) -> torch.dtype:
    """bfloat16 where the device multiplies it natively, float32 elsewhere (a CPU would emulate it, slowly)."""
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if native_bf16() else torch.float32


class Taps:
    """What `aux_layers` put into the residual stream of a transformers causal LM, kept from its last forward.

    Nothing is kept while `active` is False: a training forward would hold its graph.
    """

    def __init__(self, model: torch.nn.Module, aux_layers: Sequence[int]) -> None:
        self.aux_layers, self.active = tuple(aux_layers), True
        self._held: dict[int, torch.Tensor] = {}
        blocks = model.model.layers
        for layer in self.aux_layers:
            if not 0 <= layer <= len(blocks):
                raise UserError(f"drafter.aux_layers: the verifier has layers 0 to {len(blocks)}, not {layer}.")
            tapped = blocks[layer - 1] if layer else model.get_input_embeddings()
            tapped.register_forward_hook(self._hold(layer))

    def _hold(self, layer: int) -> Callable:
        def hook(_module, _inputs, output):
            if self.active:
                self._held[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def take(self) -> torch.Tensor:
        """[documents, T, F], the layers side by side in the order of aux_layers; forgets them."""
        aux = torch.cat([self._held[layer] for layer in self.aux_layers], -1)
        self._held.clear()
        return aux


class Verifier:
    """The verifier as transformers runs it, frozen.

    embed_VH and head_VH: its embedding and LM head (the same tensor when tied). dtype: of the forward and the states.
    form: in which states are kept (`forms`); the teacher's numbers are those of the state as it is read back.
    """

    def __init__(
        self,
        path: Path,
        aux_layers: Sequence[int],
        temperature: float,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        form: Form = "exact",
    ) -> None:
        self.form = form
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval().requires_grad_(False)
        self._use(model, aux_layers, temperature, device)

    def _use(self, model: torch.nn.Module, aux_layers: Sequence[int], temperature: float, device: str) -> None:
        self.model, self.device = model, device
        self.aux_layers, self.temperature = tuple(aux_layers), temperature or 1.0
        self.embed_VH = model.get_input_embeddings().weight
        self.head_VH = model.get_output_embeddings().weight
        self._taps = Taps(model, aux_layers)

    @classmethod
    def shifted(cls, verifier: Verifier, shift: int) -> Verifier:
        """The same model tapped `shift` layers later (within its depth): what an off-by-one in the ids would see."""
        deepest = len(verifier.model.model.layers)
        other = cls.__new__(cls)
        other.form = verifier.form
        layers = [min(max(layer + shift, 0), deepest) for layer in verifier.aux_layers]
        other._use(verifier.model, layers, verifier.temperature, verifier.device)
        return other

    @torch.no_grad()
    def states(self, documents: Sequence[Document]) -> list[dict[str, torch.Tensor]]:
        """Per document: aux [T, F], last [T, H], lse, max [T] float32, top [T] int64."""
        longest = max(len(d.tokens) for d in documents)
        tokens = torch.zeros(len(documents), longest, dtype=torch.int64)
        for row, document in enumerate(documents):
            tokens[row, : len(document.tokens)] = torch.tensor(document.tokens)
        last = self.model.model(input_ids=tokens.to(self.device), use_cache=False).last_hidden_state
        aux = self._taps.take() if self.aux_layers else last[..., :0]
        result = []
        for row, document in enumerate(documents):
            length = len(document.tokens)
            hidden = last[row, :length].contiguous()
            mask = torch.tensor(document.mask, device=hidden.device)
            teacher = self._teacher(read_back(hidden, self.form), mask)
            result.append({"aux": aux[row, :length].contiguous(), "last": hidden, **teacher})
        return result

    def _teacher(self, hidden_TH: torch.Tensor, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
        """lse, max, top at the supervised tokens, where slots have their labels; zero elsewhere."""
        lse, maximum = hidden_TH.new_zeros(2, len(hidden_TH), dtype=torch.float32)
        index = torch.zeros(len(hidden_TH), dtype=torch.int64, device=hidden_TH.device)
        for rows in mask_T.nonzero().squeeze(1).split(LOGIT_ROWS):
            logits = (hidden_TH[rows] @ self.head_VH.T).float().div_(self.temperature)
            maximum[rows], index[rows] = logits.max(-1)
            lse[rows] = logits.sub_(maximum[rows].unsqueeze(1)).exp_().sum(-1).log() + maximum[rows]
        return {"lse": lse, "max": maximum, "top": index}


def chunks(lengths: Sequence[int], tokens: int = CHUNK_TOKENS) -> list[list[int]]:
    """Document numbers by forward pass: neighbours in length go together, so little is spent on padding."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    result: list[list[int]] = [[]]
    for i in order:
        if result[-1] and (len(result[-1]) + 1) * lengths[i] > tokens:
            result.append([])
        result[-1].append(i)
    return result


class StreamedStates:
    """States captured when a batch asks for them; the last few chunks stay in memory."""

    def __init__(self, verifier: Verifier, documents: Sequence[Document], keep: int = 16) -> None:
        self.verifier, self.documents, self.keep = verifier, documents, keep
        self.chunks = chunks([len(d.tokens) for d in documents])
        self.chunk_of = {i: number for number, members in enumerate(self.chunks) for i in members}
        self._held: OrderedDict[int, dict[int, dict[str, torch.Tensor]]] = OrderedDict()

    def document(self, i: int) -> dict[str, torch.Tensor]:
        number = self.chunk_of[i]
        if number not in self._held:
            members = self.chunks[number]
            form, dtype = self.verifier.form, self.verifier.embed_VH.dtype
            captured = self.verifier.states([self.documents[j] for j in members])
            states = [decode(encode(s, form), form, dtype) for s in captured]
            self._held[number] = dict(zip(members, states, strict=True))
            if len(self._held) > self.keep:
                self._held.popitem(last=False)
        self._held.move_to_end(number)
        return self._held[number][i]


class CachedStates:
    """States read from the shards that `fill` wrote: one per chunk, tensors named `<document>.<field>`. dtype: of the
    states as they are read."""

    def __init__(
        self,
        directory: Path,
        documents: Sequence[Document],
        form: Form = "exact",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.directory, self.documents, self.form, self.dtype = directory, documents, form, dtype
        self.chunks = chunks([len(d.tokens) for d in documents])
        self.chunk_of = {i: number for number, members in enumerate(self.chunks) for i in members}
        self._open: dict[int, safe_open] = {}

    @staticmethod
    def key(verifier: Verifier, fingerprint: dict, documents: Sequence[Document]) -> dict:
        """What the cached states depend on."""
        digest = hashlib.sha256()
        for d in documents:
            digest.update(repr((d.tokens, d.mask)).encode())
        return {
            "schema": SCHEMA,
            "verifier": fingerprint,
            "aux_layers": list(verifier.aux_layers),
            "temperature": verifier.temperature,
            "dtype": str(verifier.embed_VH.dtype),
            "form": verifier.form,
            "documents": digest.hexdigest(),
        }

    @classmethod
    def fill(
        cls,
        directory: Path,
        verifier: Verifier,
        fingerprint: dict,
        documents: Sequence[Document],
        progress: Callable[[int], None],
    ) -> CachedStates:
        """Capture what is missing, chunk by chunk; a killed run goes on where it was. progress(n): n more tokens done.

        Raises UserError when the estimate does not fit on the disk.
        """
        directory.mkdir(parents=True, exist_ok=True)
        key, key_file = cls.key(verifier, fingerprint, documents), directory / "key.json"
        if not key_file.exists() or json.loads(key_file.read_text()) != key:
            for stale in directory.glob("*.safetensors"):
                stale.unlink()
            atomic_json(key_file, key)
        cache = cls(directory, documents, verifier.form, verifier.embed_VH.dtype)
        missing = [n for n in range(len(cache.chunks)) if not cache.path(n).exists()]
        need = sum(len(documents[i].tokens) for n in missing for i in cache.chunks[n]) * cls.bytes_per_token(verifier)
        no_space(directory, need, "the verifier's hidden states")
        for n in missing:
            members = cache.chunks[n]
            tensors = {
                f"{i}.{name}": tensor
                for i, state in zip(members, verifier.states([documents[i] for i in members]), strict=True)
                for name, tensor in encode(state, verifier.form).items()
            }
            aside = cache.path(n).with_suffix(".tmp")
            save_file(tensors, aside)
            aside.rename(cache.path(n))
            progress(sum(len(documents[i].tokens) for i in members))
        return cache

    @staticmethod
    def bytes_per_token(verifier: Verifier) -> int:
        hidden, dtype = verifier.embed_VH.shape[1], verifier.embed_VH.dtype
        widths = (hidden * len(verifier.aux_layers), hidden)
        return sum(bytes_of(width, dtype, verifier.form) for width in widths) + 4 + 4 + 8

    def path(self, number: int) -> Path:
        return self.directory / f"{number:05d}.safetensors"

    def document(self, i: int) -> dict[str, torch.Tensor]:
        number = self.chunk_of[i]
        if number not in self._open:
            self._open[number] = safe_open(self.path(number), "pt")
        file = self._open[number]
        stored = {name: file.get_tensor(f"{i}.{name}") for name in (*fields(self.form), "lse", "max", "top")}
        return decode(stored, self.form, self.dtype)


States = StreamedStates | CachedStates


def collate(states: States, members: Sequence[int], num_steps: int, device: str | torch.device = "cpu") -> DraftBatch:
    """The batch of these documents (numbers), in this order, on the device that trains on it."""
    tokens, pos, segments, slots, valid = layout([states.documents[i] for i in members], num_steps)
    fields = [states.document(i) for i in members]
    joined = {name: torch.cat([f[name] for f in fields]).to(device) for name in ("aux", "last", "lse", "max", "top")}
    return DraftBatch(
        tokens_N=torch.from_numpy(tokens).to(device),
        pos_N=torch.from_numpy(pos).to(device),
        aux_NF=joined["aux"],
        last_NH=joined["last"],
        lse_N=joined["lse"],
        max_N=joined["max"],
        top_N=joined["top"],
        segments=segments,
        slot_R=torch.from_numpy(slots).to(device),
        valid_LR=torch.from_numpy(valid).to(device),
    )
