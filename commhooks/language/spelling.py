"""Compressors as text: a class's name and its settings, which `make_compressor` can parse."""

from __future__ import annotations

import dataclasses
from typing import Any


def spelled(value: object) -> str:
    """Return a value as text that `make_compressor` can parse; settings that are defaults are left out.

    A class from outside this package is written with its module, as in "mypackage.sparse:TopK(ratio=0.1)".
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        settings = [(field.name, getattr(value, field.name)) for field in _changed(value)]
        return f"{_name_of(type(value))}({', '.join(f'{name}={spelled(one)}' for name, one in settings)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(spelled, value))}{',' * (len(value) == 1)})"
    return repr(value)


def _changed(value: Any) -> list[dataclasses.Field[Any]]:
    return [
        field for field in dataclasses.fields(value) if field.init and getattr(value, field.name) != _default(field)
    ]


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _name_of(kind: type) -> str:
    is_ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    return kind.__qualname__ if is_ours else f"{kind.__module__}:{kind.__qualname__}"
