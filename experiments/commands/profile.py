"""The command `commhooks profile`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import BucketCap, Ddp, Device, Hooks, WorldLink, WorldRanks, json_option, task_option
from .terminal import announce, check_unused, errors_in_words, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..predicting import Profile


def profile(
    context: typer.Context,
    task: Annotated[str, task_option()],
    hook: Hooks = None,
    ranks: WorldRanks = None,
    link: WorldLink = None,
    device: Device = "auto",
    ddp: Ddp = "core",
    bucket_cap_mb: BucketCap = None,
    seconds: Annotated[float, typer.Option(help="The time that measuring may take.")] = 60.0,
    steps: Annotated[
        int | None, typer.Option(help="Steps of each hook; default: as many as fit into the time, up to 42.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the task's model and data.")] = 0,
    overlap: Annotated[
        bool,
        typer.Option("--overlap", help="Instead, measure how much of the communication overlaps the backward pass."),
    ] = False,
    json: Annotated[Path | None, json_option("the profile, for 'plan --profile',")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw a timeline into this PNG file.")] = None,
) -> None:
    """Measure where the time of a step goes."""
    with errors_in_words(json) as console:
        from ..devices import chosen
        from ..planning.overlap import OverlapSettings, measure_overlap, overlap_table
        from ..planning.profiling import Asked, measure_profile
        from ..planning.worlds import check_place, check_world
        from ..specs import Spec

        number, settings = check_world(ranks, link)
        if overlap:
            check_unused(context, ("hook", "seconds", "json", "picture"), "with --overlap, which is no profile")
            asked_overlap = OverlapSettings(
                task=Spec.parse(task, "task"),
                ranks=number,
                link=settings,
                rounds=9 if steps is None else steps,
                ddp=ddp,
                bucket_cap_mb=0.5 if bucket_cap_mb is None else bucket_cap_mb,
                seed=seed,
            )
            announce(
                console, f"measuring {asked_overlap.task.label} on {number} ranks in {asked_overlap.rounds} rounds"
            )
            if (measured := measure_overlap(asked_overlap)) is not None:
                console.print(overlap_table(measured))
            return
        check_place(json, picture)
        asked = Asked(
            task=Spec.parse(task, "task"),
            hooks=None if hook is None else tuple(map(Spec.parse, hook)),
            link=settings,
            ddp=ddp,
            bucket_cap_mb=bucket_cap_mb,
            steps=steps,
            seconds=seconds,
            seed=seed,
            device=chosen(device),
        )
        how_long = f"for up to {seconds:.0f} s" if steps is None else f"in {steps} steps of each hook"
        announce(console, f"measuring {asked.task.label} on {number} ranks {how_long}")
        found = measure_profile(asked, number)
        if found is not None:
            _show(found, json, picture, console)


def _show(found: Profile, json: Path | None, picture: Path | None, console: Console) -> None:
    """Print a profile, and write the files that are asked for."""
    from ..planning.profiling import profile_table, sentences
    from ..predicting.stored import write_bytes

    console.print(profile_table(found))
    for sentence in sentences(found):
        console.print(sentence, highlight=False, markup=False)
    if json is not None:
        write_json(found.write, "profile", json, console)
    if picture is not None:
        from ..planning.timeline import timeline

        write_bytes(picture, timeline(found))
        console.print(f"picture  {picture}", highlight=False, soft_wrap=True, markup=False)
