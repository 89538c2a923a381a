"""Fixtures that several test files share: the demo verifier, and draftkit as a real subprocess."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftkit.models import resolve_model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo verifier in the user's cache, made on first use."""
    return resolve_model("demo")


@pytest.fixture
def draftkit(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`draftkit(*words)` runs the command line in an empty working directory."""

    def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "draftkit", *words]
        environment = os.environ | {"COLUMNS": "200"} | env
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)

    return run
