"""The errors of measurements."""

from __future__ import annotations

from commhooks.errors import CommHooksError


class ProfileError(CommHooksError, RuntimeError):
    """A profile that could not be measured, because a step failed on some rank, or that could not be read."""


class ProbeError(CommHooksError, RuntimeError):
    """A network that could not be measured, or whose measurements contradict one another."""
