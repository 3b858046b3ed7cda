"""The packages that commands need beyond torch, numpy and scipy, and how to install them."""

from __future__ import annotations

import importlib.util

_CLI = {"typer": "typer", "rich": "rich"}
_DRAWING = {
    "matplotlib": "matplotlib",
    "sklearn": "scikit-learn",
    "tensorboard": "tensorboard",
    "jinja2": "jinja2",
    "pandas": "pandas",
    "yaml": "pyyaml",
}
EXTRAS = {"cli": _CLI, "experiments": _CLI | _DRAWING}
"""What each extra installs: modules, and the packages that have them."""
WITHOUT_EXTRA = "env"
"""The command that runs wherever commhooks is installed."""
_LIGHT = ("estimate", "plan", "profile", "probe", "hooks", "tasks", "cluster", WITHOUT_EXTRA)


def extra_of(command: str) -> str:
    """Return the extra that a command needs: those that draw pictures and write reports need more than the others."""
    return "cli" if command in _LIGHT else "experiments"


def missing(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    return [package for module, package in EXTRAS[extra].items() if importlib.util.find_spec(module) is None]


def not_installed(extra: str) -> str:
    """Return the end of a sentence about what needs an extra: what is missing of it, and how to install that."""
    return f"{', '.join(missing(extra))}, not installed here: pip install 'commhooks[{extra}]'"
