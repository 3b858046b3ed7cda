"""Settings: the fields of compressors and codecs, each declared with its bounds, and checked here."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from commhooks.errors import SettingsError

Owner = TypeVar("Owner")
Others = TypeVarTuple("Others")
T = TypeVar("T")
_BOUNDS = "bounds"
_PLAIN = (int, float, str, torch.dtype, types.NoneType)
_HINTS = {"Compressor": "; make one from a name with make_compressor", "Codec": ", such as Sign()"}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The bounds of a number: `above` and `below` are exclusive, `least` and `most` inclusive."""

    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None

    def hold(self, value: float) -> bool:
        """Return whether a number is within the bounds; NaN never is."""
        return (
            (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
            and value == value
        )

    def in_words(self, kind: type) -> str:
        """Return the bounds of an int or a float in words, for errors."""
        if kind is int:
            until = f"from {self.least} to {self.most}" if self.most is not None else f"of at least {self.least}"
            return f"an integer {until}" if self.least is not None else "an integer"
        if self.below == math.inf:
            return f"above {self.above:g}, and finite"
        if self.most is not None or self.below is not None:
            start = f"[{self.least:g}" if self.least is not None else f"({self.above:g}"
            return f"in {start}, {self.most:g}]" if self.most is not None else f"in {start}, {self.below:g})"
        if self.above is not None:
            return f"above {self.above:g}"
        return f"{self.least:g} or more" if self.least is not None else "a number"


def setting(
    default: Any = dataclasses.MISSING,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> Any:
    """Return a dataclass's field for a number that must be within these bounds, or None if its annotation says so.

    `above` and `below` are exclusive, `least` and `most` inclusive. Without a default the setting must be given.
    """
    return dataclasses.field(default=default, metadata={_BOUNDS: Bounds(above, least, below, most)})


def check_settings(owner: Any) -> None:
    """Raise `SettingsError` unless every field of a dataclass is of its annotated type, and within its bounds.

    Only simple types are checked: numbers, bools, strings, classes, literals, and any of these or None.
    """
    kind: Any = type(owner)
    for name, kinds, bounds in _fields_of(kind):
        value = getattr(owner, name)
        if not any(_fits(value, kind, bounds) for kind in kinds):
            allowed = ", or ".join([_in_words(kind, bounds) for kind in kinds if kind is not type(None)])
            allowed += ", or None" * (type(None) in kinds)
            raise refusal(owner, name, f"must be {allowed}")


def refusal(owner: Any, name: str, why: str) -> SettingsError:
    """Return the error for a setting, with the reason `why`."""
    return SettingsError(f"{type(owner).__name__}({name}={getattr(owner, name)!r}): {name} {why}.")


def cached_for_each(function: Callable[[Owner, *Others], T]) -> Callable[[Owner, *Others], T]:
    """Cache a function's results by its first argument, a compressor or a codec, and by the others.

    Owners of one class whose settings are numbers, texts and dtypes, and equal, share a result. Others are known by
    identity, while they exist: users' settings may be of types that cannot be compared, such as arrays.
    """
    of_equal: dict[Any, dict[tuple[*Others], T]] = {}
    of_each = WeakIdKeyDictionary()

    @functools.wraps(function)
    def cached(owner: Owner, *others: *Others) -> T:
        values = tuple(vars(owner).values())
        if all(isinstance(value, _PLAIN) for value in values):
            results = of_equal.setdefault((type(owner), values), {})
        else:
            results = of_each.setdefault(owner, {})
        if others not in results:
            results[others] = function(owner, *others)
        return results[others]

    return cached


@functools.cache
def _fields_of(owner: Any) -> list[tuple[str, tuple[Any, ...], Bounds]]:
    """Return the name, types and bounds of every field; a class that only changes a default keeps its base's bounds."""
    hints = hints_of(owner)
    found = []
    for name in (field.name for field in dataclasses.fields(owner)):
        declared = (vars(base).get("__dataclass_fields__", {}).get(name) for base in owner.__mro__)
        bounds = (field.metadata[_BOUNDS] for field in declared if field is not None and _BOUNDS in field.metadata)
        found.append((name, kinds_in(hints.get(name, Any)), next(bounds, Bounds())))
    return found


def hints_of(owner: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotated types of a class or function; none if one is imported for type checkers only."""
    try:
        return typing.get_type_hints(owner)
    except NameError:
        return {}


def kinds_in(kind: Any) -> tuple[Any, ...]:
    """Return the types of which a value may have any."""
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return typing.get_args(kind) if is_union else (kind,)


def _fits(value: object, kind: Any, bounds: Bounds) -> bool:
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool) and bounds.hold(value)
    return isinstance(value, kind) if isinstance(kind, type) and kind is not Any else True


def _in_words(kind: Any, bounds: Bounds) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(kind)))}"
    if kind in (int, float):
        return bounds.in_words(kind)
    if kind is torch.dtype:
        return "a torch.dtype"
    name = getattr(kind, "__name__", str(kind))
    return f"a {name}{_HINTS.get(name, '')}"
