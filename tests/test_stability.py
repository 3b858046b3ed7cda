"""What users may rely on (docs/stability.md) is what `public.txt` lists.

`python -m tests.test_stability` writes the list again. Review its diff like code: a line that changes or goes
away breaks somebody's program, unless the page's rule of deprecation was followed.
"""

from __future__ import annotations

import ast
import difflib
import enum
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from commhooks.compressors import COMPRESSORS
from commhooks.saving.form import LAYOUT

ROOT = Path(__file__).parent.parent
STORED = Path(__file__).with_name("public.txt")
MODULES = (
    "commhooks",
    *(f"commhooks.{name}" for name in ("codecs", "communicators", "compressors", "control", "diloco", "exchange")),
    *(f"commhooks.{name}" for name in ("experiments", "language", "lockstep", "native", "testing")),
    "ddp_core",
)
INTEGRATIONS = ("accelerate", "fabric", "lightning", "lightning_diloco", "ray", "torchft", "transformers")
OURS = ("commhooks.", "ddp_core.")


def public() -> Iterator[str]:
    """Yield a line for each public name, member, option and stored format."""
    yield f"checkpoints: layout {LAYOUT}"
    offered = {f"{module}.{name}": found for module in MODULES for name, found in offered_by(module)}
    classes = [found for found in offered.values() if inspect.isclass(found)]
    first: dict[int, str] = {}
    for place, found in offered.items():
        if first.setdefault(id(found), place) == place:
            yield from of_object(place, found, classes)
        else:
            yield f"{place} = {first[id(found)]}"
    for name in sorted(COMPRESSORS):
        yield f"make_compressor: {name}"
    for name in INTEGRATIONS:  # from the sources: the frameworks need not be installed
        tree = ast.parse((ROOT / "commhooks" / "integrations" / f"{name}.py").read_text(encoding="utf-8"))
        for node in tree.body:
            yield from of_source(f"commhooks.integrations.{name}", node)
    # The command's own modules, as the command imports them.
    app = importlib.import_module("commhooks.experiments.commands.cli").app
    yield from of_command("$ commhooks", typer.main.get_command(app))


def offered_by(module: str) -> list[tuple[str, Any]]:
    imported = importlib.import_module(module)
    return [(name, getattr(imported, name)) for name in sorted(imported.__all__)]


def of_object(name: str, found: Any, listed: list[type]) -> Iterator[str]:
    if not inspect.isclass(found):
        yield f"{name}{signature(found)}" if callable(found) else name
        return
    bases = ", ".join(base.__name__ for base in found.__bases__ if base not in (object, typing.Generic))
    yield f"class {name}({bases})"
    if issubclass(found, enum.Enum):
        yield from (f"{name}.{member}" for member in found.__members__)
    elif typing.is_typeddict(found):
        yield from (f"{name}[{key!r}]" for key in sorted(found.__annotations__))
    elif not issubclass(found, BaseException):
        yield f"{name}.__init__{signature(found)}"
    bases_of_ours = (base for base in found.__mro__ if base.__module__.startswith(OURS))
    own = [base for base in bases_of_ours if base is found or base not in listed]  # others have lines of their own
    members = {member for base in own for member in vars(base)}
    for member in sorted(members if not issubclass(found, enum.Enum) else ()):
        value = inspect.getattr_static(found, member)
        if member.startswith("_") or type(value).__name__ in ("member_descriptor", "_abc_data"):
            continue
        if callable(value) or isinstance(value, (classmethod, staticmethod)):
            yield f"{name}.{member}{signature(getattr(found, member))}"
        else:
            yield f"{name}.{member}"


def signature(found: Any) -> str:
    """Return parameters with their kinds and defaults, without types, which may become more general."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return "(...)"
    plain = [one.replace(annotation=one.empty) for one in parameters]
    return re.sub(r" at 0x\w+", "", str(inspect.Signature(plain)))


def of_source(where: str, node: ast.stmt) -> Iterator[str]:
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
        return
    if isinstance(node, ast.FunctionDef):
        for argument in (*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
            if argument is not None:
                argument.annotation = None
        yield f"{where}.{node.name}({ast.unparse(node.args)})"
        return
    yield f"class {where}.{node.name}({', '.join(map(ast.unparse, node.bases))})"
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            yield from of_source(f"{where}.{node.name}", part)


def of_command(name: str, command: Any) -> Iterator[str]:
    if hasattr(command, "commands"):  # a group
        for part in sorted(command.commands):
            yield from of_command(f"{name} {part}", command.commands[part])
        return
    yield name
    for option in sorted(command.params, key=lambda option: str(option.name)):
        yield f"{name} {'/'.join(sorted([*option.opts, *option.secondary_opts], reverse=True))}"


def test_what_is_public_is_what_the_list_says() -> None:
    stored, now = STORED.read_text(encoding="utf-8").splitlines(), list(public())
    changed = [
        line for line in difflib.unified_diff(stored, now, "promised", "now", n=0, lineterm="") if line[0] in "+-"
    ]
    assert not changed, "\n".join(
        [
            "The public interface differs from tests/public.txt:",
            *changed,
            "A line with - breaks programs: keep it, deprecated, for two minor versions (docs/stability.md). If the "
            "change is meant, run `python -m tests.test_stability` and tell users in CHANGELOG.md.",
        ]
    )


def test_the_page_names_what_the_list_covers() -> None:
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    assert not [name for name in MODULES if f"`{name}`" not in page]
    assert f"layout {LAYOUT}" in page


if __name__ == "__main__":
    STORED.write_text("".join(f"{line}\n" for line in public()), encoding="utf-8")
