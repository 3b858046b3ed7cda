"""Checks of settings that low-rank compressors have in common."""

from __future__ import annotations

from commhooks.errors import SettingsError


def check_count(owner: str, name: str, value: object, least: int = 1) -> None:
    """Raise `SettingsError` for what is no integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingsError(f"{owner}({name}={value!r}): {name} must be an integer of at least {least}.")


def check_rate(owner: str, rate: float) -> None:
    """Raise `SettingsError` for a `min_compression_rate` that is not above 0."""
    if not rate > 0:
        raise SettingsError(f"{owner}(min_compression_rate={rate!r}): min_compression_rate must be above 0.")
