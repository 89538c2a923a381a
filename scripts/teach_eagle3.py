"""EAGLE-3 in one file, to be read: the mathematics of `draftkit train-drafter` without its speed.

One document a step, dense masks, full tables of logits; the real thing (draftkit/drafters, draftkit/train) computes
the same and is tested against a float64 loop. Usage, on the corpus that `make demo` left:

    .venv/bin/python scripts/teach_eagle3.py --corpus outputs/demo/prepare --steps 100
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from draftkit.data.shards import Corpus
from draftkit.models import resolve_model

# T tokens of the document, H hidden size, D draft vocabulary, V verifier vocabulary, L test-time-training steps


def norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def rotate(x_nTd, positions_T, theta=100_000.0):
    """Rotary embedding: the angle depends on the position, so scores depend on distances."""
    d = x_nTd.shape[-1]
    angle_Td = positions_T[:, None] / theta ** (torch.arange(0, d, 2) / d)
    cos, sin = angle_Td.cos().repeat(1, 2), angle_Td.sin().repeat(1, 2)
    first, second = x_nTd.chunk(2, -1)
    return x_nTd * cos + torch.cat([-second, first], -1) * sin


class Drafter(nn.Module):
    """One decoder layer that reads [embedding of the next token ; hidden state] and predicts the token after it."""

    def __init__(self, hidden: int, heads: int, mlp: int, draft_vocab: int):
        super().__init__()
        self.heads = heads
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.q, self.k, self.v = (nn.Linear(2 * hidden, hidden, bias=False) for _ in range(3))
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, mlp, bias=False), nn.Linear(hidden, mlp, bias=False)
        self.down = nn.Linear(mlp, hidden, bias=False)
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(hidden)) for _ in range(4)])
        self.head = nn.Linear(hidden, draft_vocab, bias=False)

    def forward(self, aux_T3H, embed, tokens_T, num_steps):
        """Draft logits [T, D] of every step. Step i at slot p: reads x[p+1+i], predicts x[p+2+i]."""
        length = len(tokens_T)
        slots = torch.arange(length)
        split = lambda x_TH: x_TH.view(length, self.heads, -1).transpose(0, 1)  # noqa: E731
        hidden = self.fc(aux_T3H)
        keys, values, logits = [], [], []
        for i in range(num_steps):
            inputs = embed[tokens_T[(slots + 1 + i).clamp(max=length - 1)]]
            x = torch.cat([norm(inputs, self.norms[0]), norm(hidden, self.norms[1])], -1)
            query = rotate(split(self.q(x)), slots + i)
            keys.append(rotate(split(self.k(x)), slots + i))
            values.append(split(self.v(x)))
            # Step 0 is causal; of the drafter's own steps 1..i a slot sees only its own column.
            masks = [torch.ones(length, length).tril(), *[torch.eye(length)] * i]
            scores = torch.cat([query @ k.transpose(1, 2) for k in keys], -1) / query.shape[-1] ** 0.5
            weights = scores.masked_fill(torch.cat(masks, -1) == 0, float("-inf")).softmax(-1)
            mixed = (weights @ torch.cat(values, 1)).transpose(0, 1).reshape(length, -1)
            hidden = hidden + self.o(mixed)
            y = norm(hidden, self.norms[2])
            hidden = hidden + self.down(F.silu(self.gate(y)) * self.up(y))
            logits.append(self.head(norm(hidden, self.norms[3])))  # the next step reads `hidden` before this norm
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ttt-steps", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)

    verifier = AutoModelForCausalLM.from_pretrained(resolve_model(args.model), dtype=torch.float32).requires_grad_(
        False
    )
    rollouts = list(Corpus.open(args.corpus).rollouts("train"))
    embed, head = verifier.get_input_embeddings().weight, verifier.get_output_embeddings().weight
    layers = verifier.config.num_hidden_layers

    # The draft vocabulary: the tokens that the verifier really writes.
    counts = Counter(token for rollout in rollouts for token in rollout.response_ids)
    to_target_D = torch.tensor(sorted(token for token, _ in counts.most_common(4096)))
    in_draft_V = torch.zeros(len(head), dtype=torch.bool).index_fill(0, to_target_D, True)

    config = verifier.config
    drafter = Drafter(config.hidden_size, config.num_attention_heads, config.intermediate_size, len(to_target_D))
    with torch.no_grad():  # start as an early exit of the verifier: pass the highest state on, use its own head
        drafter.fc.weight.zero_()[:, -config.hidden_size :] = torch.eye(config.hidden_size)
        drafter.o.weight.mul_(0.1)
        drafter.down.weight.mul_(0.1)
        drafter.head.weight.copy_(head[to_target_D])
        drafter.norms[3].copy_(verifier.model.norm.weight)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, betas=(0.9, 0.95))

    for step in range(args.steps):
        rollout = rollouts[step % len(rollouts)]
        tokens_T = torch.tensor([*rollout.prompt_ids, *rollout.response_ids])
        supervised_T = torch.arange(len(tokens_T)) >= len(rollout.prompt_ids)

        # ---- the teacher: states after 2, n/2 and n-3 layers, and its distribution at every position ----
        with torch.no_grad():
            out = verifier(tokens_T[None], output_hidden_states=True)
            aux = torch.cat([out.hidden_states[i][0] for i in (2, layers // 2, layers - 3)], -1)
            teacher_TV = out.logits[0].log_softmax(-1)
            teacher_TD = out.logits[0][:, in_draft_V].log_softmax(-1)

        # ---- the student, step by step ----
        loss, accuracy = 0.0, []
        slots = torch.arange(len(tokens_T))
        for i, student_TD in enumerate(drafter(aux, embed, tokens_T, args.ttt_steps)):
            label = slots + 1 + i  # the teacher's state at p+1+i predicts x[p+2+i]
            inside = label + 1 < len(tokens_T)
            valid = inside & supervised_T[(slots + 1).clamp(max=len(tokens_T) - 1)]
            q, p = student_TD[valid].log_softmax(-1), teacher_TD[label[valid]]
            loss = loss + 0.8**i * (p.exp() * (p - q)).sum(-1).mean()
            accuracy.append((to_target_D[q.argmax(-1)] == teacher_TV[label[valid]].argmax(-1)).float().mean().item())

        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(
                f"step {step:4d}  loss {loss.item():7.3f}  agrees with the verifier's argmax",
                [round(a, 2) for a in accuracy],
            )


if __name__ == "__main__":
    main()
