"""The emulated link: what a link is, what Gloo would send over it, and what makes collectives wait for it."""

from .link import EmulatedLink, LinkSettings, Wire
from .linked_group import LinkedGroup

__all__ = ["EmulatedLink", "LinkSettings", "LinkedGroup", "Wire"]
