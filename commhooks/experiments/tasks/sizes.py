"""The sizes of the built-in tasks, and the settings that replace their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

SizeType = TypeVar("SizeType")


def size_named(sizes: Mapping[str, SizeType], size: str) -> SizeType:
    """Return the preset of this name.

    Raises:
        ValueError: There is no such preset.

    """
    if size not in sizes:
        raise ValueError(f"size {size!r} is not known: expected one of {', '.join(sizes)}")
    return sizes[size]


def asked_for(**settings: Any) -> dict[str, Any]:
    """Return the settings of a built-in task that replace its size's own: all that are not 0 or empty.

    Raises:
        ValueError: A setting is negative.

    """
    for name, value in settings.items():
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{name} must be at least 1 (got {value})")
    return {name: value for name, value in settings.items() if value}
