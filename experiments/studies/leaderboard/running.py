"""The execution of the leaderboard: training under every contender with every seed, timing, and the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from commhooks.errors import CommHooksError
from commhooks.experiments.machine import cores
from commhooks.experiments.results.summary import Spread
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import LoadedTask, load_task
from experiments.studies.jobs import run_jobs
from experiments.studies.leaderboard.board import (
    Results,
    RunsFile,
    accuracy_of,
    prepare_board,
    print_board,
    write_board,
)
from experiments.studies.leaderboard.contenders import Contender, LeftOut, contenders, known_names
from experiments.studies.leaderboard.standings import Run, Standing, standings
from experiments.studies.lockstep import SCORES, time_in_lockstep, train_in_lockstep

SIZE = "tiny"
"""The size of the trained models. A compressor's bytes and error can be measured at any size, and at this one hundreds
of runs fit into minutes."""
_TIMED, _ROUNDS = ("gpt", "medium"), 7  # the task and size whose gradient is used to time compressors


@dataclass(frozen=True, kw_only=True)
class Leaderboard:
    """The settings of a leaderboard: its runs, and the places of the results."""

    out: Path
    tasks: tuple[str, ...] = ("digits", "gpt")
    seeds: int = 3
    steps: int | None = None  # None: each task's own
    workers: int = 4
    only: tuple[str, ...] | None = None  # names of compressors; None: all
    overwrite: bool = False  # results of an earlier leaderboard in that folder
    docs: Path | None = None  # a folder for the tables of the documentation
    accuracy: Path | None = None  # a file for the differences that `estimate` shows
    processes: int | None = None  # None: one for each core
    command: str = "python -m experiments.studies leaderboard"  # the command that reproduces the results

    def __post_init__(self) -> None:
        known_names(self.tasks, list(SCORES), "task")
        if not self.tasks or self.only == ():
            raise ValueError("nothing to run: name at least one task and one compressor")
        for name, least in (("seeds", 2), ("steps", 1), ("workers", 2), ("processes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least} (got {value})")

    def steps_of(self, task: str) -> int:
        """Return the number of steps in a run of the task."""
        return load_sized(task, SIZE).steps if self.steps is None else self.steps


@dataclass(frozen=True)
class TrainingJob:
    """One run to be made."""

    task: str
    contender: Contender
    seed: int
    steps: int
    workers: int

    def run(self) -> Run | Failed:
        """Train, and return the run; a contender that fails does not stop the others."""
        try:
            compressor = self.contender.make(self.seed)
            task = load_sized(self.task, SIZE, self.seed)
            trained = train_in_lockstep(task, compressor, steps=self.steps, workers=self.workers)
        except (CommHooksError, ValueError) as error:
            return Failed(self.task, self.contender, str(error))
        return Run(self.task, self.contender, self.seed, trained)


@dataclass(frozen=True)
class TimingJob:
    """One contender to be timed."""

    contender: Contender
    workers: int

    def run(self) -> Timing | Failed:
        """Time the contender; one that fails does not stop the others."""
        try:
            task, compressor = load_sized(*_TIMED), self.contender.make()
            times = time_in_lockstep(task, compressor, workers=self.workers, rounds=_ROUNDS)
        except (CommHooksError, ValueError) as error:
            return Failed(None, self.contender, str(error))
        return Timing(self.contender, times)


@dataclass(frozen=True)
class Timing:
    """The time for one worker to compress and decompress a gradient, relative to copying it."""

    contender: Contender
    times: Spread


@dataclass(frozen=True)
class Failed:
    """A run, or a timing (with a task of None), that failed with an error."""

    task: str | None
    contender: Contender
    reason: str


def run_leaderboard(board: Leaderboard, console: Console) -> list[Standing]:
    """Make all runs, write the results, and return the standings.

    Raises:
        ValueError: A name is not known, or the folder cannot be used; see `prepare_board`.

    """
    jobs, left_out = _plan(board)
    prepare_board(board.out, overwrite=board.overwrite)
    listener = _Listener(board.out, jobs, left_out, console)
    timings = [TimingJob(one, board.workers) for one in dict.fromkeys(job.contender for job in jobs)]
    run_jobs(jobs, min(board.processes or cores(), len(jobs)), listener, alone=timings)
    results = Results(
        standings=standings(listener.whole_runs(), listener.times),
        left_out=list(dict.fromkeys(left_out)),
        seeds=board.seeds,
        workers=board.workers,
        descriptions={task: load_sized(task, SIZE).description for task in board.tasks},
        steps={task: board.steps_of(task) for task in board.tasks},
        command=board.command,
    )
    write_board(results, board.out, board.docs)
    if board.accuracy is not None:
        accuracy_of(results).write(board.accuracy)
    print_board(results, board.out, console)
    return results.standings


def load_sized(task: str, size: str, seed: int = 0) -> LoadedTask:
    """Return a built-in task with a model of this size."""
    return load_task(Spec(task, (("size", size),)), seed)


def _plan(board: Leaderboard) -> tuple[list[TrainingJob], list[LeftOut]]:
    jobs, left_out = list[TrainingJob](), list[LeftOut]()
    for task in board.tasks:
        found, refused = contenders(board.only, load_sized(task, SIZE))
        left_out += refused
        steps = board.steps_of(task)
        jobs += [TrainingJob(task, one, seed, steps, board.workers) for one in found for seed in range(board.seeds)]
    return jobs, left_out


class _Listener:
    """A listener that collects results, writes each run as it ends, and prints a line for each contender."""

    def __init__(self, out: Path, jobs: Sequence[TrainingJob], left_out: list[LeftOut], console: Console) -> None:
        self.times: dict[Contender, Spread] = {}
        self._runs: dict[tuple[str, Contender, int], Run] = {}
        self._order = [(job.task, job.contender, job.seed) for job in jobs]
        self._left_out = left_out
        self._file, self._console = RunsFile(out), console

    def __call__(self, message: object) -> None:
        if isinstance(message, Run):
            self._runs[message.task, message.contender, message.seed] = message
            self._file.append(message)
            self._print_if_whole(message)
        elif isinstance(message, Timing):
            self.times[message.contender] = message.times
        elif isinstance(message, Failed):
            what = f"{message.contender.label} ({message.task or 'timing'})"
            self._left_out.append(LeftOut(what, message.reason))

    def whole_runs(self) -> list[Run]:
        """Return the runs in the planned order, without contenders that failed."""
        failed = {key[:2] for key in self._order if key not in self._runs}
        return [self._runs[key] for key in self._order if key[:2] not in failed]

    def _print_if_whole(self, run: Run) -> None:
        keys = [key for key in self._order if key[:2] == (run.task, run.contender)]
        if all(key in self._runs for key in keys):
            score = SCORES[run.task]
            scores = ", ".join(f"{score.of(self._runs[key].trained):.3f}" for key in keys)
            count = f"{len(self._runs)} of {len(self._order)} runs"
            line = f"{run.task} · {run.contender.label}: {score.name} {scores} ({count})"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
