"""The direction of imports: lower rooms never import higher ones, and only the engine room knows vLLM."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "draftkit"
# A room may import rooms of a lower number, and its own. Rooms of one number are siblings that may import each other,
# but for `data` and `drafters`, which meet in `types.DraftBatch`, and `rl` and `report`, which meet in run directories.
LEVEL = {
    "__init__": 0,
    "types": 0,
    "errors": 0,
    "recipe": 1,
    "console": 2,
    "run": 2,
    "track": 2,
    "models": 2,
    "engine": 2,
    "data": 3,
    "drafters": 3,
    "train": 4,
    "evals": 5,
    "project": 6,
    "doctor": 5,
    "report": 6,
    "rl": 6,
    "cli": 7,
    "__main__": 8,
}
STRANGERS = {("data", "drafters"), ("drafters", "data"), ("report", "rl"), ("rl", "report")}
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path, *, toplevel: bool = False) -> Iterator[str]:
    """Dotted names of what a file imports, also inside functions unless `toplevel`, but not under TYPE_CHECKING."""
    pending: list[ast.AST] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (toplevel and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            pending.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_lower_rooms(path: Path) -> None:
    here = room(path)
    for name in imports(path):
        if not name.startswith("draftkit."):
            continue
        there = name.split(".")[1]
        there = there if there in LEVEL else "__init__"  # `from draftkit import __version__`
        assert LEVEL[there] <= LEVEL[here], f"{path.name} ({here}) imports the higher room {there}"
        assert (here, there) not in STRANGERS, f"{here} imports {there}: they meet in types.DraftBatch, or in files"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_engine_room_imports_vllm(path: Path) -> None:
    foreign = {name.split(".")[0] for name in imports(path)}
    assert "vllm" not in foreign or room(path) == "engine"
    assert "deepspeed" not in foreign or room(path) == "rl"


def test_the_command_line_loads_nothing_heavy() -> None:
    heavy = {"torch", "vllm", "transformers", "deepspeed", "datasets", "matplotlib", "numpy", "pyarrow"}
    for name in ("cli", "recipe", "run", "console", "models", "errors", "types"):
        loaded = {imported.split(".")[0] for imported in imports(PACKAGE / f"{name}.py", toplevel=True)}
        assert not loaded & heavy, f"{name}.py"


def test_no_room_is_called_utils() -> None:
    assert not [path for path in FILES if path.stem in {"utils", "common", "helpers", "registry"}]
