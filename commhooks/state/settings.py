"""A compressor's settings as a state_dict records them, and the comparison with those of the run that loads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from commhooks.language.compressor import Compressor


def settings_of(compressor: Compressor, *, only_defaults: bool = False) -> dict[str, str]:
    """Return a compressor's settings as strings, those of what it wraps under "inner.rank" and the like."""
    settings = {} if only_defaults else {"compressor": type(compressor).__name__}
    for field in dataclasses.fields(compressor):  # type: ignore[arg-type]  # every compressor is a dataclass
        value = getattr(compressor, field.name)
        if isinstance(value, Compressor):
            inner = settings_of(value, only_defaults=only_defaults)
            settings |= {f"{field.name}.{name}": text for name, text in inner.items()}
        elif field.compare and not only_defaults:
            settings[field.name] = repr(value)
        elif field.compare and field.default is not dataclasses.MISSING:
            settings[field.name] = repr(field.default)
    return settings


def settings_that_differ(saved: Mapping[str, str], compressor: Compressor) -> list[str]:
    """List the settings that differ from the saved ones; a setting that an older file lacks had its default."""
    now = settings_of(compressor)
    then = {**settings_of(compressor, only_defaults=True), **saved}
    found = [
        f"setting {name}: saved with {then.get(name, 'nothing')}, now {now.get(name, 'nothing')}"
        for name in sorted({*saved, *now})
        if then.get(name) != now.get(name)
    ]
    return [*found[:-1], f"{found[-1]}; pass settings='change' to continue with the new ones"] if found else []
