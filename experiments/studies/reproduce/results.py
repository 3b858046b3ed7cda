"""A reproduction: its source's figures and its measurement; and what was measured, as a file and as a page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from commhooks.experiments import stored
from commhooks.experiments.runs import NOT_FINITE, strict
from experiments.studies.blocks import Block, circumstances, print_blocks
from experiments.studies.reproduce.notes import Notes

RESULTS, MEASURED = "results.json", "measured.md"
FORMAT = 1  # of the file; increased when readers must change
BEGINNING = '{\n "reproduction": '  # how its text begins


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


@dataclass(frozen=True, kw_only=True)
class Results:
    """A finished reproduction."""

    reproduction: str  # its name
    size: str  # "default", "tiny"
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    command: str
    seconds: float  # that the measuring took
    measured: Mapping[str, Any]

    def write(self, folder: Path) -> Path:
        """Write the file, completely or not at all, and return its path."""
        path = folder / RESULTS
        raw = {"reproduction": self.reproduction, "format": FORMAT} | vars(self)
        lines = [f" {json.dumps(key)}: {json.dumps(strict(value))}" for key, value in raw.items()]
        stored.write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
        return path

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return the results in a file.

        Raises:
            ValueError: The file is damaged, or of another format.

        """
        try:
            found = stored.read(cls, path, form=FORMAT)
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path}: expected the results of a reproduction, of format {FORMAT} ({error}); move it away, or "
                "replace it with --overwrite"
            ) from error
        return dataclasses.replace(found, measured=_with_numbers(found.measured))

    @staticmethod
    def of_settings(settings: Any) -> dict[str, Any]:
        """Return settings as the file has them: as a JSON object."""
        written: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(settings)))
        return written


def _with_numbers(value: Any) -> Any:
    """Return the value with the numbers that are not finite, which JSON has as text."""
    if isinstance(value, dict):
        return {key: _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and value in NOT_FINITE else value


def page(reproduction: Reproduction, results: Results, blocks: Sequence[Block]) -> list[Block]:
    """Return what the source says, and what was measured and how, as a page's blocks."""
    settings = [f"- {name.replace('_', ' ')}: {_plain(value)}" for name, value in results.settings.items() if value]
    return [
        "## What the source says",
        f"{reproduction.source}.",
        _listed(reproduction),
        "## What was measured",
        circumstances(results.command, results.seconds, results.machine, results.versions),
        *(["With these settings:", "\n".join(settings)] if settings else []),
        *blocks,
    ]


def print_page(reproduction: Reproduction, blocks: Sequence[Block], console: Console) -> None:
    """Print what the source says and what was measured."""
    console.print(f"\n[bold]{escape(reproduction.title)}[/bold]\n{escape(reproduction.source)}\n", highlight=False)
    print_blocks([_listed(reproduction), *blocks], console)


def _listed(reproduction: Reproduction) -> str:
    return "\n".join(f"- {sentence}" for sentence in reproduction.said)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: `{_plain(item)}`" for key, item in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)
