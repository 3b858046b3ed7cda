"""The command line, `commhooks`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..links.text import DEFAULT_LATENCY, DEFAULT_LINK, DEFAULT_RATE
from . import cluster, help_texts
from .estimate import estimate
from .leaderboard import leaderboard
from .options import (
    Baseline,
    BucketCap,
    ComputeOption,
    Ddp,
    EvaluateEvery,
    GoOn,
    Hooks,
    Latency,
    Links,
    Optimizers,
    Out,
    Overwrite,
    Quiet,
    Ranks,
    Rates,
    Seed,
    Seeds,
    Size,
    Steps,
    Target,
    Tasks,
)
from .overlap import overlap
from .plan import plan
from .probe import probe
from .profile import profile
from .purpose import PURPOSE, version
from .simulate import simulate
from .terminal import EachOptionOnce, command_given, errors_in_words

if TYPE_CHECKING:
    from rich.console import Console

    from ..runs import RunResult, RunSettings
    from ..sweeps.sweep import Sweep

app = typer.Typer(
    help=PURPOSE,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(cluster.app, name="cluster")


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


@app.command(help=help_texts.COMPARE, cls=EachOptionOnce)
def compare(
    task: Tasks = None,
    hook: Hooks = None,
    optimizer: Optimizers = None,
    ranks: Ranks = None,
    link: Links = None,
    rate: Rates = None,
    latency: Latency = None,
    compute: ComputeOption = None,
    steps: Steps = None,
    size: Size = None,
    seed: Seed = None,
    seeds: Seeds = None,
    ddp: Ddp = "core",
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
        from ..sweeps.plan import plan
        from ..sweeps.presets import DEFAULT_HOOKS, DEFAULT_TASKS
        from ..sweeps.sweep import Sweep

        runs = plan(
            task or DEFAULT_TASKS,
            hook or DEFAULT_HOOKS,
            optimizers=optimizer or [None],
            ranks=ranks or [None],
            links=_links(link, rate, latency),
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
            out=out or _dated(),
            overwrite=overwrite,
            baseline=baseline,
            target_loss=target_loss,
            go_on=go_on,
            command=command_given(),
            quiet=quiet,
        )
        _make(sweep, console)


@app.command(help=help_texts.RUN, cls=EachOptionOnce)
def run(
    task: Annotated[str, typer.Option(help="What to train: digits, gpt, lstm, or your own file.py:function.")],
    hook: Annotated[str, typer.Option(help="The hook, name:setting=value,...")] = "all-reduce",
    optimizer: Annotated[str | None, typer.Option(help="sgd:lr=0.1,momentum=0.9; default: the task's own.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes here; default: 2, or torchrun's world size.")] = None,
    link: Annotated[str, typer.Option(help="The link: 1Gbit/s,latency=1ms, or real.")] = DEFAULT_LINK,
    compute: ComputeOption = None,
    steps: Steps = None,
    seed: Seed = None,
    seeds: Seeds = None,
    ddp: Ddp = "core",
    bucket_cap_mb: BucketCap = None,
    evaluate_every: EvaluateEvery = 20,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train one model under one hook."""
    with errors_in_words() as console:
        from ..sweeps.plan import plan
        from ..sweeps.sweep import Sweep

        runs = plan(
            [task],
            [hook],
            optimizers=[optimizer],
            ranks=[ranks],
            links=[link],
            compute=compute,
            steps=steps,
            seeds=_seeds(seed, seeds),
            ddp=ddp,
            bucket_cap_mb=bucket_cap_mb,
            evaluate_every=evaluate_every,
        )
        sweep = Sweep(
            runs=runs,
            out=out or _dated(),
            overwrite=overwrite,
            command=command_given(),
            report=False,
            quiet=quiet,
        )
        _make(sweep, console)


@app.command(help=help_texts.SWEEP, cls=EachOptionOnce)
def sweep(
    file: Annotated[Path | None, typer.Argument(help="A YAML file with runs.", show_default=False)] = None,
    preset: Annotated[
        str | None, typer.Option(help="Instead of a file: demo, quick, slow-links or slow-links-long.")
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a file that works, with comments.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and estimate the time.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; default: the file's, or runs/<name>.")
    ] = None,
    overwrite: Overwrite = False,
    baseline: Baseline = None,
    target_loss: Target = None,
    quiet: Quiet = False,
) -> None:
    """Make all the runs of a YAML file."""
    with errors_in_words() as console:
        from ..sweeps.yaml_file import EXAMPLE

        if example:
            typer.echo(EXAMPLE, nl=False)
            return
        asked = _asked_sweep(file, preset)
        asked = dataclasses.replace(
            asked,
            out=out or asked.out,
            overwrite=overwrite,
            baseline=baseline or asked.baseline,
            target_loss=asked.target_loss if target_loss is None else target_loss,
            command=command_given(),
            quiet=quiet,
        )
        if dry_run:
            _print_forecast(asked, console)
        else:
            _make(asked, console)


@app.command(help=help_texts.REPORT, cls=EachOptionOnce)
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders written by compare, sweep or run.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the report; default: the first of the folders.")] = None,
    baseline: Baseline = None,
    target_loss: Target = None,
) -> None:
    """Write tables and the report again."""
    with errors_in_words() as console:
        from ..sweeps.sweep import report_again

        report_again(
            folders, out or folders[0], console, baseline=baseline, target_loss=target_loss, command=command_given()
        )


app.command(help=help_texts.OVERLAP, cls=EachOptionOnce)(overlap)
app.command(help=help_texts.PROFILE, cls=EachOptionOnce)(profile)
app.command(help=help_texts.LEADERBOARD, cls=EachOptionOnce)(leaderboard)
app.command(help=help_texts.PROBE, cls=EachOptionOnce)(probe)
app.command(help=help_texts.PLAN, cls=EachOptionOnce)(plan)
app.command(help=help_texts.ESTIMATE, cls=EachOptionOnce)(estimate)
app.command(help=help_texts.SIMULATE, cls=EachOptionOnce)(simulate)


def _asked_sweep(file: Path | None, preset: str | None) -> Sweep:
    """Return the sweep of a file or of a preset."""
    from ..sweeps.presets import preset as runs_of_preset
    from ..sweeps.sweep import Sweep
    from ..sweeps.yaml_file import read_sweep

    if (file is None) == (preset is None):
        raise ValueError(
            "name a YAML file or a preset: 'commhooks sweep FILE.yaml' or 'commhooks sweep --preset quick'; "
            "'commhooks sweep --example > FILE.yaml' writes a file that works"
        )
    if preset is not None:
        return Sweep(runs=runs_of_preset(preset), out=Path("runs") / preset)
    assert file is not None, "one of the two is there"
    return Sweep(**vars(read_sweep(file)))


def _make(sweep: Sweep, console: Console) -> None:
    """Make the runs; exit with 1 if some failed."""
    from ..sweeps.sweep import make

    if make(sweep, console).failures:
        raise typer.Exit(1)


def _print_forecast(sweep: Sweep, console: Console) -> None:
    from ..sweeps.forecast import forecast
    from ..sweeps.store import finished, sources_of

    done: dict[RunSettings, RunResult] = {}
    if not sweep.overwrite:
        done = finished(sweep.out, sweep.runs, sources_of(sweep.runs))
    for line in forecast(sweep.runs, done):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _links(links: Sequence[str] | None, rates: Sequence[str] | None, latency: str | None) -> list[str]:
    """Return the links in full: those given so, and one for each rate, with the latency.

    Raises:
        ValueError: A latency is given, and no rate that could have it.

    """
    if links and not rates and latency is not None:
        raise ValueError(
            "--latency is that of each --rate; that of a --link is part of it: write --link "
            f"{links[0]},latency={latency}"
        )
    if not links and not rates:
        rates = [DEFAULT_RATE]
    latency = DEFAULT_LATENCY if latency is None else latency
    return [*(links or []), *(f"{rate},latency={latency}" for rate in rates or [])]


def _seeds(seed: int | None, seeds: int | None) -> Sequence[int]:
    from ..sweeps.yaml_file import seeds_of

    if seed is not None and seeds is not None:
        raise ValueError("give --seed for one seed or --seeds for several, not both")
    return [seed or 0] if seeds is None else seeds_of(seeds)


def _dated() -> Path:
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}"
