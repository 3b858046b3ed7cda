"""The command line, `commhooks`."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from .cluster import commands as cluster_commands
from .front import COMMANDS, PURPOSE, version

if TYPE_CHECKING:
    from rich.console import Console

    from .link import LinkSettings

DEFAULT_TASKS = ["digits", "gpt"]
DEFAULT_HOOKS = ["all-reduce", "fp16", "bf16", "powersgd:rank=1,start_after=5", "powersgd:rank=4,start_after=5"]

app = typer.Typer(
    help=PURPOSE,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(cluster_commands.app, name="cluster")

_COMPARE_HELP = f"""
{COMMANDS["compare"]}

Every run has the same seed, data and number of steps; only the communication hook differs. \
The runs of a task take turns, one step each, so that their times can be compared. \
Ranks are processes on this machine, connected by an emulated link whose rate you choose; it does not need root.

[bold]The demo[/bold]: two tasks under five hooks on 2 ranks at 100 Mbit/s, about four minutes.

    commhooks compare

[bold]Choose[/bold] the task, the hooks, the link and the ranks.

    commhooks compare --task gpt --hook all-reduce --hook powersgd:rank=8 --rate 1Gbit/s --ranks 3

[bold]A quick look[/bold], on a small model.

    commhooks compare --task digits --size small --steps 30

[bold]Several machines[/bold], over their own network: torchrun starts the ranks.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 --no-python commhooks compare --rate unlimited

[bold]A hook[/bold] is a name, or a name with settings: fp16, powersgd:rank=4,start_after=10. \
The first hook is the baseline for the others. \
An unknown name or setting is reported before anything starts, with the names that exist.

[bold]The folder[/bold] given by --out receives report.html (one self-contained file), \
results/*.json (settings, versions, machine and every step of each run), plots/*.png and tensorboard/. \
A folder that already holds results raises an error before anything runs. --overwrite removes those results, \
and nothing that compare did not write.
"""

_OVERLAP_HELP = f"""
{COMMANDS["overlap"]}

Times three things in turns: a local step (compute), the collectives of a step with nothing to compute \
(communication), and a step that does both. The batch size is chosen so that the first two take about equally long. \
Prints step / (compute + communication): 1.0 would mean no overlap; about 0.67 is the best possible, because the \
forward pass, a third of the compute, has nothing to send.

    commhooks overlap --rate 100Mbit/s --rounds 9
"""

_LEADERBOARD_HELP = f"""
{COMMANDS["leaderboard"]}

The workers live in one process, and all runs have the same steps and data: only how gradients are averaged differs. \
The results are accuracy against bytes and against compute, with the Pareto front, \
differences from dense for each seed, and the effect of error feedback beside the one published by GRACE.

[bold]All of them[/bold], about a quarter of an hour on two cores.

    commhooks leaderboard --out runs/leaderboard

[bold]A few[/bold], on one task, with more seeds.

    commhooks leaderboard --only top-k,powersgd --tasks digits --seeds 10 --out runs/few

[bold]The folder[/bold] receives leaderboard.html (one self-contained file), runs.csv, standings.csv, \
grace.csv and plots/*.png. Existing results are replaced only with --overwrite.
"""


class _EachOptionOnce(TyperCommand):
    """A command that rejects an option given twice; Typer would silently take the last one."""

    # "supertype defines the argument type as Context", a class that only a private module of Typer has
    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments; options that are lists may be repeated."""
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        for option in given:
            if given.count(option) > 1 and not getattr(option, "multiple", False):
                ctx.fail(f"{option.opts[0]} is given {given.count(option)} times, but takes one value: give it once.")
        return super().parse_args(ctx, args)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(version())
        raise typer.Exit


@app.callback()
def commhooks(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions, and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run before every command; do nothing except for --version."""


@app.command(help=_COMPARE_HELP, cls=_EachOptionOnce)
def compare(
    task: Annotated[list[str], typer.Option(help="What to train: digits or gpt. Repeat for both.")] = DEFAULT_TASKS,
    hook: Annotated[
        list[str], typer.Option(help="A hook, name:setting=value,... Repeat; the first is the baseline.")
    ] = DEFAULT_HOOKS,
    ranks: Annotated[
        int | None, typer.Option(help="Processes on this machine (2); under torchrun its world size.")
    ] = None,
    rate: Annotated[str, typer.Option(help="The link's rate: 100Mbit/s, 1.5Gbps, 12.5MB/s, unlimited.")] = "100Mbit/s",
    latency: Annotated[
        str, typer.Option(help="The link's latency, per step around the ring: 0.2ms, 50us, 0.")
    ] = "0.2ms",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps per run; default: the task's own.")] = None,
    size: Annotated[str, typer.Option(help="The model's size: tiny, small, medium or large.")] = "medium",
    seed: Annotated[int, typer.Option(help="The same seed gives the same losses, bit for bit.")] = 0,
    ddp: Annotated[str, typer.Option(help="core: ddp_core's DistributedDataParallel; torch: PyTorch's.")] = "core",
    bucket_cap_mb: Annotated[float | None, typer.Option(help="Bucket size in MiB; default: the DDP's own.")] = None,
    target_loss: Annotated[
        float | None, typer.Option(help="Training loss to reach; default: 95 % of the baseline's progress.")
    ] = None,
    eval_every: Annotated[int, typer.Option(help="Steps between two evaluations on held-out data.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Folder for the report; default: runs/<date-time>.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results of an earlier comparison in that folder.")
    ] = False,
) -> None:
    """Train one model under several hooks."""
    with _errors_in_words() as console:
        from .compare import Comparison
        from .compare import compare as run_comparison
        from .plan import plan

        runs = plan(
            task,
            hook,
            ranks=ranks,
            link=_link(rate, latency),
            steps=steps,
            size=size,
            seed=seed,
            ddp=ddp,
            bucket_cap_mb=bucket_cap_mb,
            evaluate_every=eval_every,
        )
        folder = out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}"
        command = shlex.join(["commhooks", *sys.argv[1:]])
        comparison = Comparison(runs=runs, out=folder, overwrite=overwrite, target_loss=target_loss, command=command)
        run_comparison(comparison, console)


@app.command(help=_OVERLAP_HELP, cls=_EachOptionOnce)
def overlap(
    task: Annotated[str, typer.Option(help="Whose model to train: digits or gpt.")] = "gpt",
    size: Annotated[str, typer.Option(help="The model's size: tiny, small, medium or large.")] = "medium",
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
    with _errors_in_words() as console:
        from .overlap import OverlapSettings, measure_overlap, overlap_table

        settings = OverlapSettings(
            task=task,
            size=size,
            ranks=ranks,
            link=_link(rate, latency),
            rounds=rounds,
            ddp=ddp,
            bucket_cap_mb=bucket_cap_mb,
        )
        console.print(overlap_table(measure_overlap(settings)))


@app.command(help=_LEADERBOARD_HELP, cls=_EachOptionOnce)
def leaderboard(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/leaderboard"),
    tasks: Annotated[str, typer.Option(help="What to train, as a list.")] = ",".join(DEFAULT_TASKS),
    seeds: Annotated[int, typer.Option(help="Runs of each compressor; more: narrower intervals.")] = 3,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps per run; default: the task's own.")] = None,
    workers: Annotated[int, typer.Option(help="Workers that share each batch.")] = 4,
    only: Annotated[str | None, typer.Option(help="Names of compressors, as a list; default: all.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results of an earlier leaderboard in that folder.")
    ] = False,
    docs: Annotated[Path | None, typer.Option(help="Folder for the tables and pictures of the documentation.")] = None,
    processes: Annotated[int | None, typer.Option(help="How many runs at a time; default: one per core.")] = None,
) -> None:
    """Train under every compressor, and report what each costs."""
    with _errors_in_words() as console:
        from .leaderboard import Leaderboard, run_leaderboard

        board = Leaderboard(
            out=out,
            tasks=_names(tasks),
            seeds=seeds,
            steps=steps,
            workers=workers,
            only=None if only is None else _names(only),
            overwrite=overwrite,
            docs=docs,
            processes=processes,
            command=shlex.join(["commhooks", *sys.argv[1:]]),
        )
        run_leaderboard(board, console)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _link(rate: str, latency: str) -> LinkSettings:
    from .link import LinkSettings, parse_latency, parse_rate

    return LinkSettings(bits_per_second=parse_rate(rate), latency_seconds=parse_latency(latency))


@contextmanager
def _errors_in_words() -> Iterator[Console]:
    """Provide a console; exit with 2 on a user's mistake, 1 on a rank's failure, 130 on Ctrl-C, and say why."""
    from rich.console import Console

    from .launch import WorldError

    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield Console() if sys.stdout.isatty() else Console(width=110)
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    except WorldError as error:
        typer.echo(f"\n{error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("\nstopped; the ranks are ended", err=True)
        raise typer.Exit(130) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: object) -> None:
    """Turn a termination request into an orderly exit, so that the ranks are ended first."""
    raise SystemExit(128 + number)
