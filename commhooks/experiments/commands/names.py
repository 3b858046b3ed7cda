"""The commands `commhooks hooks` and `commhooks tasks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from commhooks.experiments.commands.options import complete_hook, complete_task
from commhooks.experiments.commands.terminal import errors_in_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from commhooks.experiments.cards import Card


def hooks(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A hook, to see its settings and description.", show_default=False, autocompletion=complete_hook
        ),
    ] = None,
) -> None:
    """List hooks, or describe one."""
    with errors_in_words() as console:
        from commhooks.experiments.cards import hook_card, hook_names

        _show(name, hook_names, hook_card, "hooks", console)


def tasks(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A task, or your own file.py:function, to see its settings.",
            show_default=False,
            autocompletion=complete_task,
        ),
    ] = None,
) -> None:
    """List tasks, or describe one."""
    with errors_in_words() as console:
        from commhooks.experiments.cards import task_card, task_names

        _show(name, task_names, task_card, "tasks", console)


def _show(
    name: str | None, names: Callable[[], list[str]], card_of: Callable[[str], Card], command: str, console: Console
) -> None:
    """Print the card of a name; without a name, print all names with their summaries."""
    from rich.markup import escape
    from rich.table import Table

    if name is not None:
        _print_card(card_of(name), console)
        return
    table = Table.grid(padding=(0, 2))
    for each in names():
        table.add_row(each, escape(card_of(each).summary))
    console.print(table, highlight=False)
    console.print(f"\ncommhooks {command} NAME describes one, with its settings.", highlight=False)


def _print_card(card: Card, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    console.print(f"{card.name}\n\n{card.about}\n", markup=False, highlight=False)
    if not card.settings:
        console.print("It has no settings.")
        return
    table = Table("setting", "default", "", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for setting in card.settings:
        table.add_row(setting.name, escape(setting.default), escape(setting.about))
    console.print(table, highlight=False)
