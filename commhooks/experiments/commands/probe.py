"""The command `commhooks probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commhooks.experiments.commands.options import Device, WorldLink, WorldRanks, json_option
from commhooks.experiments.commands.terminal import announce, errors_in_words, write_json


def probe(
    ranks: WorldRanks = None,
    link: WorldLink = None,
    device: Device = "auto",
    seconds: Annotated[float, typer.Option(help="The time it may take, 1 to 120.")] = 20.0,
    profile: Annotated[
        Path | None,
        typer.Option(help="A file that 'profile --json' wrote: measure only the messages of its hooks."),
    ] = None,
    json: Annotated[Path | None, json_option("the probe, for 'plan --probe',")] = None,
) -> None:
    """Measure the time of every collective between the ranks."""
    with errors_in_words(json) as console:
        from commhooks.experiments.devices import chosen
        from commhooks.experiments.planning.measurements import Asked, check_probe, measure
        from commhooks.experiments.planning.request import load
        from commhooks.experiments.planning.showing import probe_table
        from commhooks.experiments.planning.worlds import check_place, check_world

        number, settings = check_world(ranks, link)
        check_probe(number, seconds)
        check_place(json)
        given = load(None, profile)["profiled"]
        if given is not None and given.ranks != number:
            raise ValueError(
                f"the profile is of {given.ranks} ranks, and the probe of {number}: give --ranks {given.ranks}"
            )
        announce(console, f"probing the link {settings.label} between {number} ranks for up to {seconds:.0f} s")
        found = measure(Asked(link=settings, probe_seconds=seconds, profiled=given, device=chosen(device)), number)
        if found is None or found.probe is None:
            return
        console.print(probe_table(found.probe))
        if json is not None:
            write_json(found.probe.write, "probe", json, console)
