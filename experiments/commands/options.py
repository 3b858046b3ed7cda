"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", help="What to train: digits, gpt, lstm, or your own file.py:function. Repeat for more."),
]
Hooks = Annotated[list[str] | None, typer.Option("--hook", help="A hook, name:setting=value,... Repeat for more.")]
Optimizers = Annotated[
    list[str] | None,
    typer.Option("--optimizer", help="One of PyTorch's: sgd:lr=0.1; default: the task's own. Repeat for more."),
]
Ranks = Annotated[
    list[int] | None,
    typer.Option("--ranks", help="Processes on this machine; default: 2, or torchrun's world size. Repeat for more."),
]
Links = Annotated[
    list[str] | None, typer.Option("--link", help="A link in full: 100Mbit/s,latency=1ms. Repeat for more.")
]
Rates = Annotated[
    list[str] | None,
    typer.Option("--rate", help="A link's rate: 1.5Gbps, 12.5MB/s, unlimited; default: 100Mbit/s. Repeat for more."),
]
Latency = Annotated[
    str | None,
    typer.Option(help="The latency of each --rate, per step around the ring: 50us, 0; default: 0.2ms."),
]
Steps = Annotated[int | None, typer.Option(help="Optimizer steps per run; default: the task's own.")]
Size = Annotated[str | None, typer.Option(help="Size of a built-in task's model: tiny, small, medium, large.")]
Seed = Annotated[int | None, typer.Option(help="A single seed (default: 0); with it, losses are the same bit for bit.")]
Seeds = Annotated[int | None, typer.Option(help="How many seeds, from 0 on; several give intervals.")]
ComputeOption = Annotated[
    str | None,
    typer.Option("--compute", help="A step's compute on your processor: 200ms, or 0.5x of what it takes here."),
]
Ddp = Annotated[str, typer.Option(help="core: ddp_core's DistributedDataParallel; torch: PyTorch's.")]
BucketCap = Annotated[float | None, typer.Option(help="Bucket size in MiB; default: the DDP's own.")]
Target = Annotated[float | None, typer.Option(help="Training loss to reach; default: 95 % of the baseline's progress.")]
Baseline = Annotated[
    str | None, typer.Option(help="The hook that others are compared with; default: all-reduce, or else the first.")
]
EvaluateEvery = Annotated[
    int, typer.Option("--evaluate-every", "--eval-every", help="Steps between two evaluations on held-out data.")
]
GoOn = Annotated[
    int,
    typer.Option(help="Times its steps that a hook may take at most, to reach the target or have the baseline's time."),
]
Out = Annotated[Path | None, typer.Option(help="Folder for the results; default: runs/<date-time>.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Remove the results of earlier commands in that folder first.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show nothing while the runs go.")]
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
Unsteady = Annotated[
    bool, typer.Option("--unsteady", help="Go on even if two halves of the probe disagree by more than 30 %.")
]
