"""Compressors as text: `name:key=value,…` or a call, read and written, and the table of names.

    spelling = name [":" settings]            powersgd:rank=4,start_after=10
             | name "(" [settings] ")"        PowerSGD(rank=4), which is read and never written
    settings = key "=" value {"," key "=" value}
    value    = "(" spelling ")"               compressor=(powersgd:rank=4)
             | "(" [value ","] … ")"          dimensions=(2,4), rules=(("head.*",(fp16)),)
             | text in quotes | a number, True, False, None | other text, such as fp16 or weight+bias

`commhooks.making` makes the compressor that a text describes.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from commhooks.errors import SettingsError
from commhooks.language.settings import hints_of

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""Dtypes by their short names."""

NAME = re.compile(r"[\w.]+:[A-Z]\w*(?=\s*(?:[:(),]|$))|[\w.-]+")
"""A name: `top-k`, `torch.none`, or a class of another package, `module:Class`. A class begins with a capital, so that
`powersgd:rank` is a mistake."""
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=")
_TOKENS = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^'\"(),]+|.", re.DOTALL)
_DEEPEST = 100
"""The most parentheses inside each other; each level is read again for those around it."""
_CONSTANTS = {"true": True, "false": False, "none": None}
_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class Spelling:
    """A name, with the settings that differ from its defaults.

    Settings are in alphabetical order, and whole numbers are ints, so that equal compressors are written alike.
    """

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    """Each a number, a bool, None, a text, a `Spelling`, or a tuple of such."""
    unsaid: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), compare=False)
    """Settings that the name implies, except inside a class of another package."""

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


@dataclasses.dataclass(frozen=True)
class Registered:
    """What a name stands for."""

    make: Callable[..., Any]
    """A compressor's class, or a function that returns one."""
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings with other defaults than the class has."""
    codec: type | None = None
    """The class of the setting `codec`, whose own settings the name takes too."""
    feeds_back: bool = False
    """True if `ErrorFeedback` belongs to it, where it takes feedback: what it does not send is kept."""
    decay: float = 1.0
    """The default decay of that `ErrorFeedback`."""

    @property
    def owners(self) -> tuple[Callable[..., Any], ...]:
        """Whose settings the name takes."""
        return (self.make,) if self.codec is None else (self.codec, self.make)

    def types(self) -> dict[str, Any]:
        """Return the types of its settings; Any for unannotated ones."""
        hints = {name: kind for owner in self.owners for name, kind in hints_of(owner).items()}
        return {one.name: hints.get(one.name, Any) for one in self._parameters()}

    def defaults(self) -> dict[str, Any]:
        """Return the values that its settings have if they are not given."""
        return {one.name: one.default for one in self._parameters() if one.default is not one.empty} | dict(self.given)

    def without_default(self) -> list[str]:
        """Return the settings that must be given."""
        return [one.name for one in self._parameters() if one.default is one.empty and one.name not in self.given]

    def __call__(self, settings: Mapping[str, Any]) -> Any:
        """Make the compressor with these settings."""
        settings = {**self.given, **settings}
        if self.codec is None:
            return self.make(**settings)
        own = inspect.signature(self.make).parameters.keys() & settings.keys()
        codec = self.codec(**{name: value for name, value in settings.items() if name not in own})
        return self.make(codec=codec, **{name: settings[name] for name in own})

    def _parameters(self) -> list[inspect.Parameter]:
        found = [one for owner in self.owners for one in inspect.signature(owner).parameters.values()]
        hidden = () if self.codec is None else ("codec",)
        return [one for one in found if one.kind in _NAMED and one.name not in hidden]

    def settings_of(self, made: Any) -> dict[str, Any] | None:
        """Return the settings with which it makes this object; None if it makes something else."""
        if type(made) is not self.make or (self.codec is not None and type(made.codec) is not self.codec):
            return None
        if self.codec is None:
            return changed(made, self.given)
        return changed(made.codec, self.given) | changed(made, {**self.given, "codec": made.codec})


COMPRESSORS: dict[str, Registered] = {}
"""The names of compressors; `commhooks.compressors` fills it."""


def name_of(made: object) -> Spelling | None:
    """Return the shortest spelling by a registered name; None if there is none.

    The compressor's own name is preferred: bf16 is not fp16 with another dtype.
    """
    found = []
    for name, registered in COMPRESSORS.items():
        settings = registered.settings_of(made)
        if settings is not None:
            overridden = len(settings.keys() & registered.given.keys())
            found.append((overridden, len(settings), Spelling(name, tuple(settings.items()))))
    return min(found, key=lambda one: one[:2])[2] if found else None


def spelled(value: Any) -> Spelling:
    """Return the spelling of a dataclass: its own (`by_name`), or its class with its settings.

    A class from outside this package is written with its module, as in "mypackage.sparse:TopK:ratio=0.1".
    """
    # A subclass of a wrapper does not take over its spelling, which would make the wrapper itself of the text.
    definers = [one for one in type(value).__mro__ if "by_name" in vars(one)]
    own = value.by_name() if definers and (definers[0] is type(value) or len(definers) == 1) else None
    settings = tuple(changed(value).items())
    return own or Spelling(_class_name(type(value)), settings if is_ours(type(value)) else _said(settings))


def changed(value: Any, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of a dataclass that differ from its own defaults, or from these, in a `Spelling`'s form."""
    found = {}
    for field in dataclasses.fields(value):
        own = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        one = getattr(value, field.name)
        if field.init and one != (defaults or {}).get(field.name, own):
            found[field.name] = _as_setting(one)
    return found


def short_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in text: "bf16", or "torch.int8" if there is no shorter one."""
    return next((name for name, one in DTYPES.items() if one == dtype), str(dtype))


def lower_name(kind: type) -> str:
    """Return a class's name as names of compressors are written: ErrorFeedback is "error-feedback"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "-", kind.__name__).lower()


def parse(text: str, what: str = "compressor", name: re.Pattern[str] = NAME) -> Spelling:
    """Parse a text; raise `SettingsError` if it does not have the form above.

    It does not check that the name exists, or has these settings. `what` describes the object in errors, and `name`
    matches the outermost name.
    """
    try:
        return _spelling(text.strip(), name)
    except SyntaxError as error:
        raise SettingsError(f"{what} {text!r:.1000} does not parse: {error.msg}.") from error


def value_in(text: str) -> bool | int | float | str | None:
    """Convert a text without quotes to a bool, None or a number; return any other text unchanged."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    for read in (ast.literal_eval, float):  # the second: inf
        try:
            value = read(text)
        except (SyntaxError, ValueError, TypeError, MemoryError):  # the last: nested too deeply
            continue
        if isinstance(value, int | float):
            return value
    return text


def _spelling(text: str, pattern: re.Pattern[str] = NAME) -> Spelling:
    match = pattern.match(text)
    if match is None:
        raise SyntaxError("expected a name")
    name, rest = match[0].strip(), text[match.end() :].strip()
    items: list[str] = []
    if rest.startswith("("):
        items = _divided(_inside(rest))
        items = items[:-1] if not items[-1] else items
    elif rest.startswith(":"):
        items = _divided(rest[1:])
    elif rest:
        raise SyntaxError(f"unexpected {rest!r}")
    settings: dict[str, Any] = {}
    for item in items:
        match = _KEY.match(item)
        if match is None:
            raise SyntaxError("expected 'name' or 'name:setting=value,setting=value'")
        if match[1] in settings:
            raise SyntaxError(f"{match[1]} is given twice")
        settings[match[1]] = _value(item[match.end() :].strip())
    return Spelling(name, tuple(settings.items()))


def _value(text: str) -> Any:
    if text.startswith("("):
        return _group(_divided(_inside(text)))
    if text.startswith(("'", '"')):
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError) as error:  # such as a line break, or a backslash that begins no escape
            raise SyntaxError(f"{text!r} is no text in quotes ({error})") from error
    if "(" in text:  # a call, as `repr` prints it
        return _spelling(text)
    if not text or "'" in text or '"' in text:
        raise SyntaxError(f"unexpected {text!r}" if text else "expected a value")
    return value_in(text)


def _group(items: list[str]) -> Any:
    """Return the content of parentheses: a compressor, or a tuple."""
    whole: list[str] = []
    for item in items if items[-1] else items[:-1]:
        if whole and _has_settings(whole[-1]) and _KEY.match(item):  # another setting of the same spelling
            whole[-1] += f",{item}"
        else:
            whole.append(item)
    values = tuple(_spelling(item) if _has_settings(item) else _value(item) for item in whole)
    if len(values) != 1 or not items[-1]:
        return values
    return Spelling(values[0]) if isinstance(values[0], str) else values[0]


def _has_settings(text: str) -> bool:
    match = NAME.match(text)
    return match is not None and text[match.end() :].lstrip().startswith(":")


def _inside(text: str) -> str:
    if not text.endswith(")"):
        raise SyntaxError("expected ')'")
    return text[1:-1]


def _divided(text: str) -> list[str]:
    """Return what stands between the commas of a text, except those in quotes and parentheses."""
    items, depth = [""], 0
    for token in _TOKENS.findall(text):
        depth += (token == "(") - (token == ")")
        if depth < 0 or token in ("'", '"'):
            raise SyntaxError(f"unexpected {token!r}")
        if depth > _DEEPEST:
            raise SyntaxError("its brackets are nested too deeply")
        if token == "," and not depth:
            items.append("")
        else:
            items[-1] += token
    if depth:
        raise SyntaxError("expected ')'")
    return [item.strip() for item in items]


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


def _said(value: Any) -> Any:
    """Return a setting in which each spelling says what its name implies elsewhere."""
    if isinstance(value, Spelling):
        return Spelling(value.name, _said(value.settings + value.unsaid))
    return tuple(map(_said, value)) if isinstance(value, tuple) else value


def is_ours(make: Callable[..., Any]) -> bool:
    """Return whether a class or function is of this package; a class of another one is taken as it is."""
    return make.__module__.partition(".")[0] == __name__.partition(".")[0]


def _class_name(kind: type) -> str:
    return lower_name(kind) if is_ours(kind) else f"{kind.__module__}:{kind.__qualname__}"


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value
