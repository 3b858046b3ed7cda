"""The terminal's display during runs."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live as Display
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from commhooks.units import bytes_in_words, counted, seconds_in_words

from ..launch import reason_of, torchrun_world
from ..report.heartbeat import Heartbeat
from ..results.rates import bytes_per_second, link_use
from ..results.summary import SMOOTHING_STEPS, total_seconds
from ..runs import RunResult, RunSettings, StepRecord
from ..specs import Spec
from ..training.worker import BeginsAgain, Evaluated, NotSaved, RunDone, StepDone
from .execute import Listener, RunFailed
from .pace import Pace

_NONE = "–"
_OTHER_LINES = 4  # of the terminal: progress, scene, the table's header, hooks that are not shown
# Beside the hook, and their least width in characters.
_COLUMNS = {"step": 7, "loss": 6, "step time": 9, "sent/s": 9, "link": 5, "held-out": 8}
_NARROW = 72  # characters; a terminal with fewer shows only these columns:
_IF_NARROW = {"step", "loss", "step time", "held-out"}


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
    recent: tuple[StepRecord, ...] = ()  # the last steps; never changed in place
    held_out_loss: float | None = None
    ended: bool = False
    failed: bool = False

    @property
    def in_progress(self) -> bool:
        return self.step > 0 and not self.ended

    def hear(self, message: object) -> None:
        if isinstance(message, StepDone):
            if message.record.step == 1:  # again, if a run of the same scene failed
                self.recent, self.held_out_loss = (), None
            self.step = message.record.step
            self.recent = (*self.recent, message.record)[-SMOOTHING_STEPS:]
        elif isinstance(message, Evaluated):
            self.held_out_loss = message.evaluation.loss
        elif isinstance(message, RunDone):
            self.ended = True
        elif isinstance(message, RunFailed):
            self.ended = self.failed = True


class Live:
    """A listener of `execute` that shows the progress of runs; use it as a context manager.

    On a terminal it shows the number of finished runs, the time left, and for each hook of the scene in progress: the
    step, the training loss, the duration of a step, the bytes that a rank sends per second and their share of the
    link's rate (each over the last ten steps), and the held-out loss of the last evaluation. Above that, and on
    anything but a terminal, each run leaves one line when it ends. On anything but a terminal, a line of progress
    follows after every minute without one, as long as steps are taken. With `quiet`, and under torchrun on all ranks
    but 0, nothing is shown.
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
        self._console = console
        self._quiet = quiet or (world is not None and world[0] != 0)
        self._clock = clock
        self._began = clock()
        self._heartbeat = Heartbeat(console, clock)
        self._pace = Pace(runs, finished, clock)
        self._rows = {settings: _Row(settings) for settings in runs}
        for settings, result in finished.items():
            if settings in self._rows:
                self._rows[settings] = _row_of(result)
        scenes: dict[RunSettings, list[_Row]] = {}
        for settings, row in self._rows.items():
            scenes.setdefault(settings.scene, []).append(row)
        self._beside = {row.settings: rows for rows in scenes.values() for row in rows}
        self._shown = next((self._beside[one] for one in runs if one not in finished), [])
        self._varying = [key for key in _written(runs) if len({str(one.to_dict().get(key)) for one in runs}) > 1]
        # The display is drawn by a thread of its own. Nothing may be printed while this is held: printing waits for the
        # display, and the display for this.
        self._lock = threading.Lock()
        self._display: Display | None = None

    def __enter__(self) -> Live:
        if self._console.is_terminal and not self._console.is_dumb_terminal and not self._quiet:
            # Under torchrun this process is a rank too, and drawing takes some of its time.
            often = 2 if torchrun_world() is None else 1
            self._display = Display(
                get_renderable=self.drawn, console=self._console, refresh_per_second=often, transient=True
            )
            self._display.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._display.stop()

    def __call__(self, settings: RunSettings, message: object) -> None:
        """Record a message, and print a line if a run ended."""
        with self._lock:
            self._shown = self._beside[settings]
            self._rows[settings].hear(message)
            self._pace.hear(settings, message)
            if isinstance(message, RunDone | RunFailed):
                self._pace.end(settings)
        if self._quiet:
            return
        line = None
        if isinstance(message, RunDone | RunFailed | BeginsAgain | NotSaved):
            line = self._line(settings, message)
        elif self._display is None and self._heartbeat.due:
            row = self._rows[settings]
            line = " · ".join([f"{settings.label}: step {_cells(row)[0]}", *self._progress_in_words()])
        if line is not None:
            self._heartbeat.print(line)

    def drawn(self) -> RenderableType:
        """Return the current display."""
        with self._lock:
            rows = self._shown
            room = max(1, self._console.height - _OTHER_LINES)
            shown = rows
            if len(rows) > room:
                progressing = [row for row in rows if row.in_progress]
                shown = [*progressing, *(row for row in rows if not row.in_progress)][:room]
            parts: list[RenderableType] = [self._progress()]
            if rows:
                parts += [
                    Text(_scene_in_words(rows[0].settings), no_wrap=True, overflow="ellipsis"),
                    self._table(shown),
                ]
            if len(shown) < len(rows):
                parts.append(Text(f"and {counted(len(rows) - len(shown), 'hook')} more", style="dim"))
            return Group(*parts)

    def _progress_in_words(self) -> list[str]:
        rows = self._rows.values()
        ended, failed = sum(row.ended for row in rows), sum(row.failed for row in rows)
        left = self._pace.seconds_left()
        return [
            f"{ended:,} of {counted(len(rows), 'run')}",
            *([f"{failed:,} failed"] if failed else []),
            str(timedelta(seconds=round(self._clock() - self._began))),
            "time left not known yet" if left is None else f"about {timedelta(seconds=round(left))} left",
        ]

    def _progress(self) -> RenderableType:
        rows = self._rows.values()
        steps = sum(row.settings.steps if row.ended else min(row.step, row.settings.steps) for row in rows)
        bar = ProgressBar(total=sum(row.settings.steps for row in rows), completed=steps, width=20)
        line = Table.grid(padding=(0, 1))
        line.add_row(bar, Text(" · ".join(self._progress_in_words()), no_wrap=True, overflow="ellipsis"))
        return line

    def _table(self, rows: Sequence[_Row]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        narrow = self._console.width < _NARROW
        columns = {name: width for name, width in _COLUMNS.items() if not narrow or name in _IF_NARROW}
        columns["step"] = max(columns["step"], *(len(_cells(row)[0]) for row in rows))
        room = max(1, self._console.width - sum(width + 2 for width in columns.values()))
        table.add_column("hook", no_wrap=True, overflow="ellipsis", max_width=room)
        for name, width in columns.items():
            table.add_column(name, justify="right", no_wrap=True, min_width=width)
        labels = short_labels([row.settings.hook for row in rows], room)
        for label, row in zip(labels, rows, strict=True):
            style = "red" if row.failed else "green" if row.ended else "" if row.step else "dim"
            cells = zip(_COLUMNS, _cells(row), strict=True)
            table.add_row(label, *(cell for name, cell in cells if name in columns), style=style)
        return table

    def _line(self, settings: RunSettings, message: RunDone | RunFailed | BeginsAgain | NotSaved) -> str:
        written = settings.to_dict()
        varying = [f"{key} {written[key]}" for key in self._varying if key in written]
        label = " · ".join([settings.label, *varying])
        if isinstance(message, NotSaved):
            return f"{label}: goes on, but its progress could not be saved: {message.reason}"
        if isinstance(message, BeginsAgain):
            return f"{label}: begins again, since what was saved of it cannot be used: {message.reason}"
        if isinstance(message, RunFailed):
            return f"{label}: failed: {reason_of(message.traceback)}"
        result = message.result
        time_taken = seconds_in_words(total_seconds(result.steps))
        return f"{label}: {len(result.steps)} steps in {time_taken}, held-out loss {result.evaluations[-1].loss:.3f}"


def short_labels(hooks: Sequence[Spec], room: int) -> list[str]:
    """Return the hooks' labels; if longer than `room`, without the settings that all hooks of the same name share.

    Labels stay distinct.
    """
    shared = {
        name: set.intersection(*(set(other.settings) for other in hooks if other.name == name))
        for name in {hook.name for hook in hooks}
    }
    short = [Spec(hook.name, tuple(pair for pair in hook.settings if pair not in shared[hook.name])) for hook in hooks]
    return [(hook if len(hook.label) <= room else own).label for hook, own in zip(hooks, short, strict=True)]


def _row_of(result: RunResult) -> _Row:
    return _Row(
        result.settings,
        step=len(result.steps),
        recent=result.steps[-SMOOTHING_STEPS:],
        held_out_loss=result.evaluations[-1].loss,
        ended=True,
    )


def _cells(row: _Row) -> list[str]:
    """Return the columns after the hook's name."""
    more = f"+{row.step - row.settings.steps}" if row.step > row.settings.steps else ""
    step = "failed" if row.failed else f"{min(row.step, row.settings.steps)}/{row.settings.steps}{more}"
    held_out = _NONE if row.held_out_loss is None else f"{row.held_out_loss:.3f}"
    if not row.recent:
        return [step, _NONE, _NONE, _NONE, _NONE, held_out]
    use = link_use(row.recent, row.settings.link)
    return [
        step,
        f"{sum(one.loss for one in row.recent) / len(row.recent):.3f}",
        seconds_in_words(sum(one.seconds for one in row.recent) / len(row.recent)),
        f"{bytes_in_words(bytes_per_second(row.recent))}/s",
        _NONE if use is None else f"{100 * use:.0f} %",
        held_out,
    ]


def _written(runs: Sequence[RunSettings]) -> list[str]:
    """Return the names of settings that any of the runs has set, except task, hook and seed, which labels contain."""
    keys = dict.fromkeys(key for settings in runs for key in settings.to_dict())
    return [key for key in keys if key not in {"task", "hook", "seed"}]


def _scene_in_words(settings: RunSettings) -> str:
    others = settings.to_dict()
    words = [f"{key} {others[key]}" for key in _written([settings]) if key not in {"steps", "evaluate_every"}]
    return " · ".join([settings.task.label, f"seed {settings.seed}", *words])
