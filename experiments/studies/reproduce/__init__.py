"""Reproductions of published experiments: modules that measure them, and pages with what was measured."""

from __future__ import annotations

import importlib

from commhooks.units import unknown
from experiments.studies.reproduce.results import Reproduction

__all__ = ["MODULES", "Reproduction", "load_reproduction"]

MODULES: dict[str, str] = {
    "feedback-and-optimizers": ".feedback",
    "diloco-utilisation": ".utilisation",
    "control-link": ".control",
    "sharded-loss": ".sharded_loss",
    "sharded-hosts": ".sharded_hosts",
}
"""The module of each reproduction, by its name, in the order in which they are listed."""


def load_reproduction(name: str) -> Reproduction:
    """Return the reproduction of this name.

    Raises:
        ValueError: There is no such reproduction; the message lists all names.

    """
    if name not in MODULES:
        raise ValueError(unknown("reproduction", name, MODULES))
    module = importlib.import_module(MODULES[name], __package__)
    found = module.REPRODUCTION
    assert isinstance(found, Reproduction) and found.name == name, "each is listed under its name"
    return found
