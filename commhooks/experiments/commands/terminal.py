"""The behaviour of commands in a terminal: options, error messages, exit codes."""

from __future__ import annotations

import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from commhooks.experiments.commands.needs import WITHOUT_EXTRA, missing, not_installed

if TYPE_CHECKING:
    from rich.console import Console

CONTEXT: dict[str, Any] = {"help_option_names": ["--help", "-h"], "max_content_width": 120}
"""Settings of commands that hold others."""
STDOUT = Path("-")
"""The file name that means standard output on the command line."""


def write_help(text: str | None, formatter: Any) -> None:
    """Write a help text: paragraphs are wrapped, examples are indented and stay as they are.

    Rich would draw boxes, and takes longer to import than everything else that help needs.
    """
    for paragraph in (text or "").strip("\n").split("\n\n"):
        lead, end, rest = paragraph.removeprefix("[bold]").partition("[/bold]")
        shown = lead + rest
        if not shown.startswith(" "):
            shown = textwrap.fill(shown, formatter.width)
        formatter.write(f"\n{typer.style(shown[: len(lead)], bold=bool(end))}{shown[len(lead) :]}\n")


class Explained(TyperGroup):
    """A command that holds others."""

    def format_help_text(self, ctx: object, formatter: Any) -> None:
        """Write the group's help text, with examples."""
        write_help(self.help, formatter)

    def format_commands(self, ctx: object, formatter: Any) -> None:
        """Write each command with its summary."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help or "") for name, command in self.commands.items()])


class EachOptionOnce(TyperCommand):
    """A command that rejects an option given twice; Typer would silently take the last one."""

    def format_help_text(self, ctx: object, formatter: Any) -> None:
        """Write the command's help text, with examples."""
        write_help(self.help, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; options that are lists may be repeated."""
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        for option in given:
            if given.count(option) > 1 and not getattr(option, "multiple", False):
                ctx.fail(f"{option.opts[0]} is given {given.count(option)} times, but takes one value: give it once.")
        return super().parse_args(ctx, args)


class Command(EachOptionOnce):
    """A command that needs packages which may not be installed."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; if packages are missing, say what to install and exit with 2."""
        if ctx.info_name != WITHOUT_EXTRA and missing():
            typer.echo(f"commhooks {ctx.info_name} needs {not_installed()}", err=True)
            raise typer.Exit(2)
        return super().invoke(ctx)


def console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal; wide enough for whole tables if there is none."""
    from commhooks.experiments.screen import Screen

    file = sys.stderr if stderr else sys.stdout
    return Screen(stderr=stderr) if file.isatty() else Screen(stderr=stderr, width=110)


@contextmanager
def errors_in_words(json: Path | None = None) -> Iterator[Console]:
    """Yield a console, on standard error if JSON goes to standard output; print an error as a sentence, and exit.

    The exit code is 2 for a request that cannot work, 1 for a failure, and 130 for Ctrl-C.
    """
    from commhooks.experiments.cluster import ClusterError
    from commhooks.experiments.launch import WorldError
    from commhooks.experiments.screen import visible

    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield console(stderr=json == STDOUT)
    except ValueError as error:
        typer.echo(visible(f"error: {error}"), err=True)
        raise typer.Exit(2) from error
    except WorldError as error:
        typer.echo(visible(f"\n{error}"), err=True)
        raise typer.Exit(1) from error
    except BrokenPipeError:  # `| head`: Typer ends the command without a word
        raise
    except (ClusterError, OSError) as error:  # OSError: a disk that is full, a folder that was deleted
        typer.echo(visible(f"\nerror: {error}"), err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("\nstopped; the ranks are ended", err=True)
        raise typer.Exit(130) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def check_unused(context: typer.Context, options: Sequence[str], why: str) -> None:
    """Raise ValueError if the command line has one of these options, which have no effect; `why` ends the message."""
    for name in options:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"--{name.replace('_', '-')} has no effect {why}: leave it out")


def announce(console: Console, text: str) -> None:
    """Print the announcement of a measurement; under torchrun on rank 0 alone."""
    from commhooks.experiments.launch import torchrun_world

    if (torchrun_world() or (0,))[0] == 0:
        console.print(f"{text} ...", highlight=False, markup=False, soft_wrap=True)


def command_given() -> str:
    """Return the command line, with which a report can be made again."""
    return shlex.join(["commhooks", *sys.argv[1:]])


def write_json(write: Callable[[Path], None], what: str, place: Path, console: Console) -> None:
    """Write a file by calling `write`, and print its path; if the place is '-', print its text instead."""
    if place == STDOUT:
        with TemporaryDirectory() as folder:
            write(file := Path(folder) / "found.json")
            typer.echo(file.read_text(encoding="utf-8"), nl=False)
    else:
        write(place)
        console.print(f"{what}  {place}", highlight=False, soft_wrap=True, markup=False)


def _leave(number: int, frame: object) -> None:
    """Turn a termination request into an orderly exit, so that the ranks are ended first."""
    raise SystemExit(128 + number)
