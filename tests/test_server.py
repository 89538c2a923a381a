"""Verifier states from a server: a double that speaks as vLLM's connector does, over a real model and real HTTP.

vLLM's own connector needs a GPU; what it writes is read from its source (example_hidden_states_connector.py): the file
holds `hidden_states` [T, layers, H] in ascending order of layers and `token_ids`, under a lock until it is whole.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from draftkit.data.capture import Verifier
from draftkit.errors import RunFailed, UserError
from draftkit.train.server import SEEN, ServedVerifier, serve_command, served_layers, skeleton
from draftkit.types import Document

AUX, LAST = (1, 3), 4
LOCK = threading.Lock()  # one forward at a time


class Double:
    """layers: those that it was started with. delay_s: between its answer and the file's last byte."""

    def __init__(self, model: Path, storage: Path, layers: list[int], delay_s: float = 0.0) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.storage, self.layers, self.delay_s = storage, layers, delay_s
        self.asked = 0

    def answer(self, body: dict) -> dict:
        assert body["max_tokens"] == 1 and body["temperature"] == 0
        with LOCK, torch.no_grad():
            self.asked += 1
            streams: dict[int, torch.Tensor] = {}
            hooks = [
                self.model.model.layers[layer - 1].register_forward_hook(
                    lambda _module, _inputs, out, layer=layer: streams.__setitem__(
                        layer, (out[0] if isinstance(out, tuple) else out).reshape(len(body["prompt"]), -1)
                    )
                )
                for layer in self.layers
            ]
            logits = self.model(input_ids=torch.tensor([body["prompt"]])).logits[0, -1]
            for hook in hooks:
                hook.remove()
            file = self.storage / f"{self.asked}.safetensors"
        states = torch.stack([streams[layer] for layer in sorted(self.layers)], 1)
        lock = file.with_name(f"{file.name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(self.delay_s)
            save_file({"hidden_states": states, "token_ids": torch.tensor(self.tokens(body["prompt"]))}, file)
            lock.close()

        threading.Thread(target=write).start()
        choice = {"text": "", "token_ids": [int(logits.argmax())]}
        return {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(file)}}

    def tokens(self, prompt: list[int]) -> list[int]:
        return prompt


@pytest.fixture
def serve() -> Iterator[Callable[[Double], str]]:
    """serve(double) -> its address."""
    running = []

    def start(double: Double) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply({"data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(double.answer(body))

            def reply(self, content: dict) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def documents(count: int = 5) -> list[Document]:
    draw = torch.Generator().manual_seed(1)
    made = []
    for i in range(count):
        tokens = torch.randint(1, 96, (7 + 3 * i,), generator=draw).tolist()
        made.append(Document(tuple(tokens), (False,) * 4 + (True,) * (len(tokens) - 4)))
    return made


def verifier(path: Path, server: str, aux: tuple[int, ...] = AUX) -> ServedVerifier:
    return ServedVerifier(path, aux, 0.7, torch.float32, "cpu", "exact", server=server)


@pytest.mark.parametrize("aux", [AUX, (3, 1), (4, 2), ()])
def test_states_are_those_of_a_local_forward(tiny_verifier, tmp_path, serve, aux):
    layers = served_layers(aux, LAST)
    double = Double(tiny_verifier, tmp_path, layers, delay_s=0.05)
    theirs = verifier(tiny_verifier, serve(double), aux).states(documents())
    ours = Verifier(tiny_verifier, aux, 0.7, torch.float32).states(documents())
    for a, b in zip(theirs, ours, strict=True):
        assert a.keys() == b.keys() and torch.equal(a["top"], b["top"])
        for name in ("aux", "last", "lse", "max"):
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)
    assert double.asked == len(ours) and not list(tmp_path.iterdir()), "a file was left on the server's disk"


def test_only_the_ends_and_the_last_layers_are_loaded(tiny_verifier):
    model = skeleton(tiny_verifier, torch.float32, last_layers=1)
    held = {name.rsplit(".", 1)[0] for name, p in model.named_parameters(remove_duplicate=False) if not p.is_meta}
    assert {"model.embed_tokens", "model.norm", "lm_head", "model.layers.3.mlp.up_proj"} <= held
    assert not [name for name in held if name.startswith(("model.layers.0.", "model.layers.1.", "model.layers.2."))]


def test_a_server_of_other_weights_is_found(tiny_verifier, tmp_path, serve):
    other = Double(tiny_verifier, tmp_path, served_layers(AUX, LAST))
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(torch.randn(parameter.shape[0], generator=torch.Generator().manual_seed(3)).abs().view(
                -1, *[1] * (parameter.dim() - 1)
            ))  # fmt: skip
    with pytest.raises(RunFailed, match="it serves other weights"):
        verifier(tiny_verifier, serve(other)).states(documents(SEEN))


def test_a_server_with_other_layers_is_found(tiny_verifier, tmp_path, serve):
    """As many as asked for, so that shapes fit, but the last one is not the last."""
    with pytest.raises(RunFailed, match=r"or other layers than \[1, 3, 4\]") as raised:
        verifier(tiny_verifier, serve(Double(tiny_verifier, tmp_path, [1, 2, 3]))).states(documents(SEEN))
    assert serve_command(tiny_verifier, [1, 3, 4]) in str(raised.value)


class OtherTokens(Double):
    def tokens(self, prompt: list[int]) -> list[int]:
        return prompt[:-1] + [0]


class NoFile(Double):
    def answer(self, body: dict) -> dict:
        return super().answer(body) | {"kv_transfer_params": None}


class Elsewhere(Double):
    def answer(self, body: dict) -> dict:
        return super().answer(body) | {"kv_transfer_params": {"hidden_states_path": "/nowhere/1.safetensors"}}


@pytest.mark.parametrize(
    ("kind", "layers", "said"),
    [
        (OtherTokens, [1, 3, 4], "holds the states of other tokens"),
        (NoFile, [1, 3, 4], "names no file of hidden states"),
        (Elsewhere, [1, 3, 4], "a directory that server and trainer both see"),
        (Double, [1, 2, 3, 4], r"holds states of shape \[7, 4, 64\], not \[7, 3, 64\]"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(tiny_verifier, tmp_path, serve, kind, layers, said):
    with pytest.raises(UserError, match=said):
        verifier(tiny_verifier, serve(kind(tiny_verifier, tmp_path, layers))).states(documents(1))


def test_no_server_says_how_to_start_one(tiny_verifier):
    with pytest.raises(UserError, match=r"no vLLM answers at http://127.0.0.1:9 .*") as raised:
        verifier(tiny_verifier, "http://127.0.0.1:9")
    assert "extract_hidden_states" in str(raised.value)


def test_a_drafter_is_trained_from_a_server(draftkit, tiny_verifier, tiny_corpus, tmp_path, serve):
    (tmp_path / "states").mkdir()
    server = serve(Double(tiny_verifier, tmp_path / "states", served_layers((2, 3), LAST)))
    words = ["train-drafter", "--model", str(tiny_verifier), "--corpus", str(tiny_corpus), "train.parity=false"]
    words += ["train.epochs=1", "drafter.aux_layers=[2, 3]", "drafter.draft_vocab_size=64", "train.eval_every=1000"]
    losses = []
    for out, more in (("theirs", [f"train.server={server}"]), ("ours", [])):
        done = draftkit(*words, *more, "--out", out)
        assert done.returncode == 0, done.stderr
        results = json.loads((tmp_path / out / "results.json").read_text())
        losses.append(results["heldout"]["walk_acceptance_length"])
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    lm = [word for word in words if not word.startswith("drafter.")]
    done = draftkit(*lm, "--method", "draft-lm", f"train.server={server}", "--out", "lm")
    assert done.returncode == 2 and "train.server" in done.stderr
