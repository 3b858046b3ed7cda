"""The former path of `commhooks.control.adaptive`, by which pickles know `Decision`."""

from commhooks.control.adaptive import Decision

__all__ = ["Decision"]
