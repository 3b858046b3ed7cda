"""The command `commhooks profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import BucketCap, Ddp, Hooks, WorldLink, WorldRanks
from .terminal import errors_in_words


def profile(
    task: Annotated[str, typer.Option(help="What to train: digits, gpt, lstm, or your own file.py:function.")],
    hook: Hooks = None,
    ranks: WorldRanks = None,
    link: WorldLink = None,
    ddp: Ddp = "core",
    bucket_cap_mb: BucketCap = None,
    seconds: Annotated[float, typer.Option(help="The time that measuring may take.")] = 60.0,
    steps: Annotated[
        int | None, typer.Option(help="Steps of each hook; default: as many as fit into the time, up to 42.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the task's model and data.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the profile into this file, for 'plan --profile'.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace into this file, which Perfetto opens.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw a timeline into this PNG file.")] = None,
) -> None:
    """Measure where the time of a step goes."""
    with errors_in_words() as console:
        from commhooks.planning.stored import write_bytes
        from commhooks.planning.trace import write_trace

        from ..launch import torchrun_world
        from ..planning.profiling import Asked, measure_profile, profile_table, sentences
        from ..planning.worlds import check_place, check_world
        from ..specs import Spec

        number, settings = check_world(ranks, link)
        check_place(json, trace, picture)
        asked = Asked(
            task=Spec.parse(task, "task"),
            hooks=None if hook is None else tuple(map(Spec.parse, hook)),
            link=settings,
            ddp=ddp,
            bucket_cap_mb=bucket_cap_mb,
            steps=steps,
            seconds=seconds,
            seed=seed,
        )
        joined = torchrun_world()
        if joined is None or joined[0] == 0:
            how_long = f"for up to {seconds:.0f} s" if steps is None else f"in {steps} steps of each hook"
            console.print(
                f"measuring {asked.task.label} on {number} ranks {how_long} ...", highlight=False, markup=False
            )
        found = measure_profile(asked, number)
        if found is None:
            return
        console.print(profile_table(found))
        for sentence in sentences(found):
            console.print(sentence, highlight=False, markup=False)
        if json is not None:
            found.write(json)
        if trace is not None:
            write_trace(found, trace)
        if picture is not None:
            from ..planning.timeline import timeline

            write_bytes(picture, timeline(found))
        for name, file in (("profile", json), ("trace", trace), ("picture", picture)):
            if file is not None:
                console.print(f"{name}  {file}", highlight=False, soft_wrap=True, markup=False)
