"""A seeded fault: a mistake in one function, found by the function and not by its line."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import NamedTuple


class FaultError(ValueError):
    """A fault that no longer applies."""


class Span(NamedTuple):
    """A function's place in its file's text."""

    begin: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One mistake."""

    name: str
    subpackage: str
    """The part of the library that it is in."""
    says: str
    """The mistake, in one sentence."""
    at: str
    """The function: "commhooks.engine.undo:UndoLog.watch", or "commhooks/native/signs.h:encode_signs" if it is in C."""
    old: str
    """What occurs in the function's source exactly once."""
    new: str
    """What takes its place."""
    seen_at: str = ""
    """The Python function through which C code is called, whose callers try it; empty: `at` itself."""

    @property
    def file(self) -> Path:
        """The file that it changes, relative to the repository."""
        return file_of(self.at)

    @property
    def is_native(self) -> bool:
        """True if the library has to be built with it."""
        return self.file.suffix == ".h"

    def applied(self, text: str) -> str:
        """Return the file's text with the mistake in it; raise `FaultError` if it no longer applies."""
        begin = self.place_in(text)
        return text[:begin] + self.new + text[begin + len(self.old) :]

    def place_in(self, text: str) -> int:
        """Return where the old text begins; raise `FaultError` if it is not there exactly once."""
        span = span_of(self.at, text)
        found = text.count(self.old, *span)
        if found != 1:
            raise FaultError(f"fault {self.name!r}: {self.at} must hold its old text once (found {found} times).")
        return text.index(self.old, *span)


def file_of(at: str) -> Path:
    """Return the file of a function, given as a module and a name, or as a path and a name."""
    where, _, _ = at.partition(":")
    return Path(where) if where.endswith(".h") else Path(*where.split(".")).with_suffix(".py")


def span_of(at: str, text: str) -> Span:
    """Return where a function is in its file's text; raise `FaultError` if it is not there exactly once."""
    where, _, name = at.partition(":")
    found = _spans_in_c(name, text) if where.endswith(".h") else _spans_in_python(name, text)
    if len(found) != 1:
        raise FaultError(f"{where} must have one function {name} (found {len(found)}).")
    return found[0]


def _spans_in_c(name: str, text: str) -> list[Span]:
    """Find a function that begins and ends in a line's first column."""
    return [Span(*match.span()) for match in re.finditer(rf"^\w[^\n;]*\b{name}\([^;]*?\) \{{\n.*?^}}", text, _C)]


_C = re.DOTALL | re.MULTILINE


def _spans_in_python(name: str, text: str) -> list[Span]:
    *outer, last = name.split(".")
    bodies = [ast.parse(text).body]
    for one in outer:
        bodies = [node.body for body in bodies for node in body if isinstance(node, ast.ClassDef) and node.name == one]
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    return [
        Span(starts[node.lineno - 1], starts[node.end_lineno] if node.end_lineno < len(starts) else len(text))
        for body in bodies
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name == last and node.end_lineno is not None
    ]
