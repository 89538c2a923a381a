"""Accelerators as a roofline sees them, how an engine fills them, and where to get one's own.

Numbers are peaks per GPU from the makers' data sheets: dense FLOP/s, no sparsity; links per direction. What an engine
reaches of them stands apart, in `Engine`, because it belongs to the software. Left out: clocks that fall under load,
power, NUMA, and congestion between nodes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from draftkit.errors import UserError
from draftkit.recipe import nearest, read_yaml

BYTES = {"bf16": 2.0, "fp8": 1.0}  # of one weight or activation


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU of a cluster. domain: GPUs that reach each other over `link`; beyond it, messages take `network`."""

    name: str
    bf16_flops: float
    fp8_flops: float
    hbm_bytes_s: float
    hbm_bytes: float
    link_bytes_s: float
    network_bytes_s: float
    domain: int
    link_latency_s: float = 6e-6  # of one all-reduce of a small message inside the domain
    network_latency_s: float = 2e-5

    def flops(self, precision: str) -> float:
        return self.fp8_flops if precision == "fp8" else self.bf16_flops


# NVIDIA data sheets: A100 40GB SXM; H100 and H200 SXM; HGX B200; GB200 NVL72 (a 72nd of the rack). Network: 400 Gbit/s
# a GPU (A100: 200).
TABLE = {
    hardware.name: hardware
    for hardware in (
        Hardware("a100-40gb", 312e12, 312e12, 1.555e12, 40e9, 300e9, 25e9, 8),
        Hardware("h100", 989e12, 1979e12, 3.35e12, 80e9, 450e9, 50e9, 8),
        Hardware("h200", 989e12, 1979e12, 4.8e12, 141e9, 450e9, 50e9, 8),
        Hardware("b200", 2250e12, 4500e12, 8.0e12, 180e9, 900e9, 50e9, 8),
        Hardware("gb200", 2500e12, 5000e12, 8.0e12, 186e9, 900e9, 50e9, 72),
    )
}


def find_hardware(name_or_path: str) -> Hardware:
    """A name of the table, or a YAML file with the fields of `Hardware` (those left out: of `like`, a table name)."""
    path = Path(name_or_path).expanduser()
    if path.suffix in {".yaml", ".yml"}:
        if not path.is_file():
            raise UserError(f"The hardware file {name_or_path} does not exist.", f"Known names: {', '.join(TABLE)}.")
        return _own(path, read_yaml(path))
    if name_or_path not in TABLE:
        hint = nearest(name_or_path, TABLE)
        raise UserError(
            f"hardware: {name_or_path!r} is not in the table.",
            f"{hint}Known: {', '.join(TABLE)}; or give a YAML file with your own.",
        )
    return TABLE[name_or_path]


def _own(path: Path, given: dict[str, Any]) -> Hardware:
    like = given.pop("like", None)
    if like is not None and like not in TABLE:
        raise UserError(f"{path}: like: {like!r} is not in the table.", f"Known: {', '.join(TABLE)}.")
    names = [field.name for field in fields(Hardware)]
    if unknown := sorted(given.keys() - set(names)):
        raise UserError(f"{path}: there is no hardware field {unknown[0]!r}.", nearest(unknown[0], names) or "")
    values = ({} if like is None else asdict(TABLE[like])) | {"name": path.stem} | given
    if missing := [field.name for field in fields(Hardware) if field.name not in values and field.name in names[:8]]:
        raise UserError(f"{path}: {missing[0]} is missing.", "Give it, or name a known GPU with `like: h100`.")
    for name in names[1:]:
        if name in values:
            values[name] = _positive(path, name, values[name])
    return Hardware(**values | {"domain": int(values["domain"])})


def _positive(path: Path, name: str, value: Any) -> float:
    """YAML 1.1 reads 3.35e12 as a string (it wants 3.35e+12): take both."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if isinstance(value, bool) or not 0 < number < float("inf"):
        raise UserError(f"{path}: {name} should be a number above 0, not {value!r}.", "Units: FLOP/s, bytes, seconds.")
    return number


@dataclass(frozen=True, slots=True)
class Engine:
    """How an inference engine fills the hardware. Seconds are host time that kernels do not hide.

    graph_tokens: most tokens of a pass that is replayed as a CUDA graph; a larger one launches its kernels, by layer.
    """

    name: str
    hbm_share: float  # of the memory bandwidth
    flops_share: float  # of the matrix peak, in decoding batches
    step_s: float  # of a pass of the verifier: schedule, prepare, sample, detokenise
    round_s: float  # of a round with drafts, beyond that: rejection sampling, bookkeeping of what was rejected
    draft_s: float  # of one pass of the drafter
    eager_s: float  # of a layer of a pass too large for a CUDA graph
    graph_tokens: int = 512  # vLLM's default limit
