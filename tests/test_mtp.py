"""MTP layers: the PyTorch module against a plain loop in float64, and what stock vLLM makes of both layouts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftkit.data.capture import StreamedStates, Verifier, collate
from draftkit.drafters import mtp, stitch
from draftkit.drafters.mtp import Mtp, MtpConfig
from draftkit.errors import RunFailed, UserError
from draftkit.models import model_facts
from draftkit.train.parity import check_parity
from draftkit.train.served import export, spec_config
from draftkit.train.start import build_drafter, mtp_config, native_mtp
from draftkit.types import Document, DraftBatch

LAYOUTS = ["mimo", "eagle"]


def randomised(drafter: Mtp, seed: int = 1) -> Mtp:
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.12, generator=made)
            else:
                parameter.uniform_(0.6, 1.4, generator=made)
    return drafter


# ---- against a plain loop -----------------------------------------------------------------------------------------


def small(layout: str) -> tuple[Mtp, DraftBatch]:
    """A drafter and a batch of two documents in float64, all random."""
    made = torch.Generator().manual_seed(3)
    config = MtpConfig(layout, 4, 12, 20, 4, 2, 6, 30, 1e-5, {"rope_type": "default", "rope_theta": 100.0}, 64)
    normal = lambda *shape: torch.randn(*shape, generator=made, dtype=torch.float64)  # noqa: E731
    drafter = Mtp(config, normal(30, 12), normal(30, 12))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=made)
    docs = [
        Document(tuple(torch.randint(30, (9,), generator=made).tolist()), (False,) * 3 + (True,) * 6),
        Document(tuple(torch.randint(30, (7,), generator=made).tolist()), (False, True, True, True, False, True, True)),
    ]

    class States:
        documents = docs

        def document(self, i: int) -> dict[str, torch.Tensor]:
            length = len(docs[i].tokens)
            zeros = torch.zeros(length)
            aux = normal(length, 12)
            return {"aux": aux, "last": normal(length, 12), "lse": zeros, "max": zeros, "top": zeros.long()}

    return drafter.double(), collate(States(), [0, 1], 3)


def plain_loop(drafter: Mtp, batch: DraftBatch) -> list[torch.Tensor]:
    """One slot, one step, one head at a time; every key is computed anew. Row r of the result [L][R, H]."""
    c, p = drafter.config, dict(drafter.named_parameters())
    mimo = c.layout == "mimo"

    def rms(x, name):
        return x / (x.square().mean() + c.rms_norm_eps).sqrt() * p[name + ".weight"]

    def fuse(token, hidden, position):
        e = drafter.embed_VH[token]
        if not mimo:
            return p["input_proj.weight"] @ torch.cat([e, hidden])
        e = torch.zeros_like(e) if position == 0 else e
        return p["input_proj.weight"] @ torch.cat([rms(hidden, "hidden_layernorm"), rms(e, "token_layernorm")])

    def project(x, name, position=None):
        x = rms(x, "input_layernorm") if mimo else x
        y = p[f"self_attn.{name}_proj.weight"] @ x
        y = (y + p[f"self_attn.{name}_proj.bias"] if mimo else y).view(-1, c.head_dim)
        if position is None:
            return y
        angle = position / 100.0 ** (torch.arange(0, 6, 2, dtype=torch.float32) / 6)
        cos, sin = angle.cos().repeat(2), angle.sin().repeat(2)
        return y * cos + torch.cat([-y[:, 3:], y[:, :3]], 1) * sin

    fed = batch.aux_NF if mimo else batch.last_NH
    states = [[] for _ in batch.valid_LR]
    for start, first, last in batch.segments:
        for slot in range(first, last):
            keys = []
            for t in range(start, slot + 1):
                x = fuse(batch.tokens_N[t + 1], fed[t], t - start)
                keys.append((project(x, "k", t - start), project(x, "v")))
            hidden = None
            for i in range(len(states)):
                at = min(slot + 1 + i, len(batch.tokens_N) - 1)
                x = fuse(batch.tokens_N[at], fed[slot] if i == 0 else hidden, slot - start + i)
                if i > 0:
                    keys.append((project(x, "k", slot - start + i), project(x, "v")))
                q, out = project(x, "q", slot - start + i), []
                for head in range(c.num_attention_heads):
                    kv = head // (c.num_attention_heads // c.num_key_value_heads)
                    scores = torch.stack([q[head] @ k[kv] for k, _ in keys]) / c.head_dim**0.5
                    out.append((scores.softmax(0).unsqueeze(1) * torch.stack([v[kv] for _, v in keys])).sum(0))
                h = x + p["self_attn.o_proj.weight"] @ torch.cat(out)
                y = rms(h, "post_attention_layernorm")
                gate = torch.nn.functional.silu(p["mlp.gate_proj.weight"] @ y) * (p["mlp.up_proj.weight"] @ y)
                h = h + p["mlp.down_proj.weight"] @ gate
                hidden = rms(h, "final_layernorm") if mimo else h
                states[i].append(hidden)
    return [torch.stack(rows) for rows in states]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_and_gradients_equal_the_plain_loop(layout):
    drafter, batch = small(layout)
    assert any(first == start for start, first, _ in batch.segments)  # a slot at position 0, where MiMo embeds nothing
    weights = [
        torch.randn(len(batch.slot_R), 12, dtype=torch.float64) * batch.valid_LR[i].unsqueeze(1) for i in range(3)
    ]
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    got, want = drafter(batch), plain_loop(drafter, batch)
    for i in range(3):
        ok = batch.valid_LR[i]
        torch.testing.assert_close(got[i][ok], want[i][ok], rtol=1e-5, atol=1e-6)  # rope angles are float32
    grads = [
        torch.autograd.grad(sum((s * w).sum() for s, w in zip(states, weights, strict=True)), parameters)
        for states in (got, want)
    ]
    for name, ours, theirs in zip(names, *grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


# ---- where one begins ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory) -> dict[str, Verifier]:
    """By layout: a Qwen2 one, and a Llama one."""
    folder = tmp_path_factory.mktemp("verifiers")
    paths = {"mimo": tiny.save_qwen2(folder / "qwen2"), "eagle": tiny.save_verifier(folder / "llama")}
    taps = {"mimo": (tiny.LAYERS,), "eagle": ()}
    return {layout: Verifier(path, taps[layout], 1.0, torch.float32) for layout, path in paths.items()}


def built(verifier: Verifier) -> Mtp:
    facts = model_facts(Path(verifier.model.name_or_path))
    return Mtp(mtp_config(facts), verifier.embed_VH, verifier.head_VH)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_it_begins_as_the_last_layer_run_once_more(verifiers, layout):
    """Through transformers' own layer, on one document whose slots see all of it. In the eagle layout the folded norms
    take the size of the state as constant, so that it is an approximation there."""
    verifier = verifiers[layout]
    drafter, model = built(verifier), verifier.model
    made = torch.Generator().manual_seed(0)
    docs = [Document(tuple(torch.randint(tiny.VOCAB, (24,), generator=made).tolist()), (False,) + (True,) * 23)]
    held = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: held.append(inputs[0]))
    batch = collate(StreamedStates(verifier, docs), [0], 1)
    hook.remove()
    hidden = held[0]
    mtp.from_verifier(drafter, model.state_dict(), float(hidden.square().mean().sqrt()))
    if layout == "mimo":
        hidden = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt() * hidden.square().mean().sqrt()
    rope = model.model.rotary_emb(hidden, torch.arange(24).unsqueeze(0))
    mask = torch.full((24, 24), float("-inf")).triu(1)[None, None]
    out = model.model.layers[-1](hidden, attention_mask=mask, position_embeddings=rope)
    again = model.model.norm(out[0] if isinstance(out, tuple) else out)[0, :22]
    ours = drafter(batch)[0]
    near = torch.nn.functional.cosine_similarity(ours, again, -1)
    assert near.min() > (0.9999 if layout == "mimo" else 0.97), near


# ---- stitched into the verifier -------------------------------------------------------------------------------------


def test_stitching_leaves_the_verifier_and_its_tensors_as_they_are(verifiers, tmp_path):
    verifier = verifiers["mimo"]
    path = Path(verifier.model.name_or_path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    drafter = randomised(built(verifier))
    export(drafter, tmp_path / "drafter", path, tiny.FINGERPRINT, tiny.card())
    assert before == {file.name: file.read_bytes() for file in path.iterdir()}
    assert (tmp_path / "drafter" / "model.safetensors").read_bytes() == before["model.safetensors"]
    index = json.loads((tmp_path / "drafter" / stitch.INDEX).read_text())["weight_map"]
    for name, file in index.items():
        with safe_open(tmp_path / "drafter" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    mine = load_file(tmp_path / "drafter" / stitch.SHARD)
    assert mine.keys() == {n for n, f in index.items() if f == stitch.SHARD} and len(mine) == 16
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "drafter", dtype=torch.float32)  # still a Qwen2 to others
    text = torch.randint(tiny.VOCAB, (1, 9))
    assert torch.equal(whole(text).logits, verifier.model(text).logits)


def test_a_layer_that_the_verifier_carries_is_fine_tuned_and_replaced(verifiers, tmp_path):
    """What a run does whose verifier is a stitched checkpoint: begins with its layer, and puts another in its place."""
    path = Path(verifiers["mimo"].model.name_or_path)
    first = randomised(built(verifiers["mimo"]))
    export(first, tmp_path / "once", path, tiny.FINGERPRINT, tiny.card())
    carrier = Verifier(tmp_path / "once", (tiny.LAYERS,), 1.0, torch.float32)
    facts = model_facts(tmp_path / "once")
    begun = build_drafter(tiny.recipe(drafter={"kind": "mtp"}), facts, carrier, Counter(), [], [])
    for (name, a), (_, b) in zip(first.named_parameters(), begun.named_parameters(), strict=True):
        assert torch.equal(a.bfloat16().float(), b), name
    second = randomised(begun, seed=9)
    export(second, tmp_path / "twice", tmp_path / "once", tiny.FINGERPRINT, tiny.card())
    held = load_file(tmp_path / "twice" / stitch.SHARD)
    assert torch.equal(held[mtp.PREFIX + "input_proj.weight"], second.input_proj.weight.bfloat16())
    assert (tmp_path / "twice" / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


def test_layers_of_another_family_are_not_taken_for_mimos(verifiers, tmp_path):
    path = Path(verifiers["eagle"].model.name_or_path)
    other = tmp_path / "deepseek"
    other.mkdir()
    config = json.loads((path / "config.json").read_text())
    changes = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}
    (other / "config.json").write_text(json.dumps(config | changes))
    assert native_mtp(other).name == "deepseek_v3" and native_mtp(path) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_warm_start_reads_back_what_was_exported(verifiers, layout, tmp_path):
    verifier = verifiers[layout]
    drafter = randomised(built(verifier))
    export(drafter, tmp_path / "drafter", Path(verifier.model.name_or_path), tiny.FINGERPRINT, tiny.card())
    other = built(verifier)
    mtp.load_init(other, tmp_path / "drafter")
    for (name, a), (_, b) in zip(drafter.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a.bfloat16().float(), b), name
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="lacks"):
        mtp.load_init(other, tmp_path / "empty")


# ---- served ---------------------------------------------------------------------------------------------------------


def parity(directory: Path, drafter: Mtp, verifier: Verifier) -> dict:
    path = Path(verifier.model.name_or_path)
    return check_parity(tiny.recipe(), path, directory, drafter, verifier, tiny.prompts(12, seed=7))


@pytest.mark.engine
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stock_vllm_proposes_what_pytorch_proposes(verifiers, layout, tmp_path):
    drafter = randomised(built(verifiers[layout]))
    export(drafter, tmp_path / "drafter", Path(verifiers[layout].model.name_or_path), tiny.FINGERPRINT, tiny.card())
    assert spec_config(drafter, tmp_path / "drafter", 3).method == {"mimo": "mtp", "eagle": "eagle"}[layout]
    result = parity(tmp_path / "drafter", drafter, verifiers[layout])
    assert result["first_proposal_agreement"] > 0.93
    assert min(result["agreement_per_position"]) > 0.85


def _swap_order(t: dict[str, torch.Tensor]) -> None:
    name = next(n for n in t if n.endswith(("input_proj.weight", "fc.weight")))
    t[name] = torch.cat(t[name].chunk(2, 1)[::-1], 1).contiguous()


def _swap_norms(t: dict[str, torch.Tensor]) -> None:
    one, other = (mtp.PREFIX + n + "_layernorm.weight" for n in ("token", "hidden"))
    t[one], t[other] = t[other], t[one]


def _no_biases(t: dict[str, torch.Tensor]) -> None:
    for name in t:
        if name.endswith("bias"):
            t[name].zero_()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("layout", "sabotage", "cause"),
    [
        ("mimo", _swap_order, "concatenation order"),
        ("mimo", _swap_norms, "norms: those of the two inputs"),
        ("mimo", _no_biases, "biases"),
        ("eagle", _swap_order, "concatenation order"),
    ],
)
def test_a_wrong_layer_is_named(verifiers, layout, sabotage: Callable, cause, tmp_path):
    drafter = randomised(built(verifiers[layout]))
    export(drafter, tmp_path / "drafter", Path(verifiers[layout].model.name_or_path), tiny.FINGERPRINT, tiny.card())
    file = tmp_path / "drafter" / (stitch.SHARD if layout == "mimo" else "model.safetensors")
    tensors = load_file(file)
    sabotage(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(RunFailed, match="not the trained one") as caught:
        parity(tmp_path / "drafter", drafter, verifiers[layout])
    assert cause in caught.value.hint


def test_a_mimo_keeps_its_own_layout_and_the_others_get_the_nearest():
    assert [mtp.layout_for(name) for name in ("mimo", "qwen2", "qwen3", "llama")] == ["mimo", "mimo", "eagle", "eagle"]
