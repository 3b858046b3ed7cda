"""The spelling of compressors, `name:key=value,…`, in commands, files, tables and `make_compressor` alike.

    spelling = name [":" settings]            powersgd:rank=4,start_after=10
             | name "(" [settings] ")"        PowerSGD(rank=4), which is read and never written
    settings = key "=" value {"," key "=" value}
    value    = "(" spelling ")"               compressor=(powersgd:rank=4)
             | "(" [value ","] … ")"          dimensions=(2,4), rules=(("head.*",(fp16)),)
             | text in quotes | a number, True, False, None | other text, such as fp16 or weight+bias

This module knows only the grammar. `commhooks.making` makes the compressor of a name, and `commhooks.language.registry`
finds the name of a compressor.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any, Self

import torch

from commhooks.errors import SettingsError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""Dtypes by their short names."""

NAME = re.compile(r"[\w.]+:[A-Z]\w*(?=\s*(?:[:(),]|$))|[\w.-]+")
"""A name: `top-k`, `torch.none`, or a class of another package, `module:Class`. A class begins with a capital, so that
`powersgd:rank` is a mistake."""
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_BARE = re.compile(r"[^,()'\"]+")
_CONSTANTS = {"true": True, "false": False, "none": None}


@dataclasses.dataclass(frozen=True)
class Spelling:
    """A name, with the settings that differ from its defaults.

    Settings are in alphabetical order, and whole numbers are ints, so that equal compressors are written alike.
    """

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    """Each a number, a bool, None, a text, a `Spelling`, or a tuple of such."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", tuple(sorted((key, _whole(value)) for key, value in self.settings)))

    def __str__(self) -> str:
        settings = ",".join(f"{key}={_written(value)}" for key, value in self.settings)
        return f"{self.name}:{settings}" if settings else self.name

    def has(self, *names: str) -> bool:
        """Return whether it has any of these settings."""
        return not set(names).isdisjoint(dict(self.settings))

    def having(self, **settings: Any) -> Self:
        """Return a copy with these settings added or replaced; None removes one."""
        kept = {key: value for key, value in self.settings if key not in settings}
        given = {key: value for key, value in settings.items() if value is not None}
        return dataclasses.replace(self, settings=tuple((kept | given).items()))


def parse(text: str, what: str = "compressor", name: re.Pattern[str] = NAME) -> Spelling:
    """Parse a text; raise `SettingsError` if it does not have the form above.

    It does not check that the name exists, or has these settings. `what` describes the object in errors, and `name`
    matches the outermost name.
    """
    try:
        return _Reader(text, what).whole(name)
    except RecursionError as error:
        raise SettingsError(f"{what} {text!r:.80} does not parse: its brackets are nested too deeply.") from error


def spelled(value: object) -> Spelling:
    """Return the spelling of a dataclass: its own (`by_name`), or its class with its settings.

    A class from outside this package is written with its module, as in "mypackage.sparse:TopK:ratio=0.1".
    """
    own = value.by_name() if hasattr(value, "by_name") else None
    return own or Spelling(_class_name(type(value)), tuple(changed(value).items()))


def changed(value: Any, defaults: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of a dataclass that differ from its own defaults, or from these, in a `Spelling`'s form."""
    defaults = defaults or {}
    found = {}
    for field in dataclasses.fields(value):
        one = getattr(value, field.name)
        if field.init and one != defaults.get(field.name, _default(field)):
            found[field.name] = _as_setting(one)
    return found


def short_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in text: "bf16", or "torch.int8" if there is no shorter one."""
    return next((name for name, one in DTYPES.items() if one == dtype), str(dtype))


def lower_name(kind: type) -> str:
    """Return a class's name as names of compressors are written: ErrorFeedback is "error-feedback"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "-", kind.__name__).lower()


def value_in(text: str) -> bool | int | float | str | None:
    """Convert a text without quotes to a bool, None or a number; return any other text unchanged."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue  # not of this kind
    return text


class _Reader:
    """A reader: a text, and its position in it."""

    def __init__(self, text: str, what: str) -> None:
        self._text, self._what = text.strip(), what
        self._at = 0

    def whole(self, name: re.Pattern[str]) -> Spelling:
        found = self._spelling(name)
        if self._at < len(self._text):
            raise self._error(f"unexpected {self._text[self._at :]!r}")
        return found

    def _spelling(self, pattern: re.Pattern[str] = NAME) -> Spelling:
        name = self._taken(pattern)
        if not name:
            raise self._error("expected a name")
        if self._take("("):
            settings = {} if self._take(")") else self._settings(")")
        else:
            settings = self._settings() if self._take(":") else {}
        return Spelling(name.strip(), tuple(settings.items()))

    def _settings(self, end: str = "") -> dict[str, Any]:
        """Read settings and the sign that ends them."""
        found: dict[str, Any] = {}
        while True:
            match = _KEY.match(self._text, self._at)
            if not match:
                raise self._error("expected 'name' or 'name:setting=value,setting=value'")
            if match[1] in found:
                raise self._error(f"{match[1]} is given twice")
            self._at = match.end()
            found[match[1]] = self._value()
            if not self._take(","):
                break
            if end and self._take(end):
                return found
        if end and not self._take(end):
            raise self._error(f"expected {end!r}")
        return found

    def _value(self) -> Any:
        if self._take("("):
            return self._group()
        if quoted := self._taken(_QUOTED):
            return self._unquoted(quoted)
        start = self._at
        bare = self._taken(_BARE).strip()
        if not bare:
            raise self._error("expected a value")
        if self._text.startswith("(", self._at):  # a call, as `repr` prints it
            self._at = start
            return self._spelling()
        return value_in(bare)

    def _unquoted(self, quoted: str) -> Any:
        try:
            return ast.literal_eval(quoted)
        except (SyntaxError, ValueError) as error:  # such as a line break, or a backslash that begins no escape
            raise self._error(f"{quoted!r} is no text in quotes ({error})") from error

    def _group(self) -> Any:
        """Read the content of parentheses: a compressor, or a tuple."""
        found = []
        while not self._take(")"):
            found.append(self._item())
            if not self._take(","):
                if not self._take(")"):
                    raise self._error("expected ')'")
                if len(found) > 1:
                    break
                return Spelling(found[0]) if isinstance(found[0], str) else found[0]
        return tuple(found)

    def _item(self) -> Any:
        start = self._at
        name = self._taken(NAME)
        is_spelling = name and self._take(":")
        self._at = start
        return self._spelling() if is_spelling else self._value()

    def _taken(self, pattern: re.Pattern[str]) -> str:
        """Skip spaces, and read the text that the pattern matches there, if any."""
        self._skip_spaces()
        match = pattern.match(self._text, self._at)
        if match:
            self._at = match.end()
        return match[0] if match else ""

    def _take(self, sign: str) -> bool:
        self._skip_spaces()
        found = self._text.startswith(sign, self._at)
        self._at += found
        return found

    def _skip_spaces(self) -> None:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1

    def _error(self, why: str) -> SettingsError:
        return SettingsError(f"{self._what} {self._text!r} does not parse: {why}.")


def _written(value: Any) -> str:
    if isinstance(value, Spelling):
        return f"({value})"
    if isinstance(value, tuple):
        return f"({','.join(map(_written, value))}{',' * (len(value) == 1)})"
    is_bare = isinstance(value, str) and re.fullmatch(r"[\w.*+/%-]+", value) and value_in(value) == value
    return value if is_bare else repr(value)


def _as_setting(value: object) -> Any:
    if isinstance(value, torch.dtype):
        return short_name(value)
    if isinstance(value, tuple):
        return tuple(map(_as_setting, value))
    return spelled(value) if dataclasses.is_dataclass(value) else value


def _class_name(kind: type) -> str:
    is_ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    return lower_name(kind) if is_ours else f"{kind.__module__}:{kind.__qualname__}"


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value
