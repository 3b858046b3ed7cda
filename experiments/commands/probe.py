"""The command `commhooks probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Unsteady, WorldLink, WorldRanks
from .terminal import errors_in_words


def probe(
    ranks: WorldRanks = None,
    link: WorldLink = None,
    seconds: Annotated[float, typer.Option(help="The time it may take, 1 to 28.")] = 20.0,
    ranks_per_host: Annotated[
        int | None, typer.Option(help="Consecutive ranks that form a machine; default: torchrun's, or 1.")
    ] = None,
    unsteady: Unsteady = False,
    json: Annotated[Path | None, typer.Option(help="Write the probe into this file, for 'plan --probe'.")] = None,
) -> None:
    """Measure what every collective costs between the ranks."""
    with errors_in_words() as console:
        from ..planning.probing import Asked, measure_probe, probe_tables
        from ..planning.worlds import check_place, check_world

        number, settings = check_world(ranks, link)
        check_place(json)
        found = measure_probe(Asked(settings, seconds, ranks_per_host, unsteady), number)
        if found is None:
            return
        for table in probe_tables(found):
            console.print(table)
        if json is not None:
            found.write(json)
            console.print(f"probe  {json}", highlight=False, soft_wrap=True, markup=False)
