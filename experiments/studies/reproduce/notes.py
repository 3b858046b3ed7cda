"""The messages and finished parts of a reproduction that measures: an interruption loses no finished part."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from commhooks.saving.files import json_in
from commhooks.units import counted

PARTS = "parts.jsonl"
BEGINNING = '{"parts of": '  # how the text of the file begins


class Notes:
    """Progress in the terminal, and finished parts in a file: one line of JSON each."""

    def __init__(self, folder: Path, head: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Open the file, or continue it.

        Args:
            folder: Where the file is.
            head: The name, the settings and the versions that the parts belong to.
            say: Called with each line of progress.

        Raises:
            ValueError: The file holds parts of something else, or a line that is damaged.

        """
        self.tell = say
        self._path = folder / PARTS
        first = json.dumps({"parts of": dict(head)})
        whole = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        lines = whole.split("\n")[:-1]  # a process that is killed may leave half a line at the end
        if lines and lines[0] != first:
            raise ValueError(
                f"{self._path} holds what an interrupted reproduction with other settings or versions had finished: "
                "continue that one with its own command, name another folder with --out, or remove it with --overwrite"
            )
        self._parts: dict[str, Any] = {}
        before = 0.0
        for number, line in enumerate(lines[1:], 2):
            try:
                key, value, seconds = json_in(line)
                self._parts[key], before = value, float(seconds)
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{self._path}, line {number}: expected a key, a value and seconds in a JSON array ({error}); "
                    "remove the line to measure that part again, or begin anew with --overwrite"
                ) from error
        self._begun = time.perf_counter() - before
        self._path.write_text("".join(f"{line}\n" for line in lines or [first]), encoding="utf-8")
        if self._parts:
            say(f"continuing: {counted(len(self._parts), 'part')} finished already ({self._path})")

    @property
    def seconds(self) -> float:
        """Seconds of the measurement so far, without parts that were lost in interruptions."""
        return time.perf_counter() - self._begun

    def get(self, key: str) -> Any | None:
        """Return what was kept under the key, also by an interrupted run; None if nothing was."""
        return self._parts.get(key)

    def keep(self, key: str, value: Any, said: str | None = None) -> None:
        """Write a finished part to the disk, and say something about it; JSON must be able to hold the part."""
        line = json.dumps([key, value, self.seconds])
        self._parts[key] = json.loads(line)[1]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        if said is not None:
            self.tell(f"{key}: {said}")

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return what was kept under the key; if nothing was, make it and keep it."""
        if key not in self._parts:
            self.keep(key, make())
        return self._parts[key]
