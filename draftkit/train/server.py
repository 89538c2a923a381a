"""Verifier states from a vLLM that serves the verifier: for one that does not fit beside the trainer.

    documents' token ids -> POST /v1/completions, one token asked for -> the server writes the prompt's states to a file
    (`extract_hidden_states`, ExampleHiddenStatesConnector) -> read here, checked, deleted

The server gives the residual stream after the layers that it was started with, in ascending order; the last one is the
stream before the final norm, which is applied here. Of the weights only the ends, the final norm and the last layers
(where a drafter starts) are loaded. Both sides have to see the server's `shared_storage_path`. Each answer is held
against the file: its tokens, its shape, and that the state of the last token really leads to the token that the server
chose, which no other model or layer would do for long. Left out: drafters that copy whole verifiers (draft-lm).
"""

from __future__ import annotations

import fcntl
import json
import shlex
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from draftkit.data.capture import Verifier
from draftkit.data.forms import Form, read_back
from draftkit.drafters.init import EMBEDDING, HEAD, NORM
from draftkit.errors import RunFailed, UserError
from draftkit.models import stored_tensors
from draftkit.types import Document

AT_ONCE = 32  # requests that the server has at a time
TIMEOUT_S = 600
SEEN, AGREE = 16, 0.75  # answers after which the states must have led to so many of the tokens chosen; ties differ


class ServedVerifier(Verifier):
    """As `Verifier`, its states from `server` (http://host:port). last_layers: how many of the verifier's last layers
    are loaded here. Raises UserError when the server is not there or serves something else."""

    def __init__(
        self,
        path: Path,
        aux_layers: Sequence[int],
        temperature: float,
        dtype: torch.dtype,
        device: str,
        form: Form,
        *,
        server: str,
        last_layers: int = 1,
    ) -> None:
        self.form, self.server, self.path = form, server.rstrip("/"), path
        self._use(skeleton(path, dtype, last_layers, device), aux_layers, temperature, device)
        self.layers = served_layers(aux_layers, self.model.config.num_hidden_layers)
        self.agreed = self.seen = 0
        models = self._ask("/v1/models")["data"]
        self.name = models[0]["id"]

    @torch.no_grad()
    def states(self, documents: Sequence[Document]) -> list[dict[str, torch.Tensor]]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            fetched = list(pool.map(self._fetch, documents))
        result = []
        for document, (states, chosen) in zip(documents, fetched, strict=True):
            states_TLH = states.to(self.device, self.embed_VH.dtype)
            aux = [states_TLH[:, self.layers.index(layer)] for layer in self.aux_layers]
            last_TH = self.model.model.norm(states_TLH[:, -1].contiguous())
            self._compare(last_TH[-1], chosen)
            mask = torch.tensor(document.mask, device=self.device)
            teacher = self._teacher(read_back(last_TH, self.form), mask)
            result.append({"aux": torch.cat(aux, -1) if aux else last_TH[:, :0], "last": last_TH, **teacher})
        return result

    def _fetch(self, document: Document) -> tuple[torch.Tensor, int]:
        """states [T, layers, H] in the server's dtype, and the token that it chose after the document."""
        asked = {"model": self.name, "prompt": list(document.tokens), "max_tokens": 1, "temperature": 0}
        answer = self._ask("/v1/completions", asked | {"return_token_ids": True})
        file = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if file is None:
            raise self._other("its answer names no file of hidden states")
        found = self._read(Path(file))
        states = found["hidden_states"]
        if found["token_ids"].tolist() != list(document.tokens):
            raise self._other(f"{file} holds the states of other tokens than were asked for")
        expected = (len(document.tokens), len(self.layers), self.embed_VH.shape[1])
        if tuple(states.shape) != expected:
            raise self._other(f"{file} holds states of shape {list(states.shape)}, not {list(expected)}")
        return states, answer["choices"][0]["token_ids"][0]

    def _read(self, file: Path) -> dict[str, torch.Tensor]:
        lock = file.with_name(f"{file.name}.lock")
        try:
            if lock.exists():
                with lock.open() as opened:
                    fcntl.flock(opened, fcntl.LOCK_SH)  # until it is written
            found = load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"train.server: {self.server} wrote {file}, which cannot be read here ({error}).",
                "Let shared_storage_path be a directory that server and trainer both see.",
            ) from error
        file.unlink()
        lock.unlink(missing_ok=True)
        return found

    def _compare(self, last_H: torch.Tensor, chosen: int) -> None:
        self.seen += 1
        self.agreed += int((self.head_VH @ last_H).argmax()) == chosen
        if self.seen >= SEEN and self.agreed < AGREE * self.seen:
            raise RunFailed(
                f"train.server: states from {self.server} led to the token that it chose in {self.agreed} of "
                f"{self.seen} answers: it serves other weights than {self.path}, or other layers than {self.layers}.",
                self._how(),
            )

    def _ask(self, where: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            self.server + where,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:300]
            raise UserError(
                f"train.server: {self.server} refused {where} ({error.code}): {said}", self._how()
            ) from error
        except (OSError, ValueError) as error:
            raise UserError(f"train.server: no vLLM answers at {self.server} ({error}).", self._how()) from error

    def _other(self, what: str) -> UserError:
        return UserError(f"train.server: {self.server} does not serve states as needed: {what}.", self._how())

    def _how(self) -> str:
        return f"Start it with: {serve_command(self.path, self.layers)}"


def served_layers(aux_layers: Sequence[int], num_layers: int) -> list[int]:
    """Ascending, as a server gives them; the last one is the stream that the final norm takes."""
    return sorted({*aux_layers, num_layers})


def serve_command(path: Path, layers: Sequence[int]) -> str:
    spec = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/states"},
    }
    words = ["vllm", "serve", str(path), "--no-enable-prefix-caching"]
    return shlex.join([*words, "--speculative-config", json.dumps(spec), "--kv-transfer-config", json.dumps(transfer)])


def skeleton(path: Path, dtype: torch.dtype, last_layers: int, device: str = "cpu") -> torch.nn.Module:
    """The verifier with weights at its ends, in its final norm and in its last layers (experts left out); the rest is
    on the meta device."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    count = config.num_hidden_layers
    layers = tuple(f"model.layers.{i}." for i in range(count - last_layers, count))

    def needed(name: str) -> bool:
        return name in (EMBEDDING, NORM, HEAD) or (name.startswith(layers) and ".experts." not in name)

    tensors = {name: tensor.to(device, dtype) for name, tensor in stored_tensors(path, needed)}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    ends = (EMBEDDING, NORM) if config.tie_word_embeddings else (EMBEDDING, NORM, HEAD)
    if missing := [name for name in ends if name not in tensors]:
        raise UserError(f"{path} holds no {missing[0]}.", "Capture without train.server.")
    return model.eval().requires_grad_(False)
