"""Mixtures of experts, as the decoder layers of Qwen3-Next, Qwen3.5, DeepSeek V3 and GLM-4.5 have them.

    y = sum over the chosen experts e of weight_e * mlp_e(x)  +  what every token gets (the shared expert)

The router runs in float32. Every expert runs, also on no rows, so that every parameter has a gradient. Its choice has
none: what is learnt about it comes through the weights of the chosen. Left out: auxiliary balancing losses, as a draft
layer is fine-tuned, not trained from nothing; kernels that group the experts' products.

N rows, H hidden size, E experts, K chosen of them, I an expert's intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from draftkit.drafters.layers import Mlp, linear


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """kind: how experts are chosen and which token gets what besides (`Qwen`, `DeepSeek`). num_experts E, chosen K;
    intermediate_size I, and of the shared expert (0: there is none). stacked: all experts are two tensors, not three
    each. normalise: the chosen experts' weights add up to 1. num_groups, num_chosen_groups, scale: DeepSeek's."""

    kind: Literal["qwen", "deepseek"]
    num_experts: int
    chosen: int
    intermediate_size: int
    shared_size: int
    stacked: bool
    normalise: bool
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0


def build(hidden_size: int, config: MoeConfig) -> Moe:
    return {"qwen": Qwen, "deepseek": DeepSeek}[config.kind](hidden_size, config)


class Moe(nn.Module):
    """Its parts are named as in checkpoints."""

    def __init__(self, hidden_size: int, config: MoeConfig) -> None:
        super().__init__()
        c = self.config = config
        self.gate = nn.Linear(hidden_size, c.num_experts, bias=False)
        if c.stacked:
            self.experts: nn.Module = Stacked(c.num_experts, hidden_size, c.intermediate_size)
        else:
            self.experts = nn.ModuleList(Mlp(hidden_size, c.intermediate_size) for _ in range(c.num_experts))

    def route(self, logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights [N, K], experts [N, K])."""
        raise NotImplementedError

    def for_all(self, x_NH: torch.Tensor) -> torch.Tensor | float:
        """What every token gets, whatever its experts."""
        raise NotImplementedError

    def forward(self, x_NH: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x_NH.dtype, torch.float32)
        weights_NK, experts_NK = self.route(F.linear(x_NH.to(wide), self.gate.weight.to(wide)))
        order = experts_NK.flatten().argsort(stable=True)  # choices, those of one expert together
        rows = order // self.config.chosen
        counts = experts_NK.flatten().bincount(minlength=self.config.num_experts).tolist()
        made = [run(part) for run, part in zip(self._experts(), x_NH[rows].split(counts), strict=True)]
        weighted = torch.cat(made).to(wide) * weights_NK.flatten()[order].unsqueeze(1)
        routed = torch.zeros_like(x_NH, dtype=wide).index_add(0, rows, weighted)
        return routed.to(x_NH.dtype) + self.for_all(x_NH)

    def _experts(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        return self.experts.each() if isinstance(self.experts, Stacked) else list(self.experts)


class Qwen(Moe):
    """The K likeliest of a softmax; the shared expert behind a gate of its own."""

    def __init__(self, hidden_size: int, config: MoeConfig) -> None:
        super().__init__(hidden_size, config)
        self.shared_expert = Mlp(hidden_size, config.shared_size)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def route(self, logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = logits_NE.softmax(-1).topk(self.config.chosen, -1)
        return (weights / weights.sum(-1, keepdim=True) if self.config.normalise else weights), experts

    def for_all(self, x_NH: torch.Tensor) -> torch.Tensor:
        return linear(x_NH, self.shared_expert_gate).sigmoid() * self.shared_expert(x_NH)


class DeepSeek(Moe):
    """Sigmoid scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): a bias that balances the load is added for the
    choice alone and no parameter here; experts come from the groups whose two best add up to most; what they give is
    scaled, the shared experts' is not."""

    def __init__(self, hidden_size: int, config: MoeConfig) -> None:
        super().__init__(hidden_size, config)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))
        self.shared_experts = Mlp(hidden_size, config.shared_size) if config.shared_size else None

    def route(self, logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c, scores = self.config, logits_NE.sigmoid()
        biased = scores.detach() + self.gate.e_score_correction_bias
        if c.num_groups > 1:
            of_groups = biased.unflatten(1, (c.num_groups, -1))
            best = of_groups.topk(2, -1).values.sum(-1).topk(c.num_chosen_groups, -1).indices
            out = torch.ones_like(of_groups[..., 0], dtype=torch.bool).scatter(1, best, False)
            biased = of_groups.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(1)
        experts = biased.topk(c.chosen, -1).indices
        weights = scores.gather(1, experts)
        if c.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * c.scale, experts

    def for_all(self, x_NH: torch.Tensor) -> torch.Tensor | float:
        return 0.0 if self.shared_experts is None else self.shared_experts(x_NH)


class Stacked(nn.Module):
    """Experts in two tensors: gate_up_proj [E, 2I, H], the gate's rows first, and down_proj [E, H, I]."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def each(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        def expert(gate_up: torch.Tensor, down: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
            def run(x: torch.Tensor) -> torch.Tensor:
                gate, up = F.linear(x, gate_up.to(x.dtype)).chunk(2, -1)
                return F.linear(F.silu(gate) * up, down.to(x.dtype))

            return run

        return [expert(*pair) for pair in zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)]


def moe_config(c: dict[str, Any], kind: Literal["qwen", "deepseek"], stacked: bool) -> MoeConfig:
    """From the fields of a config.json with every default filled in."""
    if kind == "qwen":
        return MoeConfig(
            kind=kind,
            num_experts=c["num_experts"],
            chosen=c["num_experts_per_tok"],
            intermediate_size=c["moe_intermediate_size"],
            shared_size=c["shared_expert_intermediate_size"],
            stacked=stacked,
            normalise=c.get("norm_topk_prob", True),  # Qwen3.5 has no such field
        )
    return MoeConfig(
        kind=kind,
        num_experts=c["n_routed_experts"],
        chosen=c["num_experts_per_tok"],
        intermediate_size=c["moe_intermediate_size"],
        shared_size=c["moe_intermediate_size"] * (c.get("n_shared_experts") or 0),
        stacked=stacked,
        normalise=c["norm_topk_prob"],
        num_groups=c["n_group"] or 1,
        num_chosen_groups=c["topk_group"] or 1,
        scale=c["routed_scaling_factor"],
    )
