"""Seconds of one pass of a transformer over a decoding batch, as a roofline with fixed costs.

    pass = max(weight bytes / bandwidth, matrix FLOPs / rate)     rate: the share of the peak that decoding reaches
         + max(KV bytes / bandwidth, attention FLOPs / rate)
         + communication + logits + host time

Tokens, requests and context may be numpy arrays: many batches at once.

`n` tokens of `B` requests: n = B in plain decoding, B (k + 1) when k drafts of each are verified. Keys and values of a
request are read once, whatever its number of queries. Experts: a pass reads those its tokens wake
(`ModelShape.distinct_experts`). Under tensor parallelism (TP) every GPU holds a TP-th of everything; experts are dealt
over the same GPUs (EP = TP). Left out: pipeline parallelism in decoding, prefill (small where answers have thousands of
tokens), uneven experts, attention data parallelism. Source: measures.md (c) 3, refined.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from draftkit.errors import UserError
from draftkit.project.hardware import BYTES, Engine, Hardware
from draftkit.project.model_shape import ModelShape

Many = float | np.ndarray

LOGIT_PASSES = 10  # over [tokens, vocabulary] in float32, read or written: cast, temperature, softmax, sample, accept
KV_ROOM = 0.85  # of the memory that weights leave


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds by cause. `matrix` and `attention` are each the larger of memory and arithmetic."""

    matrix: Many
    attention: Many
    communication: Many
    logits: Many
    host: Many

    @property
    def total(self) -> Many:
        return self.matrix + self.attention + self.communication + self.logits + self.host


@dataclass(frozen=True, slots=True)
class Server:
    """One replica: a model on `tp` GPUs of a kind, driven by an engine, with weights and KV in their precisions."""

    model: ModelShape
    drafter: ModelShape | None
    hardware: Hardware
    engine: Engine
    tp: int = 1
    precision: str = "bf16"
    kv_precision: str = "bf16"

    def fits(self) -> bool:
        return self.weight_bytes() / self.tp <= 0.9 * self.hardware.hbm_bytes

    def check(self) -> Server:
        if not self.fits():
            raise UserError(
                f"{self.model.name} in {self.precision} takes {self.weight_bytes() / self.tp / 1e9:.0f} GB on each of "
                f"{self.tp} GPUs; {self.hardware.name} has {self.hardware.hbm_bytes / 1e9:.0f} GB.",
                "Raise rollout.tp, or set rollout.precision=fp8.",
            )
        return self

    def weight_bytes(self) -> float:
        drafter = self.drafter.total_params if self.drafter else 0
        return (self.model.total_params + drafter) * BYTES[self.precision]

    def most_requests(self, context: float) -> int:
        """That fit beside the weights, at their mean context."""
        room = KV_ROOM * (self.tp * self.hardware.hbm_bytes - self.weight_bytes())
        return max(1, int(room / (self.model.kv_values() * context * BYTES[self.kv_precision])))

    # --- one round

    def plain(self, requests: Many, context: Many) -> PassTime:
        return self.forward(self.model, requests, requests, context, self.engine.step_s)

    def verify(self, requests: Many, context: Many, k: int, *, graphs: bool = True) -> PassTime:
        """graphs False: queries of uneven length (n-gram proposes now and then), which no full CUDA graph covers."""
        host = self.engine.step_s + self.engine.round_s
        return self.forward(self.model, requests * (k + 1), requests, context, host, graphs=graphs)

    def draft(self, requests: Many, context: Many, k: int) -> Many:
        """k passes of the drafter: the first over the k + 1 tokens just verified, the others over one a request."""
        if self.drafter is None or k == 0:
            return 0.0
        first = self.forward(
            self.drafter, requests * (k + 1), requests, context, self.engine.draft_s, logit_rows=requests
        )
        later = self.forward(self.drafter, requests, requests, context, self.engine.draft_s)
        return first.total + (k - 1) * later.total

    def round(self, requests: Many, context: Many, k: int) -> Many:
        """Seconds of a round; k = 0 is a plain step."""
        if k == 0:
            return self.plain(requests, context).total
        return self.verify(requests, context, k, graphs=self.drafter is not None).total + self.draft(
            requests, context, k
        )

    # --- one pass

    def forward(
        self,
        model: ModelShape,
        tokens: Many,
        requests: Many,
        context: Many,
        host: float,
        *,
        graphs: bool = True,
        logit_rows: Many | None = None,
    ) -> PassTime:
        hardware, engine, tp = self.hardware, self.engine, self.tp
        bandwidth = hardware.hbm_bytes_s * engine.hbm_share * tp
        rate = hardware.flops(self.precision) * engine.flops_share * tp
        rows = tokens if logit_rows is None else logit_rows
        # matrices
        experts = model.moe_layers * model.distinct_experts(tokens) * model.expert_params
        weights = (model.fixed_params + experts) * BYTES[self.precision]
        flops = 2 * (tokens * (model.active_params - model.head_params) + rows * model.head_params)
        # attention; with fewer KV heads than GPUs, heads are copied
        copies = max(1.0, tp / model.kv_heads)
        kv = requests * context * model.kv_values() * BYTES[self.kv_precision] * copies
        attention = tokens * model.attention_flops(context)
        launched = np.where(graphs & (np.asarray(tokens) <= engine.graph_tokens), 0.0, engine.eager_s)
        return PassTime(
            matrix=np.maximum(weights / bandwidth, flops / rate),
            attention=np.maximum(kv / bandwidth, attention / (hardware.bf16_flops * engine.flops_share * tp)),
            communication=self._communication(model, tokens),
            logits=LOGIT_PASSES * rows * model.vocab * 4 / bandwidth,
            host=host + launched * model.layers,
        )

    def _communication(self, model: ModelShape, tokens: Many) -> Many:
        """Of each layer: an all-reduce after attention; another after the MLP, or to the experts and back."""
        if self.tp == 1:
            return 0.0
        inside = self.tp <= self.hardware.domain
        rate = self.hardware.link_bytes_s if inside else self.hardware.network_bytes_s
        latency = self.hardware.link_latency_s if inside else self.hardware.network_latency_s
        state = tokens * model.hidden * 2.0
        reduce = latency + 2 * (self.tp - 1) / self.tp * state / rate
        spread = 2 * (latency + min(model.top_k, self.tp) / self.tp * state / rate)
        return model.layers * reduce + model.moe_layers * spread + (model.layers - model.moe_layers) * reduce


def shares(parts: PassTime) -> dict[str, float]:
    """Each cause as a share of the pass."""
    return {field.name: float(getattr(parts, field.name) / parts.total) for field in fields(parts)}
