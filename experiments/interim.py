"""Stand-ins for the report and for what is shown while runs go, until both are there; then this file goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .report.page import HEAD
from .runs import RunResult, RunSettings
from .summary import summarise
from .worker import RunDone

Listener = Callable[[RunSettings, object], None]


def print_tables(
    results: Sequence[RunResult], console: Console, *, baseline: str | None = None, target_loss: float | None = None
) -> None:
    """Print a row for each run."""
    table = Table("run", "link", "held-out loss", "seconds", "median step, ms", "ratio")
    for result, summary in zip(results, summarise(results, target_loss), strict=True):
        table.add_row(
            escape(result.settings.label),
            result.settings.link.label,
            f"{summary.held_out_loss:.3f}",
            f"{summary.seconds:.1f}",
            f"{1e3 * summary.step.median:.1f}",
            f"{summary.ratio:.2f}",
        )
    console.print(table)


def write(
    results: Sequence[RunResult],
    out: Path,
    *,
    baseline: str | None,
    target_loss: float | None,
    command: str,
    notes: Sequence[str] = (),
    failures: Mapping[RunSettings, str] | None = None,
) -> Path:
    """Write a page that lists the runs."""
    lines = [*notes, *(result.settings.label for result in results), *(one.label for one in failures or {})]
    path = out / "report.html"
    path.write_text(f"{HEAD}{len(results)} runs</title>\n<pre>\n" + "\n".join(lines) + f"\n{command}\n</pre>\n")
    return path


class Live:
    """A line for each finished run."""

    def __init__(
        self, runs: Sequence[RunSettings], finished: Iterable[RunSettings], console: Console, *, quiet: bool = False
    ) -> None:
        self._console, self._quiet = console, quiet

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def __call__(self, settings: RunSettings, message: object) -> None:
        """Hear of a run."""
        if isinstance(message, RunDone) and not self._quiet:
            loss = message.result.evaluations[-1].loss
            self._console.print(f"{settings.label}: held-out loss {loss:.3f}", highlight=False, markup=False)


class LiveLogs:
    """No logs."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, settings: RunSettings, message: object) -> None:
        """Hear of a run."""

    def close(self) -> None:
        """Do nothing."""


def listeners(*each: Listener) -> Listener:
    """Return a listener that tells all of these."""

    def tell(settings: RunSettings, message: object) -> None:
        for one in each:
            one(settings, message)

    return tell
