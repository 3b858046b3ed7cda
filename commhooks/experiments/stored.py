"""Dataclasses in JSON files: written at once or not at all, and read back with their types checked."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from commhooks.saving.files import read_json

T = TypeVar("T")
_LARGEST = 1e30
"""No time, size or rate is larger; products of three such numbers are still finite."""


def write(value: Any, path: Path, *, form: int) -> None:
    """Write a dataclass, and the number of its format; an existing file is replaced at once, or stays as it is."""
    write_text(path, json.dumps({"format": form, **dataclasses.asdict(value)}, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file; an existing one is replaced at once, or stays as it is."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file; an existing one is replaced at once, or stays as it is."""
    if path.exists() and not path.is_file():  # a device, such as /dev/null
        path.write_bytes(content)
        return
    path = path.resolve()  # what a link points to is replaced, not the link
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # another process may write the same file at once
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read(kind: type[T], path: Path, *, form: int) -> T:
    """Return the dataclass in a file.

    Raises:
        OSError: There is no such file.
        TypeError, ValueError, LookupError: It holds something else; fields with defaults may be missing.

    """
    raw = read_json(path)
    if not isinstance(raw, dict) or raw.get("format") != form:
        found = raw.get("format") if isinstance(raw, dict) else None
        raise ValueError(f"its format is {found}, not {form}")
    value: T = made_of(kind, {key: one for key, one in raw.items() if key != "format"})
    return value


def read_of(kind: type[T], path: Path, *, form: int, what: str, by: str) -> T:
    """Return the dataclass in a file of `what`, which `by` writes; raise ValueError, in words, if there is none."""
    try:
        return read(kind, path, form=form)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{what} {path}: expected a file of format {form} that {by} wrote ({type(error).__name__}: {error}); "
            "write it again"
        ) from error


def made_of(kind: Any, raw: Any) -> Any:
    """Return a value of an annotated type, given what JSON makes of it."""
    if kind is Any:
        return raw
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        made: Any = kind
        endless = {field.name for field in dataclasses.fields(kind) if field.default == math.inf}
        return made(
            **{
                name: value if name in endless and value == math.inf else made_of(hints[name], value)
                for name, value in _checked(raw, dict, kind).items()
            }
        )
    if origin is tuple:
        values = _checked(raw, list, kind)
        each = arguments[:1] * len(values) if arguments[-1] is Ellipsis else arguments
        return tuple(made_of(one, value) for one, value in zip(each, values, strict=True))
    if origin is Mapping:
        return {key: made_of(arguments[1], value) for key, value in _checked(raw, dict, kind).items()}
    if origin in (types.UnionType, typing.Union):
        return None if raw is None else made_of(next(one for one in arguments if one is not type(None)), raw)
    return _checked(raw, (int, float) if kind is float else kind, kind)


def _checked(raw: Any, expected: Any, kind: Any) -> Any:
    if not isinstance(raw, expected) or (isinstance(raw, bool) and kind is not bool):
        raise TypeError(f"expected {kind} (got {raw!r:.80})")
    if isinstance(raw, int | float) and not abs(raw) <= _LARGEST:  # NaN neither
        raise ValueError(f"expected a number of at most {_LARGEST:g} in size (got {raw!r:.80})")
    return float(raw) if kind is float else raw
