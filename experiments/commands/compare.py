"""The command `commhooks compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..links.text import DEFAULT_LATENCY, DEFAULT_RATE
from .links import links_in
from .options import (
    REPEAT,
    Baseline,
    BucketCap,
    ComputeOption,
    Ddp,
    EvaluateEvery,
    GoOn,
    Hooks,
    Links,
    Optimizers,
    Out,
    Overwrite,
    Quiet,
    Ranks,
    Seed,
    Seeds,
    Sharded,
    Size,
    Steps,
    Target,
    Tasks,
    latency_option,
    rate_option,
)
from .terminal import command_given, errors_in_words

if TYPE_CHECKING:
    from rich.console import Console

    from ..sweeps.sweep import Sweep


def compare(
    task: Tasks = None,
    hook: Hooks = None,
    optimizer: Optimizers = None,
    ranks: Ranks = None,
    link: Links = None,
    rate: Annotated[list[str] | None, rate_option(DEFAULT_RATE, REPEAT)] = None,
    latency: Annotated[str | None, latency_option(DEFAULT_LATENCY)] = None,
    compute: ComputeOption = None,
    steps: Steps = None,
    size: Size = None,
    seed: Seed = None,
    seeds: Seeds = None,
    ddp: Ddp = "core",
    sharded: Sharded = False,
    bucket_cap_mb: BucketCap = None,
    baseline: Baseline = None,
    target_loss: Target = None,
    evaluate_every: EvaluateEvery = 20,
    go_on: GoOn = 10,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train one model under several hooks."""
    with errors_in_words() as console:
        from ..runs import SHARDED
        from ..sweeps.output import dated_folder
        from ..sweeps.plan import plan
        from ..sweeps.presets import DEFAULT_HOOKS, DEFAULT_TASKS, SHARDED_HOOKS
        from ..sweeps.sweep import Sweep
        from ..training.stock import NO_HOOK

        if sharded:
            if ddp != "core":
                raise ValueError(f"--sharded trains with FSDP2 in place of a DDP: leave out --ddp {ddp}")
            ddp, baseline = SHARDED, baseline or NO_HOOK
            hook = list(dict.fromkeys([NO_HOOK, *(hook or SHARDED_HOOKS)]))

        runs = plan(
            task or DEFAULT_TASKS,
            hook or DEFAULT_HOOKS,
            optimizers=optimizer or [None],
            ranks=ranks or [None],
            links=links_in(link, rate, latency, ([DEFAULT_RATE], DEFAULT_LATENCY)),
            compute=compute,
            steps=steps,
            size=size,
            seeds=_seeds(seed, seeds),
            ddp=ddp,
            bucket_cap_mb=bucket_cap_mb,
            evaluate_every=evaluate_every,
        )
        sweep = Sweep(
            runs=runs,
            out=out or dated_folder(),
            overwrite=overwrite,
            baseline=baseline,
            target_loss=target_loss,
            go_on=go_on,
            command=command_given(),
            quiet=quiet,
        )
        make_runs(sweep, console)


def make_runs(sweep: Sweep, console: Console) -> None:
    """Train the runs; exit with 1 if some failed."""
    from ..sweeps.sweep import make

    if make(sweep, console).failures:
        raise typer.Exit(1)


def _seeds(seed: int | None, seeds: int | None) -> Sequence[int]:
    from ..sweeps.yaml_file import seeds_of

    if seed is not None and seeds is not None:
        raise ValueError("give --seed for one seed or --seeds for several, not both")
    return [seed or 0] if seeds is None else seeds_of(seeds)
