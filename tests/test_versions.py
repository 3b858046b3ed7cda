"""The promise about versions, the private names of PyTorch that it rests on, and the table of what was tried."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator

import pytest
import torch

from commhooks.experiments.versions import FSDP2, PYTHON, TORCH, missing, private_names
from tests import versions
from tests.structure import ROOT, Source, sources_of

INSTALLED = torch.__version__
OF_FRAMEWORKS = "commhooks/integrations/"
OF_PYTHON = {"_asdict", "_fields", "_replace", "_exit", "_is_protocol"}
"""Of named tuples, `os` and protocols."""
OF_DDP_CORE = {"_authoritative_rank"}
"""It is assigned where a DDP joins, and not in a method of its class."""


def sources(package: str) -> list[Source]:
    return [source for source in sources_of(package) if not str(source.path).startswith(OF_FRAMEWORKS)]


def private_uses(source: Source, own: set[str]) -> Iterator[str]:
    """Yield what a file uses of PyTorch's private names: in full from `torch` on, or the attribute alone."""
    imported = imports_of_torch(source)
    yield from filter(is_private, imported.values())
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            first, _, rest = ast.unparse(node).partition(".")
            name = f"{imported.get(first, '?')}.{rest}"
            if name.startswith("torch."):
                yield name
            elif node.attr not in own:
                yield node.attr
        elif isinstance(node, ast.Call) and is_name(node.func, "getattr", "hasattr", "setattr", "_held"):
            name = ast.literal_eval(node.args[1]) if isinstance(node.args[1], ast.Constant) else ""
            if is_private(name) and name not in own:
                yield name


def imports_of_torch(source: Source) -> dict[str, str]:
    """Return the full names of what a file imports from PyTorch, by its own names for them."""
    found = {"torch": "torch"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_name(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def own_names(sources: list[Source]) -> set[str]:
    """Return what a package defines: functions, classes, fields, and attributes that methods assign."""
    found = OF_PYTHON | OF_DDP_CORE
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if is_name(node.value, "self") else set()
    return found


def is_listed(name: str, listed: set[str]) -> bool:
    """Return whether a name is listed, or one that it is an attribute of; of an attribute alone, whether any has it."""
    if name.startswith("torch."):
        return any(f"{name}.".startswith(f"{one}.") or f"{one}.".startswith(f"{name}.") for one in listed)
    return any(name in one.split(".") for one in listed)


@pytest.mark.a_row
@pytest.mark.parametrize("package", ["commhooks", "ddp_core"])
def test_every_private_name_of_pytorch_that_is_used_is_listed(package: str) -> None:
    tables = {file: names for file, names in private_names().items() if file.startswith(f"{package}/")}
    listed = {one.replace(":", ".") for names in tables.values() for name in names for one in name.split(" | ")}
    files = sources(package)
    own = own_names(files)
    uses = {(str(source.path), name) for source in files for name in private_uses(source, own)}
    assert len(uses) > 20
    assert sorted(use for use in uses if not is_listed(use[1], listed)) == []


def test_every_listed_name_exists_in_this_version() -> None:
    lacking = {file: gone for file, names in private_names().items() if (gone := missing(names))}
    if INSTALLED not in FSDP2:
        lacking.pop("commhooks/sharded/fsdp.py", None)
    assert lacking == {}


def test_the_promise_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={PYTHON}".split(" to ")[0]
    minors = {f"Programming Language :: Python :: 3.{n}" for n in range(PYTHON.oldest[1], PYTHON.newest[1] + 1)}
    assert minors == {one for one in project["classifiers"] if re.search(r":: 3\.\d+$", one)}
    assert project["dependencies"][0] == f"torch>={TORCH}".split(" to ")[0]
    for page in ("README.md", "docs/guide/getting-started.md", "docs/versions.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        for said in (f"Python {PYTHON}", f"PyTorch {TORCH}", f"PyTorch {FSDP2}"):
            assert said in text, page


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_page_is_the_one_that_the_rows_make() -> None:
    rows = json.loads(versions.ROWS.read_text(encoding="utf-8"))
    assert versions.PAGE.read_text(encoding="utf-8") == versions.page(rows), "python -m tests.versions writes it"
