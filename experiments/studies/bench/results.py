"""The file of results: every section's rows, with the machine, versions and commit on which they were measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commhooks.experiments import stored
from commhooks.experiments.commit import commit_of_code
from commhooks.experiments.machine import machine, versions
from experiments.studies.bench.rows import Row

FORMAT = 1  # of the file; increased when readers must change
_DIGITS = 4  # after the point
ROUNDED_BY = 10.0**-_DIGITS
"""A number in the file differs from the one measured by less: exact rows have no spread that would cover it."""
_LEFT_OUT = ("load", "threads_per_rank")  # of `machine()`: what differs between two runs on the same one


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One section's rows, and how they came about."""

    rows: tuple[Row, ...]
    command: str
    commit: str  # of the code; with "+changes" if that was changed since
    seconds: float  # that it took
    machine: Mapping[str, Any]
    versions: Mapping[str, str]

    @property
    def place(self) -> dict[str, str | int | float]:
        """The kind of machine, without how busy it was."""
        return {key: value for key, value in self.machine.items() if key not in _LEFT_OUT}


Results = dict[str, Measured]
"""The measurements of each section."""


@dataclass(frozen=True)
class _File:
    """The contents of the file."""

    sections: Mapping[str, Measured]


def measured_now(rows: list[Row], command: str, seconds: float) -> Measured:
    """Return rows that were measured just now."""
    return Measured(
        rows=tuple(rows),
        command=command,
        commit=commit_of_code() or "unknown",
        seconds=round(seconds, 1),
        machine=machine(),
        versions=versions(),
    )


def read(path: Path) -> Results:
    """Return the results in a file.

    Raises:
        ValueError: The file is damaged, or of another format; it is left as it is.
        OSError: It cannot be read.

    """
    try:
        return dict(stored.read(_File, path, form=FORMAT).sections)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path}: expected results of the benchmarks, of format {FORMAT} ({type(error).__name__}: {error}); "
            "move it away, and measure all sections again"
        ) from error


def write(path: Path, results: Results) -> None:
    """Write the file, completely or not at all: a line for each row."""
    text = json.dumps({"format": FORMAT, "sections": {name: _plain(one) for name, one in results.items()}}, indent=1)
    stored.write_text(path, text + "\n")


def _plain(measured: Measured) -> dict[str, Any]:
    """Return a section for JSON: of a row, only what is not as it is by default."""
    plain = dataclasses.asdict(measured)
    defaults = {field.name: field.default for field in dataclasses.fields(Row)}
    plain["rows"] = [
        {key: _rounded(value) for key, value in row.items() if value != defaults[key]} for row in plain["rows"]
    ]
    return plain


def _rounded(value: Any) -> Any:
    """Return numbers with the digits that mean something."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, _DIGITS) if isinstance(value, float) else value
