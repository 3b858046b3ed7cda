"""The command `commhooks profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commhooks.experiments.commands.options import (
    BucketCap,
    Ddp,
    Device,
    Hooks,
    WorldLink,
    WorldRanks,
    json_option,
    task_option,
)
from commhooks.experiments.commands.terminal import announce, errors_in_words, write_json


def profile(
    task: Annotated[str, task_option()],
    hook: Hooks = None,
    ranks: WorldRanks = None,
    link: WorldLink = None,
    device: Device = "auto",
    ddp: Ddp = "core",
    bucket_cap_mb: BucketCap = None,
    seconds: Annotated[float, typer.Option(help="The time that measuring may take.")] = 60.0,
    json: Annotated[Path | None, json_option("the profile, for 'plan --profile',")] = None,
) -> None:
    """Measure where the time of a step goes."""
    with errors_in_words(json) as console:
        from commhooks.experiments.devices import chosen
        from commhooks.experiments.planning.measurements import Asked, measure
        from commhooks.experiments.planning.showing import profile_sentences, profile_table
        from commhooks.experiments.planning.worlds import check_place, check_world
        from commhooks.experiments.specs import Spec

        number, settings = check_world(ranks, link)
        check_place(json)
        asked = Asked(
            task=Spec.parse(task, "task"),
            hooks=None if hook is None else tuple(map(Spec.parse, hook)),
            link=settings,
            ddp=ddp,
            bucket_cap_mb=bucket_cap_mb,
            seconds=seconds,
            device=chosen(device),
        )
        announce(console, f"measuring {task} on {number} ranks for up to {seconds:.0f} s")
        found = measure(asked, number)
        if found is None or found.profile is None:
            return
        console.print(profile_table(found.profile))
        for sentence in profile_sentences(found.profile):
            console.print(sentence, highlight=False, markup=False)
        if json is not None:
            write_json(found.profile.write, "profile", json, console)
