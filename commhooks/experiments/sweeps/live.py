"""The terminal's display during runs."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import IO, Any

from rich.console import Console, Group
from rich.live import Live as Display
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from commhooks.experiments.launch import reason_of, torchrun_world
from commhooks.experiments.results.rates import bytes_per_second, link_use
from commhooks.experiments.results.summary import SMOOTHING_STEPS, total_seconds
from commhooks.experiments.runs import RunResult, RunSettings, StepRecord
from commhooks.experiments.sweeps.execute import Listener, RunFailed
from commhooks.experiments.training.worker import BeginsAgain, Evaluated, NotSaved, RunDone, StepDone
from commhooks.units import bytes_in_words, counted, seconds_in_words

_SILENCE = 60.0  # seconds after which a line tells the progress if there is no terminal
_PACE = 600.0  # seconds whose pace tells the time left
_NARROW = 80  # characters: a terminal with fewer shows less of a run


def listeners(*each: Listener) -> Listener:
    """Return one listener that passes every message to each of these, in order."""
    return functools.partial(_tell, each)


def _tell(each: Sequence[Listener], settings: RunSettings, message: object) -> None:
    for one in each:
        one(settings, message)


@dataclass
class _Row:
    """The displayed facts of one run."""

    settings: RunSettings
    step: int = 0
    recent: tuple[StepRecord, ...] = ()  # the last steps
    held_out: float | None = None
    ended: bool = False
    failed: bool = False

    def hear(self, message: object) -> None:
        """Record a message."""
        if isinstance(message, StepDone):
            if message.record.step == 1:  # again, if a run of the same comparison group failed
                self.recent, self.held_out = (), None
            self.step = message.record.step
            self.recent = (*self.recent, message.record)[-SMOOTHING_STEPS:]
        elif isinstance(message, Evaluated):
            self.held_out = message.evaluation.loss
        elif isinstance(message, RunDone | RunFailed):
            self.ended, self.failed = True, isinstance(message, RunFailed)

    @property
    def made(self) -> int:
        """The steps that need no more time, of those asked for."""
        return self.settings.steps if self.ended else min(self.step, self.settings.steps)

    def facts(self) -> dict[str, Any]:
        """Return the texts beside the bar; figures are means over the last steps."""
        asked = self.settings.steps
        more = f"+{self.step - asked}" if self.step > asked else ""
        found: dict[str, Any] = dict.fromkeys(("loss", "time", "rate", "held_out"), "")
        found["step"] = "failed" if self.failed else f"{min(self.step, asked)}/{asked}{more}"
        if self.recent:
            use = link_use(self.recent, self.settings.link)
            found["loss"] = f"loss {sum(one.loss for one in self.recent) / len(self.recent):.3f}"
            found["time"] = f"{seconds_in_words(total_seconds(self.recent) / len(self.recent))}/step"
            found["rate"] = f"{bytes_in_words(bytes_per_second(self.recent))}/s"
            found["rate"] += "" if use is None else f" {100 * use:.0f} %"
        if self.held_out is not None:
            found["held_out"] = f"held-out {self.held_out:.3f}"
        return found


class Live:
    """A listener of `execute` that shows the progress of runs; use it as a context manager.

    On a terminal it shows the finished runs, the time left, and each hook of the comparison group in progress. What
    ranks write to standard error stands above that, each line once. On anything but a terminal a line of progress
    follows after every minute without one. Each run leaves one line when it ends. With `quiet`, and under torchrun on
    all ranks but 0, nothing is shown.
    """

    def __init__(
        self,
        runs: Sequence[RunSettings],
        finished: Mapping[RunSettings, RunResult],
        console: Console,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        world = torchrun_world()
        self._console, self._clock = console, clock
        self._quiet = quiet or (world is not None and world[0] != 0)
        self._printed = clock()
        self._rows = {settings: _Row(settings) for settings in runs}
        for settings in finished.keys() & self._rows.keys():
            result = finished[settings]
            steps = result.steps[-SMOOTHING_STEPS:]
            self._rows[settings] = _Row(settings, len(result.steps), steps, result.evaluations[-1].loss, ended=True)
        facts = ("step", "loss", "time", "rate", "held_out") if console.width >= _NARROW else ("step", "loss", "time")
        fixed, wide = Column(no_wrap=True, justify="right"), Column(overflow="ellipsis")
        texts = [TextColumn(f"{{task.fields[{name}]}}", markup=False, table_column=fixed.copy()) for name in facts]
        name = TextColumn("{task.description}", markup=False, table_column=wide)
        words = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("runs", "left")]
        whole = (BarColumn(20), words[0], TimeElapsedColumn(), words[1])
        self._whole = Progress(*whole, console=console, get_time=clock, speed_estimate_period=_PACE)
        self._hooks = Progress(name, *texts, console=console, get_time=clock)
        made, asked = sum(row.made for row in self._rows.values()), sum(one.steps for one in runs)
        self._total = self._whole.add_task("", total=asked, completed=made, runs="", left="")
        self.drawn: Group = Group(self._whole, self._hooks)
        self._group: RunSettings | None = None
        self._tasks: dict[RunSettings, TaskID] = {}
        self._varying = [key for key in _written(runs) if len({str(one.to_dict().get(key)) for one in runs}) > 1]
        self._stack = ExitStack()
        self._shown = console.is_terminal and not console.is_dumb_terminal and not self._quiet

    def __enter__(self) -> Live:
        if self._shown:
            # Under torchrun this process is a rank too, and drawing takes some of its time.
            often = 2 if torchrun_world() is None else 1
            if os.isatty(2):
                stderr = self._stack.enter_context(_each_line_of_stderr(self._print))
                if self._console.stderr:
                    self._console.file = stderr
                    self._stack.callback(setattr, self._console, "file", sys.stderr)
            display = Display(self.drawn, console=self._console, refresh_per_second=often, transient=True)
            self._stack.enter_context(display)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __call__(self, settings: RunSettings, message: object) -> None:
        """Record a message, and print a line if a run ended."""
        self._rows[settings].hear(message)
        self._update(settings)
        if self._quiet:
            return
        if isinstance(message, RunDone | RunFailed | BeginsAgain | NotSaved):
            self._print(self._line(settings, message))
        elif not self._shown and self._clock() - self._printed >= _SILENCE:
            whole = self._whole.tasks[0]
            elapsed = timedelta(seconds=round(whole.elapsed or 0))
            step = self._rows[settings].facts()["step"]
            self._print(f"{settings.label}: step {step} · {whole.fields['runs']} · {elapsed} · {whole.fields['left']}")

    def _update(self, settings: RunSettings) -> None:
        if settings.comparison_group != self._group:
            self._group = settings.comparison_group
            for task in self._tasks.values():
                self._hooks.remove_task(task)
            beside = [row for row in self._rows.values() if row.settings.comparison_group == settings.comparison_group]
            self._tasks = {
                row.settings: self._hooks.add_task(
                    row.settings.hook.label, total=row.settings.steps, completed=row.made, **row.facts()
                )
                for row in beside
            }
        row, rows = self._rows[settings], self._rows.values()
        self._hooks.update(self._tasks[settings], completed=row.made, **row.facts())
        ended, failed = sum(one.ended for one in rows), sum(one.failed for one in rows)
        runs = f"{ended:,} of {counted(len(rows), 'run')}{f', {failed:,} failed' if failed else ''}"
        self._whole.update(self._total, completed=sum(one.made for one in rows), runs=runs)
        left = self._whole.tasks[0].time_remaining
        if row.step > row.settings.steps:  # it goes on, and nobody knows for how many steps
            left = None
        words = "time left not known yet" if left is None else f"about {timedelta(seconds=round(left))} left"
        self._whole.update(self._total, left=words)

    def _print(self, line: str) -> None:
        self._printed = self._clock()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _line(self, settings: RunSettings, message: RunDone | RunFailed | BeginsAgain | NotSaved) -> str:
        written = settings.to_dict()
        label = " · ".join([settings.label, *(f"{key} {written[key]}" for key in self._varying if key in written)])
        if isinstance(message, NotSaved):
            return f"{label}: goes on, but its progress could not be saved: {message.reason}"
        if isinstance(message, BeginsAgain):
            return f"{label}: begins again, since what was saved of it cannot be used: {message.reason}"
        if isinstance(message, RunFailed):
            return f"{label}: failed: {reason_of(message.traceback)}"
        result = message.result
        time_taken = seconds_in_words(total_seconds(result.steps))
        return f"{label}: {len(result.steps)} steps in {time_taken}, held-out loss {result.evaluations[-1].loss:.3f}"


@contextmanager
def _each_line_of_stderr(hear: Callable[[str], None]) -> Iterator[IO[str]]:
    """Pass on each different line that this process and the ranks it starts write to standard error.

    They would write over the progress. Yields the terminal's own standard error.
    """
    sys.stderr.flush()
    terminal, (reading, writing) = os.dup(2), os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    reader = threading.Thread(target=_hear_lines, args=(reading, hear), daemon=True)
    reader.start()
    try:
        with os.fdopen(os.dup(terminal), "w") as stderr:
            yield stderr
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
        reader.join(1.0)  # not for ever: a process that a task started may still hold the other end


def _hear_lines(reading: int, hear: Callable[[str], None]) -> None:
    heard = {""}
    with os.fdopen(reading, errors="replace") as lines:
        for line in lines:
            if line.rstrip() not in heard:
                heard.add(line.rstrip())
                hear(line.rstrip())


def _written(runs: Sequence[RunSettings]) -> list[str]:
    """Return the names of settings that any of the runs has set, except task, hook and seed, which labels contain."""
    keys = dict.fromkeys(key for settings in runs for key in settings.to_dict())
    return [key for key in keys if key not in {"task", "hook", "seed"}]
