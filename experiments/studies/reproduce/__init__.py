"""Reproductions of published experiments: modules that measure them, and pages with what was measured."""

from __future__ import annotations

import importlib

from commhooks.units import unknown
from experiments.studies.reproduce.reproduction import Reproduction

__all__ = ["MODULES", "Reproduction", "load_reproduction"]

MODULES: dict[str, str] = {
    "powersgd-data-sent": ".powersgd.data_sent",
    "powersgd-compressors": ".powersgd.compressors",
    "powersgd-error-feedback": ".ablations",
    "powersgd-warm-start": ".ablations",
    "powersgd-rank": ".ablations",
    "powersgd-start-step": ".ablations",
    "powersgd-layers": ".ablations",
    "powersgd-global-residual": ".powersgd.global_residual",
    "powersgd-rates": ".powersgd.rates",
    "accordion": ".accordion",
    "feedback-and-optimizers": ".ablations",
    "ddp-figure-2": ".ddp.figure_2",
    "ddp-figure-6": ".ddp.figure_6",
    "ddp-figure-7": ".ddp.figure_7",
    "ddp-figure-9": ".ddp.figure_9",
    "ddp-figure-10": ".ddp.figure_10",
    "ddp-figure-11": ".ddp.figure_11",
    "ddp-figure-12": ".ddp.figure_12",
    "simulation-clusters": ".simulation.clusters",
    "diloco-table-4": ".simulation.diloco",
    "diloco-measured": ".simulation.diloco_measured",
    "diloco-utilisation": ".utilisation",
    "diloco-recipes": ".diloco_recipes",
    "control-link": ".control",
    "sharded-loss": ".sharded_loss",
    "sharded-hosts": ".sharded_hosts",
    "hsdp": ".hsdp",
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
    found = module.REPRODUCTIONS[name] if MODULES[name] == ".ablations" else module.REPRODUCTION
    assert isinstance(found, Reproduction) and found.name == name, "each is listed under its name"
    return found
