"""Dataclasses from plain data, checked entry by entry: the fields of a class are the layout of what is saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from commhooks.errors import CheckpointError, SettingsError

_PLAIN: dict[type, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number of at least 0", lambda value: type(value) is int and 0 <= value < 2**63),
    float: ("a finite number of at least 0", lambda value: type(value) in (int, float) and 0 <= value < math.inf),
    str: ("a text", lambda value: type(value) is str),
}


def read(form: Any, saved: Any, name: str) -> Any:
    """Return a value of type `form`, a dataclass for example, from what `dataclasses.asdict` made of one.

    Raises `CheckpointError`, naming the entry, for anything else.
    """
    if get_origin(form) is UnionType:  # with None
        return None if saved is None else read(get_args(form)[0], saved, name)
    if get_origin(form) is list:
        expected = "a list"
        if isinstance(saved, (list, tuple)):
            return [read(get_args(form)[0], one, f"{name}[{number}]") for number, one in enumerate(saved)]
    elif form in _PLAIN:
        expected, fits = _PLAIN[form]
        if fits(saved):
            return saved
    else:
        fields = get_type_hints(form)
        expected = f"the entries {', '.join(fields)}"
        if isinstance(saved, dict) and saved.keys() == fields.keys():
            entries = {key: read(field, saved[key], f"{name}.{key}") for key, field in fields.items()}
            try:
                return form(**entries)
            except SettingsError as error:
                raise CheckpointError(f"Adaptive: the state is damaged. {name}: {error}") from error
        saved = list(saved) if isinstance(saved, dict) else saved
    raise CheckpointError(
        f"Adaptive: the state is damaged, or another version of commhooks saved it. {name}: expected {expected}, got "
        f"{saved!r}."
    )
