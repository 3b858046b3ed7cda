"""Turns a hook's name and settings into a compressor, before any process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import commhooks

from experiments.runs import HookSpec

if TYPE_CHECKING:
    from commhooks.compressor import Compressor


def make_hook(spec: HookSpec) -> Compressor:
    """Return a fresh compressor for this hook.

    Raises:
        ValueError: No hook has this name, it has no such setting, or a setting's value is out of range.
    """
    return commhooks.make_compressor(spec.name, **dict(spec.settings))
