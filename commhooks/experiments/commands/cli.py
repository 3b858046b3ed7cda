"""The command line, `commhooks`: its commands in their groups."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from commhooks.experiments.commands import cluster
from commhooks.experiments.commands.check import check
from commhooks.experiments.commands.compare import compare
from commhooks.experiments.commands.env import env
from commhooks.experiments.commands.help_texts import help_of
from commhooks.experiments.commands.names import hooks, tasks
from commhooks.experiments.commands.plan import plan
from commhooks.experiments.commands.probe import probe
from commhooks.experiments.commands.profile import profile
from commhooks.experiments.commands.purpose import COMMANDS, GROUPS, PURPOSE, version
from commhooks.experiments.commands.sweep import report, sweep
from commhooks.experiments.commands.terminal import CONTEXT, Command, Explained


class Commands(Explained):
    """The commands in their groups."""

    def format_commands(self, ctx: object, formatter: Any) -> None:
        """Write each command with its summary, in its group."""
        width = max(map(len, COMMANDS))
        for group, commands in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in commands.items()])


app: typer.Typer = typer.Typer(
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


for _function in (
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
    _name = _function.__name__
    app.command(help=help_of(_name), cls=Command)(_function)
app.add_typer(cluster.app, name="cluster")
