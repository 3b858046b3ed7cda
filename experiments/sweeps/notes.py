"""Warnings about the circumstances under which runs were made: a busy machine, shared cores, different times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commhooks.units import counted

from ..report.words import listed, range_of_seconds, seconds_in_words
from ..results.outcomes import took_turns
from ..results.summary import Spread, typical_steps
from ..runs import RunResult, RunSettings
from .plan import crowded

_ENOUGH = 0.9  # of a core for each rank; with less, the machine was busy
_WIDE = 1.5  # upper over lower quartile of a run's steps, above which the machine disturbed them


def notes_about(results: Sequence[RunResult]) -> list[str]:
    """Return warnings about the circumstances under which these runs were made."""
    busy = _busy(results)
    scenes: dict[RunSettings, list[RunResult]] = {}
    for result in results:
        scenes.setdefault(result.settings.scene, []).append(result)
    by_cores: dict[int, list[RunSettings]] = {}
    for result in results:
        by_cores.setdefault(int(result.machine["cores"]), []).append(result.settings)
    warnings = [crowded(runs, available) for available, runs in by_cores.items()]
    notes = [warning for warning in (busy, _scattered(scenes), *warnings) if warning is not None]
    for scene in scenes.values():
        first, *others = scene
        apart = [result.settings.hook.label for result in others if not took_turns(first, result)]
        if apart:
            notes.append(
                f"{', '.join(apart)} ({first.settings.label.replace(first.settings.hook.label + ' · ', '')}) ran at "
                f"another time than {first.settings.hook.label}: the load on the machine may have been different"
            )
    return notes


def _busy(results: Sequence[RunResult]) -> str | None:
    """Return a warning if other programs left the ranks too little of the cores; None if not."""
    taken: dict[int, float] = {}  # by the number of cores
    for result in results:
        cores = int(result.machine["cores"])
        # Where nobody counts what others use, the load tells, less the ranks and the process that started them.
        by_load = min(max(0.0, float(result.machine["load"]) - result.settings.ranks - 1), cores)
        others = float(result.machine.get("used_by_others", by_load))
        if cores - others < _ENOUGH * min(result.settings.ranks, cores):
            taken[cores] = max(others, taken.get(cores, 0.0))
    if not taken:
        return None
    used = listed([f"{others:.1f} of {counted(cores, 'core')}" for cores, others in taken.items()])
    return (
        f"The machine was busy: while ranks trained, other programs used up to {used}. Compute took longer than on an "
        "idle machine, so that compression looks less useful than it is. Hooks that took turns were slowed alike; for "
        "figures to rely on, run this again on an idle machine."
    )


def _scattered(scenes: Mapping[RunSettings, Sequence[RunResult]]) -> str | None:
    """Return a warning if the steps of every hook of a scene scattered widely; None if not.

    A hook may have steps that differ by design, as with `start_after`. What disturbs a machine widens them all.
    """
    worst: tuple[float, RunResult, Spread] | None = None
    for scene, runs in scenes.items():
        spreads = [(run, Spread.of([step.seconds for step in typical_steps(run)])) for run in runs]
        run, spread = min(spreads, key=lambda each: each[1].high / each[1].low)
        width = spread.high / spread.low
        if width > _WIDE and not scene.link.schedule and (worst is None or width > worst[0]):
            worst = width, run, spread
    if worst is None:
        return None
    _, run, spread = worst
    return (
        f"Steps took very different times: even of {run.settings.label}, which scattered least beside other hooks, the "
        f"middle half took {range_of_seconds(spread.median, spread.low, spread.high)} "
        f"{seconds_in_words(spread.median).split()[-1]}. Something disturbed the machine or the link: before you rely "
        "on a time or a speed-up, run this again while nothing else runs."
    )
