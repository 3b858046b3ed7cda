"""The files can be read one after the other: none needs one that needs it, not even for a type."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ddp_core"


def imported_files(path: Path) -> set[str]:
    """Return the files of the package that this one imports from, wherever in the file it says so."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    modules = {node.module for node in imports if node.module} | {
        f"ddp_core.{name.name}" for node in imports if node.module == "ddp_core" for name in node.names
    }
    return {module.removeprefix("ddp_core.") for module in modules if module.startswith("ddp_core.")}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def test_imports_form_no_circle() -> None:
    graph = {name_of(path): imported_files(path) for path in sorted(PACKAGE.rglob("*.py"))}
    assert graph["reducer"], "imports are looked for in the wrong place"
    order = tuple(graphlib.TopologicalSorter(graph).static_order())  # CycleError names a circle
    assert set(order) == set(graph)
