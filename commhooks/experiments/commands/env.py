"""The command `commhooks env`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def env(
    json: Annotated[Path | None, typer.Option(help="Write the same into this file; -: to standard output.")] = None,
) -> None:
    """Print the facts that an issue report needs."""
    from commhooks.experiments.environment import print_environment

    try:
        print_environment(json)
    except OSError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
