"""Drafter training side by side with `speculators`, and as a share of what this machine's cores can do.

    python scripts/bench_train.py [--corpus DIR] [--minutes 5] [--repeats 3] [--arms NAME,NAME] [--out FILE]

Both toolkits train the same EAGLE-3 shape (sizes, draft vocabulary, TTT steps, norm flags) on the same batches of the
same captured verifier states for the same time, each with its own start, loss, optimizer and schedule (stretched over
the time). Within a repeat the arms take turns of a few seconds, and between the turns the plain bfloat16 matrix
product is timed, so that drift of the machine hits all alike. Afterwards both drafters are judged by one evaluation
(`draftkit.train.evaluate`) on held-out documents: the tensors have the same names, so the speculators drafter is
copied into ours.

Floating-point operations are counted, not sampled (`cost`): the multiplications that EAGLE-3 training needs at
supervised slots, forward and backward, without recomputation, masked-out rows, norms or softmax. A toolkit that does
more work for the same documents is not credited for it. Divided by the time of whole optimizer steps.

speculators 0.9 goes beside the virtual environment, not into it:

    .venv/bin/pip install --no-deps --target .cache/speculators 'speculators==0.9.*' 'hs-connectors==0.9.*'

Its `Trainer` moves the model to a CUDA ordinal, its fused losses are Triton kernels and FlexAttention has no backward
on CPUs; so its model, batches, eager loss and optimizers run here in the order of `Trainer.train_epoch`, with its SDPA
attention (twice as fast here as its eager one). What does not run is tried and its error printed. Its batches are not
padded to `total_seq_len`, which favours it. Given our weights in float32, its logits equal ours to 3e-5 of 40.
Its published defaults are kept where they are no matter of shape: Muon, a frozen LM head, no decay over TTT steps, a
random first layer. `speculators-adamw` takes its other optimizer, `speculators-warm` that and our initial weights: what
is left between it and ours is the implementation (12 steps from there gave a KL of 2.68 and 2.54, so steps are alike).

Without --corpus a small corpus is made: the demo verifier answers sums. That shows the script, not a result.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from draftkit.console import say, table
from draftkit.data.batch import layout, plan_epoch
from draftkit.data.capture import States, StreamedStates, Verifier, collate
from draftkit.data.shards import Corpus
from draftkit.drafters.eagle3 import Eagle3, Eagle3Config
from draftkit.drafters.losses import drafter_loss
from draftkit.errors import UserError, explain
from draftkit.models import ModelFacts, fingerprint, load_tokenizer, model_facts, render, resolve_model
from draftkit.recipe import Recipe, load_recipe
from draftkit.train import optim
from draftkit.train.documents import documents, token_counts
from draftkit.train.evaluate import TeacherView, evaluate
from draftkit.train.start import aux_layers, build_drafter
from draftkit.types import Document

SPECULATORS = Path(__file__).resolve().parent.parent / ".cache" / "speculators"
ARMS = ("draftkit", "speculators", "speculators-warm", "speculators-adamw")
TURN_S = 10.0  # an arm trains so long before the other has its turn
SQUARES = (1024, 2048, 4096)  # plain products; the fastest is what the cores can do
RESOLUTION = 10_000  # steps of a learning-rate schedule that runs over time


# ---- what a batch costs ---------------------------------------------------------------------------------------------


def cost(c: Eagle3Config, documents: Sequence[Document], num_steps: int) -> dict[str, int]:
    """Tokens and slots of these documents, and the operations that training on them needs, forward and backward.

    A product of a trained matrix with a row costs 2 in * out forward and twice that backward (its weight and its
    input); `fc` has no trained input, the teacher's head has no backward. Attention: two products forward, four back.
    """
    hidden, wide = c.hidden_size, c.num_attention_heads * c.head_dim
    key_value = 2 * hidden * 2 * c.num_key_value_heads * c.head_dim
    per_row = 2 * hidden * wide + wide * hidden + 3 * hidden * c.intermediate_size + hidden * c.draft_vocab_size
    tokens, pos, _, slots, valid = layout(documents, num_steps)
    flops = len(tokens) * (4 * len(c.aux_layers) * c.target_hidden_size * hidden + 6 * key_value)
    flops += 2 * len(slots) * hidden * c.draft_vocab_size
    for i, of_step in enumerate(valid):
        rows, keys = int(of_step.sum()), int((pos[slots[of_step]] + 1 + i).sum())
        flops += 6 * rows * (per_row + (key_value if i else 0)) + 6 * 2 * keys * wide
    return {"steps": 1, "tokens": len(tokens), "slots": len(slots), "flops": flops}


def gflops(product: Callable[[], Any], flops: int, seconds: float) -> float:
    product()
    start, times = time.perf_counter(), 0
    while times < 2 or time.perf_counter() - start < seconds:
        product()
        times += 1
    return flops * times / (time.perf_counter() - start) / 1e9


class MatrixProduct:
    """bfloat16 products timed between the turns: large squares, and the drafter's own shapes at a batch's rows."""

    def __init__(self, c: Eagle3Config, rows: int) -> None:
        normal = lambda *shape: torch.randn(*shape).to(torch.bfloat16)  # noqa: E731
        hidden, wide, narrow = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        sizes = [
            (len(c.aux_layers) * c.target_hidden_size, hidden),
            *[(2 * hidden, wide), (2 * hidden, narrow), (2 * hidden, narrow), (wide, hidden)],
            *[(hidden, c.intermediate_size)] * 2,
            *[(c.intermediate_size, hidden), (hidden, c.draft_vocab_size)],
        ]
        self.squares = [(normal(n, n), normal(n, n)) for n in SQUARES]
        self.layers = [(normal(rows, inner), normal(outer, inner)) for inner, outer in sizes]
        self.layer_flops = sum(2 * rows * inner * outer for inner, outer in sizes)
        self.peak: list[float] = []
        self.shapes: list[float] = []

    def measure(self) -> None:
        self.peak.append(max(gflops(lambda a=a, b=b: a @ b, 2 * len(a) ** 3, 0.1) for a, b in self.squares))
        self.shapes.append(gflops(lambda: [F.linear(x, w) for x, w in self.layers], self.layer_flops, 0.2))


# ---- arms -----------------------------------------------------------------------------------------------------------


class Draftkit:
    """`draftkit train-drafter` without its logging and checkpoints."""

    def __init__(self, drafter: Eagle3, teacher: TeacherView, recipe: Recipe) -> None:
        self.drafter, self.teacher, self.recipe = drafter, teacher, recipe
        self.optimizer = optim.build(drafter, recipe.train)

    def step(self, states: States, members: Sequence[int], share: float) -> None:
        """One optimizer step, at `share` (0 to 1) of the time."""
        t = self.recipe.train
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = optim.lr_at(max(1, round(share * RESOLUTION)), RESOLUTION, t)
        batch = collate(states, members, t.ttt_steps)
        loss, _ = drafter_loss(
            self.drafter(batch),
            self.drafter.lm_head.weight,
            self.teacher.at(batch),
            batch.valid_LR,
            t.ttt_decay,
            len(batch.slot_R),
            True,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), t.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self) -> Eagle3:
        return self.drafter


class Speculators:
    """speculators 0.9: its model, batches, loss and optimizers, in the order of its `Trainer.train_epoch`."""

    def __init__(
        self, like: Eagle3, path: Path, recipe: Recipe, attention: str, optimizer: str, loss: str = "eager"
    ) -> None:
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3.core import Eagle3DraftModel
        from speculators.models.eagle3.data import shift_batch
        from speculators.train.data import CollateFn
        from speculators.train.optimizers import build_optimizers

        self.like, self.recipe = like, recipe
        c = like.config
        ids = like.draft_to_target_D
        t2d = torch.zeros(c.vocab_size, dtype=torch.bool)
        t2d[ids] = True
        self.model = Eagle3DraftModel.from_training_args(
            verifier_config=_llama_config(c),
            t2d=t2d,
            d2t=like.d2t.clone(),
            draft_vocab_size=c.draft_vocab_size,
            norm_before_residual=c.norm_before_residual,
            ttt_steps=recipe.train.ttt_steps,
            verifier_name_or_path=str(path),
            target_layer_ids=list(c.aux_layers),
            draft_attn_impl=attention,
        ).float()
        self.model.verifier_norm = torch.nn.Identity()  # our captured last state already has the final norm
        self.loss_config = resolve_loss_config("kl_div", loss)
        settings = SimpleNamespace(  # the defaults of speculators.train.config.schema
            optimizer=optimizer,
            lr=1e-3,
            weight_decay=0.01,
            muon_lr=1e-3,
            muon_momentum=0.95,
            muon_weight_decay=0.1,
            muon_ns_steps=5,
            muon_adjust_lr_fn="match_rms_adamw",
        )
        self.optimizers = build_optimizers(self.model, settings)
        self.base_lr = [group["lr"] for each in self.optimizers for group in each.param_groups]
        self.collate = lambda length: CollateFn(
            length, c.hidden_size, len(c.aux_layers), torch.bfloat16, preprocess=shift_batch
        )

    @torch.no_grad()
    def start_from(self, drafter: Eagle3) -> None:
        ours = dict(drafter.named_parameters())
        for name, parameter in self.model.named_parameters():
            if name.replace("layers.0.", "midlayer.") in ours:
                parameter.copy_(ours[name.replace("layers.0.", "midlayer.")])

    def step(self, states: States, members: Sequence[int], share: float) -> None:
        batch = self._batch(states, members)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss, _ = self.model(
                **batch,
                ttt_steps=self.recipe.train.ttt_steps,
                ttt_step_loss_decay=1.0,
                loss_config=self.loss_config,
            )
        for each in self.optimizers:
            each.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        groups = [group for each in self.optimizers for group in each.param_groups]
        for group, lr in zip(groups, self.base_lr, strict=True):  # linear, one hundredth of warm-up
            group["lr"] = lr * (min(share / 0.01, 1.0) if share < 0.01 else (1 - share) / 0.99)
        for each in self.optimizers:
            each.step()

    def _batch(self, states: States, members: Sequence[int]) -> dict[str, Any]:
        samples = []
        for i in members:
            document, state = states.documents[i], states.document(i)
            length = len(document.tokens)
            samples.append(
                {
                    "hidden_states": state["aux"],
                    "input_ids": torch.tensor(document.tokens),
                    "verifier_last_hidden_states": state["last"],
                    "loss_mask": torch.tensor(document.mask),
                    "lengths": torch.tensor([length]),
                    "position_ids": torch.arange(length),
                }
            )
        total = sum(len(sample["input_ids"]) - 1 for sample in samples)
        return self.collate(total)(samples)

    def result(self) -> Eagle3:
        """Our drafter with these weights, for the common evaluation."""
        names = {name.replace("layers.0.", "midlayer."): p.detach() for name, p in self.model.named_parameters()}
        drafter = Eagle3(self.like.config, self.like.embed_VH, self.like.draft_to_target_D)
        drafter.load_state_dict({name: names[name] for name, _ in drafter.named_parameters()}, strict=False)
        return drafter


def _llama_config(c: Eagle3Config) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=dict(c.rope_parameters),
        max_position_embeddings=c.max_position_embeddings,
        tie_word_embeddings=False,
        attention_bias=False,
        hidden_act="silu",
        initializer_range=0.02,
    )


def arm(name: str, like: Eagle3, teacher: TeacherView, path: Path, recipe: Recipe, attention: str, fresh: Callable):
    if name == "draftkit":
        return Draftkit(fresh(), teacher, recipe)
    made = Speculators(like, path, recipe, attention, "muon" if name == "speculators" else "adamw")
    if name == "speculators-warm":
        made.start_from(fresh())
    return made


# ---- data -----------------------------------------------------------------------------------------------------------


def sums(path: Path, number: int, recipe: Recipe) -> list[Document]:
    """The verifier's sampled answers to small sums, as documents."""
    from transformers import AutoModelForCausalLM

    rng, tokenizer, facts = random.Random(0), load_tokenizer(path), model_facts(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    torch.manual_seed(0)
    made: list[Document] = []
    while len(made) < number:
        question = f"What is {rng.randint(10, 99)} plus {rng.randint(10, 99)}? Explain each step."
        prompt = render(tokenizer, [{"role": "user", "content": question}], recipe.sampling.thinking)
        rows = torch.tensor([prompt] * 16)
        answers = model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=True,
            top_k=0,
            max_new_tokens=96,
            pad_token_id=facts.eos_token_ids[0],
        )
        for row in answers[:, len(prompt) :].tolist():
            ends = [n for n, token in enumerate(row) if token in facts.eos_token_ids]
            response = row[: ends[0] + 1] if ends else row
            made.append(Document((*prompt, *response), (False,) * len(prompt) + (True,) * len(response)))
    return [d for d in made if sum(d.mask) > 1]


def load_documents(args: argparse.Namespace, recipe: Recipe, path: Path) -> tuple[list[Document], list[Document]]:
    """(training, held out), training cut to --tokens."""
    if args.corpus is None:
        say("no --corpus: the verifier answers sums (a demonstration, not a result)")
        made = sums(path, 160, recipe)
        train, held = made[:128], made[128:]
    else:
        corpus, temperature = Corpus.open(args.corpus), recipe.sampling.temperature
        corpus.check_verifier(fingerprint(path))
        if temperature != 1.0:
            raise UserError("sampling.temperature must be 1: speculators knows no other teacher.", "Override it.")
        train = documents(corpus, "train", recipe.train.seq_len, {temperature, 0.0})
        held = documents(corpus, "heldout", recipe.train.seq_len, {temperature})
    random.Random(0).shuffle(train)
    kept, total = [], 0
    for document in train:
        if total + len(document.tokens) <= args.tokens:
            kept.append(document)
            total += len(document.tokens)
    say(f"{len(kept)} training documents ({total:,} tokens), {len(held)} held out")
    return kept, held


# ---- the measurement ------------------------------------------------------------------------------------------------


def try_published_path(like: Eagle3, path: Path, recipe: Recipe, states: States) -> None:
    """What speculators would do on a GPU, tried for one step each on this machine; errors are printed, not hidden."""
    members = plan_epoch([len(d.tokens) for d in states.documents], recipe.train.tokens_per_batch, 0, 0)[0]
    for attention, loss in (("simple_flex_attention", "eager"), ("eager", "fused")):
        try:
            Speculators(like, path, recipe, attention, "muon", loss).step(states, members, 0.0)
            say(f"speculators, {attention} attention, {loss} loss: runs here")
        except Exception as error:  # whatever it raises is the finding
            line = str(error).strip().splitlines()[-1][:160]
            say(f"speculators, {attention} attention, {loss} loss: {type(error).__name__}: {line}")


def race(
    arms: dict[str, Any],
    config: Eagle3Config,
    states: States,
    recipe: Recipe,
    seconds: float,
    products: MatrixProduct,
) -> dict[str, dict[str, Any]]:
    """Every arm trains `seconds` of its own clock, in turns. Returns its counts per arm."""
    lengths = [len(d.tokens) for d in states.documents]
    done = {name: dict(steps=0, tokens=0, slots=0, flops=0, seconds=0.0) for name in arms}
    plans: dict[str, list[list[int]]] = {name: [] for name in arms}
    epochs = dict.fromkeys(arms, 0)
    while waiting := [name for name in arms if done[name]["seconds"] < seconds]:
        name = min(waiting, key=lambda n: done[n]["seconds"])
        count, until = done[name], min(done[name]["seconds"] + TURN_S, seconds)
        while count["seconds"] < until:
            if not plans[name]:
                plans[name] = plan_epoch(lengths, recipe.train.tokens_per_batch, recipe.train.seed, epochs[name])
                epochs[name] += 1
            members = plans[name].pop(0)
            start = time.perf_counter()
            arms[name].step(states, members, count["seconds"] / seconds)
            count["seconds"] += time.perf_counter() - start
            for key, value in cost(config, [states.documents[i] for i in members], recipe.train.ttt_steps).items():
                count[key] += value
        products.measure()
    return done


def spread(values: Sequence[float], digits: int = 0) -> str:
    """`median (least-most)`; a single value stands alone."""
    middle, least, most = (f"{x:,.{digits}f}" for x in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least}-{most})" if len(values) > 1 else middle


def report(names: Sequence[str], rows: list[dict[str, Any]], products: MatrixProduct, args: argparse.Namespace) -> None:
    peak, shapes = statistics.median(products.peak), statistics.median(products.shapes)

    def line(title: str, value: Callable[[dict[str, Any]], float], digits: int = 0) -> list[str]:
        return [title, *(spread([value(row) for row in rows if row["arm"] == name], digits) for name in names)]

    rate = lambda row: row["flops"] / row["seconds"] / 1e9  # noqa: E731
    held = lambda name: lambda row: row["heldout"][name]  # noqa: E731
    accuracies = [
        line(f"accuracy, step {i + 1}", lambda row, i=i: row["heldout"]["cond_acc"][i], 3)
        for i in range(args.ttt_steps)
    ]
    table(
        f"{args.repeats} repeats of {args.minutes:g} min, {torch.get_num_threads()} threads: median (least-most)",
        ["", *names],
        [
            line("tokens/s", lambda row: row["tokens"] / row["seconds"]),
            line("slots/s", lambda row: row["slots"] / row["seconds"]),
            line("optimizer steps", lambda row: row["steps"]),
            line("useful GFLOP/s", rate),
            line("  % of best square", lambda row: 100 * rate(row) / peak),
            line("  % of these shapes", lambda row: 100 * rate(row) / shapes),
            line("held-out KL", held("loss"), 3),
            *accuracies,
            line("simulated length", held("simulated_acceptance_length"), 2),
            line("walked length", held("walk_acceptance_length"), 2),
        ],
        caption=f"bfloat16 products in the same run: best square {spread(products.peak)} GFLOP/s, the drafter's shapes "
        f"{spread(products.shapes)}. Held-out accuracy: the argmax is the verifier's; simulated length: 1 + the sums "
        "of its products (greedy); walked: argmax drafts against the held-out samples (temperature 1).",
    )


def main() -> int:
    args = arguments()
    try:
        bench(args)
    except UserError as error:
        code, message, hint = explain(error)
        say(f"{message} {hint}".strip())
        return code
    return 0


def bench(args: argparse.Namespace) -> None:
    names = args.arms.split(",")
    if unknown := [name for name in names if name not in ARMS]:
        raise UserError(f"--arms: there is no arm {unknown[0]!r}.", f"Arms: {', '.join(ARMS)}.")
    recipe = load_recipe(args.recipe, args.overrides, {"train.ttt_steps": args.ttt_steps})[0].settled()
    args.ttt_steps = recipe.train.ttt_steps
    path = resolve_model(recipe.model.path, recipe.model.revision)
    facts: ModelFacts = model_facts(path)

    # ---- data, once for all ----
    train_docs, held_docs = load_documents(args, recipe, path)
    verifier = Verifier(path, aux_layers(recipe, facts), recipe.sampling.temperature)
    counts, special = token_counts(train_docs), [*load_tokenizer(path).all_special_ids, *facts.eos_token_ids]
    train_states = StreamedStates(verifier, train_docs, keep=len(train_docs))
    held_states = StreamedStates(verifier, held_docs, keep=len(held_docs))
    for states in (train_states, held_states):  # captured before any clock runs
        for i in range(len(states.documents)):
            states.document(i)

    def fresh(seed: int = 0) -> Eagle3:
        seeded = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})
        return build_drafter(seeded, facts, verifier, counts, special)

    like = fresh()
    teacher = TeacherView(like, verifier)
    slots = sum(sum(d.mask) for d in train_docs) / sum(len(d.tokens) for d in train_docs)
    products = MatrixProduct(like.config, round(slots * recipe.train.tokens_per_batch))
    if any(name.startswith("speculators") for name in names):
        need_speculators()
        try_published_path(like, path, recipe, train_states)

    # ---- repeats ----
    rows: list[dict[str, Any]] = []
    for repeat in range(args.repeats):
        torch.manual_seed(repeat)
        turn = names[repeat % len(names) :] + names[: repeat % len(names)]
        arms = {
            name: arm(name, like, teacher, path, recipe, args.attention, lambda r=repeat: fresh(r)) for name in turn
        }
        done = race(arms, like.config, train_states, recipe, args.minutes * 60, products)
        for name in names:
            heldout = evaluate(arms[name].result(), teacher, held_states, recipe)
            rows.append({"arm": name, "repeat": repeat, **done[name], "heldout": heldout})
            say(
                f"repeat {repeat + 1} of {args.repeats}, {name}: {done[name]['tokens'] / done[name]['seconds']:,.0f} "
                f"tokens/s, simulated acceptance length {heldout['simulated_acceptance_length']:.2f}"
            )
    report(names, rows, products, args)
    if args.out:
        args.out.write_text(json.dumps({"rows": rows, "peak": products.peak, "shapes": products.shapes}, indent=2))


def need_speculators() -> None:
    if SPECULATORS.is_dir():
        sys.path.append(str(SPECULATORS))
    try:
        import speculators.models.eagle3.core  # noqa: F401
        from loguru import logger

        logger.disable("speculators")  # which file it loads, every time
    except ImportError as error:
        raise UserError(
            f"speculators cannot be imported: {error}.",
            "Install it beside the environment: .venv/bin/pip install --no-deps --target .cache/speculators "
            "'speculators==0.9.*' 'hs-connectors==0.9.*'; or leave it out with --arms draftkit.",
        ) from error


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="recipe overrides")
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--corpus", type=Path, help="a run of `draftkit prepare`")
    parser.add_argument("--arms", default="draftkit,speculators,speculators-warm", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--minutes", type=float, default=5.0, help="training time of each arm in each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=150_000, help="at most so many training tokens (4.6 kB each)")
    parser.add_argument("--ttt-steps", type=int, help="default: the recipe's")
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="sdpa", help="of speculators")
    parser.add_argument("--out", type=Path, help="also write every measurement as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
