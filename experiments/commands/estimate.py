"""The command `commhooks estimate`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from .links import constant_link, links_in
from .options import LINK, BucketCap, Hooks, Imports, json_option, latency_option, rate_option, task_option
from .terminal import check_unused, errors_in_words, write_json

_RATE, _LATENCY = "1Gbit/s", "50us"


def estimate(
    context: typer.Context,
    parameters: Annotated[str | None, typer.Option(help="The model's number of parameters: 25M, 1.5B.")] = None,
    task: Annotated[
        str | None, task_option(" Instead of --parameters: its shapes are used, and its step is timed here.")
    ] = None,
    compute: Annotated[
        str | None, typer.Option(help="Time of a step's forward and backward pass on your processor: 200ms.")
    ] = None,
    optimizer_time: Annotated[
        str, typer.Option(help="Time of the optimizer's step, unless --compute includes it: 5ms.")
    ] = "0",
    ranks: Annotated[int, typer.Option(help="The number of ranks.")] = 4,
    link: Annotated[str | None, typer.Option(help=LINK)] = None,
    rate: Annotated[str | None, rate_option(_RATE)] = None,
    latency: Annotated[str | None, latency_option(_LATENCY)] = None,
    ranks_per_host: Annotated[int, typer.Option(help="The number of ranks that share a host's link.")] = 1,
    cores: Annotated[int, typer.Option(help="Cores of each rank; from 2 on, compression overlaps compute.")] = 1,
    hook: Hooks = None,
    sharded: Annotated[
        bool, typer.Option("--sharded", help="Shard the model with FSDP2, and compare with plain FSDP2 (torch.none).")
    ] = False,
    bucket_cap_mb: BucketCap = None,
    matrix: Annotated[
        str, typer.Option(help="Elements of each square matrix of which the --parameters are assumed to consist.")
    ] = "1M",
    copy_rate: Annotated[
        str | None, typer.Option(help="Bytes that your processor copies per second: 10GB/s; default: measured here.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="gloo: its CPU time for each byte is counted; none: sending uses no CPU time.")
    ] = "gloo",
    costs: Annotated[
        Path | None, typer.Option(help="A file that --measure-costs wrote; default: the package's costs.")
    ] = None,
    imports: Imports = None,
    measure_costs: Annotated[
        Path | None,
        typer.Option(
            help="Estimate nothing: measure the costs of compression here, in minutes, and write them to this file."
        ),
    ] = None,
    json: Annotated[Path | None, json_option("the estimate")] = None,
) -> None:
    """Estimate whether compression pays, without a process or a link."""
    with errors_in_words(json) as console:
        from ..estimate.costs import measure_costs as measure
        from ..estimate.request import Request, estimated
        from ..estimate.showing import as_json, show
        from ..planning.worlds import check_place
        from ..predicting.stored import write_text
        from ..tasks.importing import import_named

        if measure_costs is not None:
            if parameters or task or costs:
                raise ValueError("--measure-costs estimates nothing: leave out --parameters, --task and --costs")
            others = [name for name in context.params if name != "measure_costs"]
            check_unused(context, others, "with --measure-costs, which estimates nothing")
            measure(measure_costs)
            return
        if task is not None:
            check_unused(context, ["matrix"], "with --task, whose shapes are known")
        check_place(json)
        import_named(imports or ())
        if link is not None and rate is not None:
            raise ValueError(
                "--link and --rate each name a link, but an estimate is for one link: leave one of them out"
            )
        links, rates = (None if one is None else [one] for one in (link, rate))
        (written,) = links_in(links, rates, latency, ([_RATE], _LATENCY))
        bits, seconds = constant_link(written)
        found = estimated(
            Request(
                parameters=parameters,
                task=task,
                compute=compute,
                optimizer=optimizer_time,
                ranks=ranks,
                rate="unlimited" if math.isinf(bits) else f"{bits}bit/s",
                latency=f"{seconds:.12f}s",
                ranks_per_host=ranks_per_host,
                cores=cores,
                hooks=None if hook is None else tuple(hook),
                bucket_cap_mb=bucket_cap_mb,
                matrix=matrix,
                copy_rate=copy_rate,
                backend=backend,
                costs=costs,
                sharded=sharded,
            )
        )
        show(found, console, costs)
        if json is not None:
            write_json(lambda path: write_text(path, as_json(found) + "\n"), "estimate", json, console)
