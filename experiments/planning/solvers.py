"""SciPy's solvers, imported when a fit or a search needs them: for a quarter of a second, and perhaps not installed."""

from __future__ import annotations

import importlib
from typing import Any


def optimize() -> Any:
    """Return `scipy.optimize`; raise `ImportError` that says how to install it."""
    try:
        return importlib.import_module("scipy.optimize")
    except ImportError as error:
        raise ImportError(
            "probe and plan need SciPy, which is not installed: pip install 'commhooks[experiments]'"
        ) from error
