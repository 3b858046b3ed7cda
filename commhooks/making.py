"""Compressors by name: `make_compressor("top-k", ratio=0.01)`, and parsing what `str(compressor)` prints."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import torch

from commhooks.compressors import COMPRESSORS, Registered, TwoHop
from commhooks.errors import SettingsError
from commhooks.language.compressor import Compressor
from commhooks.wrappers import ErrorFeedback, StartAfter, WireDtype
from commhooks.wrappers.error_feedback import takes_feedback

ROOMS = ("commhooks.compressors", "commhooks.compressors.codecs", "commhooks.wrappers")
"""The modules whose classes a specification may name."""
ENTRY_POINTS = "commhooks.compressors"
"""The entry-point group in which other packages register a class, a function that returns one, or a `Registered`."""
_NAME = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"  # text is left alone
    |(?<![\w.])(?:[A-Za-z_][\w.]*:[A-Za-z_]\w*|[a-z][a-z0-9]*(?:-[a-z0-9]+)+)  # package:Class, and names with a dash
    """,
    re.VERBOSE,
)
_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def make_compressor(
    name: str,
    *,
    start_after: int = 0,
    wire: torch.dtype | None = None,
    error_feedback: bool | None = None,
    decay: float | None = None,
    **settings: Any,
) -> Compressor:
    """Make the compressor called `name` with its `settings`, as `make_compressor("powersgd", rank=4)`.

    `name` is a key of `COMPRESSORS`, a name registered by another package under the entry points
    `commhooks.compressors`, a class such as "mypackage.module:TopK", or, without settings, a whole compressor as
    printed by `str`, such as "ErrorFeedback(inner=TopK(ratio=0.1))". Such a text may also contain names with their
    settings: "top-k(ratio=0.1)".

    `start_after` runs a plain all-reduce for that many steps first; `wire` is the dtype in which messages are sent;
    `error_feedback` keeps what is not sent for the next step (None: if losing it would cost accuracy), and `decay` is
    the fraction of it that is kept (None: all, or what the compressor's paper uses). Raises `SettingsError` (a
    `ValueError`) for a name or a setting that does not exist, or a value that cannot work.
    """
    given = {"start_after": start_after, "wire": wire, "error_feedback": error_feedback, "decay": decay}
    _check_settings(name, make_compressor, given)
    if "(" in name:
        if settings or error_feedback is not None or decay is not None:
            raise SettingsError(f"make_compressor({name!r}): write the settings inside, or give a name without any.")
        compressor = _read(name)
    else:
        compressor = _made(name, error_feedback, decay, settings)
    if wire is not None:
        compressor = WireDtype(inner=compressor, dtype=wire)
    return StartAfter(inner=compressor, steps=start_after) if start_after else compressor


def settings_of(name: str) -> list[str]:
    """Return the sorted settings that `make_compressor` takes for a name: its own, and those common to all names."""
    return sorted({*_types_of(_registered(name).make), *_types_of(make_compressor)} - {"name"})


def _made(name: str, error_feedback: bool | None, decay: float | None, settings: Mapping[str, Any]) -> Compressor:
    registered = _registered(name)
    _check_settings(name, registered.make, settings)
    compressor = _called(name, registered.make, settings)
    if not isinstance(compressor, Compressor):
        raise SettingsError(f"compressor {name!r}: {registered.make} made {compressor!r}, which is not a Compressor.")
    wanted = registered.feeds_back and takes_feedback(compressor)
    if wanted if error_feedback is None else error_feedback:
        return ErrorFeedback(inner=compressor, decay=registered.decay if decay is None else decay)
    if decay is not None:
        raise SettingsError(f"compressor {name!r} keeps no residual, so decay={decay!r} has no effect; leave it out.")
    if isinstance(compressor, TwoHop) and error_feedback is False and "server_feedback" not in settings:
        return dataclasses.replace(compressor, server_feedback=False)
    return compressor


def _called(name: str, make: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    try:
        return make(**settings)
    except TypeError as error:
        raise SettingsError(f"compressor {name!r} does not take these settings, {settings}: {error}") from error


def _registered(name: str) -> Registered:
    """Return how to make the compressor of this name; raise `SettingsError`, naming the nearest, if there is none."""
    if name in COMPRESSORS:
        return COMPRESSORS[name]
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in others:
        found = others[name].load()
    elif ":" in name:
        found = _imported(name)
    else:
        known = sorted({*COMPRESSORS, *others})
        raise SettingsError(f"compressor {name!r} is not known; known are {', '.join(known)}.{_nearest(name, known)}")
    return found if isinstance(found, Registered) else Registered(found)


def _imported(name: str) -> Any:
    """Return a class from another package, and nothing else: a text must not be able to call arbitrary functions."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"compressor {name!r} cannot be imported: {error}.") from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)) and not isinstance(found, Registered):
        raise SettingsError(f"compressor {name!r}: {found!r} is not a dataclass, as compressors must be.")
    return found


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _check_settings(name: str, make: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for a setting that does not exist, or a value of the wrong type."""
    known = _types_of(make)
    for setting, value in settings.items():
        if setting not in known:
            takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
            raise SettingsError(
                f"compressor {name!r} has no setting {setting!r}; {takes}.{_nearest(setting, sorted(known))}"
            )
        if not _is_of(value, known[setting]):
            expected = getattr(known[setting], "__name__", str(known[setting]))
            raise SettingsError(
                f"compressor {name!r}: {setting} must be of type {expected} (got {value!r} of type "
                f"{type(value).__name__})."
            )


def _types_of(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the settings that a class or function takes; Any for unannotated ones."""
    inner = make.func if isinstance(make, functools.partial) else make
    try:
        hints = typing.get_type_hints(inner)
    except NameError:  # in another package, imported for type checkers only
        hints = {}
    passed_on = make.args if isinstance(make, functools.partial) else ()  # a codec, which takes settings too
    named = [one for one in inspect.signature(make).parameters.values() if one.kind in _NAMED]
    types_of_codec = {setting: kind for codec in passed_on for setting, kind in _types_of(codec).items()}
    return types_of_codec | {one.name: hints.get(one.name, Any) for one in named}


def _is_of(value: object, kind: Any) -> bool:
    """Return whether a value has an annotated type, as far as a simple check can tell."""
    if kind is Any:
        return True
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return any(_is_of(value, one) for one in typing.get_args(kind))
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) if isinstance(kind, type) else True


def _read(text: str) -> Compressor:
    """Parse what `str(compressor)` prints: calls of compressor classes and constants, and nothing else.

    A name with a colon imports its module, which runs that module's code.
    """
    names: dict[str, str] = {}

    def stand_in(found: re.Match[str]) -> str:
        if found[0][0] in "'\"":
            return found[0]
        names[name := f"_{len(names)}_"] = found[0]
        return name

    try:
        tree = ast.parse(_NAME.sub(stand_in, text.strip()), mode="eval").body
    except SyntaxError as error:
        raise SettingsError(f"compressor {text!r} does not parse: {error.msg}.") from error
    value = _value_of(tree, names, text)
    if not isinstance(value, Compressor):
        raise SettingsError(f"compressor {text!r}: expected a compressor (got {value!r}).")
    return value


def _value_of(tree: ast.expr, names: Mapping[str, str], text: str) -> Any:
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args:
        name = names.get(tree.func.id, tree.func.id)
        settings = {str(one.arg): _value_of(one.value, names, text) for one in tree.keywords}
        if len(settings) < len(tree.keywords):
            raise SettingsError(f"compressor {text!r}: a setting of {name} is given twice.")
        kind = _classes().get(name) or (_imported(name) if ":" in name else None)
        if kind is None and "name" in settings:
            raise SettingsError(f"compressor {name!r} has no setting 'name'.")
        if kind is None:
            return make_compressor(name, **settings)
        _check_settings(name, kind, settings)
        return _called(name, kind, settings)
    if isinstance(tree, ast.Tuple):
        return tuple(_value_of(one, names, text) for one in tree.elts)
    if isinstance(tree, ast.Attribute) and isinstance(tree.value, ast.Name) and tree.value.id == "torch":
        dtype = getattr(torch, tree.attr, None)
        if isinstance(dtype, torch.dtype):
            return dtype
    if isinstance(tree, ast.Name) and tree.id in ("inf", "nan"):
        return math.inf if tree.id == "inf" else math.nan
    try:
        return ast.literal_eval(tree)
    except (ValueError, TypeError):  # a list as a key
        raise SettingsError(f"compressor {text!r} does not parse: {ast.unparse(tree)!r} is not a setting.") from None


def _classes() -> dict[str, type]:
    """Return the classes of this package that a compressor's text may name."""
    found = [vars(room)[name] for room in map(importlib.import_module, ROOMS) for name in room.__all__]
    return {one.__name__: one for one in found if isinstance(one, type) and dataclasses.is_dataclass(one)}
