"""A compressor's settings as a state_dict records them, and their comparison with the loading run's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from commhooks.language.compressor import Compressor


def settings_of(compressor: Compressor) -> dict[str, str]:
    """Return a compressor's settings as strings; a wrapped compressor's have names such as "inner.rank"."""
    settings = {"compressor": type(compressor).__name__}
    for field in dataclasses.fields(compressor):  # type: ignore[arg-type]  # every compressor is a dataclass
        value = getattr(compressor, field.name)
        if isinstance(value, Compressor):
            settings |= {f"{field.name}.{name}": text for name, text in settings_of(value).items()}
        elif field.compare:
            settings[field.name] = repr(value)
    return settings


def settings_that_differ(saved: Mapping[str, str], compressor: Compressor) -> list[str]:
    """List the settings that differ from the saved ones."""
    now = settings_of(compressor)
    found = [
        f"setting {name}: saved with {saved.get(name, 'nothing')}, now {now.get(name, 'nothing')}"
        for name in sorted({*saved, *now})
        if saved.get(name) != now.get(name)
    ]
    return [*found[:-1], f"{found[-1]}; pass settings='change' to continue with the new ones"] if found else []
