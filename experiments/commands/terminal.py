"""How commands behave in a terminal: options, errors in words, exit codes."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from rich.console import Console


class EachOptionOnce(TyperCommand):
    """A command that rejects an option given twice; Typer would silently take the last one."""

    # "supertype defines the argument type as Context", a class that only a private module of Typer has
    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments; options that are lists may be repeated."""
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        for option in given:
            if given.count(option) > 1 and not getattr(option, "multiple", False):
                ctx.fail(f"{option.opts[0]} is given {given.count(option)} times, but takes one value: give it once.")
        return super().parse_args(ctx, args)


def console(*, quiet: bool = False) -> Console:
    """Return a console as wide as the terminal; wide enough for whole tables if there is none."""
    from rich.console import Console

    return Console(quiet=quiet) if sys.stdout.isatty() else Console(quiet=quiet, width=110)


@contextmanager
def errors_in_words() -> Iterator[Console]:
    """Provide a console; print errors as a sentence, and exit.

    The exit code is 2 for what cannot work as requested, 1 for a failure, and 130 for Ctrl-C.
    """
    from ..cluster import ClusterError
    from ..launch import WorldError

    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield console()
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    except WorldError as error:
        typer.echo(f"\n{error}", err=True)
        raise typer.Exit(1) from error
    except BrokenPipeError:  # `| head`: Typer ends the command without a word
        raise
    except (ClusterError, OSError) as error:  # OSError: a disk that is full, a folder that was deleted
        typer.echo(f"\nerror: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("\nstopped; the ranks are ended", err=True)
        raise typer.Exit(130) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def command_given() -> str:
    """Return the command line, for reports that say how to get them again."""
    return shlex.join(["commhooks", *sys.argv[1:]])


def _leave(number: int, frame: object) -> None:
    """Turn a termination request into an orderly exit, so that the ranks are ended first."""
    raise SystemExit(128 + number)
