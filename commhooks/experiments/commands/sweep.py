"""The commands `commhooks sweep` and `commhooks report`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commhooks.experiments.commands.compare import make_runs
from commhooks.experiments.commands.options import (
    Baseline,
    Matters,
    Overwrite,
    Quiet,
    Saves,
    Target,
    json_option,
)
from commhooks.experiments.commands.terminal import check_unused, command_given, errors_in_words, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from commhooks.experiments.sweeps.sweep import Sweep


def sweep(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="A YAML file with runs.", show_default=False)] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a file that works, with comments.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the runs and list them.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; default: the file's, or runs/<name>.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda (a GPU for each rank) or auto, in place of the file's.")
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Train all the runs of a YAML file."""
    with errors_in_words() as console:
        from commhooks.experiments.sweeps.sweep import Sweep
        from commhooks.experiments.sweeps.yaml_file import EXAMPLE, read_sweep

        if example:
            check_unused(context, ["dry_run", "out", "device", "overwrite", "quiet"], "with --example")
            typer.echo(EXAMPLE, nl=False)
            return
        if file is None:
            raise ValueError(
                "name a YAML file: 'commhooks sweep FILE.yaml'; 'commhooks sweep --example > FILE.yaml' writes one "
                "that works"
            )
        asked = Sweep(**vars(read_sweep(file, device)), overwrite=overwrite, command=command_given(), quiet=quiet)
        asked = dataclasses.replace(asked, out=out or asked.out)
        if dry_run:
            _list_runs(asked, console)
        else:
            make_runs(asked, console)


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders written by compare or sweep.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the report; default: the first of the folders.")] = None,
    baseline: Baseline = None,
    target_loss: Target = None,
    matters: Matters = 0.01,
    saves: Saves = 0.05,
    json: Annotated[Path | None, json_option("a summary with units, spread and seeds")] = None,
) -> None:
    """Write tables and the report again."""
    with errors_in_words(json) as console:
        from commhooks.experiments.report.as_json import write_text
        from commhooks.experiments.results.verdicts import Margins
        from commhooks.experiments.sweeps.sweep import report_again

        found = report_again(
            folders,
            out or folders[0],
            console,
            baseline=baseline,
            target_loss=target_loss,
            margins=Margins(matters=matters, saves=saves),
            command=command_given(),
        )
        if json is not None:
            write_json(lambda path: write_text(found, path), "summary     ", json, console)


def _list_runs(sweep: Sweep, console: Console) -> None:
    """Print every run with the settings in which runs differ, and how many are finished."""
    from commhooks.experiments.sweeps.store import finished, sources_of

    done = {} if sweep.overwrite else finished(sweep.out, sweep.runs, sources_of(sweep.runs))
    settings = [{name: getattr(value, "label", value) for name, value in vars(one).items()} for one in sweep.runs]
    shown = [name for name in settings[0] if len({one[name] for one in settings}) > 1] or ["task", "hook"]
    for one, labels in zip(sweep.runs, settings, strict=True):
        line = ", ".join(f"{name} {labels[name]}" for name in shown if labels[name] is not None)
        console.print(f"{line}{': finished' if one in done else ''}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(done)} of {len(sweep.runs)} runs are finished already.", highlight=False)
