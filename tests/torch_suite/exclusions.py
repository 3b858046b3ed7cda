"""The tests of PyTorch's suite that our class does not pass, each with the reason. Nothing else may fail."""

from __future__ import annotations

EXCLUDED: dict[str, str] = {}
