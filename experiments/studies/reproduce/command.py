"""The study `reproduce`, as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commhooks.experiments.commands.terminal import errors_in_words
from experiments.studies.reproduce import MODULES, load_reproduction
from experiments.studies.reproduce.running import Request
from experiments.studies.reproduce.running import reproduce as run

HELP = """
Measure again what the documentation promises, and compare the results with their source.

[bold]A list[/bold] of all reproductions.

    python -m experiments.studies reproduce

[bold]One of them[/bold], with its usual settings: at most ten minutes on a machine with two cores.

    python -m experiments.studies reproduce feedback-and-optimizers

More seeds make intervals narrower; emulated links need no root.

[bold]The folder[/bold] given by --out receives results.json (all measurements, with settings, versions and machine), \
measured.md (what the source says, tables and findings) and the pictures. The same command prints a finished \
one again; after Ctrl-C, it continues. The documentation has a page for each.
"""


def reproduce(
    name: Annotated[str | None, typer.Argument(help="Its name; without one, all reproductions are listed.")] = None,
    size: Annotated[str, typer.Option(help="default; tiny: a trial that takes seconds.")] = "default",
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
        if name is None:
            width = max(map(len, MODULES))
            for each in MODULES:
                console.print(f"{each:{width}}  {load_reproduction(each).title}", highlight=False, markup=False)
            return
        asked = Request(name=name, out=out, size=size, seeds=seeds, link=link, docs=docs, overwrite=overwrite)
        run(asked, console)
