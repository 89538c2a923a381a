"""`EngineProcess`: an `Engine` in a process of its own, behind the same methods.

For trainers of several processes (each rank has an engine, of which torch.distributed must not see the others) and for
rollouts that run beside training. Requests and replies go through a pipe, one at a time; weights through a buffer of
shared memory, of which the child copies them, so that neither side needs room for a model twice.

The child belongs to its parent: it ignores Ctrl-C and SIGTERM, which the parent handles for both, and ends when the
parent does, by whatever means. A `generate` that the parent is interrupted in is cancelled between two steps.

Left out: handing over CUDA tensors by handle (they go through host memory), tensor-parallel engines.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftkit import console
from draftkit.errors import RunFailed, UserError
from draftkit.recipe import EngineSection
from draftkit.types import EngineStep, Generation, Sampling, SpecConfig, SpecCounters

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event

    import torch

    from draftkit.engine.weights import Weights

BUFFER_BYTES = 1 << 24
# A rank of a launcher is no rank of the engine's own group of one process.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
CLOSE_SECONDS = 30
GIVE_UP = "give up"  # in place of the next part of the weights


class EngineProcess:
    """An `Engine` in a child process. env: variables of the child, None removes one; for instance
    CUDA_VISIBLE_DEVICES for the device it may use, OMP_NUM_THREADS for its share of the cores.

    Raises what the engine raises, by type; RunFailed when the child has died.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        recipe_engine: EngineSection,
        spec: SpecConfig | None = None,
        seed: int = 0,
        can_sleep: bool = False,
        env: dict[str, str | None] | None = None,
    ) -> None:
        import torch.multiprocessing

        if recipe_engine.tensor_parallel_size > 1:
            raise UserError(
                "an engine process of its own cannot be tensor-parallel.", "Set engine.tensor_parallel_size to 1."
            )
        self.spec, self.max_model_len, self.max_num_seqs = spec, recipe_engine.max_model_len, recipe_engine.max_num_seqs
        spawn = torch.multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._cancel = spawn.Event()
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8).share_memory_()
        self._lock = threading.Lock()  # one request at a time, also when a thread generates
        self._owes = False
        arguments = dict(model=str(model), recipe_engine=recipe_engine, spec=spec, seed=seed, can_sleep=can_sleep)
        child = (theirs, self._cancel, self._buffer, arguments, console.console.quiet)
        self._process = spawn.Process(target=_serve, args=child, daemon=True, name="draftkit-engine")
        with _environment(dict.fromkeys(LAUNCHER) | (env or {})):
            self._process.start()
        theirs.close()
        atexit.register(self.close)
        done, value = self._answer(None, None)
        if not done:
            self.close()
            raise value
        self.device, self._dtype = value

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self._dtype)

    # ---- the methods of Engine ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        *,
        max_concurrency: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Generation]:
        return self._call("generate", prompts, sampling, max_concurrency=max_concurrency, progress=progress)

    def generate_traced(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]
    ) -> tuple[list[Generation], list[list[list[int]]]]:
        return self._call("generate_traced", prompts, sampling)

    def set_k(self, k: int) -> None:
        self._call("set_k", k)

    def set_schedule(self, schedule: Sequence[Sequence[int]]) -> None:
        self._call("set_schedule", schedule)

    def counters(self) -> SpecCounters:
        return self._call("counters")

    def step_log(self) -> list[EngineStep]:
        return self._call("step_log")

    def aux_layers(self) -> tuple[int, ...] | None:
        return self._call("aux_layers")

    def probe(self, columns: int | None = None) -> dict[str, torch.Tensor]:
        import torch

        return {name: torch.from_numpy(values) for name, values in self._call("probe", columns).items()}

    def load_verifier(self, weights: Weights) -> None:
        self._call("load_verifier", weights=weights)

    def load_drafter(self, weights: Weights) -> None:
        self._call("load_drafter", weights=weights)

    def sleep(self, level: int = 1) -> None:
        self._call("sleep", level)

    def wake(self) -> None:
        self._call("wake")

    def close(self) -> None:
        """End the child; a second time does nothing."""
        atexit.unregister(self.close)
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(CLOSE_SECONDS)
            self._process.kill()
        self._process.join()
        self._pipe.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- the pipe -----------------------------------------------------------------------------------------------

    def _call(
        self, method: str, *args: Any, weights: Weights | None = None, progress: Any = None, **kwargs: Any
    ) -> Any:
        with self._lock:
            self._send((method, args, kwargs, weights is not None, progress is not None))
            try:
                done, value = self._answer(progress, _parts(weights, self._buffer) if weights is not None else None)
            except BaseException:
                # Raised on this side (Ctrl-C, a progress, weights that could not be made): the child is still at work.
                self._abandon()
                raise
        if not done:
            raise value
        return value

    def _answer(self, progress: Callable[[int], None] | None, parts: Iterator[Any] | None) -> tuple[bool, Any]:
        """(True, result) or (False, exception); serves what the child asks for meanwhile."""
        while True:
            kind, value = self._receive()
            if kind == "progress":
                progress(value)  # type: ignore[misc]
            elif kind == "next":
                self._owes = True  # while the child waits for an answer; making it may fail
                self._send(next(parts, None))  # type: ignore[arg-type]
                self._owes = False
            else:
                return kind == "done", value

    def _abandon(self) -> None:
        """Have the child give up its request, so that the next finds it idle; a child that does not is ended."""
        self._cancel.set()
        try:
            if self._owes:
                self._owes = False
                self._pipe.send(GIVE_UP)
            while self._process.is_alive():
                if not self._pipe.poll(CLOSE_SECONDS):
                    raise TimeoutError
                kind, _ = self._pipe.recv()
                if kind == "next":
                    self._pipe.send(GIVE_UP)
                elif kind != "progress":
                    break
        except Exception:
            self._process.kill()
        self._cancel.clear()

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            raise self._died() from None

    def _receive(self) -> tuple[str, Any]:
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def _died(self) -> RunFailed:
        self._process.join(CLOSE_SECONDS)
        code = self._process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        hint = "Signal 9 mostly means that the machine ran out of memory: try a smaller engine.kv_cache_gib, then"
        return RunFailed(f"The engine's process {how}.", f"{hint if code == -9 else 'Go on with'} --resume.")


def _parts(weights: Weights, buffer: torch.Tensor) -> Iterator[Any]:
    """(name, dtype, shape) of each tensor, then for every part of its bytes the number that now are in the buffer."""
    import torch

    for name, tensor in weights:
        flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        yield name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        for part in flat.split(len(buffer)):
            buffer[: len(part)].copy_(part)
            yield len(part)


@contextlib.contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    """os.environ with changes, for the child that starts meanwhile: libraries read it when they are loaded."""
    before = {name: os.environ.get(name) for name in changes}

    def put(values: dict[str, str | None]) -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    put(changes)
    try:
        yield
    finally:
        put(before)


# ---- the child ------------------------------------------------------------------------------------------------------


class Cancelled(Exception):
    """The parent wants no answer any more."""


def _serve(pipe: Connection, cancel: Event, buffer: torch.Tensor, arguments: dict[str, Any], quiet: bool) -> None:
    """The child's life: build the engine, then one request after the other until None comes or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # stdout is the parent's, for results
    console.set_mode(quiet=quiet)
    from draftkit.engine.core import Engine

    def between_steps() -> None:
        if cancel.is_set():
            raise Cancelled

    try:
        engine = Engine(arguments.pop("model"), **arguments)
    except BaseException as error:
        pipe.send(("error", _portable(error)))
        return
    engine.between_steps = between_steps
    pipe.send(("done", (engine.device, str(engine.dtype).removeprefix("torch."))))
    while (request := pipe.recv()) is not None:
        method, args, kwargs, takes_weights, wants_progress = request
        if takes_weights:
            args = (_received(pipe, buffer), *args)
        if wants_progress:
            kwargs["progress"] = lambda n: pipe.send(("progress", n))
        try:
            result = getattr(engine, method)(*args, **kwargs)
            if method == "probe":  # as arrays: tensors would take a file descriptor each
                result = {name: values.numpy() for name, values in result.items()}
            reply = ("done", result)
        except Exception as error:
            reply = ("error", _portable(error))
        pipe.send(reply)
    engine.close()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


def _received(pipe: Connection, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    def ask() -> Any:
        pipe.send(("next", None))
        if (answer := pipe.recv()) == GIVE_UP:
            raise Cancelled
        return answer

    while (header := ask()) is not None:
        name, dtype, shape = header
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        flat, done = tensor.view(-1).view(torch.uint8), 0
        while done < len(flat):
            size = ask()
            flat[done : done + size].copy_(buffer[:size])
            done += size
        yield name, tensor


def _portable(error: BaseException) -> BaseException:
    """The exception with the child's traceback as a note, or, where it does not survive pickling, its words."""
    words = "".join(traceback.format_exception(error))
    try:
        same = pickle.loads(pickle.dumps(error))
    except Exception:
        same = RuntimeError(f"{type(error).__name__}: {error}")
    same.add_note(f"In the engine's process:\n{words}")
    return same
