"""The file of a finished reproduction: what was measured, with which settings and versions, and where."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.runs import NOT_FINITE, strict

RESULTS = "results.json"
FORMAT = 1  # of the file; increased when readers must change
BEGINNING = '{\n "reproduction": '  # how its text begins


@dataclass(frozen=True, kw_only=True)
class Results:
    """A finished reproduction."""

    reproduction: str  # its name
    format: int = FORMAT
    size: str  # "default", "tiny"
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    machine: Mapping[str, str | int | float]
    command: str
    seconds: float  # that the measuring took
    measured: Mapping[str, Any]

    def write(self, folder: Path) -> Path:
        """Write the file, completely or not at all, and return its path."""
        path = folder / RESULTS
        partial = path.with_suffix(".json.part")
        lines = [f" {json.dumps(key)}: {json.dumps(strict(value))}" for key, value in vars(self).items()]
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return the results in a file.

        Raises:
            ValueError: The file is damaged, or of another format.

        """
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if raw.get("format") != FORMAT:
                raise ValueError(f"it is of format {raw.get('format')}, which another version of commhooks wrote")
            fields = {field.name for field in dataclasses.fields(cls)}
            if raw.keys() != fields:
                raise ValueError(f"it has the keys {', '.join(raw)}")
            others = [
                name for name in ("settings", "versions", "machine", "measured") if not isinstance(raw[name], dict)
            ]
            if others:
                raise ValueError(f"its {others[0]} must be an object")
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"{path}: expected the results of a reproduction, of format {FORMAT} ({error}); move it away, or "
                "replace it with --overwrite"
            ) from error
        return cls(**{**raw, "measured": _with_numbers(raw["measured"])})

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
