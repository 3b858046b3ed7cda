"""The emulated link: its settings, and the communicator and the process group whose collectives wait for it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commhooks.experiments.links.link import EmulatedLink, LinkSettings, Wire
    from commhooks.experiments.links.linked_group import LinkedGroup

__all__ = ["EmulatedLink", "LinkSettings", "LinkedGroup", "Wire"]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: links as text (`text.py`) are read without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".linked_group" if name == "LinkedGroup" else ".link", __name__), name)
