"""Peak memory and speed of an EAGLE-3 training step against document length and TTT steps, before and after.

    python scripts/bench_memory.py [--lengths 512,1024,2048,4096] [--steps 1,3,5,7] [--arms ours,dense]

`dense` is the same drafter with the textbook form of what draftkit does in pieces: attention scores of every slot
against every key of every step at once, and full tables of float32 logits of teacher and student for all steps. Each
cell is a process of its own: one document a batch, a quarter of it prompt, the demo verifier's sizes, a draft
vocabulary of 4,096, random states (speed and memory do not depend on what they say). Memory: highest resident size
during three optimizer steps, less what the process held before the first; gradients and both AdamW moments are in it.
`--paper` works the same terms out for Qwen3-8B at 32k tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from draftkit.data.batch import layout
from draftkit.drafters import recurrent
from draftkit.drafters.eagle3 import Eagle3, Eagle3Config
from draftkit.drafters.losses import Teacher, drafter_loss
from draftkit.types import Document, DraftBatch

VERIFIER_VOCAB, HIDDEN, DRAFT_VOCAB = 49152, 576, 4096
TIMED = 3


# ---- the step as textbooks write it -------------------------------------------------------------------------------


def dense_attention(q, k, v, own_k, own_v, segments, scale):
    """`ttt_attention` by one table of scores [heads, slots, keys of step 0 and of steps 1 .. i] and autograd."""
    rows, tokens = len(q), len(k)
    seen = torch.zeros(rows, tokens + rows * len(own_k), dtype=torch.bool)
    row = 0
    for start, first, last in segments:
        for slot in range(first, last):
            seen[row, start : slot + 1] = True
            row += 1
    for j in range(len(own_k)):
        seen[torch.arange(rows), tokens + j * rows + torch.arange(rows)] = True
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = torch.cat([k, *own_k]).to(wide), torch.cat([v, *own_v]).to(wide)
    scores = torch.einsum("rhd,khd->hrk", q.to(wide), keys) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hrk,khd->rhd", weights, values).to(q.dtype)


def dense_loss(states, head_DH, teacher: Teacher, valid_LR, decay: float, denominator: float) -> torch.Tensor:
    """KL of every slot and step from whole tables, by autograd."""
    wide = torch.promote_types(head_DH.dtype, torch.float32)
    p = (teacher.hidden_RH.to(wide) @ teacher.head_DH.to(wide).T / teacher.temperature).log_softmax(-1)
    total = torch.zeros((), dtype=wide)
    for i, state in enumerate(states):
        log_q = (state.to(wide) @ head_DH.T.to(wide) / teacher.temperature).log_softmax(-1)
        label = p.roll(-i, 0)
        kl = (label.exp() * (label - log_q)).sum(-1)
        total = total + decay**i * torch.where(valid_LR[i], kl, 0.0).sum() / denominator
    return total


# ---- one cell -------------------------------------------------------------------------------------------------------


def config(aux: int = 3) -> Eagle3Config:
    return Eagle3Config(
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=VERIFIER_VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        aux_layers=tuple(range(1, aux + 1)),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        max_position_embeddings=8192,
    )


def make_batch(length: int, steps: int) -> tuple[DraftBatch, Teacher]:
    made = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=made)  # noqa: E731
    prompt = length // 4
    tokens = torch.randint(VERIFIER_VOCAB, (length,), generator=made)
    document = Document(tuple(tokens.tolist()), (False,) * prompt + (True,) * (length - prompt))
    ids, pos, segments, slots, valid = layout([document], steps)
    last = normal(length, HIDDEN).bfloat16()
    head = (normal(DRAFT_VOCAB, HIDDEN) * 0.05).bfloat16()
    slot = torch.from_numpy(slots)
    lse = (last.float() @ head.float().T).logsumexp(-1)
    batch = DraftBatch(
        tokens_N=torch.from_numpy(ids),
        pos_N=torch.from_numpy(pos),
        aux_NF=normal(length, 3 * HIDDEN).bfloat16(),
        last_NH=last,
        lse_N=lse,
        max_N=lse,
        top_N=torch.zeros(length, dtype=torch.int64),
        segments=segments,
        slot_R=slot,
        valid_LR=torch.from_numpy(valid),
    )
    unknown = torch.zeros(len(slot), dtype=torch.int64)
    return batch, Teacher(last[slot + 1], lse[slot + 1], unknown, unknown, head, 1.0)


def cell(arm: str, length: int, steps: int) -> dict[str, float]:
    """{"mib": peak above the start, "slots_per_s": median of the timed steps}."""
    torch.manual_seed(0)
    drafter = Eagle3(config(), torch.randn(VERIFIER_VOCAB, HIDDEN).bfloat16() * 0.02, torch.arange(DRAFT_VOCAB))
    batch, teacher = make_batch(length, steps)
    if arm == "dense":
        recurrent.ttt_attention = dense_attention
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=True)
    before, seconds = _resident(), []
    for _ in range(TIMED):
        start = time.perf_counter()
        states, count = drafter(batch), float(len(batch.slot_R))
        if arm == "dense":
            loss = dense_loss(states, drafter.lm_head.weight, teacher, batch.valid_LR, 0.8, count)
        else:
            loss, _ = drafter_loss(states, drafter.lm_head.weight, teacher, batch.valid_LR, 0.8, count)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"mib": peak - before, "slots_per_s": len(batch.slot_R) / statistics.median(seconds), "loss": float(loss)}


def _resident() -> float:
    """MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


# ---- on paper -------------------------------------------------------------------------------------------------------


def paper(tokens: int = 32768, steps: int = 7) -> None:
    """Qwen3-8B, EAGLE-3 with 32,000 draft tokens, one document of `tokens`, on a GPU of 80 GB."""
    hidden, inter, heads, kv, dim, vocab, verifier_vocab = 4096, 12288, 32, 8, 128, 32000, 151936
    r, gib = tokens, 2**30
    params = 3 * hidden * hidden + hidden * dim * (2 * heads + 4 * kv) + heads * dim * hidden + 3 * hidden * inter
    params += vocab * hidden
    head = 512  # rows of logits at a time
    terms = {
        "drafter: float32 masters, gradients, two moments": 16 * params,
        "verifier's embedding and LM head, bfloat16": 2 * 2 * verifier_vocab * hidden,
        "states of the batch: 3 auxiliary, last, bfloat16": tokens * 4 * hidden * 2,
        "step 0: fused state, norms and inputs of every token": tokens * 2 * (hidden + 3 * hidden + 2 * hidden),
        "keys and values of step 0, repeated to all heads": tokens * 2 * 2 * heads * dim,
        f"kept for the backward, each of {steps} steps: inputs, q, k, v, attention, norms": steps
        * r
        * 2
        * (2 * hidden + 2 * hidden + 4 * heads * dim + 3 * hidden),
        f"kept for the backward, each of {steps} steps: MLP gate, up, product": steps * r * 2 * 4 * inter,
        f"normed states of {steps} steps and their gradients": steps * r * 2 * 2 * hidden,
        f"logits, {head} rows of teacher and student, float32": 4 * head * vocab * 4,
    }
    table = Table(title=f"EAGLE-3 for Qwen3-8B, {tokens:,} tokens in one document, {steps} TTT steps")
    table.add_column("what")
    table.add_column("GiB", justify="right")
    for name, size in terms.items():
        table.add_row(name, f"{size / gib:.1f}")
    table.add_row("sum", f"{sum(terms.values()) / gib:.1f}")
    dense = heads * r * tokens * 4 * (1 + (steps - 1) / 2) * steps
    table.add_row("beside it, dense: attention scores of all steps, float32", f"{dense / gib:,.0f}")
    table.add_row(
        "beside it, dense: logits of all steps and the teacher, float32", f"{(steps + 1) * r * vocab * 4 / gib:.0f}"
    )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,1024,2048,4096")
    parser.add_argument("--steps", default="1,3,5,7")
    parser.add_argument("--arms", default="ours,dense")
    parser.add_argument("--paper", action="store_true")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        arm, length, steps = options.cell
        print(json.dumps(cell(arm, int(length), int(steps))))
        return
    if options.paper:
        return paper()
    table = Table(title="one training step: MiB at its peak, slots/s")
    for column in ("tokens", "TTT steps", *(f"{a}: {w}" for a in options.arms.split(",") for w in ("MiB", "slots/s"))):
        table.add_column(column, justify="right")
    for length in options.lengths.split(","):
        for steps in options.steps.split(","):
            row = [length, steps]
            for arm in options.arms.split(","):
                command = [sys.executable, __file__, "--cell", arm, length, steps]
                done = subprocess.run(command, capture_output=True, text=True)
                found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
                row += ["failed", ""] if found is None else [f"{found['mib']:,.0f}", f"{found['slots_per_s']:,.0f}"]
            table.add_row(*row)
            print(*row, file=sys.stderr)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
