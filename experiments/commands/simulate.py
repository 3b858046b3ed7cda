"""The command `commhooks simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .links import constant_link, links_in
from .options import REPEAT, BucketCap, ComputeOption, Hooks, Links, latency_option, rate_option, task_option
from .terminal import check_unused, command_given, errors_in_words

_LATENCY = "0.05ms"
DEFAULT_RATES = ("100Mbit/s", "1Gbit/s", "10Gbit/s", "100Gbit/s")


def simulate(
    context: typer.Context,
    task: Annotated[str | None, task_option(" Its step is measured; default: gpt:size=base.")] = None,
    hook: Hooks = None,
    link: Links = None,
    rate: Annotated[list[str] | None, rate_option(", ".join(DEFAULT_RATES), REPEAT)] = None,
    latency: Annotated[str | None, latency_option(_LATENCY)] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks; dots continue by doubling.")] = "2,4,...,1024",
    ranks_per_host: Annotated[int, typer.Option(help="The number of ranks that share a host's link.")] = 1,
    inner_rate: Annotated[
        str | None, typer.Option(help="Simulate also hosts with an inner link of this rate: 2.4Tbit/s.")
    ] = None,
    inner_latency: Annotated[str, typer.Option(help="The latency of that inner link.")] = "5us",
    hosts_per_site: Annotated[int | None, typer.Option(help="The number of hosts that share a site's uplink.")] = None,
    site_rate: Annotated[str | None, typer.Option(help="The rate of that uplink.")] = None,
    algorithm: Annotated[str, typer.Option(help="gloo: with its headers and messages; ring: data alone.")] = "gloo",
    compute: ComputeOption = None,
    cores: Annotated[int, typer.Option(help="Cores of each rank; from 2 on, compression overlaps compute.")] = 1,
    backend: Annotated[
        str, typer.Option(help="none: sending uses no CPU time; gloo: its CPU time for each byte is counted.")
    ] = "none",
    copy_rate: Annotated[
        str | None,
        typer.Option(help="With gloo: bytes that your processor copies per second: 10GB/s; default: measured here."),
    ] = None,
    bucket_cap_mb: BucketCap = None,
    sharded: Annotated[
        bool, typer.Option("--sharded", help="Shard the model with FSDP2, and compare with plain FSDP2 (torch.none).")
    ] = False,
    parameters: Annotated[str | None, typer.Option(help="Instead of a task: 124M, 1B. Needs --compute.")] = None,
    measured: Annotated[Path | None, typer.Option(help="A file that --save wrote, instead of a task.")] = None,
    save: Annotated[Path | None, typer.Option(help="Keep the measurements in this file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the table, the picture and all data.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the files of --out and --save.")] = False,
) -> None:
    """Compute step times on clusters of any size."""
    with errors_in_words() as console:
        from ..estimate.request import count_in, rate_in
        from ..links.link import parse_latency, parse_rate
        from ..predicting.link import Link
        from ..simulate.request import DEFAULT_HOOKS, SHARDED_HOOKS, Request
        from ..simulate.simulating import simulate as run
        from ..specs import Spec

        if inner_rate is not None and ranks_per_host == 1:
            raise ValueError(
                "--inner-rate is the rate of a link inside hosts: give the ranks of each with --ranks-per-host"
            )
        if inner_rate is None:
            check_unused(context, ["inner_latency"], "without --inner-rate")
        insides = [None] if inner_rate is None else [None, parse_rate(inner_rate) or float("inf")]
        links = tuple(
            Link(
                rate=bits,
                latency=seconds,
                ranks_per_host=ranks_per_host,
                inner_rate=inside,
                inner_latency=parse_latency(inner_latency),
                algorithm=algorithm,
                hosts_per_site=hosts_per_site,
                site_rate=None if site_rate is None else parse_rate(site_rate) or float("inf"),
            )
            for bits, seconds in map(constant_link, links_in(link, rate, latency, (DEFAULT_RATES, _LATENCY)))
            for inside in insides
        )
        default = ("all-reduce", "fp16") if parameters is not None else SHARDED_HOOKS if sharded else DEFAULT_HOOKS
        request = Request(
            hooks=tuple(map(Spec.parse, hook or default)),
            ranks=numbers_in(ranks),
            links=links,
            task=None if task is None else Spec.parse(task, "task"),
            measured=measured,
            parameters=None if parameters is None else count_in(parameters),
            compute=compute,
            cores=cores,
            backend=backend,
            copy_rate=None if copy_rate is None else rate_in(copy_rate) / 8,
            bucket_cap_mb=bucket_cap_mb,
            sharded=sharded,
            save=save,
            out=out,
            overwrite=overwrite,
            command=command_given(),
        )
        run(request, console)


def numbers_in(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks in a text such as '2,4,8' or '2,4,...,1024'.

    Raises:
        ValueError: The text does not have that form.

    """
    found: list[int] = []
    pieces = [piece.strip() for piece in text.split(",")]
    for before, piece in zip(["", *pieces], pieces, strict=False):
        if piece == "..." and found:
            continue
        if not piece.isdecimal() or int(piece) < 1 or (found and int(piece) <= found[-1]):
            raise ValueError(
                f"ranks {text!r} does not parse: expected ascending numbers from 1 on, such as '2,4,8' or "
                "'2,4,...,1024'"
            )
        while before == "..." and 2 * found[-1] < int(piece):
            found.append(2 * found[-1])
        found.append(int(piece))
    if pieces[-1] == "...":
        raise ValueError(f"ranks {text!r} does not parse: the last number must follow the dots, as in '2,4,...,1024'")
    return tuple(found)
