"""`python -m experiments.bench`: measure sections of the suite."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from . import real_step
from .rows import Row

SECTIONS = {"real-step": real_step}


def main(
    sections: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(SECTIONS)}; none: all.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure tiny models, a few rounds: shows that it runs.")
    ] = False,
) -> None:
    """Measure, and print the ratios."""
    for name in sections or list(SECTIONS):
        rows = SECTIONS[name].measure(quick, typer.echo)
        Console(width=170).print(table(name, rows))


def table(title: str, rows: list[Row]) -> Table:
    """Return rows as a table."""
    found = Table("", "", "median (quartiles)", "noise", "target", "", "", title=title)
    for row in rows:
        found.add_row(
            row.name,
            row.quantity,
            *(f"{one.median:.3f} ({one.low:.3f}-{one.high:.3f})" if one else "" for one in (row.spread, row.noise)),
            "" if row.target is None else f"{row.target:.2f}",
            row.verdict,
            row.absolute,
        )
    return found


if __name__ == "__main__":
    typer.run(main)
