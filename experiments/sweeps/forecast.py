"""A forecast of the runs' time, from finished runs and from the bytes that cross the link."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from commhooks.lockstep import average_in_lockstep
from commhooks.tensors import tensor_bytes

from ..hooks import make_hook
from ..machine import cores
from ..runs import Compute, RunResult, RunSettings
from ..seldom import exchanged
from ..specs import Spec, steps_of_a_round
from ..tasks import load_task
from ..training.lockstep import join_workers
from ..training.sharded import step_bytes
from ..training.stock import is_stock
from .execute import starts

_START_SECONDS = 8.0  # of new ranks: the imports, mostly
_UNNAMED = ("optimizer", "compute", "ddp", "bucket_cap_mb", "evaluate_every")  # settings in a run's line if they differ


@dataclass
class Forecast:
    """Estimates of runs, from shared results and measurements."""

    results: Sequence[RunResult]  # of finished runs
    _compute: dict[object, float] = field(default_factory=dict)  # seconds of a step, by task and ranks
    _bytes: dict[object, float] = field(default_factory=dict)  # sent by a rank in a step, by task, hook and ranks

    def seconds(self, settings: RunSettings) -> float:
        """Return the estimated seconds that the run takes here."""
        telling = vars(settings).keys() - {"seed", "steps", "evaluate_every"}
        same = [
            one
            for one in self.results
            if all(getattr(one.settings, name) == getattr(settings, name) for name in telling)
        ]
        if same:
            step = statistics.fmean(step.seconds * one.dilation for one in same for step in one.steps)
            return settings.steps * step
        compute = self._compute_of(settings)
        dilation = 1.0
        if settings.compute is not None:
            stated = Compute.parse(settings.compute)
            dilation = 1 / stated.factor if stated.factor is not None else compute / (stated.seconds or compute)
        rate = settings.link.slowest
        communication = 8 * self._bytes_of(settings) / rate if rate else 0.0
        return settings.steps * (compute + dilation * communication)

    def total(self, runs: Sequence[RunSettings]) -> float:
        """Return the estimated seconds that all of the runs take, with the starts of their ranks."""
        return starts(runs) * _START_SECONDS + sum(self.seconds(settings) for settings in runs)

    def _bytes_of(self, settings: RunSettings) -> float:
        """Return the mean number of bytes that a rank sends in a step: in finished runs, or else in a trial here."""
        kind = ("task", "hook", "ranks", "is_sharded")
        key = tuple(getattr(settings, name) for name in kind)
        if key not in self._bytes:
            same = [one for one in self.results if tuple(getattr(one.settings, name) for name in kind) == key]
            steps = [step.moved_bytes for one in same for step in one.steps]
            self._bytes[key] = statistics.fmean(steps) if steps else _counted(settings)
        return self._bytes[key]

    def _compute_of(self, settings: RunSettings) -> float:
        """Return the seconds of a step's compute here, with all ranks at work."""
        key = settings.task, settings.ranks
        if key not in self._compute:
            same = [one for one in self.results if (one.settings.task, one.settings.ranks) == key]
            if same:
                self._compute[key] = statistics.median(
                    (step.compute + step.compression) * one.dilation for one in same for step in one.steps
                )
            else:
                self._compute[key] = _measured(settings)
        return self._compute[key]


def _counted(settings: RunSettings) -> float:
    """Return a rank's bytes in a step; our hooks' are counted as workers of this process average random gradients."""
    model = load_task(settings.task, settings.seed).model
    if settings.is_sharded:
        return step_bytes(model, settings.hook, settings.ranks)
    dense = 2 * (settings.ranks - 1) / settings.ranks * sum(tensor_bytes(p) for p in model.parameters())
    if is_stock(settings.hook):
        return dense
    hook, every = exchanged(settings.hook), steps_of_a_round(settings.hook)
    start_after = every * int(dict(hook.settings).get("start_after", 0))
    others = tuple((name, value) for name, value in hook.settings if name != "start_after")
    workers = join_workers(model, make_hook(Spec(hook.name, others)), settings.ranks)
    gradients = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    average_in_lockstep(workers, [{n: g.clone() for n, g in gradients.items()} for _ in workers])
    share = min(start_after / settings.steps, 1.0)
    return (share * dense + (1 - share) * workers[0].last_step().moved_bytes) / every


def _measured(settings: RunSettings) -> float:
    """Return the seconds of a step's compute in this process, multiplied if the ranks share cores."""
    task, times = load_task(settings.task, settings.seed), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a rank
    try:
        for step in range(3):
            batch = task.batch(step, 0, settings.ranks)
            begin = time.perf_counter()
            task.loss(task.model, batch).backward()
            times.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    return min(times) * max(1.0, settings.ranks / cores())


def forecast(runs: Sequence[RunSettings], done: Mapping[RunSettings, RunResult]) -> list[str]:
    """Return a line for each run, finished or with its estimated time, and lines for all of them together."""
    estimate, missing = Forecast(list(done.values())), [settings for settings in runs if settings not in done]
    differing = [name for name in _UNNAMED if len({getattr(settings, name) for settings in runs}) > 1]
    lines = []
    for settings in runs:
        state = "finished" if settings in done else f"about {in_words(estimate.seconds(settings))}"
        others = ""
        for name in differing:
            value = getattr(settings, name)
            others += f", {name} {value.label if isinstance(value, Spec) else 'as usual' if value is None else value}"
        lines.append(
            f"{settings.label}, {settings.ranks} ranks, {settings.link.label}, {settings.steps} steps{others}: {state}"
        )
    lines.append(f"{len(done)} of {len(runs)} runs are finished already.")
    if missing:
        lines.append(
            f"The others take about {in_words(estimate.total(missing))} here: the bytes over the link's rate, and the "
            "compute."
        )
        if any(settings.link.kind == "real" for settings in missing):
            lines.append("The rate of a real network is not known: the time of its transfers is not included.")
    return lines


def in_words(seconds: float) -> str:
    """Return '40 s', '12 min' or '3.5 h'."""
    if seconds < 1:
        return "1 s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
