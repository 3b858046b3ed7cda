"""The packages that commands need beyond torch and numpy, and how to install them."""

from __future__ import annotations

import importlib.util

EXPERIMENTS = {
    "typer": "typer",
    "rich": "rich",
    "scipy": "scipy",
    "matplotlib": "matplotlib",
    "sklearn": "scikit-learn",
    "tensorboard": "tensorboard",
    "jinja2": "jinja2",
    "pandas": "pandas",
    "yaml": "pyyaml",
}
"""The contents of the extra `experiments`: modules, and the packages that contain them."""
WITHOUT_EXTRA = "env"
"""The command that runs wherever commhooks is installed."""


def missing() -> list[str]:
    """Return the packages of the extra that are not installed."""
    return [package for module, package in EXPERIMENTS.items() if importlib.util.find_spec(module) is None]


def not_installed() -> str:
    """Return the end of a sentence about the extra: its missing packages, and the line that installs them."""
    packages = missing()
    return f"{', '.join(packages)}, not installed here: pip install {' '.join(packages)}"
