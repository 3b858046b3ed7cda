"""The blocks of a page of results: paragraphs, tables and pictures, as Markdown and in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape

from commhooks.experiments.report.plots import LIGHT, Theme, png, style
from commhooks.experiments.report.table import plain_table
from commhooks.units import seconds_in_words


@dataclass(frozen=True)
class Table:
    """A table; its first column has names, the others numbers with their units in the headings."""

    title: str  # "": none
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A picture, drawn in the colours of a theme."""

    name: str  # of its file, without a suffix
    caption: str  # what it shows, for those who cannot see it
    draw: Callable[[Theme], Figure]

    def png(self, theme: Theme) -> bytes:
        """Return it as a PNG, the same for the same measurements."""
        with matplotlib.rc_context(style(theme)):
            return png(self.draw(theme))


Block = Table | Picture | str
"""A part of what is shown; a text is a paragraph, mostly a finding, or another piece of Markdown."""


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown, with an empty one at the end: names first, numbers in other columns."""
    table = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return [*("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table), ""]


def markdown(blocks: Iterable[Block], folder: str = "") -> str:
    """Return the blocks as Markdown; `folder` is where pictures are, seen from the page, with a slash at the end."""
    lines = []
    for block in blocks:
        if isinstance(block, Table):
            lines += [f"**{block.title}**", ""] if block.title else []
            lines += markdown_table(block.columns, block.rows)
        elif isinstance(block, Picture):
            lines += [f"![{block.caption}]({folder}{block.name}.png)", ""]
        else:
            lines += [block, ""]
    return "\n".join(lines)


def print_blocks(blocks: Iterable[Block], console: Console) -> None:
    """Print the blocks; of a picture, nothing."""
    for block in blocks:
        if isinstance(block, Table):
            console.print()
            first, *others = block.columns
            table = plain_table(block.title, tuple(others), first=first)
            for row in block.rows:
                table.add_row(*(escape(cell.replace("`", "")) for cell in row))
            console.print(table)
        elif isinstance(block, str):
            console.print(block.replace("`", ""), highlight=False, markup=False)


def write_pictures(blocks: Iterable[Block], folder: Path) -> None:
    """Write the pictures among the blocks into a folder, in light colours."""
    for block in blocks:
        if isinstance(block, Picture):
            (folder / f"{block.name}.png").write_bytes(block.png(LIGHT))


def circumstances(
    command: str,
    seconds: float,
    machine: Mapping[str, str | int | float],
    versions: Mapping[str, str],
    *,
    more: str = "",
    commit: str | None = None,
) -> str:
    """Return a sentence about how, where and with what something was measured.

    Args:
        command: That measured it.
        seconds: That the measuring took.
        machine: See `commhooks.experiments.machine.machine`.
        versions: See `commhooks.experiments.machine.versions`.
        more: Said of the machine after its cores.
        commit: Of the code; None: not known.

    """
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"`{command}` took {seconds_in_words(seconds)} on {machine['processor']}, {machine['cores']} cores{more}, with "
        f"{named}{'' if commit is None else f', at commit {commit}'}; {machine['load']} processes wanted to run in the "
        "minute before the end."
    )
