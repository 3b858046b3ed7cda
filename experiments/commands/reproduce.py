"""The command `commhooks reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .terminal import errors_in_words


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Its name; without one, all reproductions are listed.")] = None,
    size: Annotated[
        str, typer.Option(help="default, or tiny: a trial that takes seconds and shows little.")
    ] = "default",
    seeds: Annotated[int | None, typer.Option(help="Runs of each variant; more: narrower intervals.")] = None,
    link: Annotated[
        str | None, typer.Option(help="hosts: network namespaces, which need root; emulated: without root.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; default: runs/reproduce/NAME.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Write them here, too: docs/reproductions.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure again, even what is finished.")] = False,
) -> None:
    """Run a published experiment again."""
    with errors_in_words() as console:
        from ..reproduce import MODULES, load_reproduction
        from ..reproduce.running import Request
        from ..reproduce.running import reproduce as run

        if name is None:
            width = max(map(len, MODULES))
            for each in MODULES:
                console.print(f"{each:{width}}  {load_reproduction(each).title}", highlight=False, markup=False)
            return
        run(
            Request(
                name=name,
                out=out,
                size=size,
                seeds=seeds,
                link=link,
                docs=docs,
                overwrite=overwrite,
            ),
            console,
        )
