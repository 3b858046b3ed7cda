"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def complete_hook(incomplete: str) -> list[str]:
    """Return the names of hooks that begin with this text, for the shell's completion."""
    from commhooks.experiments.cards import hook_names

    return [name for name in hook_names() if name.startswith(incomplete)]


def complete_task(incomplete: str) -> list[str]:
    """Return the names of built-in tasks that begin with this text, for the shell's completion."""
    from commhooks.experiments.cards import task_names

    return [name for name in task_names() if name.startswith(incomplete)]


def json_option(what: str) -> Any:
    """Return the option --json of a command whose output is called `what`."""
    return typer.Option(
        "--json", help=f"Write {what} to this file; -: to standard output, and all other output to standard error."
    )


def task_option(more: str = "") -> Any:
    """Return the option --task of a command; `more` is added to its help."""
    return typer.Option(
        "--task",
        help=f"The task: digits, gpt, lstm, or your own file.py:function.{more}",
        autocompletion=complete_task,
    )


REPEAT = " Repeat for more."
Tasks = Annotated[list[str] | None, task_option(REPEAT)]


def hook_option(more: str = "") -> Any:
    """Return the option --hook of a command; `more` is added to its help."""
    return typer.Option("--hook", help=f"A hook, name:setting=value,...{more}{REPEAT}", autocompletion=complete_hook)


Hooks = Annotated[list[str] | None, hook_option()]
Optimizers = Annotated[
    list[str] | None,
    typer.Option("--optimizer", help="One of PyTorch's: sgd:lr=0.1; default: the task's own. Repeat for more."),
]
Ranks = Annotated[
    list[int] | None,
    typer.Option("--ranks", help="Processes on this machine; default: 2, or torchrun's world size. Repeat for more."),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="cpu, cuda (a GPU for each rank), or auto: a GPU if there is one; without one it trains on the CPU.",
    ),
]
Links = Annotated[list[str] | None, typer.Option("--link", help=f"A link in full: 100Mbit/s,latency=1ms.{REPEAT}")]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps per run; default: the task's own.")]
Seeds = Annotated[int, typer.Option(help="The number of seeds, from 0 on; several give intervals.")]
ComputeOption = Annotated[
    str | None,
    typer.Option("--compute", help="Time of a step's compute on your processor: 200ms, or 0.5x of its time here."),
]
Ddp = Annotated[str, typer.Option(help="core: ddp_core's DistributedDataParallel; torch: PyTorch's.")]
Sharded = Annotated[
    bool, typer.Option("--sharded", help="Shard the model with FSDP2, and compare with plain FSDP2 (torch.none).")
]
BucketCap = Annotated[float | None, typer.Option(help="Bucket size in MiB; default: the DDP's own.")]
Target = Annotated[float | None, typer.Option(help="Training loss to reach; default: 95 % of the baseline's progress.")]
Matters = Annotated[
    float, typer.Option(help="A difference of losses matters above this fraction of what the baseline's loss falls.")
]
Saves = Annotated[float, typer.Option(help="A saving matters above this fraction of a step's time.")]
Baseline = Annotated[
    str | None, typer.Option(help="The hook with which others are compared; default: all-reduce, or else the first.")
]
GoOn = Annotated[
    int,
    typer.Option(
        help="A hook may take up to this many times its steps, to reach the target or use the baseline's time."
    ),
]
Out = Annotated[Path | None, typer.Option(help="Folder for the results; default: runs/<date-time>.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Remove the results of earlier commands in that folder first.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show nothing during the runs.")]
WorldRanks = Annotated[
    int | None, typer.Option("--ranks", help="Processes on this machine; default: 2, or torchrun's world size.")
]
WorldLink = Annotated[
    str | None,
    typer.Option(
        "--link",
        help="hosts:1Gbit/s (as root), an emulated 100Mbit/s,latency=1ms, or, under torchrun, real; default: no limit.",
    ),
]
