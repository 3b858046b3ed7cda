"""Counts of right, wrong and open verdicts, from repetitions and from recorded runs that are resampled."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from commhooks.experiments.results.verdicts import Judged, Run, Verdict, judge
from experiments.studies.verdicts.recording import BASELINE, Repetitions

Floats = npt.NDArray[np.float64]
_FIRST, _BLOCK = 5, 10  # the first steps stay; turns are drawn in blocks, since neighbours are alike
_AGAIN = "all-reduce:policy=fifo"  # the baseline a second time
_STABLE = ("digits", "gpt:size=tiny")
_CLOSE = 1.15  # a speed-up between its inverse and it is close to none


@dataclass
class Count:
    """The verdicts of single runs, beside the verdict of all of them together."""

    truth: Verdict
    speed_up: float
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def right(self) -> int:
        """Verdicts equal to the truth; none if that is open."""
        return self.verdicts.count(self.truth) if self.truth is not Verdict.OPEN else 0

    @property
    def open(self) -> int:
        """Verdicts that settle nothing."""
        return self.verdicts.count(Verdict.OPEN)

    @property
    def wrong(self) -> int:
        """Settled verdicts that differ from a settled truth."""
        return 0 if self.truth is Verdict.OPEN else len(self.verdicts) - self.right - self.open

    @property
    def is_close(self) -> bool:
        """True if the steps take about as long as the baseline's."""
        return 1 / _CLOSE < self.speed_up < _CLOSE


def of_repetitions(found: Repetitions, seeds: int = 1) -> dict[tuple[str, str], Count]:
    """Return the counts by setting and hook, each verdict from as many neighbouring seeds."""
    counts = {}
    for setting, hooks in found.items():
        baseline = hooks[BASELINE]
        steps = min(len(run.losses) for run in baseline.values())
        for hook, runs in hooks.items():
            if hook != BASELINE:
                both = sorted(runs.keys() & baseline.keys())
                whole = judge(baseline, runs, steps=steps)
                count = counts[setting, hook] = Count(whole.verdict, whole.speed_up.mean)
                for some in zip(*(both[place::seeds] for place in range(seeds)), strict=False):
                    count.verdicts.append(_of_seeds(baseline, runs, some, steps).verdict)
    return counts


def _of_seeds(baseline: Mapping[int, Run], runs: Mapping[int, Run], seeds: Sequence[int], steps: int) -> Judged:
    theirs, ours = ({seed: every[seed] for seed in seeds} for every in (baseline, runs))
    return judge(theirs, ours, steps=steps)


class Recorded:
    """Losses of several seeds and step times of several links, of the same tasks and hooks.

    Keys: `curve|task|hook|loss` (seeds × steps, NaN after a run's end), `curve|task|hook|seeds`, `curve|task|steps`
    (those asked for), `run|order|task|link|seed|hook|seconds` (order of turns: demo and fixed are the same in each
    round).
    """

    def __init__(self, path: Path) -> None:
        with np.load(path) as data:
            self._data = {key: data[key] for key in data.files}

    def steps(self, task: str) -> int:
        """Return the steps asked for."""
        return int(self._data[f"curve|{task}|steps"])

    def losses(self, task: str, hook: str) -> dict[int, Floats]:
        """Return the training losses by seed; none if the hook was not run."""
        key = f"curve|{task}|{hook}"
        if f"{key}|loss" not in self._data:
            return {}
        curves = zip(self._data[f"{key}|seeds"].tolist(), self._data[f"{key}|loss"], strict=True)
        return {seed: curve[np.isfinite(curve)].astype(np.float64) for seed, curve in curves}

    def times(self) -> Iterator[tuple[str, str, dict[str, Floats]]]:
        """Yield task, link and the seconds by hook of each comparison whose turns were drawn, or that was a demo."""
        found: dict[tuple[str, ...], dict[str, Floats]] = defaultdict(dict)
        for key, value in self._data.items():
            kind, *place = key.split("|")
            if kind == "run" and place[-1] == "seconds" and place[0] != "fixed":
                found[tuple(place[:4])][place[4]] = value.astype(np.float64)
        for (_, task, link, _), hooks in found.items():
            if f"curve|{task}|steps" in self._data:
                yield task, link, hooks


def of_recorded(recorded: Recorded, times: int = 12) -> dict[tuple[str, str, str], Count]:
    """Return the counts by task, link and hook, of curves of one seed with times that are drawn from recorded turns."""
    draw = np.random.default_rng(0)
    counts: dict[tuple[str, str, str], Count] = {}
    by_place: dict[tuple[str, str], list[dict[str, Floats]]] = defaultdict(list)
    for task, link, hooks in recorded.times():
        by_place[task, link].append(hooks)
    for (task, link), every in by_place.items():
        steps, theirs = recorded.steps(task), recorded.losses(task, BASELINE)
        for hook in dict.fromkeys(name for hooks in every for name in hooks):
            timed = [hooks for hooks in every if hook in hooks]
            ours = recorded.losses(task, hook)
            seeds = sorted(ours.keys() & theirs.keys())
            if hook == BASELINE or not seeds:
                continue
            drawn = [
                _runs(ours[seed], theirs[seed], timed[number % len(timed)], hook, steps, draw)
                for number, seed in zip(range(max(times, len(seeds))), itertools.cycle(seeds), strict=False)
            ]
            pooled = [dict(enumerate(one)) for one in zip(*drawn, strict=True)]
            whole = judge(*pooled, steps=steps)
            count = counts[task, link, hook] = Count(whole.verdict, whole.speed_up.mean)
            for baseline, run in drawn[:times]:
                count.verdicts.append(judge({0: baseline}, {0: run}, steps=steps).verdict)
    return counts


def of_nulls(recorded: Recorded) -> dict[str, list[Verdict]]:
    """Return the verdicts on all-reduce compared with itself: with other rounding, and with another seed.

    Times are those of the baseline that was run a second time.
    """
    draw = np.random.default_rng(1)
    twice = {task: hooks for task, _, hooks in recorded.times() if _AGAIN in hooks}
    found: dict[str, list[Verdict]] = {"other rounding": [], "another seed": []}
    for task in _STABLE:
        steps, theirs, seconds = recorded.steps(task), recorded.losses(task, BASELINE), twice[task]
        rounded = recorded.losses(task, "null:1e-6")
        pairs = [("other rounding", rounded[seed], theirs[seed]) for seed in sorted(rounded.keys() & theirs.keys())]
        pairs += [("another seed", theirs[one], theirs[other]) for one, other in itertools.permutations(theirs, 2)]
        for kind, mine, its in pairs:
            baseline, run = _runs(mine, its, seconds, _AGAIN, steps, draw)
            found[kind].append(judge({0: baseline}, {0: run}, steps=steps).verdict)
    return found


def _runs(
    ours: Floats, theirs: Floats, seconds: Mapping[str, Floats], hook: str, steps: int, draw: np.random.Generator
) -> tuple[Run, Run]:
    """Return the baseline's run and the hook's, with the times of the same turns; the hook goes on for as long."""
    turns = min(len(seconds[hook]), len(seconds[BASELINE]))
    begins = draw.integers(_FIRST, turns, len(ours) // _BLOCK + 1)
    places = np.concatenate(
        [np.arange(_FIRST), *[_FIRST + (b - _FIRST + np.arange(_BLOCK)) % (turns - _FIRST) for b in begins]]
    )
    mine, its = seconds[hook][places][: len(ours)], seconds[BASELINE][places][:steps]
    made = max(steps, int(np.searchsorted(np.cumsum(mine), its.sum())) + 1)
    return Run(theirs[:steps].tolist(), its.tolist()), Run(ours[:made].tolist(), mine[:made].tolist())
