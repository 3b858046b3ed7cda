"""Puts the catalogue of hooks into its page: one row for each registered compressor, from its docstring."""

from __future__ import annotations

from commhooks.compressors import COMPRESSORS
from commhooks.experiments.cards import hook_card

MARK = "<!-- catalogue of hooks -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the mark by the table. MkDocs calls this for every page before it is rendered."""
    return markdown.replace(MARK, table()) if MARK in markdown else markdown


def table() -> str:
    """Return a Markdown table of all hooks: the names, what is sent, and whether error feedback belongs to them."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in sorted(COMPRESSORS):
        feedback = "yes" if COMPRESSORS[name].feeds_back else "no"
        rows.setdefault((hook_card(name).summary, feedback), []).append(f"`{name}`")
    head = ["| name | what it sends | error feedback |", "| --- | --- | --- |"]
    return "\n".join([*head, *(f"| {', '.join(names)} | {about} | {fed} |" for (about, fed), names in rows.items())])
