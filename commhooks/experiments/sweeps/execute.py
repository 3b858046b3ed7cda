"""The execution of runs: results are kept, and one run that fails does not end the others."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from commhooks.experiments.cluster import check_rates, follow, hosts_on
from commhooks.experiments.devices import backend_for
from commhooks.experiments.launch import WorldError, ranks_here, run_in_torchrun, run_world, torchrun_world
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.results.goals import GoingOn
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.experiments.specs import Spec
from commhooks.experiments.sweeps.store import RESULTS
from commhooks.experiments.tasks import load_task
from commhooks.experiments.training.progress import PROGRESS, STOP, can_continue
from commhooks.experiments.training.worker import (
    GroupBegun,
    Preparing,
    RunDone,
    StepsBegin,
    Work,
    calibrate,
    time_scale_of,
    train_all,
)
from commhooks.saving.folder import newest

Listener = Callable[[RunSettings, object], None]
"""Called with a run and a message about it: `RunFailed`, or one of `commhooks.experiments.training.worker`."""


_SILENCE = 120.0  # seconds


@dataclass(frozen=True)
class RunFailed:
    """The message that a run failed while no other was in progress; it is not tried again."""

    traceback: str


@dataclass
class Made:
    """The results and failures of some runs."""

    results: dict[RunSettings, RunResult] = field(default_factory=dict)
    failures: dict[RunSettings, str] = field(default_factory=dict)  # the traceback of each run that failed


def execute(
    runs: Sequence[RunSettings],
    out: Path,
    listener: Listener,
    *,
    going_on: GoingOn | None = None,
    known: Mapping[RunSettings, RunResult] = MappingProxyType({}),
) -> Made:
    """Train the runs in order, and write each result into `out`/results as soon as it is known.

    Runs that differ only in their hooks take turns. If a rank fails, the runs of that comparison group are repeated one
    by one, and only runs that fail alone count as failed. Runs in progress are saved in `out`/progress once a minute
    and at Ctrl-C, and continue from there when they are run again (`commhooks.experiments.training.progress`).

    Args:
        runs: The runs.
        out: The folder given by --out.
        listener: Receives every message about a run.
        going_on: The goals for which runs continue after their steps; None: they end there.
        known: Earlier results, which may include a baseline's.

    Raises:
        KeyboardInterrupt: Ctrl-C; the ranks are ended, every finished result is written, and the others are saved.
        WorldError: The ranks did not start; or one failed under torchrun, which ends the ranks of all runs.

    """
    made = Made()
    if (torchrun_world() or (0,))[0] == 0:
        (out / RESULTS).mkdir(parents=True, exist_ok=True)
        (out / PROGRESS / STOP).unlink(missing_ok=True)
    if torchrun_world() is not None:  # rank 0 decides which runs are made, and every rank must take part
        one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]  # others may not see the folder
        _Attempt(runs, out, listener, made, going_on, known, saved=one_machine).in_torchrun()
        return made
    for world in _worlds(runs):
        left = list(world)
        while left:
            attempt = _Attempt(left, out, listener, made, going_on, known)
            try:
                attempt.in_new_processes()
            except WorldError as error:
                _after_failure(attempt, out, listener, made, error)
            left = [settings for settings in left if settings not in made.results and settings not in made.failures]
    return made


def _worlds(runs: Sequence[RunSettings]) -> Iterator[list[RunSettings]]:
    """Yield groups of runs that the same processes can make: with the same number of ranks and the same hosts."""
    for _, group in groupby(runs, lambda one: (one.ranks, _backend_of([one]), _shared(one))):
        yield list(group)


def _backend_of(runs: Sequence[RunSettings]) -> str:
    """Return the backend on which the same processes can make all these runs: Gloo if one of them needs it."""
    backends = {backend_for(one.device, one.link, ranks_here(one.ranks)) for one in runs}
    return backends.pop() if len(backends) == 1 else "gloo"


def _shared(settings: RunSettings) -> object:
    """Return the key that runs must share, besides the number of ranks, to be made by the same processes."""
    if settings.states_seconds:  # its compute is measured before each comparison group, since load changes
        return settings.comparison_group
    if settings.link.kind != "hosts":
        return settings.link.kind
    return settings.comparison_group if settings.compute is not None or settings.link.schedule else settings.link


def _after_failure(attempt: _Attempt, out: Path, listener: Listener, made: Made, error: WorldError) -> None:
    """Repeat each unfinished run of the failed comparison group alone, and record the runs that fail again."""
    if not attempt.group:  # the ranks did not even start, for which no run is to blame
        raise error
    suspects = [settings for settings in attempt.group if settings not in made.results]
    if len(suspects) == 1:
        _give_up(suspects[0], error, out, listener, made)
        return
    for settings in suspects:
        try:
            attempt.alone(settings).in_new_processes()
        except WorldError as alone:
            _give_up(settings, alone, out, listener, made)


def _give_up(settings: RunSettings, error: WorldError, out: Path, listener: Listener, made: Made) -> None:
    _forget(settings, out)
    made.failures[settings] = str(error)
    listener(settings, RunFailed(str(error)))


def saved_steps(out: Path, settings: RunSettings) -> int:
    """Return the number of steps after which a run in progress was saved; 0: it was not saved."""
    path = newest(_progress_of(settings, out))
    return 0 if path is None else int(path.name.rpartition("-")[2])


def goes_on_from(out: Path, runs: Iterable[RunSettings]) -> list[int]:
    """Return the saved step of each run that would continue from there if all these runs were made again."""
    groups: dict[RunSettings, list[RunSettings]] = {}
    for settings in runs:
        groups.setdefault(settings.comparison_group, []).append(settings)
    able = [settings for group in groups.values() if all(map(can_continue, group)) for settings in group]
    return [steps for settings in able if (steps := saved_steps(out, settings))]


def _forget(settings: RunSettings, out: Path) -> None:
    """Remove the checkpoint of a run that has ended, and the folder if it is empty then."""
    shutil.rmtree(_progress_of(settings, out), ignore_errors=True)
    with suppress(OSError):
        (out / PROGRESS).rmdir()


def _progress_of(settings: RunSettings, out: Path) -> Path:
    return out / PROGRESS / settings.name


class _Attempt:
    """Some runs, made by one set of processes."""

    def __init__(
        self,
        runs: Sequence[RunSettings],
        out: Path,
        listener: Listener,
        made: Made,
        going_on: GoingOn | None,
        known: Mapping[RunSettings, RunResult],
        *,
        saved: bool = True,
    ) -> None:
        self._runs = list(runs)
        self._saved = saved  # True: runs in progress are saved, and continue from there
        self._out = out
        self._listener = listener
        self._made = made
        self._going_on, self._known = going_on, known
        self.group: list[RunSettings] = []  # the runs that the processes are making
        self._stepping = False  # True once they have begun to train them

    def alone(self, settings: RunSettings) -> _Attempt:
        """Return an attempt at one of the runs."""
        return _Attempt([settings], self._out, self._listener, self._made, self._going_on, self._known, saved=False)

    def in_new_processes(self) -> None:
        """Start ranks for the runs, on the hosts of a cluster if their link asks for it."""
        first = self._runs[0]
        work = self._work(self._calibrate())
        timeout = silence_allowed(self._runs, work)
        link = self._link_of_hosts(work.time_scales[0]) if first.link.kind == "hosts" else first.link
        with ExitStack() as stack:
            cluster, hear = stack.enter_context(hosts_on(link, first.ranks)), self._hear
            if cluster is not None:
                hear = functools.partial(
                    self._hear, on_begin=lambda: stack.enter_context(follow(cluster, link.schedule))
                )
            run_world(
                train_all,
                first.ranks,
                work,
                hear,
                timeout=timeout,
                backend=_backend_of(self._runs),
                cluster=cluster,
                on_interrupt=self._stop,
            )

    def _link_of_hosts(self, time_scale: float) -> LinkSettings:
        """Return the runs' link, slowed as compute is here; raise WorldError for these runs if hosts cannot have it."""
        link = self._runs[0].link
        try:
            slowed = link.slowed(time_scale)
            check_rates(slowed)
        except ValueError as error:
            self.group = self._runs
            raise WorldError(
                f"link {link.label!r} was to be {time_scale:.3g} times as slow, as compute is here: {error}"
            ) from error
        return slowed

    def in_torchrun(self) -> None:
        """Make the runs in the world that torchrun started."""
        work = self._work({})
        timeout, backend = silence_allowed(self._runs, work), _backend_of(self._runs)
        run_in_torchrun(train_all, work, self._hear, timeout=timeout, backend=backend)

    def _calibrate(self) -> dict[int, float]:
        """Return the seconds of a step's compute here, for runs that state its seconds on another processor."""
        if not self._runs[0].states_seconds:
            return {}
        self.group = self._runs  # if the ranks fail now, these are to blame
        found: list[object] = []
        timeout = _SILENCE + _loading_seconds(self._runs)
        backend = _backend_of(self._runs)
        run_world(calibrate, self._runs[0].ranks, self._runs, found.append, timeout=timeout, backend=backend)
        self.group = []
        seconds = found[-1]  # the others were known after fewer steps
        assert isinstance(seconds, float), "rank 0 sends seconds"
        return dict.fromkeys(range(len(self._runs)), seconds)

    def _work(self, compute_here: dict[int, float]) -> Work:
        time_scales = {
            number: time_scale_of(settings, compute_here.get(number)) for number, settings in enumerate(self._runs)
        }
        goals = {}
        if self._going_on is not None:
            goals = self._going_on.goals(self._runs, {**self._known, **self._made.results})
        progress = self._out.absolute() / PROGRESS if self._saved else None
        return Work(dict(enumerate(self._runs)), time_scales, compute_here, self._going_on, goals, progress)

    def _stop(self) -> bool:
        """Tell the ranks to save the runs in progress, and to end; return whether they can."""
        if not (self._saved and self._stepping and all(can_continue(settings) for settings in self.group)):
            return False
        print("\nsaving the runs in progress; Ctrl-C again ends them at once", file=sys.stderr)
        (self._out / PROGRESS).mkdir(exist_ok=True)
        (self._out / PROGRESS / STOP).touch()
        return True

    def _hear(self, message: object, on_begin: Callable[[], object] = lambda: None) -> None:
        if isinstance(message, Preparing):
            return
        if isinstance(message, GroupBegun):
            self.group, self._stepping = [self._runs[number] for number in message.runs], False
            return
        if isinstance(message, StepsBegin):
            self._stepping = True
            on_begin()
            return
        if isinstance(message, RunDone):
            message.result.write(self._out / RESULTS)
            self._made.results[message.result.settings] = message.result
            _forget(message.result.settings, self._out)
        self._listener(self._runs[message.run], message)  # type: ignore[attr-defined]  # every other message is about a run


def silence_allowed(runs: Sequence[RunSettings], work: Work) -> float:
    """Return the seconds of silence after which a world counts as stuck.

    Two minutes, 20 of the slowest run's plain all-reduces of all gradients, and the time to load a task on a machine
    that is busy with all ranks.
    """
    slowest = 0.0
    for number, settings in enumerate(runs):
        if rate := settings.link.slowest:  # what a plain all-reduce of all gradients takes
            slowest = max(slowest, 2 * 32 * _loaded(settings.task).elements / rate * work.time_scales[number])
    return _SILENCE + 20 * slowest + _loading_seconds(runs)


def _loading_seconds(runs: Sequence[RunSettings]) -> float:
    return max((4 * settings.ranks * _loaded(settings.task).seconds for settings in runs), default=0.0)


@dataclass(frozen=True)
class _Loaded:
    """The facts learned by loading a task once."""

    seconds: float
    elements: int  # of the model


@functools.cache
def _loaded(task: Spec) -> _Loaded:
    begin = time.perf_counter()
    elements = sum(p.numel() for p in load_task(task).model.parameters())
    return _Loaded(time.perf_counter() - begin, elements)
