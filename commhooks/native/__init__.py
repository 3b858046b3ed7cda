"""Compiled passes: C functions in a shared library, which is optional, and the Python that calls them."""

from commhooks.native.library import Compiled, compiled

__all__ = ["Compiled", "compiled"]
