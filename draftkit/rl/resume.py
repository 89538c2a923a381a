"""Checkpoints of an RL run: written whole by all ranks, read back exactly.

    step-000010/policy/            DeepSpeed's own: weights, masters, optimizer, of every rank
                cotrain/           drafter, its optimizer and counts; replay
                loop.json          positions, versions, trigger, losslessness sums, ledger, whether to speculate
                waiting-0.json     rollouts asked for and not yet trained on (rl.lag), of every rank

No generator state: what is drawn at random follows from (seed, step).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from draftkit.train import checkpoint
from draftkit.types import EngineStep, SpecCounters, Trajectory, Turn

if TYPE_CHECKING:
    from draftkit.rl.loop import Loop, Rolled


def save(loop: Loop) -> None:
    """The state after `loop.done` steps."""
    world, keep = loop.world, loop.recipe.rl.keep
    waiting = loop.pipeline.waiting()
    directory = loop.run.path / "checkpoints"
    with checkpoint.whole(directory, loop.done, keep, world.is_main, world.barrier) as aside:
        loop.actors.policy.save_state(aside / "policy")
        rolled = json.dumps([asdict(r) for r in waiting])
        (aside / f"waiting-{world.rank}.json").write_text(rolled)
        if world.is_main:
            if loop.actors.cotrainer is not None:
                (aside / "cotrain").mkdir()
                loop.actors.cotrainer.save(aside / "cotrain")
                loop.replay.save(aside / "cotrain" / "replay.safetensors")
            (aside / "loop.json").write_text(json.dumps(_state(loop)))


def _state(loop: Loop) -> dict[str, Any]:
    return {
        "done": loop.done,
        "asked": loop.asked,
        "position": loop.stream.position,
        "speculate": loop.speculate,
        "strange": loop.strange,
        "versions": loop.actors.publisher.state(),
        "trigger": loop.trigger.state(),
        "monitor": loop.monitor.state(),
        "account": loop.account.state(),
        "tuner": None if loop.tuner is None else loop.tuner.state(),
    }


def load(loop: Loop) -> bool:
    """Restore the newest checkpoint; False when there is none."""
    found = checkpoint.found(loop.run.path / "checkpoints")
    newest = loop.world.gather(found[-1] if found else None)[0]  # the main rank's word: others may look too early
    if newest is None:
        return False
    state = json.loads((newest / "loop.json").read_text())
    loop.actors.policy.load_state(newest / "policy")
    if loop.actors.cotrainer is not None:
        loop.actors.cotrainer.load(newest / "cotrain")
        loop.replay.load(newest / "cotrain" / "replay.safetensors")
    loop.done, loop.asked, loop.stream.position = state["done"], state["asked"], state["position"]
    loop.speculate, loop.strange = state["speculate"], state["strange"]
    loop.actors.publisher.load(state["versions"])
    loop.trigger.load(state["trigger"])
    loop.monitor.restore(state["monitor"])
    loop.account.load(state["account"])
    if loop.tuner is not None:
        loop.tuner.load(state["tuner"])
    for batch in json.loads((newest / f"waiting-{loop.world.rank}.json").read_text()):
        loop.pipeline.keep(_rolled(batch))
    return True


def _rolled(raw: dict[str, Any]) -> Rolled:
    from draftkit.rl.loop import Rolled

    return Rolled(
        **raw
        | {
            "trajectories": [_trajectory(t) for t in raw["trajectories"]],
            "engine_steps": [EngineStep(**s) for s in raw["engine_steps"]],
        }
    )


def _trajectory(raw: dict[str, Any]) -> Trajectory:
    turns = tuple(
        Turn(**t | {"spec": None if t["spec"] is None else SpecCounters.read(t["spec"])}) for t in raw["turns"]
    )
    return Trajectory(
        **raw
        | {
            "tokens": tuple(raw["tokens"]),
            "mask": tuple(raw["mask"]),
            "engine_logp": tuple(raw["engine_logp"]),
            "turns": turns,
        }
    )
