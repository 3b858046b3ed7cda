"""Names with settings, as they are written on the command line, in YAML and in result files: 'powersgd:rank=4'."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

SettingValue = bool | int | float | str

# What a name may look like before its settings: 'fp16', 'package.module:Class' (a hook), 'module:function' or
# 'folder/file.py:function' (a task). A hook's class begins with a capital, so that 'powersgd:rank' is a mistake.
_NAMES = {
    "hook": re.compile(r"([\w.]+:[A-Z]\w*(?=:|$)|[^:]*)(?::(.*))?", re.DOTALL),
    "task": re.compile(r"(.+?\.py:[A-Za-z_]\w*(?=:|$)|[\w.]+:[A-Za-z_]\w*(?=:|$)|[^:]*)(?::(.*))?", re.DOTALL),
    "optimizer": re.compile(r"([^:]*)(?::(.*))?", re.DOTALL),
}


@dataclass(frozen=True)
class Spec:
    """A hook, a task or an optimizer by name, with the settings that differ from its defaults.

    Settings are in alphabetical order, and whole numbers are ints, so that what means the same has the same label.
    """

    name: str
    settings: tuple[tuple[str, SettingValue], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", tuple(sorted((key, _whole(value)) for key, value in self.settings)))

    @classmethod
    def parse(cls, text: str, what: str = "hook") -> Spec:
        """Return the spec described by a text such as 'powersgd:rank=4,start_after=10'.

        A hook may also be a class of another package, 'mypackage.module:TopK:ratio=0.1', or a whole compressor as
        printed by `str`, 'ErrorFeedback(inner=TopK(ratio=0.1))', which is a name without settings. A task may be a
        function, 'mypackage.module:function:width=64' or 'folder/file.py:function'.

        Args:
            text: The name, and after a colon the settings, separated by commas.
            what: "hook", "task" or "optimizer".

        Raises:
            ValueError: The text does not have that form. Whether such a name exists is checked where it is used.

        """
        if "(" in text and what == "hook":
            return cls(text.strip())
        found = _NAMES[what].fullmatch(text.strip())
        name, rest = (found[1], found[2] or "") if found else ("", "")
        pairs = [piece.partition("=") for piece in rest.split(",")] if rest.strip() else []
        if not name or any(not key.strip() or not equals or not value.strip() for key, equals, value in pairs):
            raise ValueError(f"{what} {text!r} does not parse: expected 'name' or 'name:setting=value,setting=value'")
        keys = [key.strip() for key, _, _ in pairs]
        if len(set(keys)) < len(keys):
            raise ValueError(f"{what} {text!r} does not parse: a setting is given twice")
        return cls(name.strip(), tuple((key.strip(), _value(value.strip())) for key, _, value in pairs))

    @property
    def label(self) -> str:
        """The spec as it is written on the command line."""
        settings = ",".join(f"{key}={value}" for key, value in self.settings)
        return f"{self.name}:{settings}" if settings else self.name

    @property
    def file_name(self) -> str:
        """The label without characters that are special in file names, shortened if it is long."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.label).strip("-")[:80]

    def with_default(self, key: str, value: SettingValue) -> Spec:
        """Return the spec with this setting, unless it has one of that name."""
        return self if key in dict(self.settings) else Spec(self.name, (*self.settings, (key, value)))


def unknown(what: str, got: str, known: Iterable[str]) -> str:
    """Return an error message for a name that does not exist, with the names that do and the nearest of them."""
    names = sorted(known)
    near = difflib.get_close_matches(got, names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{what} {got!r} is not known: expected one of {', '.join(names)}{hint}"


def _whole(value: SettingValue) -> SettingValue:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value


def _value(text: str) -> SettingValue:
    """Read a setting as a bool, an int or a float if possible, otherwise as text."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue  # not of this kind
    return text
