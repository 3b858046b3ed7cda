"""The command line, `commhooks`: its commands in their groups."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import cluster
from .check import check
from .compare import compare
from .env import env
from .help_texts import help_of
from .names import hooks, tasks
from .plan import plan
from .probe import probe
from .profile import profile
from .purpose import COMMANDS, GROUPS, PURPOSE, version
from .sweep import report, sweep
from .terminal import CONTEXT, Command, Explained


class Commands(Explained):
    """The commands in their groups."""

    def format_commands(self, ctx: object, formatter: Any) -> None:
        """Write each command with its summary, in its group."""
        width = max(map(len, COMMANDS))
        for group, commands in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in commands.items()])


app = typer.Typer(
    help=PURPOSE,
    cls=Commands,
    context_settings=CONTEXT,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(version())
        raise typer.Exit


@app.callback()
def commhooks(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions, and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run before every command; do nothing except for --version."""


for function in (
    plan,
    compare,
    sweep,
    report,
    profile,
    probe,
    check,
    hooks,
    tasks,
    env,
):
    name = function.__name__
    app.command(help=help_of(name), cls=Command)(function)
app.add_typer(cluster.app, name="cluster")
