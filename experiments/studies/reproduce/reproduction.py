"""The parts of a reproduction: its source's figures, its measurement, and its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.studies.blocks import Block
from experiments.studies.reproduce.notes import Notes


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A published experiment that can be run again.

    Settings are frozen dataclasses whose fields JSON can hold. Two field names have a meaning: `seeds`, the number of
    seeds, and `kind`, "hosts" or "emulated", the kind of the links between ranks.
    """

    name: str  # on the command line, and of the page
    title: str
    source: str
    said: tuple[str, ...]  # what the source says, in sentences
    sizes: Mapping[str, Any]  # settings by name: "default", and "tiny" for a trial of a few seconds
    measure: Callable[[Any, Notes], dict[str, Any]]  # from settings to whatever was measured, as JSON can hold it
    show: Callable[[Any, Mapping[str, Any]], list[Block]]  # from settings and measurements; the same for the same
