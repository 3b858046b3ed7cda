"""The versions of Python and PyTorch that commhooks is for, and the private names that it needs of PyTorch.

Every file that answers for one seam with PyTorch lists its private names in `PRIVATE_NAMES`: "module:attribute.path",
with alternatives joined by " | ". The lists are read from the sources and nothing of commhooks is imported, because a
name that is missing may be what keeps it from being imported. `python -m commhooks.experiments.versions` prints what is
missing.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import json
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

Version = tuple[int, ...]
"""The first two or three numbers of a version."""


@dataclasses.dataclass(frozen=True)
class Promise:
    """The oldest and the newest version that something is for; newer ones are allowed, and not promised."""

    oldest: Version
    newest: Version

    def __str__(self) -> str:
        return f"{in_dots(self.oldest)} to {in_dots(self.newest)}"

    def __contains__(self, version: str) -> bool:
        return self.oldest <= numbers_of(version)[:2] <= self.newest


PYTHON = Promise((3, 11), (3, 13))
TORCH = Promise((2, 6), (2, 15))
"""For hooks, attach, ddp_core, Exchanger and DiLoCo."""
FSDP2 = Promise((2, 13), (2, 15))
"""For attach_sharded."""


def numbers_of(version: str) -> Version:
    """Return the numbers of a version without what follows them: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", version)
    assert found, f"{version!r} does not begin with a number"
    return tuple(map(int, found.group().split(".")))


def in_dots(version: Version) -> str:
    """Return a version as text."""
    return ".".join(map(str, version))


def tried(torch: str, python: str) -> dict[str, Any] | None:
    """Return the row of `make test-torch` for this PyTorch and this minor version of Python; None if it was not run."""
    rows: list[dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    asked = numbers_of(torch), numbers_of(python)[:2]
    return next((r for r in rows if (numbers_of(r["torch"]), numbers_of(r["python"])[:2]) == asked), None)


def private_names() -> dict[str, tuple[str, ...]]:
    """Return the private names of PyTorch that commhooks and ddp_core list, by the file that lists them."""
    spec = importlib.util.find_spec("commhooks.version")  # which imports nothing that could fail
    assert spec is not None and spec.origin is not None, "it is installed"
    root = Path(spec.origin).parents[1]
    found = {}
    for path in sorted(path for package in ("commhooks", "ddp_core") for path in (root / package).rglob("*.py")):
        if "\nPRIVATE_NAMES = " in (text := path.read_text(encoding="utf-8")):
            found[str(path.relative_to(root))] = _assigned(text)
    return found


def _assigned(text: str) -> tuple[str, ...]:
    (value,) = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PRIVATE_NAMES"
    )
    names: tuple[str, ...] = ast.literal_eval(value)
    return names


def missing(names: Iterable[str]) -> list[str]:
    """Return the names that the installed PyTorch lacks, in every alternative."""
    return [name for name in names if not any(map(_exists, name.split(" | ")))]


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return False
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            return attribute in _named_in(found)
        found = getattr(found, attribute)
    return True


def _named_in(owner: object) -> set[object]:
    """Return the names in the code of a function or of a class: attributes of instances and of others are in it."""
    owners = owner.__mro__ if isinstance(owner, type) else ()
    members = [owner, *(getattr(value, "__func__", value) for one in owners for value in vars(one).values())]
    codes = [code for member in members if (code := getattr(member, "__code__", None))]
    found = {name for one in owners for name in vars(one).get("__annotations__", ())}
    for code in codes:  # which grows: functions inside functions are constants
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        found |= {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    return found


def promised(python: str, torch: str) -> str:
    """Return whether these versions are within the promise, and what else is, in a sentence."""
    wrong = [
        f"{name} {version} is {'older' if numbers_of(version)[:2] < promise.oldest else 'newer'} than promised"
        for name, version, promise in (("Python", python, PYTHON), ("PyTorch", torch, TORCH))
        if version not in promise
    ]
    return f"{' and '.join(wrong) or 'within the promise'}: Python {PYTHON}, PyTorch {TORCH}, FSDP2 {FSDP2}"


def main() -> int:
    """Print the promise and the private names that are missing, by the file that lists them; return 0 if none is."""
    import torch

    print(f"PyTorch {torch.__version__}, {promised(platform.python_version(), torch.__version__)}")
    tables = private_names()
    lacks = {file: gone for file, names in tables.items() if (gone := missing(names))}
    for file, gone in lacks.items():
        print(f"{file}: PyTorch {torch.__version__} has no {', '.join(gone)}")
    if not lacks:
        print(f"all {len(set().union(*tables.values()))} private names that are listed exist")
    return int(bool(lacks))


if __name__ == "__main__":
    sys.exit(main())
