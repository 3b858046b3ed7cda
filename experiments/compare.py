"""Running a comparison, from its settings to its report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .launch import Send, run_in_torchrun, run_world, torchrun_world
from .output import REPORT, prepare_folder
from .report.page import PICTURES, page
from .report.plots import THEMES, loss_against_bytes, loss_against_time, step_time
from .report.table import summary_tables
from .report.tensorboard import write_logs
from .report.words import by_task, seconds_in_words
from .runs import RunResult, RunSettings
from .summary import TARGET_RULE, Summary, summarise, total_seconds
from .tasks import make_task
from .worker import RunDone, StepDone, train_all


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What to compare, and where to put the results."""

    runs: tuple[RunSettings, ...]
    out: Path
    overwrite: bool = False  # results of an earlier comparison in that folder
    target_loss: float | None = None  # None: derived from the first hook's run
    command: str = "commhooks compare"  # the command that reproduces the report

    def __post_init__(self) -> None:
        if self.target_loss is not None and not 0 < self.target_loss < math.inf:
            raise ValueError(f"target loss {self.target_loss:g}: expected a finite loss above zero")


def compare(comparison: Comparison, console: Console) -> list[Summary]:
    """Train every run, write the results, and return their summaries (under torchrun only on rank 0).

    Raises:
        ValueError: The folder holds anything that may not be overwritten; see `prepare_folder`.

    """
    world = torchrun_world()
    reports = world is None or world[0] == 0
    if reports:
        prepare_folder(comparison.out, overwrite=comparison.overwrite)
    results: list[RunResult] = []
    with _progress(console, disable=not reports or not console.is_terminal) as progress:
        listener = _Listener(comparison, progress, results)
        _train(comparison.runs, listener)
    if not reports:
        return []
    summaries = summarise(results, comparison.target_loss)
    write_report(results, summaries, comparison)
    _print(summaries, comparison, console)
    return summaries


def write_report(results: Sequence[RunResult], summaries: list[Summary], comparison: Comparison) -> Path:
    """Write the pictures and the HTML report, and return where the report is."""
    plots: dict[tuple[str, str, str], bytes] = {}
    for task, rows in by_task(summaries).items():
        runs = [result for result in results if result.settings.task == task]
        for theme in THEMES:
            drawn = (
                step_time(rows, theme),
                loss_against_bytes(runs, rows, theme),
                loss_against_time(runs, rows, theme),
            )
            plots.update({(task, picture, theme.name): png for picture, png in zip(PICTURES, drawn, strict=True)})
    for (task, picture, theme_name), png in plots.items():
        if theme_name == THEMES[0].name:
            (comparison.out / "plots" / f"{task}.{picture}.png").write_bytes(png)
    rule = (
        TARGET_RULE
        if comparison.target_loss is None
        else f"a mean training loss of {comparison.target_loss:g}, as asked for"
    )
    text = page(results, summaries, plots, target_rule=rule, command=comparison.command)
    path = comparison.out / REPORT
    path.write_text(text, encoding="utf-8")
    return path


def silence_allowed(runs: Sequence[RunSettings]) -> float:
    """Return how many seconds of silence mean that a world is stuck: 20 of the slowest steps, and two minutes."""
    return 120 + 20 * max(_dense_seconds(settings) for settings in runs)


def _dense_seconds(settings: RunSettings) -> float:
    """Return how long the plain all-reduce of all gradients takes on the link."""
    elements = sum(p.numel() for p in make_task(settings.task, settings.size).model(0).parameters())
    rate = settings.link.bits_per_second
    return 2 * 32 * elements / rate if rate else 0.0


def _train(runs: Sequence[RunSettings], listener: Send) -> None:
    if torchrun_world() is None:
        run_world(train_all, runs[0].ranks, runs, listener, timeout=silence_allowed(runs))
    else:
        run_in_torchrun(train_all, runs, listener, timeout=silence_allowed(runs))


class _Listener:
    """Updates the progress bars and writes each result as it comes: finished runs survive Ctrl-C."""

    def __init__(self, comparison: Comparison, progress: Progress, results: list[RunResult]) -> None:
        self._out = comparison.out
        self._progress = progress
        self._results = results
        self._bars: list[TaskID] = [
            progress.add_task(settings.label, total=settings.steps, loss="", start=False)
            for settings in comparison.runs
        ]

    def __call__(self, message: object) -> None:
        if isinstance(message, StepDone):
            if message.step == 1:
                self._progress.start_task(self._bars[message.run])
            self._progress.update(self._bars[message.run], completed=message.step, loss=f"loss {message.loss:.3f}")
        elif isinstance(message, RunDone):
            self._keep(message.result)

    def _keep(self, result: RunResult) -> None:
        self._results.append(result)
        result.write(self._out / "results")
        write_logs(result, self._out / "tensorboard")
        if not self._progress.console.is_terminal:  # no bars there: one line per run shows progress
            seconds = seconds_in_words(total_seconds(result.steps))
            loss = result.evaluations[-1].loss
            self._progress.console.print(
                f"{result.settings.label}: {len(result.steps)} steps in {seconds}, held-out loss {loss:.3f}",
                highlight=False,
            )


def _progress(console: Console, *, disable: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
        disable=disable,
    )


def _print(summaries: list[Summary], comparison: Comparison, console: Console) -> None:
    for task, rows in by_task(summaries).items():
        console.print()
        console.print(*summary_tables(rows, f"{task}, {rows[0].steps} steps"), sep="\n")
    console.print(f"\nreport       {comparison.out / REPORT}", highlight=False, soft_wrap=True)
    console.print(f"results      {comparison.out / 'results'}", highlight=False, soft_wrap=True)
    console.print(
        f"tensorboard  tensorboard --logdir {comparison.out / 'tensorboard'}", highlight=False, soft_wrap=True
    )
