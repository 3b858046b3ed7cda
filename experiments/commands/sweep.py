"""The commands `commhooks sweep` and `commhooks report`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .compare import make_runs
from .options import Baseline, Overwrite, Quiet, Target, json_option
from .terminal import check_unused, command_given, errors_in_words, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from ..runs import RunResult, RunSettings
    from ..sweeps.sweep import Sweep


def sweep(
    context: typer.Context,
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
    """Train all the runs of a YAML file."""
    with errors_in_words() as console:
        from ..sweeps.yaml_file import EXAMPLE

        if example:
            others = [name for name in context.params if name not in {"example", "file"}]
            check_unused(context, others, "with --example")
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
            make_runs(asked, console)


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders written by compare, sweep or run.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the report; default: the first of the folders.")] = None,
    baseline: Baseline = None,
    target_loss: Target = None,
    json: Annotated[Path | None, json_option("a summary with units, spread and seeds")] = None,
) -> None:
    """Write tables and the report again."""
    with errors_in_words(json) as console:
        from ..report.as_json import write_text
        from ..sweeps.sweep import report_again

        found = report_again(
            folders, out or folders[0], console, baseline=baseline, target_loss=target_loss, command=command_given()
        )
        if json is not None:
            write_json(lambda path: write_text(found, path), "summary     ", json, console)


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


def _print_forecast(sweep: Sweep, console: Console) -> None:
    from ..sweeps.forecast import forecast
    from ..sweeps.store import finished, sources_of

    done: dict[RunSettings, RunResult] = {}
    if not sweep.overwrite:
        done = finished(sweep.out, sweep.runs, sources_of(sweep.runs))
    for line in forecast(sweep.runs, done):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
