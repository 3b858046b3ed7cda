"""The command `commhooks estimate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import BucketCap, Hooks
from .terminal import errors_in_words


def estimate(
    parameters: Annotated[str | None, typer.Option(help="How many the model has: 25M, 1.5B.")] = None,
    task: Annotated[
        str | None, typer.Option(help="Instead: a task, whose model's shapes are used, and whose step is timed here.")
    ] = None,
    compute: Annotated[
        str | None, typer.Option(help="A step's forward and backward pass on your processor: 200ms.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="The optimizer's part, if it is not in --compute: 5ms.")] = "0",
    ranks: Annotated[int, typer.Option(help="How many take part.")] = 4,
    rate: Annotated[str, typer.Option(help="Of each host's link: 1Gbit/s.")] = "1Gbit/s",
    latency: Annotated[str, typer.Option(help="Of the network, for a message: 50us, 0.")] = "50us",
    ranks_per_host: Annotated[int, typer.Option(help="How many ranks share a host's link.")] = 1,
    cores: Annotated[int, typer.Option(help="Cores of each rank; from 2 on, compression runs beside compute.")] = 1,
    hook: Hooks = None,
    bucket_cap_mb: BucketCap = None,
    matrix: Annotated[str, typer.Option(help="Elements of the square matrices that --parameters are in.")] = "1M",
    copy_rate: Annotated[
        str | None, typer.Option(help="Bytes that your processor copies: 10GB/s; default: timed here.")
    ] = None,
    backend: Annotated[
        str, typer.Option(help="gloo: its processor time for each byte counts; none: it does not.")
    ] = "gloo",
    costs: Annotated[
        Path | None, typer.Option(help="What --measure-costs wrote; default: the costs that come with the package.")
    ] = None,
    measure_costs: Annotated[
        Path | None,
        typer.Option(
            help="Estimate nothing: measure what compression costs here, in minutes, and write it to this file."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Estimate whether compression pays, without a process or a link."""
    with errors_in_words() as console:
        from ..estimate.costs import measure_costs as measure
        from ..estimate.request import Request, estimated
        from ..estimate.showing import as_json, show

        if measure_costs is not None:
            if parameters or task or costs:
                raise ValueError("--measure-costs estimates nothing: leave out --parameters, --task and --costs")
            measure(measure_costs)
            return
        found = estimated(
            Request(
                parameters=parameters,
                task=task,
                compute=compute,
                optimizer=optimizer,
                ranks=ranks,
                rate=rate,
                latency=latency,
                ranks_per_host=ranks_per_host,
                cores=cores,
                hooks=None if hook is None else tuple(hook),
                bucket_cap_mb=bucket_cap_mb,
                matrix=matrix,
                copy_rate=copy_rate,
                backend=backend,
                costs=costs,
            )
        )
        if json:
            typer.echo(as_json(found))
        else:
            show(found, console, costs)
