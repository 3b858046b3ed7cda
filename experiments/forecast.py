"""How long runs will take, from what finished ones took and from the bytes that cross the link."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .runs import Compute, RunResult, RunSettings
from .tasks import load_task

_START_SECONDS = 8.0  # of new ranks: the imports, mostly
_FLOAT = 4  # bytes


@dataclass
class Forecast:
    """Estimates of runs, which share what they are estimated from."""

    results: Sequence[RunResult]  # of finished runs
    _compute: dict[object, tuple[float, int]] = field(default_factory=dict)  # seconds of a step, and parameters

    def seconds(self, settings: RunSettings) -> float:
        """Return about how many seconds the run takes here; at most, if its hook has not run with this task yet."""
        same = [one for one in self.results if _is_like(one.settings, settings, "seed", "steps", "evaluate_every")]
        if same:
            step = statistics.fmean(step.seconds * one.dilation for one in same for step in one.steps)
            return settings.steps * step
        compute, parameters = self._compute_of(settings)
        dilation = 1.0
        if settings.compute is not None:
            stated = Compute.parse(settings.compute)
            dilation = 1 / stated.factor if stated.factor is not None else compute / (stated.seconds or compute)
        rate = settings.link.slowest
        communication = 8 * self._bytes_of(settings, parameters) / rate if rate else 0.0
        return settings.steps * (compute + dilation * communication)

    def total(self, runs: Sequence[RunSettings]) -> float:
        """Return about how many seconds all of the runs take."""
        worlds = len({(settings.ranks, settings.link.kind) for settings in runs})
        return worlds * _START_SECONDS + sum(self.seconds(settings) for settings in runs)

    def _bytes_of(self, settings: RunSettings, parameters: int) -> float:
        """Return how many bytes a rank sends in a step: those of the hook on another link, or else all gradients."""
        same = [
            one
            for one in self.results
            if (one.settings.task, one.settings.hook, one.settings.ranks)
            == (settings.task, settings.hook, settings.ranks)
        ]
        if same:
            return statistics.fmean(step.moved_bytes for one in same for step in one.steps)
        return 2 * (settings.ranks - 1) / settings.ranks * _FLOAT * parameters

    def _compute_of(self, settings: RunSettings) -> tuple[float, int]:
        """Return the seconds of a step's compute here, with all ranks at work, and the number of parameters."""
        key = settings.task, settings.ranks
        if key not in self._compute:
            same = [one for one in self.results if (one.settings.task, one.settings.ranks) == key]
            if same:
                seconds = statistics.median(
                    (step.compute + step.compression) * one.dilation for one in same for step in one.steps
                )
                self._compute[key] = seconds, same[0].parameters
            else:
                self._compute[key] = _measured(settings)
        return self._compute[key]


def _is_like(one: RunSettings, other: RunSettings, *but: str) -> bool:
    return all(value == getattr(other, name) for name, value in vars(one).items() if name not in but)


def _measured(settings: RunSettings) -> tuple[float, int]:
    """Time a step in this process, as slow as it is if the ranks share the cores."""
    task, times = load_task(settings.task, settings.seed), []
    for step in range(3):
        batch = task.batch(step, 0, settings.ranks)
        begin = time.perf_counter()
        task.loss(task.model, batch).backward()
        times.append(time.perf_counter() - begin)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(times) * max(1.0, settings.ranks / cores), sum(p.numel() for p in task.model.parameters())


def forecast(runs: Sequence[RunSettings], done: Mapping[RunSettings, RunResult]) -> list[str]:
    """Return a line for each run and for the whole: what is finished, and how long the others take."""
    estimate, missing = Forecast(list(done.values())), [settings for settings in runs if settings not in done]
    lines = []
    for settings in runs:
        state = "finished" if settings in done else f"about {in_words(estimate.seconds(settings))}"
        lines.append(
            f"{settings.label}, {settings.ranks} ranks, {settings.link.label}, {settings.steps} steps: {state}"
        )
    lines.append(f"{len(done)} of {len(runs)} runs are finished already.")
    if missing:
        lines.append(
            f"The others take about {in_words(estimate.total(missing))} here: the bytes over the link's rate, and the "
            "compute. A hook that has not run yet is counted as if it sent everything."
        )
        if any(settings.link.kind == "real" for settings in missing):
            lines.append("A real network's rate is not known: its time comes on top.")
    return lines


def in_words(seconds: float) -> str:
    """Return '40 s', '12 min' or '3.5 h'."""
    if seconds < 1:
        return "1 s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
