"""The modules that `--import` names."""

from __future__ import annotations

from collections.abc import Iterable

from commhooks.importing import import_module


def import_named(modules: Iterable[str]) -> None:
    """Import the modules that `--import` names, of which files may then name compressors.

    Raises:
        ValueError: There is no such module, or it fails while it is imported.

    """
    for module in modules:
        if module.endswith(".py") or ":" in module:
            raise ValueError(
                f"--import {module}: name a module as files do in front of the colon, my_module or package.module"
            )
        import_module(module, f"--import {module}")
