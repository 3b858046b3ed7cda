"""The command `commhooks compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from commhooks.experiments.commands.options import (
    REPEAT,
    Baseline,
    ComputeOption,
    Ddp,
    Device,
    GoOn,
    Hooks,
    Links,
    Matters,
    Optimizers,
    Out,
    Overwrite,
    Quiet,
    Ranks,
    Saves,
    Seeds,
    Sharded,
    Steps,
    Target,
    Tasks,
)
from commhooks.experiments.commands.terminal import command_given, errors_in_words
from commhooks.experiments.links.text import DEFAULT_LATENCY, DEFAULT_RATE

if TYPE_CHECKING:
    from rich.console import Console

    from commhooks.experiments.sweeps.sweep import Sweep


DEFAULT_TASKS = ("digits", "gpt")
DEFAULT_HOOKS = ("all-reduce", "fp16", "bf16", "powersgd:rank=1,start_after=5", "powersgd:rank=4,start_after=5")
SHARDED_HOOKS = ("bf16", "int8", "int4")
Rates = Annotated[
    list[str] | None,
    typer.Option(
        "--rate",
        help=f"A link's rate: 1.5Gbps, 12.5MB/s, unlimited; default: {DEFAULT_RATE}. Each has {DEFAULT_LATENCY} of "
        f"latency.{REPEAT}",
    ),
]


def compare(
    task: Tasks = None,
    hook: Hooks = None,
    optimizer: Optimizers = None,
    ranks: Ranks = None,
    device: Device = "auto",
    link: Links = None,
    rate: Rates = None,
    compute: ComputeOption = None,
    steps: Steps = None,
    seeds: Seeds = 1,
    ddp: Ddp = "core",
    sharded: Sharded = False,
    baseline: Baseline = None,
    target_loss: Target = None,
    matters: Matters = 0.01,
    saves: Saves = 0.05,
    go_on: GoOn = 10,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train one model under several hooks."""
    with errors_in_words() as console:
        from commhooks.experiments.results.verdicts import Margins
        from commhooks.experiments.runs import SHARDED
        from commhooks.experiments.sweeps.output import dated_folder
        from commhooks.experiments.sweeps.plan import plan
        from commhooks.experiments.sweeps.sweep import Sweep
        from commhooks.experiments.sweeps.yaml_file import seeds_of
        from commhooks.experiments.training.stock import NO_HOOK

        if sharded:
            if ddp != "core":
                raise ValueError(f"--sharded trains with FSDP2 in place of a DDP: leave out --ddp {ddp}")
            ddp, baseline = SHARDED, baseline or NO_HOOK
            hook = list(dict.fromkeys([NO_HOOK, *(hook or SHARDED_HOOKS)]))

        rates = rate or ([] if link else [DEFAULT_RATE])
        if more := [one for one in rates if "," in one]:
            raise ValueError(f"--rate {more[0]}: expected a rate alone, such as 100Mbit/s; write --link {more[0]}")
        runs = plan(
            task or DEFAULT_TASKS,
            hook or DEFAULT_HOOKS,
            optimizers=optimizer or [None],
            ranks=ranks or [None],
            device=device,
            links=[*(link or []), *(f"{one},latency={DEFAULT_LATENCY}" for one in rates)],
            compute=compute,
            steps=steps,
            seeds=seeds_of(seeds),
            ddp=ddp,
        )
        sweep = Sweep(
            runs=runs,
            out=out or dated_folder(),
            overwrite=overwrite,
            baseline=baseline,
            target_loss=target_loss,
            margins=Margins(matters=matters, saves=saves),
            go_on=go_on,
            command=command_given(),
            quiet=quiet,
        )
        make_runs(sweep, console)


def make_runs(sweep: Sweep, console: Console) -> None:
    """Train the runs; exit with 1 if some failed."""
    from commhooks.experiments.sweeps.sweep import make

    if make(sweep, console).failures:
        raise typer.Exit(1)
