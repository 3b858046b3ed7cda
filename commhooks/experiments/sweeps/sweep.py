"""The runs of a command: finished ones stay in its folder, missing ones are made, and all are reported."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from commhooks.experiments.cluster import ClusterError
from commhooks.experiments.launch import WorldError, check_real, reason_of, torchrun_world
from commhooks.experiments.report.as_json import summary
from commhooks.experiments.report.table import print_tables
from commhooks.experiments.report.writing import write
from commhooks.experiments.results.goals import GoingOn
from commhooks.experiments.results.outcomes import chosen_baseline
from commhooks.experiments.results.verdicts import USUAL, Margins
from commhooks.experiments.runs import RunSettings
from commhooks.experiments.specs import Spec
from commhooks.experiments.sweeps.execute import Made, execute, goes_on_from
from commhooks.experiments.sweeps.live import Live, listeners
from commhooks.experiments.sweeps.lock import claimed
from commhooks.experiments.sweeps.notes import notes_about
from commhooks.experiments.sweeps.output import LOGS, PLOTS, TABLES, prepare_folder
from commhooks.experiments.sweeps.plan import crowded
from commhooks.experiments.sweeps.store import (
    FAILURES,
    RESULTS,
    finished,
    read_failures,
    read_readable,
    read_results,
    remove_failure,
    remove_partial,
    sources_of,
    write_failure,
)
from commhooks.experiments.sweeps.tensorboard import LiveLogs
from commhooks.units import unknown


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Runs to make, and where to put the results."""

    runs: tuple[RunSettings, ...]
    out: Path
    overwrite: bool = False  # results of an earlier command in that folder
    baseline: str | None = None  # the hook with which others are compared; None: all-reduce, or else the first
    target_loss: float | None = None  # training loss to reach; None: derived from the baseline's runs
    margins: Margins = USUAL  # what matters in a verdict
    command: str = "commhooks sweep"  # the command that reproduces the report
    report: bool = True  # True: the page and its pictures are written
    quiet: bool = False  # True: nothing is shown during the runs
    go_on: int = 1  # a run takes up to this many times its steps, to use the baseline's time or reach the target

    def __post_init__(self) -> None:
        check_presentation(self.baseline, self.target_loss, [settings.hook for settings in self.runs])
        if not isinstance(self.go_on, int) or self.go_on < 1:
            raise ValueError(
                "go_on: expected a whole number of at least 1: a run takes up to this many times its steps (got "
                f"{self.go_on!r}); with 1 every run ends after its steps"
            )

    def going_on(self, known: Iterable[RunSettings]) -> GoingOn | None:
        """Return the goals of runs that continue after their steps; the baseline may be a hook that was run earlier."""
        if self.go_on == 1:
            return None
        hooks = [settings.hook for settings in (*self.runs, *known)]
        return GoingOn(baseline=chosen_baseline(self.baseline, hooks), times=self.go_on, target=self.target_loss)


def check_presentation(baseline: str | None, target_loss: float | None, hooks: Sequence[Spec]) -> None:
    """Raise ValueError if there is no such baseline among the hooks, or no such target."""
    if target_loss is not None and not 0 < target_loss < math.inf:
        raise ValueError(f"target loss {target_loss:g}: expected a finite loss above zero")
    labels = [hook.label for hook in hooks]
    if baseline is not None and Spec.parse(baseline).label not in labels:
        raise ValueError(f"{unknown('baseline', baseline, set(labels))}; it must be one of the hooks")


def make(sweep: Sweep, console: Console) -> Made:
    """Make the unfinished runs, and report and return all requested ones (under torchrun on rank 0).

    Raises:
        ValueError: The folder cannot be used, another process uses it, or its results belong to another task; or a
            run's link is the real network, without torchrun.

    """
    for settings in sweep.runs:
        check_real(settings.link)
    world = torchrun_world()
    if world is not None and world[0] > 0:  # it trains what rank 0 finds missing
        return execute(sweep.runs, sweep.out, lambda settings, message: None)  # and goes on as far as rank 0 says
    with claimed(sweep.out):
        prepare_folder(sweep.out, overwrite=sweep.overwrite)
        remove_partial(sweep.out)
        made = _make_missing(sweep, console)
        for settings in made.results:
            remove_failure(sweep.out, settings)
        for settings, traceback in made.failures.items():
            write_failure(sweep.out, settings, traceback)
        if made.results:
            _report(sweep, made, console)
    _print_ending(sweep, made, console)
    return made


def _make_missing(sweep: Sweep, console: Console) -> Made:
    """Make the runs that have no result; return their results and the earlier ones, in the order of the request."""
    done = finished(sweep.out, sweep.runs, sources_of(sweep.runs))
    known = {result.settings: result for result in read_readable(sweep.out)[0]} if sweep.go_on > 1 else {}
    missing = [settings for settings in sweep.runs if settings not in done]
    if done:
        _say(console, f"{len(done)} of {len(sweep.runs)} runs are finished already: {sweep.out / RESULTS}")
    warning = crowded(missing)
    if warning is not None:
        _say(console, f"warning: {warning}")
    made = Made()
    try:
        with (
            LiveLogs(sweep.out / LOGS) as logs,
            Live(sweep.runs, done, console, quiet=sweep.quiet) as live,
        ):
            made = execute(missing, sweep.out, listeners(live, logs), going_on=sweep.going_on(known), known=known)
    except (KeyboardInterrupt, SystemExit, WorldError, ClusterError, OSError):
        left = [one for one in sweep.runs if not (sweep.out / RESULTS / f"{one.name}.json").is_file()]
        there, saved = len(sweep.runs) - len(left), goes_on_from(sweep.out, left)
        goes_on = f", {len(saved)} of them from step {' or '.join(map(str, sorted(set(saved))))} on" if saved else ""
        print(
            f"\n{there} of {len(sweep.runs)} runs are finished, in {sweep.out}; the same command, with this folder as "
            f"--out, {'makes the others' if left else 'writes the report'}{goes_on}",
            file=sys.stderr,
        )
        raise
    results = done | made.results
    return Made({settings: results[settings] for settings in sweep.runs if settings in results}, made.failures)


def _report(sweep: Sweep, made: Made, console: Console) -> None:
    """Print the tables of the requested runs, and write the report of all runs in the folder."""
    asked, failures = list(made.results.values()), read_failures([sweep.out])
    console.print()
    for note in notes_about(asked):
        _say(console, f"warning: {note}")
    print_tables(
        asked,
        console,
        baseline=sweep.baseline,
        target_loss=sweep.target_loss,
        margins=sweep.margins,
        failures=list(failures),
    )
    if not sweep.report:
        return
    found, left_out = read_readable(sweep.out)
    others = [result for result in found if result.settings not in made.results]
    results = [*asked, *others]
    write(
        results,
        sweep.out,
        baseline=sweep.baseline,
        target_loss=sweep.target_loss,
        margins=sweep.margins,
        command=sweep.command,
        notes=[*notes_about(results), *left_out],
        failures=failures,
    )
    for note in left_out:
        _say(console, f"warning: {note}")


def report_again(
    folders: Sequence[Path],
    out: Path,
    console: Console,
    *,
    baseline: str | None = None,
    target_loss: float | None = None,
    margins: Margins = USUAL,
    command: str = "commhooks report",
) -> dict[str, Any]:
    """Print the tables, write the report of all results in these folders, and return what `report --json` writes.

    Raises:
        ValueError: A folder has no results, a result is damaged, or the folder for the report cannot be used.

    """
    results = read_results(folders)
    finished = {result.settings for result in results}  # what failed in one folder may have been made in another
    failures = {settings: text for settings, text in read_failures(folders).items() if settings not in finished}
    hooks = [settings.hook for settings in (*(result.settings for result in results), *failures)]
    check_presentation(baseline, target_loss, hooks)
    shown: dict[str, Any] = {"baseline": baseline, "target_loss": target_loss, "margins": margins}
    notes = notes_about(results)
    beside = {folder.resolve() for folder in folders} == {out.resolve()} and (out / RESULTS).is_dir()
    with claimed(out):
        prepare_folder(out, (PLOTS, TABLES))
        for note in notes:
            _say(console, f"warning: {note}")
        print_tables(results, console, **shown, failures=list(failures))
        path = write(
            results,
            out,
            **shown,
            command=command,
            notes=notes,
            failures=failures,
            folders=[] if beside else [str(folder) for folder in folders],
        )
    _say(console, f"\nreport       {path}")
    return summary(results, **shown, command=command, notes=notes, failures=failures)


def _print_ending(sweep: Sweep, made: Made, console: Console) -> None:
    """Print where everything is, and which runs failed."""
    for settings, story in made.failures.items():
        _say(console, f"failed: {settings.label} ({settings.link.label}, {settings.ranks} ranks): {reason_of(story)}")
    if made.failures:
        _say(console, f"{len(made.failures)} of {len(sweep.runs)} runs failed; tracebacks in {sweep.out / FAILURES}")
        _say(console, "the same command tries them again, and keeps what is finished")
    console.print()
    if sweep.report and made.results:
        _say(console, f"report       {sweep.out / 'report.html'}")
    _say(console, f"results      {sweep.out / RESULTS}")
    _say(console, f"tensorboard  tensorboard --logdir {sweep.out / LOGS}")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
