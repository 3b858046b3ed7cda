"""The command `commhooks overlap`."""

from __future__ import annotations

from typing import Annotated

import typer

from .terminal import errors_in_words


def overlap(
    task: Annotated[str, typer.Option(help="Whose model to train: a task's name, with settings.")] = "gpt",
    size: Annotated[str | None, typer.Option(help="The size of a built-in task; default: its own.")] = None,
    ranks: Annotated[int, typer.Option(help="Processes on this machine.")] = 2,
    rate: Annotated[str, typer.Option(help="The link's rate.")] = "100Mbit/s",
    latency: Annotated[str, typer.Option(help="The link's latency, per step around the ring.")] = "0.2ms",
    rounds: Annotated[int, typer.Option(help="How many times the three are timed, in turns.")] = 9,
    ddp: Annotated[str, typer.Option(help="core: ddp_core's DistributedDataParallel; torch: PyTorch's.")] = "core",
    bucket_cap_mb: Annotated[
        float, typer.Option(help="Bucket size in MiB; smaller: communication begins earlier.")
    ] = 0.5,
) -> None:
    """Measure how much of the communication hides behind the backward pass."""
    with errors_in_words() as console:
        from ..links.link import LinkSettings
        from ..overlap import OverlapSettings, measure_overlap, overlap_table
        from ..specs import Spec

        spec = Spec.parse(task, "task")
        settings = OverlapSettings(
            task=spec if size is None else spec.with_default("size", size),
            ranks=ranks,
            link=LinkSettings.parse(f"{rate},latency={latency}"),
            rounds=rounds,
            ddp=ddp,
            bucket_cap_mb=bucket_cap_mb,
        )
        console.print(overlap_table(measure_overlap(settings)))
