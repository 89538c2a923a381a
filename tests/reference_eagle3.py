"""EAGLE-3 test-time training written down once more, as slow as it reads: float64, one document, one slot, one step.

An oracle for tests only. It shares no code with `draftkit.drafters` and is written from the definitions in
arXiv 2503.01840 (alignment, attention of a later step to its own slot) with vLLM's names for the tensors.
Gradients come from autograd. `weights` maps tensor names (`fc.weight`, `midlayer.self_attn.q_proj.weight`, ...) to
float64 tensors.

    x = tokens, g = the verifier's auxiliary states, y = its final-normed state, p = a slot, i = a TTT step from 0
    reads x[p+1+i] and its own previous output (fc(g[p]) at i = 0), sits at rope position p + i, predicts x[p+2+i];
    its teacher is softmax(head y[p+1+i] / temperature) over the draft vocabulary, and its own distribution is tempered
    alike, as an engine that samples drafts does
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    norm_before_residual: bool
    num_aux: int = 3
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    num_layers: int = 1
    qk_norm: bool = False
    attention_bias: bool = False


@dataclass(frozen=True)
class Doc:
    """tokens x, mask m, aux [T, F], last [T, H]: one document as the verifier left it."""

    tokens: Sequence[int]
    mask: Sequence[bool]
    aux: torch.Tensor
    last: torch.Tensor


def is_trained(doc: Doc, p: int, i: int) -> bool:
    """Slot p counts at step i when x[p+1] .. x[p+2+i] all exist and are all supervised."""
    return p + 2 + i < len(doc.tokens) and all(doc.mask[t] for t in range(p + 1, p + 2 + i + 1))


def slots(doc: Doc) -> list[int]:
    return [p for p in range(len(doc.tokens)) if is_trained(doc, p, 0)]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean() + eps)


def rotate(head: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotary embedding of one head's vector: pairs (d, d + D/2) turn by position / theta^(2d/D)."""
    half = len(head) // 2
    turned: list[torch.Tensor] = [head[0]] * len(head)
    for d in range(half):
        angle = position / theta ** (2 * d / len(head))
        cos, sin = math.cos(angle), math.sin(angle)
        turned[d] = head[d] * cos - head[d + half] * sin
        turned[d + half] = head[d + half] * cos + head[d] * sin
    return torch.stack(turned)


def layer_input(w: Weights, s: Shape, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat(
        [
            rms_norm(embedding, w["midlayer.input_layernorm.weight"], s.eps),
            rms_norm(hidden, w["midlayer.hidden_norm.weight"], s.eps),
        ]
    )


def named(layer: int) -> str:
    return "midlayer" if layer == 0 else f"layers.{layer}"


def heads(w: Weights, s: Shape, layer: int, name: str, x: torch.Tensor) -> list[torch.Tensor]:
    projected = w[f"{named(layer)}.self_attn.{name}_proj.weight"] @ x
    if s.attention_bias:
        projected = projected + w[f"{named(layer)}.self_attn.{name}_proj.bias"]
    parts = list(projected.split(s.head_dim))
    if s.qk_norm and name in "qk":
        parts = [rms_norm(part, w[f"{named(layer)}.self_attn.{name}_norm.weight"], s.eps) for part in parts]
    return parts


def key_value(w: Weights, s: Shape, layer: int, x: torch.Tensor, position: int):
    keys = [rotate(head, position, s.rope_theta) for head in heads(w, s, layer, "k", x)]
    return keys, heads(w, s, layer, "v", x)


def attend(w: Weights, s: Shape, layer: int, x: torch.Tensor, position: int, seen: list) -> torch.Tensor:
    """o_proj of every query head's softmax over the (keys, values) in `seen`."""
    result = []
    for h, query in enumerate(heads(w, s, layer, "q", x)):
        query = rotate(query, position, s.rope_theta)
        group = h // (s.num_heads // s.num_kv_heads)
        scores = torch.stack([query @ keys[group] for keys, _ in seen]) / math.sqrt(s.head_dim)
        values = torch.stack([values[group] for _, values in seen])
        result.append(torch.softmax(scores, 0) @ values)
    out = w[f"{named(layer)}.self_attn.o_proj.weight"] @ torch.cat(result)
    return out + w[f"{named(layer)}.self_attn.o_proj.bias"] if s.attention_bias and not s.qk_norm else out


def mlp(w: Weights, layer: int, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (w[f"{named(layer)}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return down @ ((gate @ x) * torch.sigmoid(gate @ x) * (up @ x))


def fuse(w: Weights, s: Shape, g: torch.Tensor) -> torch.Tensor:
    if s.norm_before_fc:
        g = rms_norm(g, w["input_norm.weight"], s.eps)
    if s.fc_norm:
        parts = g.chunk(s.num_aux)
        g = torch.cat([rms_norm(part, w[f"fc_norm.{j}.weight"], s.eps) for j, part in enumerate(parts)])
    return w["fc.weight"] @ g


def through_layers(w: Weights, s: Shape, token_embedding, hidden, position: int, seen: list[list], keep: bool):
    """The un-normed output at one position. seen[l]: (keys, values) of layer l that it attends to; its own are added
    to it, for good if `keep`."""
    x = layer_input(w, s, token_embedding, hidden)
    residual = rms_norm(hidden, w["midlayer.hidden_norm.weight"], s.eps) if s.norm_before_residual else hidden
    for layer in range(s.num_layers):
        if layer > 0:
            x = rms_norm(residual, w[f"{named(layer)}.input_layernorm.weight"], s.eps)
        here = [*seen[layer], key_value(w, s, layer, x, position)]
        residual = residual + attend(w, s, layer, x, position, here)
        normed = rms_norm(residual, w[f"{named(layer)}.post_attention_layernorm.weight"], s.eps)
        residual = residual + mlp(w, layer, normed)
        if keep:
            seen[layer] = here
    return residual


def draft_states(
    w: Weights,
    s: Shape,
    embed_VH: torch.Tensor,
    doc: Doc,
    num_steps: int,
    draft_to_target: Sequence[int] | None = None,
) -> dict:
    """{(p, i): normed state} of every slot p, trained at step i or not, as far as the document has tokens to read.

    draft_to_target: given, the drafter reads its own greedy proposals at steps i >= 1, as when it serves.
    """
    fused = [fuse(w, s, g) for g in doc.aux]
    wanted, states = set(slots(doc)), {}
    seen_0: list[list] = [[] for _ in range(s.num_layers)]  # of step 0, of the tokens so far
    for p in range(len(doc.tokens) - 1):
        hidden = through_layers(w, s, embed_VH[doc.tokens[p + 1]], fused[p], p, seen_0, keep=True)
        if p not in wanted:
            continue
        own = [list(of_layer) for of_layer in seen_0]
        states[p, 0] = rms_norm(hidden, w["norm.weight"], s.eps)
        for i in range(1, num_steps):
            if p + 1 + i >= len(doc.tokens):
                break
            token = doc.tokens[p + 1 + i]
            if draft_to_target is not None:
                token = draft_to_target[int((w["lm_head.weight"] @ states[p, i - 1]).argmax())]
            fed = states[p, i - 1] if s.norm_output else hidden
            hidden = through_layers(w, s, embed_VH[token], fed, p + i, own, keep=True)
            states[p, i] = rms_norm(hidden, w["norm.weight"], s.eps)
    return states


def teacher_log_probs(target_head_VH: torch.Tensor, doc: Doc, position: int, temperature: float) -> torch.Tensor:
    """log p of the verifier over its full vocabulary for the token after `position`."""
    return torch.log_softmax(target_head_VH @ doc.last[position] / temperature, 0)


def num_trained(docs: Sequence[Doc], step: int) -> int:
    return sum(is_trained(doc, p, step) for doc in docs for p in range(len(doc.tokens)))


def loss(
    w: Weights,
    s: Shape,
    embed_VH: torch.Tensor,
    target_head_VH: torch.Tensor,
    draft_to_target: Sequence[int],
    docs: Sequence[Doc],
    num_steps: int,
    decay: float,
    temperature: float,
    denominator: float,
) -> torch.Tensor:
    """sum_i decay^i sum_p KL(teacher renormalised over the draft vocabulary || drafter) / denominator."""
    total = torch.zeros((), dtype=torch.float64)
    for doc in docs:
        for (p, i), state in draft_states(w, s, embed_VH, doc, num_steps).items():
            if is_trained(doc, p, i):
                full = teacher_log_probs(target_head_VH, doc, p + 1 + i, temperature)
                log_p = torch.log_softmax(full[torch.as_tensor(draft_to_target)], 0)
                log_q = torch.log_softmax(w["lm_head.weight"] @ state / temperature, 0)
                total = total + decay**i * (log_p.exp() * (log_p - log_q)).sum()
    return total / denominator
