"""The modules here import frameworks, which only the environment of `make test-frameworks` has."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("lightning") else ["test_*.py"]
