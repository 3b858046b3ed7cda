"""Compressors from their names: `make_compressor("top-k", ratio=0.01)`, or "top-k:ratio=0.01", as `str` prints it."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import torch

from commhooks.compressors import COMPRESSORS, Codec, Registered, TwoHop
from commhooks.errors import SettingsError
from commhooks.language.compressor import Compressor, takes_feedback
from commhooks.language.spelling import DTYPES, Spelling, lower_name, parse, value_in
from commhooks.wrappers import ErrorFeedback, StartAfter, WireDtype

ROOMS = ("commhooks.compressors", "commhooks.compressors.codecs", "commhooks.wrappers")
"""The modules whose classes a specification may name."""
ENTRY_POINTS = "commhooks.compressors"
"""The entry-point group in which other packages register a class, a function that returns one, or a `Registered`."""
_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_AROUND = ("start_after", "wire")
Find = Callable[[str, tuple[type, ...]], Any]
"""Returns what "module:Class" stands for; the types are those of the setting that it is given to, if it is one."""


def make_compressor(
    name: str,
    *,
    start_after: int = 0,
    wire: torch.dtype | str | None = None,
    error_feedback: bool | None = None,
    decay: float | None = None,
    **settings: Any,
) -> Compressor:
    """Make the compressor called `name` with its `settings`, as `make_compressor("powersgd", rank=4)`.

    `name` is a key of `COMPRESSORS`, a name registered by another package under the entry points
    `commhooks.compressors`, a class such as "mypackage.module:TopK", or, without settings, a whole compressor as
    printed by `str`: "powersgd:rank=4,wire=bf16" or "error-feedback:inner=(top-k:ratio=0.1),decay=0.9".

    `start_after` is the number of initial steps with a plain all-reduce; `wire` is the dtype of messages, or its name;
    `error_feedback` keeps the part that is not sent for the next step (None: if losing it would cost accuracy), and
    `decay` is the fraction of it that is kept (None: all, or the value of the compressor's paper). Raises
    `SettingsError` (a `ValueError`) for a name or a setting that does not exist, or a value that cannot work.
    """
    spelling = parse(name)
    common = {"start_after": start_after or None, "wire": wire, "error_feedback": error_feedback, "decay": decay}
    given = {setting: value for setting, value in common.items() if value is not None} | settings
    written = dict(spelling.settings)
    if written and (given.keys() - _AROUND or given.keys() & written):
        raise SettingsError(f"make_compressor({name!r}): write the settings inside, or give a name without any.")
    return _compressor(spelling.name, written | given, _imported)


def compressor_in_file(text: str) -> Compressor:
    """Make the compressor that a file names; unlike `make_compressor`, import no "module:Class" for it.

    Names of the registry are known, those that installed packages registered, and of modules that this program has
    imported compressors, codes, and dataclasses of the type that a setting has. Raises `SettingsError` (a `ValueError`)
    for any other, and as `make_compressor` does.
    """
    spelling = parse(text)
    return _compressor(spelling.name, dict(spelling.settings), _imported_before)


def settings_of(name: str) -> list[str]:
    """Return the sorted settings that `make_compressor` takes for a name: its own, and those common to all names."""
    return sorted(_settings_of(kind_of(name)))


def _compressor(name: str, settings: Mapping[str, Any], find: Find) -> Compressor:
    kind = kind_of(name, find)
    if not isinstance(kind, Registered):
        raise SettingsError(f"compressor {name!r}: expected a compressor (got {kind!r}).")
    made: Compressor = _built(name, kind, settings, find)
    return made


def _built(name: str, kind: Registered | type, settings: Mapping[str, Any], find: Find) -> Any:
    """Return the object of a name and its settings: a compressor, or a setting of one, such as a codec."""
    known = _settings_of(kind)
    values = {
        setting: _value_of(value, known.get(setting, Any), f"compressor {name!r}: {setting}", find)
        for setting, value in settings.items()
    }
    _check_settings(name, known, values)
    if not isinstance(kind, Registered):
        return _called(name, kind, values)
    own = _types_of(kind.make)
    common = {setting: values.pop(setting) for setting in list(values) if setting not in own}
    compressor = _made(name, kind, values, common.get("error_feedback"), common.get("decay"))
    if common.get("wire") is not None:
        compressor = WireDtype(inner=compressor, dtype=common["wire"])
    return StartAfter(inner=compressor, steps=common["start_after"]) if common.get("start_after") else compressor


def _made(
    name: str, registered: Registered, settings: Mapping[str, Any], error_feedback: bool | None, decay: float | None
) -> Compressor:
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
    missing = [
        one.name
        for one in inspect.signature(make).parameters.values()
        if one.kind in _NAMED and one.default is one.empty and one.name not in settings
    ]
    if missing:
        raise SettingsError(
            f"compressor {name!r} has no default for {' and '.join(missing)}: write "
            f'"{name}:{",".join(f"{one}=..." for one in missing)}".'
        )
    try:
        return make(**settings)
    except TypeError as error:
        raise SettingsError(f"compressor {name!r} does not take these settings, {settings}: {error}") from error


def _imported(name: str, _types: tuple[type, ...]) -> Any:
    """Return a class from another package, and nothing else: a text must not be able to call arbitrary functions."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"compressor {name!r} cannot be imported: {error}. Write 'module:Class', and add the module's folder to "
            "PYTHONPATH."
        ) from error
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)) and not isinstance(found, Registered):
        raise SettingsError(f"compressor {name!r}: {found!r} is not a dataclass, as compressors must be.")
    return found


def _imported_before(name: str, types_of_setting: tuple[type, ...]) -> Any:
    """Return a compressor, a codec, or a dataclass of one of these types, of a module that is imported already."""
    module, _, attribute = name.partition(":")
    if (imported := sys.modules.get(module)) is None:
        raise SettingsError(
            f"compressor {name!r}: the name comes from a file, for which no module is imported, and {module} is not "
            f"imported yet; if you know it, import {module} in your program first, or pass --import {module} to the "
            "command."
        )
    found = vars(imported).get(attribute)
    kinds = (Compressor, Codec, *(types_of_setting if dataclasses.is_dataclass(found) else ()))
    if not (isinstance(found, type) and issubclass(found, kinds)) and not isinstance(found, Registered):
        raise SettingsError(f"compressor {name!r}: the name comes from a file, and {found!r} is no compressor.")
    return found


def kind_of(name: str, find: Find = _imported, types_of_setting: tuple[type, ...] = ()) -> Registered | type:
    """Return the `Registered` compressor of this name, or the class of another setting, such as a codec.

    `find` returns the class of another package that "module:Class" names; by default it imports the module.

    Raises `SettingsError` (a `ValueError`), naming the nearest name, if there is none.
    """
    if name in COMPRESSORS:
        return COMPRESSORS[name]
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in others:
        found = others[name].load()
    elif ":" in name:
        found = find(name, types_of_setting)
    elif name in _classes():
        found = _classes()[name]
    else:
        known = sorted({*COMPRESSORS, *others})
        raise SettingsError(f"compressor {name!r} is not known; known are {', '.join(known)}.{_nearest(name, known)}")
    is_setting = isinstance(found, Registered) or (isinstance(found, type) and not issubclass(found, Compressor))
    return found if is_setting else Registered(found)


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _settings_of(kind: Registered | type) -> dict[str, Any]:
    """Return the types of all settings that a name takes; its own go before those common to all compressors."""
    if not isinstance(kind, Registered):
        return _types_of(kind)
    common = _types_of(make_compressor)
    del common["name"]
    return common | _types_of(kind.make)


def _check_settings(name: str, known: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise `SettingsError` for a setting that does not exist, or a value of the wrong type."""
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
    """Return whether a value has an annotated type; types too complex for a simple check pass."""
    if kind is Any:
        return True
    if len(kinds := _kinds_in(kind)) > 1:
        return any(_is_of(value, one) for one in kinds)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) if isinstance(kind, type) else True


def _value_of(value: Any, kind: Any, where: str, find: Find) -> Any:
    """Convert the text of a setting to its type: compressors, codecs, dtypes, tuples; return other values unchanged."""
    kinds = _kinds_in(kind)
    classes = [one for one in kinds if isinstance(one, type)]
    if isinstance(value, str) and any(issubclass(one, Compressor | Codec) for one in classes):
        value = parse(value)
    if isinstance(value, Spelling):
        # In the place of a codec, "sign" is the codec, not the compressor that sends it in two hops.
        is_code = value.name in _classes() and any(issubclass(one, Codec) for one in classes)
        own = tuple(one for one in classes if one is not object and not getattr(one, "_is_protocol", False))
        named = _classes()[value.name] if is_code else kind_of(value.name, find, own)
        return _built(value.name, named, dict(value.settings), find)
    if isinstance(value, tuple):
        return tuple(_value_of(one, Any, where, find) for one in value)
    if isinstance(value, str) and torch.dtype in kinds:
        dtype = DTYPES.get(value, vars(torch).get(value.removeprefix("torch.")))
        if not isinstance(dtype, torch.dtype):
            raise SettingsError(f"{where} must be one of {', '.join(DTYPES)}, or another torch.dtype (got {value!r}).")
        return dtype
    if isinstance(value, str | int) and any(
        typing.get_origin(one) is tuple for one in kinds
    ):  # a comma would end the setting
        is_text = any(str in typing.get_args(one) for one in kinds)
        return tuple(one if is_text else value_in(one) for one in str(value).split("+"))
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_whole and float in kinds and int not in kinds else value


def _kinds_in(kind: Any) -> tuple[Any, ...]:
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return typing.get_args(kind) if is_union else (kind,)


@functools.cache
def _classes() -> dict[str, type]:
    """Return the classes of this package that a compressor's text may name, under both of their names."""
    found = [vars(room)[name] for room in map(importlib.import_module, ROOMS) for name in room.__all__]
    kinds = [one for one in found if isinstance(one, type) and dataclasses.is_dataclass(one)]
    return {lower_name(one): one for one in kinds} | {one.__name__: one for one in kinds}
