"""A compressor's settings as a state_dict records them, and their comparison with the loading run's."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterable, Mapping

from commhooks.language.compressor import Compressor

MESSAGES = "message formats"
"""The key, among the settings, of the message formats, which are no setting: see `Compressor.message_format`."""


def settings_of(
    compressor: Compressor, *, only_defaults: bool = False, written: Callable[[object], str] = repr
) -> dict[str, str]:
    """Return a compressor's settings as strings; a wrapped compressor's have names such as "inner.rank"."""
    settings = {} if only_defaults else {"compressor": type(compressor).__name__}
    for field in dataclasses.fields(compressor):  # type: ignore[arg-type]  # every compressor is a dataclass
        value = getattr(compressor, field.name)
        if isinstance(value, Compressor):
            inner = settings_of(value, only_defaults=only_defaults, written=written)
            settings |= {f"{field.name}.{name}": text for name, text in inner.items()}
        elif field.compare and not only_defaults:
            settings[field.name] = written(value)
        elif field.compare and field.default is not dataclasses.MISSING:
            settings[field.name] = repr(field.default)
    return settings


def settings_that_differ(saved: Mapping[str, str], compressor: Compressor) -> list[str]:
    """List the settings that differ from the saved ones; a setting that an older file lacks had its default."""
    now, written = settings_of(compressor), _Written(saved.values())
    as_then = settings_of(compressor, written=written.of)
    then = {**settings_of(compressor, only_defaults=True), **saved}
    found = [
        f"setting {name}: saved with {then.get(name, 'nothing')}, now {now.get(name, 'nothing')}"
        for name in sorted({*saved, *now} - {MESSAGES})
        if then.get(name) not in (now.get(name), as_then.get(name))
    ]
    return [*found[:-1], f"{found[-1]}; pass settings='change' to continue with the new ones"] if found else []


class _Written:
    """A writer of settings in the form of the version that wrote the texts: `PerParameter`'s rules are one text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._fields: dict[str, set[str]] = {}
        """The fields that the texts mention, by class."""
        for text in texts:
            for node in _nodes(text):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    self._fields.setdefault(node.func.id, set()).update(one.arg or "" for one in node.keywords)

    def of(self, value: object) -> str:
        """Return the value's `repr`, without fields that the texts do not mention and that have their defaults."""
        if type(value) is tuple:
            items = [self.of(item) for item in value]
            return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
        kind = type(value)
        known = self._fields.get(kind.__qualname__)
        if known is None or not dataclasses.is_dataclass(value):
            return repr(value)
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
        default = {field.name: field.default for field in dataclasses.fields(value)}
        shown = {name: own for name, own in fields.items() if name in known or own != default[name]}
        return f"{kind.__qualname__}({', '.join(f'{name}={self.of(own)}' for name, own in shown.items())})"


def _nodes(text: str) -> Iterable[ast.AST]:
    """Return the parts of an expression; none of a text that is no expression."""
    try:
        return ast.walk(ast.parse(text, mode="eval"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: it is nested too deeply
        return ()
