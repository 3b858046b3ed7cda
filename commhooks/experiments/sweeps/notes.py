"""Warnings about the circumstances under which runs were made: a busy machine, and shared cores."""

from __future__ import annotations

from collections.abc import Sequence

from commhooks.experiments.report.words import listed
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.experiments.sweeps.plan import crowded
from commhooks.units import counted

_ENOUGH = 0.9  # of a core for each rank; with less, the machine was busy


def notes_about(results: Sequence[RunResult]) -> list[str]:
    """Return warnings about the circumstances under which these runs were made."""
    by_cores: dict[int, list[RunSettings]] = {}
    taken: dict[int, float] = {}  # by other programs, by the number of cores
    for result in results:
        cores, ranks = int(result.machine["cores"]), result.settings.ranks
        by_cores.setdefault(cores, []).append(result.settings)
        # Where nobody counts what others use, the load tells, less the ranks and the process that started them.
        by_load = min(max(0.0, float(result.machine["load"]) - ranks - 1), cores)
        others = float(result.machine.get("used_by_others", by_load))
        if cores - others < _ENOUGH * min(ranks, cores):
            taken[cores] = max(others, taken.get(cores, 0.0))
    notes = [crowded(runs, available) for available, runs in by_cores.items()]
    if taken:
        used = listed([f"{others:.1f} of {counted(cores, 'core')}" for cores, others in taken.items()])
        why = "compute took longer than on an idle one, so that compression looks less useful than it is"
        notes.insert(0, f"The machine was busy (other programs used up to {used}): {why}.")
    return [note for note in notes if note is not None]
