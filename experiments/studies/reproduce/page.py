"""What was measured, as the generated part of a page, and in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from experiments.report.blocks import Block, circumstances, print_blocks

from .reproduction import Reproduction
from .results import Results

MEASURED = "measured.md"


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
