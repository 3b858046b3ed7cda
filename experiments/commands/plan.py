"""The command `commhooks plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import BucketCap, Ddp, Device, Hooks, Imports, Unsteady, WorldLink, WorldRanks, json_option, task_option
from .terminal import announce, check_unused, errors_in_words, write_json

_VALIDATE_SECONDS = 30.0


def plan(
    context: typer.Context,
    task: Annotated[str | None, task_option()] = None,
    hook: Hooks = None,
    ranks: WorldRanks = None,
    link: WorldLink = None,
    device: Device = "auto",
    ddp: Ddp = "core",
    bucket_cap_mb: BucketCap = None,
    seconds: Annotated[float, typer.Option(help="The time that profiling may take.")] = 80.0,
    probe_seconds: Annotated[float, typer.Option(help="The time that probing may take, 1 to 120.")] = 20.0,
    unsteady: Unsteady = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="Then run the best three hooks and all-reduce, and compare.")
    ] = False,
    probe: Annotated[Path | None, typer.Option(help="A file that 'probe --json' wrote, instead of probing.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A file that 'profile --json' wrote, instead of profiling.")
    ] = None,
    imports: Imports = None,
    backend: Annotated[str | None, typer.Option(help="none: sending uses no CPU time; default: as probed.")] = None,
    sharded: Annotated[bool, typer.Option("--sharded", help="Predict steps of FSDP2 too.")] = False,
    json: Annotated[Path | None, json_option("plan, probe and profile")] = None,
    seed: Annotated[int, typer.Option(help="The seed of the task's model and data.")] = 0,
) -> None:
    """Predict every hook's step, and recommend one, or say that none pays."""
    with errors_in_words(json) as console:
        from ..devices import chosen
        from ..planning.planning import (
            Asked,
            load,
            make_plan,
            plan_table,
            sentences,
            validation_table,
        )
        from ..planning.probing import check_probe
        from ..planning.profiling import Asked as ProfileAsked
        from ..planning.seldom import is_asked, seldom_sentences, seldom_table
        from ..planning.sharded import sharded_sentences, sharded_table
        from ..planning.worlds import check_place, check_world
        from ..specs import Spec
        from ..tasks.importing import import_named

        _check_used(context, probe, profile, validate=validate)
        is_measured = validate or probe is None or profile is None
        if is_measured and task is None:
            raise ValueError(
                "there is something to measure, so name what to train: --task my_task.py:task (or give both --probe "
                "and --profile, without --validate)"
            )
        number, settings = check_world(ranks, link)
        if probe is None:
            check_probe(number, probe_seconds)
        check_place(json)
        import_named(imports or ())
        asked = Asked(
            profile=ProfileAsked(
                task=Spec.parse(task or "gpt", "task"),
                hooks=None if hook is None else tuple(map(Spec.parse, hook)),
                link=settings,
                ddp=ddp,
                bucket_cap_mb=bucket_cap_mb,
                seconds=seconds,
                seed=seed,
                device=chosen(device),
            ),
            probe_seconds=probe_seconds,
            unsteady=unsteady,
            validate_seconds=_VALIDATE_SECONDS if validate else None,
            backend=backend,
            sharded=sharded,
            imports=tuple(imports or ()),
            **load(probe, profile),
        )
        if is_measured:
            announce(console, f"measuring {asked.profile.task.label} on {number} ranks for up to {asked.seconds:.0f} s")
        found = make_plan(asked, number)
        if found is None:
            return
        shown: list[object] = [plan_table(found), *sentences(found)]
        shown += [seldom_table(found.plan)] if is_asked(found.plan) else []
        shown += seldom_sentences(found.plan, found.profile)
        shown += [sharded_table(found.plan), *sharded_sentences(found.plan)] if sharded else []
        shown += [validation_table(found)] if found.measured else []
        for one in shown:
            is_text = isinstance(one, str)
            console.print(one, highlight=not is_text, markup=not is_text, soft_wrap=is_text)
        if json is not None:
            write_json(found.write, "plan", json, console)


def _check_used(context: typer.Context, probe: Path | None, profile: Path | None, *, validate: bool) -> None:
    """Raise ValueError if an option concerns a measurement that a file replaces."""
    if probe is not None:
        check_unused(context, ["probe_seconds", "unsteady"], "with --probe, which is measured already")
    if profile is not None and not validate:
        check_unused(context, ["hook", "seconds"], "with --profile, whose hooks are measured already")
        if probe is not None:
            others = ["task", "ranks", "link", "ddp", "bucket_cap_mb", "seed"]
            check_unused(context, others, "with --probe and --profile, which leave nothing to measure")
