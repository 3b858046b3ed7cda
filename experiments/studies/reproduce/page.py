"""What was measured, as the generated part of a page, and in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from commhooks.units import seconds_in_words
from experiments.report.table import markdown_table, plain_table

from .reproduction import Block, Picture, Reproduction, Table
from .results import Results

MEASURED = "measured.md"


def markdown(reproduction: Reproduction, results: Results, blocks: Sequence[Block], folder: str = "") -> str:
    """Return what the source says and what was measured, as Markdown.

    Args:
        reproduction: What was reproduced.
        results: What came out.
        blocks: What is shown of it.
        folder: Where the pictures are, seen from the page, with a slash at the end.

    """
    lines = ["## What the source says", "", f"{reproduction.source}.", ""]
    lines += [*(f"- {sentence}" for sentence in reproduction.said), "", "## What was measured", ""]
    lines += [*circumstances(results), ""]
    for block in blocks:
        if isinstance(block, Table):
            lines += [f"**{block.title}**", "", *markdown_table(block.columns, block.rows)]
        elif isinstance(block, Picture):
            lines += [f"![{block.caption}]({folder}{block.name}.png)", ""]
        else:
            lines += [block, ""]
    return "\n".join(lines)


def circumstances(results: Results) -> list[str]:
    """Return sentences about how, where and with what it was measured."""
    settings = [f"- {name.replace('_', ' ')}: {_plain(value)}" for name, value in results.settings.items() if value]
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    here = results.machine
    return [
        f"`{results.command}` took {seconds_in_words(results.seconds)} on {here['processor']}, {here['cores']} cores, "
        f"with {versions}; {here['load']} processes wanted to run in the minute before the end.",
        *(["", "With these settings:", "", *settings] if settings else []),
    ]


def print_blocks(reproduction: Reproduction, blocks: Sequence[Block], console: Console) -> None:
    """Print what the source says and what was measured; of a picture, nothing."""
    console.print(f"\n[bold]{escape(reproduction.title)}[/bold]\n{escape(reproduction.source)}\n", highlight=False)
    for sentence in reproduction.said:
        console.print(f"- {sentence}", highlight=False, markup=False)
    for block in blocks:
        if isinstance(block, Table):
            console.print()
            first, *others = map(escape, block.columns)
            table = plain_table(escape(block.title), tuple(others), first=first)
            for row in block.rows:
                table.add_row(*(escape(cell.replace("`", "")) for cell in row))
            console.print(table)
        elif isinstance(block, str):
            console.print(block.replace("`", ""), highlight=False, markup=False)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: `{_plain(item)}`" for key, item in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)
