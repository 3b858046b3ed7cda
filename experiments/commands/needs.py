"""The packages that commands need beyond torch and numpy, and how to install them."""

from __future__ import annotations

import importlib.util

_CLI = {"typer": "typer", "rich": "rich", "scipy": "scipy"}
_DRAWING = {
    "matplotlib": "matplotlib",
    "sklearn": "scikit-learn",
    "tensorboard": "tensorboard",
    "jinja2": "jinja2",
    "pandas": "pandas",
    "yaml": "pyyaml",
}
EXTRAS = {"cli": _CLI, "experiments": _CLI | _DRAWING}
"""The contents of each extra: modules, and the packages that contain them."""
WITHOUT_EXTRA = "env"
"""The command that runs wherever commhooks is installed."""
_LIGHT = ("plan", "profile", "probe", "check", "hooks", "tasks", "cluster", WITHOUT_EXTRA)


def extra_of(command: str) -> str:
    """Return the extra that a command needs: "experiments" if it draws pictures or writes reports, otherwise "cli"."""
    return "cli" if command in _LIGHT else "experiments"


def missing(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    return [package for module, package in EXTRAS[extra].items() if importlib.util.find_spec(module) is None]


def not_installed(extra: str) -> str:
    """Return the end of a sentence about a missing extra: its missing packages, and the line that installs them."""
    packages = missing(extra)
    return f"{', '.join(packages)}, not installed here: pip install {' '.join(packages)}"
