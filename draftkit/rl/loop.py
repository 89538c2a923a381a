"""`draftkit rl`: GRPO whose rollouts speculate, and whose drafter learns along.

    prompts -> rollouts (engine) -> rewards, advantages
            -> log-probabilities, states (trainer) -> drafter update -> policy update
            -> publish both -> canary -> (evaluation) -> metrics, checkpoint

The drafter trains before the policy moves: its states, teacher and targets are then of one version. Steps are counted
from 1; everything that a step draws at random follows from (seed, step), so that a resumed run goes on as it would
have. Several ranks run this same loop on their own prompts (`world.py`), rollouts may run ahead (`pipeline.py`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from draftkit.console import say
from draftkit.data.data_recipe import load_data_recipe
from draftkit.data.rollouts import save_step
from draftkit.errors import Interrupted, RunFailed
from draftkit.evals import samples as drafts
from draftkit.evals.drain import Requests, Schedule, constant
from draftkit.models import load_tokenizer, model_facts, resolve_model
from draftkit.recipe import Recipe
from draftkit.rl import finish, resume, snapshots, start
from draftkit.rl.account import Account
from draftkit.rl.canary import CanaryRecord
from draftkit.rl.directions import direction_sums
from draftkit.rl.envs import Environment, load_environment, load_reward
from draftkit.rl.grpo import (
    LossSettings,
    global_denominator,
    group_advantages,
    metric_means,
    overlong_penalty,
    policy_loss,
    resolve_settings,
    useful_groups,
)
from draftkit.rl.ledger import StepClock
from draftkit.rl.lossless import Monitor, Sums, explain, sequence_sums
from draftkit.rl.pipeline import Pipeline
from draftkit.rl.policy import Sample, Scores, samples
from draftkit.rl.prompts import PromptStream, open_prompts
from draftkit.rl.replay import Replay
from draftkit.rl.rollout import acceptance_by_turn, collect, document
from draftkit.rl.start import Actors, cotrains
from draftkit.rl.template import ChatTemplate
from draftkit.rl.trigger import Decision, Observation, Trigger
from draftkit.rl.tuner import Tuner
from draftkit.rl.view import View
from draftkit.rl.warmup import warm_up
from draftkit.rl.world import World
from draftkit.run import Interrupt, RunDir
from draftkit.track import Trackers
from draftkit.train.evaluate import TeacherView
from draftkit.types import EngineStep, Prompt, Sampling, SpecCounters, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FATAL_CANARIES = 2  # in a row without the policy's own weights in the engine: its rollouts are not worth training on


@dataclass(frozen=True, slots=True)
class Rolled:
    """One step's rollouts of this rank. schedule: draft length by requests running; generate_s: in the engine."""

    step: int
    trajectories: list[Trajectory]
    schedule: Schedule
    generate_s: float
    reward_s: float
    engine_steps: list[EngineStep]

    @property
    def k(self) -> int:
        """Longest drafts, 0 without speculation."""
        return max(k for _, _, k in self.schedule)


def run(recipe: Recipe, run: RunDir) -> dict[str, Any]:
    """The whole command. Returns what `results.json` holds."""
    # ---- inputs: whatever is wrong with them is said here ----
    start.check(recipe)
    world = World()
    torch.manual_seed(recipe.rl.seed)
    path = resolve_model(recipe.model.path, recipe.model.revision)
    facts = model_facts(path, recipe.model.trust_remote_code)
    tokenizer = load_tokenizer(path, recipe.model.trust_remote_code)
    data_recipe = load_data_recipe(recipe.data.recipe)
    environment = load_environment(recipe, data_recipe, load_reward(recipe, data_recipe))
    if recipe.rl.environment != "single-turn":
        ChatTemplate(tokenizer, recipe.sampling.thinking).check()
    stream, heldout = open_prompts(recipe, data_recipe, tokenizer)
    run.begin()

    # ---- the policy to begin with, engine, drafter ----
    model = warm_up(recipe, run, world, path, tokenizer, stream.prompts)
    canary_prompts = stream.prompts[-recipe.canary.prompts :]
    actors = start.build(recipe, run, world, model, facts, tokenizer, canary_prompts)
    trackers = Trackers(recipe.rl.track if world.is_main else [], run.path, recipe.name, recipe.model_dump(mode="json"))
    try:
        loop = Loop(recipe, run, world, actors, stream, heldout, environment, tokenizer, trackers)
        loop.go()
        return finish.finish(recipe, run, world, actors, loop.account, model)
    finally:
        trackers.close()
        actors.close()


class Loop:
    """`go` runs all steps; `step` is one. What a checkpoint holds of it is listed in `resume.py`."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunDir,
        world: World,
        actors: Actors,
        stream: PromptStream,
        heldout: Sequence[Prompt],
        environment: Environment,
        tokenizer: PreTrainedTokenizerBase,
        trackers: Trackers,
    ) -> None:
        self.recipe, self.run, self.world, self.actors = recipe, run, world, actors
        self.stream, self.heldout, self.tokenizer, self.trackers = stream, list(heldout), tokenizer, trackers
        self.settings: LossSettings = resolve_settings(recipe)
        self.clock = StepClock()
        self.pipeline: Pipeline[Rolled] = Pipeline(overlapped=recipe.rl.lag > 0 and hasattr(actors.engine, "process"))
        self.environment = environment if self.pipeline.overlapped else self._timed(environment)
        self.replay = Replay(recipe.cotrain.replay, recipe.rl.seed)
        self.trigger = Trigger.new(recipe.cotrain)
        self.monitor = Monitor(recipe.rl.steps, absolute=recipe.rl.lag == 0)
        self.account = Account(recipe)
        spec, slots = recipe.spec, recipe.engine.max_num_seqs
        self.tuner = Tuner(spec.k, slots, spec.explore, recipe.rl.steps) if spec.adapt else None
        self.done, self.asked = 0, 0  # steps trained; steps whose rollouts were asked for
        self.speculate = recipe.spec.method != "none"
        self.strange = 0  # canaries in a row that did not find the policy in the engine
        self.canary: CanaryRecord | None = None

    # ---- the run ----

    def go(self) -> None:
        r = self.recipe.rl
        resumed = resume.load(self)
        self.run.rewind_metrics(self.done if resumed else 0)
        self.actors.engine.step_log()  # from here on
        if resumed:
            say(f"resumed after step {self.done} of {r.steps}")
            versions = self.actors.publisher.state()  # the engine is new, the weights are not
            self._publish(policy=True, drafter=self.actors.drafter is not None)
            self.actors.publisher.load(versions)
        else:
            self._begin()
        self.clock.lap()
        with Interrupt() as stop, View(r.steps, self.done) as view:
            while self.done < r.steps:
                row = self.step(self.done + 1)
                self.done += 1
                self.run.metrics(row)
                self.trackers.log(self.done, row)
                view.step(row)
                stopped = self.world.any(stop.requested)
                if stopped or self.done % r.save_every == 0 or self.done == r.steps:
                    resume.save(self)
                if stopped and self.done < r.steps:
                    raise Interrupted(f"step {self.done} of {r.steps} is saved")
        self.pipeline.close()

    def _begin(self) -> None:
        """Is the engine what it was built as, and what can the policy do before any step?"""
        grows = self.actors.cotrainer is not None and self.actors.cotrainer.grows
        self._look(self.actors.publisher.publish(policy=False, drafter=False))
        self.speculate = self.speculate and not grows and self.canary is not None and self.canary.speculate
        reward = self.evaluate(0)
        self.run.metrics({"step": 0, "eval_reward": reward, "canary": self._canary_row()})

    # ---- one step ----

    def step(self, number: int) -> dict[str, Any]:
        recipe, actors, clock = self.recipe, self.actors, self.clock

        # ---- rollouts ----
        while self.asked < min(recipe.rl.steps, number + recipe.rl.lag):
            self.ask(self.asked + 1)
        rolled = self._take()
        self._keep(rolled)
        rolled, dropped = self._useful(rolled)
        trajectories = rolled.trajectories
        if torch.cuda.is_available() and not self.pipeline.overlapped:
            with clock("sync"):
                actors.publisher.sleep()  # the trainer may have the GPU's memory until the publish

        # ---- advantages ----
        shaped = [t.reward + self._penalty(t) for t in trajectories]
        groups = torch.tensor([t.group for t in trajectories])
        advantages = group_advantages(torch.tensor(shaped), groups, self.settings.loss)

        # ---- log-probabilities, and the drafter's states ----
        with clock("logprob"):
            scores = actors.policy.score(trajectories, capture=cotrains(recipe))
            entropy = [float(h.sum() / max(1, sum(t.mask))) for h, t in zip(scores.entropy, trajectories, strict=True)]

            sums = self._lossless_sums(rolled, scores)

        # ---- drafter, while states and head are of one version ----
        decision, drafter_row = None, None
        if actors.cotrainer is not None and cotrains(recipe):
            decision, drafter_row = self._train_drafter(number, rolled, scores, entropy)

        # ---- policy ----
        with clock("train_policy"):
            policy_row = self._train_policy(samples(scores, advantages.tolist()))

        # ---- publish, canary ----
        with clock("publish"):
            self._publish(policy=policy_row is not None, drafter=drafter_row is not None)

        if recipe.rl.snapshot_every and number % recipe.rl.snapshot_every == 0:
            snapshots.save(self.run.path, number, recipe, self.world, actors)

        # ---- evaluation ----
        eval_reward = None
        if number % recipe.rl.eval_every == 0 or number == recipe.rl.steps:
            eval_reward = self.evaluate(number)

        # ---- the record ----
        lossless = self._lossless(rolled, sums)
        everybody = self.world.gather(self._figures(rolled, entropy))
        seconds = clock.lap()
        row: dict[str, Any] = {
            "step": number,
            "policy_version": trajectories[0].policy_version if trajectories else actors.publisher.policy_version,
            "draft_version": trajectories[0].draft_version if trajectories else actors.publisher.draft_version,
            "k": rolled.k,
            "schedule": rolled.schedule,
            **self.account.step(number, everybody, seconds, rolled.schedule),
            "tuning": self._tune(number, everybody),
            "dropped_groups": dropped,
            "policy": policy_row,
            "drafter": drafter_row,
            "cotrain": None if decision is None else dataclasses.asdict(decision),
            **lossless,
            "canary": self._canary_row(),
        }
        return row if eval_reward is None else row | {"eval_reward": eval_reward}

    # ---- rollouts ----

    def ask(self, step: int) -> None:
        """Queue the rollouts of a step, on the weights published by then."""
        with self.clock("data"):
            prompts = self.stream.take(self.recipe.rl.prompts_per_step)
        self.asked = step
        self.pipeline.roll(lambda: self._roll(step, prompts, 0))

    def _roll(self, step: int, prompts: Sequence[Prompt], first_group: int) -> Rolled:
        """In the engine's turn of the pipeline."""
        engine, publisher = self.actors.engine, self.actors.publisher
        schedule = self._set_drafts(step)
        engine.step_log()
        numbered = self.world.share(list(enumerate(prompts, first_group)))
        clock = self.clock if not self.pipeline.overlapped else StepClock()
        with clock("generate"):
            collected = collect(
                engine,
                [prompt for _, prompt in numbered],
                self.environment,
                self.tokenizer,
                self.recipe,
                policy_version=publisher.policy_version,
                draft_version=publisher.draft_version,
                k=max(k for _, _, k in schedule),
                seed=self.recipe.rl.seed,
                step=step,
                first_group=numbered[0][0] if numbered else first_group,
            )
        took = (collected.generate_s, collected.reward_s)
        return Rolled(step, collected.trajectories, schedule, *took, engine.step_log())

    def _set_drafts(self, step: int) -> Schedule:
        """Set the engine's draft lengths and return them: no drafts in a probe step or while none are accepted."""
        spec, every, engine = self.recipe.spec, self.recipe.rl.probe_every, self.actors.engine
        slots = self.recipe.engine.max_num_seqs
        if spec.method == "none":
            return constant(0, slots)
        probe = every > 0 and step % every == 1 % every
        if probe or not self.speculate:
            engine.set_k(0)
            return constant(0, slots)
        if self.tuner is not None:
            schedule = self.tuner.upcoming
        else:
            schedule = [list(row) for row in spec.schedule or constant(spec.k, slots)]
        lengths = {k for _, _, k in schedule}
        if len(lengths) == 1:
            engine.set_k(lengths.pop())  # where that is 0 the drafter need not keep its cache in step
        else:
            engine.set_schedule(schedule)
        return schedule

    def _tune(self, number: int, everybody: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Let the tuner learn from this step; all ranks go by the main one's engine, so that they agree."""
        if self.tuner is None:
            return None
        mine, slots = everybody[0], self.recipe.engine.max_num_seqs
        return self.tuner.observe(
            number,
            Requests(tuple(mine["prompts"]), tuple(mine["lengths"]), slots),
            mine["engine_steps"],
            sum((counters for one in everybody for counters in one["turns"]), SpecCounters()),
            self.account.cost(),
            self.account.engine_steps,
        )

    def _take(self) -> Rolled:
        if not self.pipeline.overlapped:
            return self.pipeline.take()
        with self.clock("idle"):
            return self.pipeline.take()

    def _keep(self, rolled: Rolled) -> None:
        """On disk, before any group is dropped."""
        keep, temperature = self.recipe.rl.keep_rollouts, self.recipe.sampling.temperature
        if keep:
            save_step(self.run.path, rolled.step, self.world.rank, rolled.trajectories, temperature, keep)

    def _useful(self, rolled: Rolled) -> tuple[Rolled, int]:
        """Dynamic sampling: only groups that teach something, and more prompts while there are too few of them."""
        if not self.settings.dynamic_sampling:
            return rolled, 0
        wanted, kept, dropped, have = self.recipe.rl.prompts_per_step, [], 0, 0
        for attempt in range(self.recipe.rl.max_resamples + 1):
            rewards, groups = [t.reward for t in rolled.trajectories], [t.group for t in rolled.trajectories]
            useful = set(useful_groups(rewards, groups))
            fresh = [t for t in rolled.trajectories if t.group in useful]
            kept += fresh
            have = sum(self.world.gather(len({t.group for t in kept})))
            dropped = (attempt + 1) * wanted - have
            if have >= wanted or attempt == self.recipe.rl.max_resamples:
                break
            with self.clock("data"):
                prompts = self.stream.take(wanted)
            step, first_group = rolled.step, (attempt + 1) * wanted
            more = self.pipeline.do(lambda s=step, p=prompts, g=first_group: self._roll(s, p, g))
            rolled = dataclasses.replace(
                more,
                generate_s=rolled.generate_s + more.generate_s,
                reward_s=rolled.reward_s + more.reward_s,
                engine_steps=rolled.engine_steps + more.engine_steps,
            )
        return dataclasses.replace(rolled, trajectories=kept), dropped

    def _penalty(self, trajectory: Trajectory) -> float:
        return overlong_penalty(sum(trajectory.mask), self.settings.max_tokens, self.recipe.rl.overlong_buffer)

    # ---- training ----

    def _train_drafter(
        self, number: int, rolled: Rolled, scores: Scores, entropy: Sequence[float]
    ) -> tuple[Decision, dict[str, Any] | None]:
        section, cotrainer = self.recipe.cotrain, self.actors.cotrainer
        assert cotrainer is not None
        observation = None
        if self.world.any(rolled.k > 0):
            observation = Observation.of(rolled.trajectories, entropy, rolled.generate_s, self.world)
        decision = self.trigger.decide(number, observation)
        row = None
        with self.clock("train_drafter"):
            begin = time.perf_counter()
            if not cotrainer.is_grown:
                row = cotrainer.grow(scores, self.tokenizer.all_special_ids)
            elif decision.train:
                wanted = int(section.batches * section.tokens_per_batch * section.replay_share)
                old = self.replay.draw(wanted, number)
                replayed = self.actors.policy.score(old, capture=True) if self.world.any(bool(old)) else None
                row = cotrainer.train(scores, section.batches, replayed)
                self.trigger.trained(max(self.world.gather(time.perf_counter() - begin)))
            self.replay.add([document(t) for t in rolled.trajectories], number)
        return decision, row

    def _train_policy(self, batch: Sequence[Sample]) -> dict[str, Any] | None:
        """rl.updates optimizer steps over the batch; None when no group taught anything."""
        if not self.world.any(any(s.advantage for s in batch)) and self.settings.kl_coef == 0:
            return None
        updates, rows = self.recipe.rl.updates, []
        for u in range(updates):
            part = batch[u * len(batch) // updates : (u + 1) * len(batch) // updates]
            sequences = sum(self.world.gather(len(part)))
            tokens = sum(self.world.gather(sum(sum(s.mask) for s in part)))
            if not sequences:
                continue
            denominator = global_denominator(self.settings, sequences, tokens)
            if self.settings.kl_coef == 0:  # without an advantage nothing of a sequence reaches the gradient
                part = [s for s in part if s.advantage]
            loss = lambda logp_N, constants, d=denominator: policy_loss(logp_N, constants, self.settings, d)  # noqa: E731
            update = self.actors.policy.update(part, loss)
            rows.append({"loss": update.loss, "grad_norm": update.grad_norm} | metric_means(update.sums))
        return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} if rows else None

    # ---- publishing ----

    def _publish(self, *, policy: bool, drafter: bool) -> None:
        """Send what changed, then ask the canary; its verdict rules the next rollouts."""
        self.pipeline.do(lambda: self._look(self.actors.publisher.publish(policy=policy, drafter=drafter)))

    def _look(self, published: Any) -> None:
        record = self.actors.canary.check(published)
        before, self.canary = self.speculate, record
        self.speculate = record.speculate
        self.strange = 0 if record.policy_intact else self.strange + 1
        if not record.ok:
            say(f"[yellow]canary:[/yellow] {record.cause}")
        if before != record.speculate:
            length = "" if record.served is None else f" (acceptance length {record.served:.2f})"
            say(f"canary: speculation {'on' if record.speculate else 'off'} for the next rollouts{length}")
        if self.strange >= FATAL_CANARIES:
            raise RunFailed(
                f"The engine does not hold the policy: {record.cause}.",
                "Training on its rollouts would be wrong; see log.txt.",
            )

    def _canary_row(self) -> dict[str, Any] | None:
        return None if self.canary is None else self.canary.asdict()

    # ---- evaluation ----

    def evaluate(self, number: int) -> float:
        """Mean reward of one greedy answer to each held-out prompt."""

        def answer() -> list[float]:
            k = max(k for _, _, k in self._set_drafts(number))
            collected = collect(
                self.actors.engine,
                self.world.share(self.heldout),
                self.environment,
                self.tokenizer,
                self.recipe,
                policy_version=self.actors.publisher.policy_version,
                draft_version=self.actors.publisher.draft_version,
                k=0,
                seed=self.recipe.rl.seed,
                step=0,
                num_samples=1,
                temperature=0.0,
            )
            if k and self.world.is_main and self.recipe.engine.tensor_parallel_size == 1:
                self._show_drafts(number, k)
            self.actors.engine.step_log()  # not the rollouts'
            return [t.reward for t in collected.trajectories]

        with self.clock("eval"):
            rewards = self.world.joined(self.pipeline.do(answer))
        return sum(rewards) / len(rewards)

    def _show_drafts(self, number: int, k: int) -> None:
        """A few first turns with their drafts, at the rollouts' settings, for `draftkit report`."""
        own, template = self.recipe.sampling, ChatTemplate(self.tokenizer, self.recipe.sampling.thinking)
        shown = [template.prompt(p.messages) for p in self.heldout[: drafts.RESPONSES]]
        one = Sampling(own.temperature, own.top_p, own.top_k, own.max_tokens, tuple(own.stop))
        seeded = [dataclasses.replace(one, seed=self.recipe.rl.seed + i) for i in range(len(shown))]
        rows = drafts.record(self.actors.engine, self.tokenizer, shown, seeded, k, number)
        drafts.keep(self.run, rows)

    # ---- figures ----

    def _lossless_sums(self, rolled: Rolled, scores: Scores) -> Sums:
        """This rank's; those that concern the drafter only before it is trained on these rollouts."""
        sums = Sums()
        for i, t in enumerate(rolled.trajectories):
            m = torch.tensor(t.mask)
            seed = (self.recipe.rl.seed, rolled.step, t.group, t.sample)
            engine = torch.tensor(t.engine_logp)
            columns = (scores.logp[i], scores.entropy[i], scores.var[i], scores.cdf[i], engine)
            sums = sums + sequence_sums(*(c[m] for c in columns), seed=seed)
        drafter, sampling = self.actors.drafter, self.recipe.sampling
        untruncated = sampling.top_p == 1 and sampling.top_k == 0
        if drafter is not None and scores.states is not None and self.actors.cotrainer.is_grown and untruncated:
            view = TeacherView(drafter, self.actors.ends)
            sums = sums + direction_sums(drafter, view, scores, self.recipe.cotrain.tokens_per_batch)
        return sums

    def _lossless(self, rolled: Rolled, mine: Sums) -> dict[str, Any]:
        total = sum(self.world.gather(mine), Sums())
        report = self.monitor.add(**{"on" if rolled.k else "off": total})
        for alarm in report.alarms:
            say(f"[red]losslessness alarm:[/red] {explain(alarm)} (p = {report.p[alarm]:.1e})")
        arm = "on" if rolled.k else "off"
        return {
            "engine_trainer_logp_gap": report.values.get(f"{arm}.logp_gap"),
            "surprise_z": report.values.get(f"{arm}.surprise_z"),
            "lossless": report.values | {"alarms": report.alarms},
        }

    def _figures(self, rolled: Rolled, entropy: Sequence[float]) -> dict[str, Any]:
        """This rank's part of the step's figures."""
        tokens = [sum(t.mask) for t in rolled.trajectories]
        return {
            "rewards": [t.reward for t in rolled.trajectories],
            "lengths": tokens,
            "prompts": [t.mask.index(True) if any(t.mask) else len(t.mask) for t in rolled.trajectories],
            "truncated": sum(t.truncated for t in rolled.trajectories),
            "entropy": sum(h * n for h, n in zip(entropy, tokens, strict=True)),
            "turns": acceptance_by_turn(rolled.trajectories),
            "generate_s": rolled.generate_s,
            "engine_steps": rolled.engine_steps,
        }

    def _timed(self, environment: Environment) -> Environment:
        def timed(prompt: Prompt, messages: Sequence[Any], last: bool) -> Any:
            with self.clock("reward"):
                return environment(prompt, messages, last)

        return timed
