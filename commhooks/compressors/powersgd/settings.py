"""Checks of settings common to low-rank compressors."""

from __future__ import annotations

from commhooks.errors import SettingsError


def check_count(owner: str, name: str, value: object, least: int = 1) -> None:
    """Raise `SettingsError` unless the value is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingsError(f"{owner}({name}={value!r}): {name} must be an integer of at least {least}.")


def check_rate(owner: str, rate: float) -> None:
    """Raise `SettingsError` unless `min_compression_rate` is above 0."""
    if not rate > 0:
        raise SettingsError(f"{owner}(min_compression_rate={rate!r}): min_compression_rate must be above 0.")
