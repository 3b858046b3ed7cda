"""The former path of `commhooks.control.rule`, by which pickles know `AdaptiveRule`."""

from commhooks.control.rule import AdaptiveRule

__all__ = ["AdaptiveRule"]
