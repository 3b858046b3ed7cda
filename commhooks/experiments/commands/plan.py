"""The command `commhooks plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commhooks.experiments.commands.options import Device, Hooks, Sharded, json_option, task_option
from commhooks.experiments.commands.terminal import announce, check_unused, errors_in_words, write_json


def plan(
    context: typer.Context,
    parameters: Annotated[
        str | None, typer.Option(help="The model's number of parameters, 25M: then nothing is measured.")
    ] = None,
    compute: Annotated[
        str | None, typer.Option(help="With --parameters: the time of a step without communication, 200ms.")
    ] = None,
    task: Annotated[str | None, task_option(" Its steps are measured.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A file that 'profile --json' wrote, in place of measuring --task.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Your link, in full: 200Mbit/s,latency=5ms; default: the ranks' link is probed.")
    ] = None,
    probe: Annotated[Path | None, typer.Option(help="A file that 'probe --json' wrote, in place of --link.")] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Ranks, one or several: 4, or 2,4,8, or 2..1024; default: 2, or torchrun's.")
    ] = None,
    device: Device = "auto",
    hook: Hooks = None,
    sharded: Sharded = False,
    cores: Annotated[
        int, typer.Option(help="With --parameters: the cores of each rank; from 2 on, compression overlaps compute.")
    ] = 1,
    seconds: Annotated[float, typer.Option(help="The time that measuring may take.")] = 100.0,
    validate: Annotated[
        bool, typer.Option("--validate", help="Then take real steps under every hook, and compare.")
    ] = False,
    json: Annotated[Path | None, json_option("plans, probe and profile")] = None,
) -> None:
    """Predict every hook's step beside what it costs in accuracy, and recommend one, or say that none pays."""
    with errors_in_words(json) as console:
        from commhooks.experiments.devices import chosen
        from commhooks.experiments.planning.request import Asked, count_in, load, make_plans, numbers_in, ranks_here
        from commhooks.experiments.planning.showing import plan_sentences, plan_tables, validation_table
        from commhooks.experiments.planning.worlds import check_place
        from commhooks.experiments.specs import Spec

        if parameters is not None:
            check_unused(context, ["seconds"], "with --parameters, which are not measured")
        else:
            check_unused(context, ["cores"], "on a measured step")
        if profile is not None and not validate:
            check_unused(context, ["hook"], "with --profile, whose hooks are measured already")
        check_place(json)
        asked = Asked(
            parameters=None if parameters is None else count_in(parameters),
            compute=compute,
            task=None if task is None else Spec.parse(task, "task"),
            link=link,
            hooks=None if hook is None else tuple(map(Spec.parse, hook)),
            ranks=None if ranks is None else numbers_in(ranks),
            cores=cores,
            sharded=sharded,
            device=chosen(device),
            seconds=seconds,
            validate=validate,
            **load(probe, profile),
        )
        if asked.measures:
            announce(console, f"measuring on {ranks_here(asked)} ranks for up to {asked.seconds:.0f} s")
        found = make_plans(asked)
        if found is None:
            return
        shown: list[object] = [*plan_tables(found), *plan_sentences(found)]
        shown += [validation_table(found)] if found.measured else []
        for one in shown:
            is_text = isinstance(one, str)
            console.print(one, highlight=not is_text, markup=not is_text, soft_wrap=is_text)
        if json is not None:
            write_json(found.write, "plan", json, console)
