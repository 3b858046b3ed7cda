"""Pictures with a curve for each hook: loss and accuracy, and what the probes found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from commhooks.experiments.report.plots import LIGHT, Look, canvas, canvases, legend
from commhooks.experiments.results.outcomes import Outcome, Setting
from commhooks.experiments.results.summary import curve_of
from commhooks.experiments.runs import EvaluationRecord, RunResult

_POINTS = 400  # of a curve, at most
_WIDE = 5  # times by which runs' times or bytes differ before their axis is logarithmic
_SIZE = (5.6, 3.6)  # inches: small, so that its words can be read on a telephone
EXACT = 1e-5  # errors below this are drawn here

Numbers = npt.NDArray[np.float64]
Measure = Callable[[RunResult], Sequence[float]]
_MEASURES: Mapping[str, tuple[Measure, str]] = {
    "time": (lambda run: [step.seconds for step in run.steps], "training time"),
    "steps": (lambda run: [1.0] * len(run.steps), "step"),
    "bytes": (lambda run: [step.moved_bytes for step in run.steps], "bytes moved by a rank so far"),
}


def progress(setting: Setting, drawn: Mapping[str, Look], against: str, *, metric: str = "") -> Figure:
    """Draw every hook's loss over "time", "steps" or "bytes", or another metric of its evaluations.

    The line is the training loss (thin for each of several seeds), the dots are the held-out loss. A dotted line shows
    where the baseline ended; what lies beyond is going on.
    """
    measure, label = _MEASURES[against]
    first = [measure(run)[0] for one in setting.outcomes for run in one.results.values()]
    totals = [sum(measure(run)) for one in setting.outcomes for run in one.results.values()]
    logarithmic = against != "steps" and min(first) > 0 and max(totals) > _WIDE * min(totals)
    figure, axes = canvas(f"{metric.capitalize() or 'Loss'} over {against}", label, *_SIZE)
    for one in setting.outcomes:
        if metric:
            _metrics(axes, one, drawn[one.hook], measure, metric)
        else:
            _losses(axes, one, drawn[one.hook], measure)
    ends = {"steps": float(setting.settings.steps)}
    if setting.baseline is not None:
        ends["time"] = setting.baseline.seconds.mean
    if against in ends:
        axes.axvline(ends[against], color=LIGHT.ink, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_ylabel(f"held-out {metric}" if metric else "loss (line: training, dots: held out)")
    if not metric:
        _loss_limits(axes, setting)
    if logarithmic:
        axes.set_xscale("log")
        logarithmic_ticks(axes.xaxis, *axes.get_xlim())
        axes.set_xlabel(f"{label} (logarithmic)")
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=against == "steps", nbins=7))
    units = {"bytes": EngFormatter(unit="B"), "time": FuncFormatter(lambda value, _: f"{value:g} s")}
    if against in units:
        axes.xaxis.set_major_formatter(units[against])
    legend(figure, axes, width=_SIZE[0])
    return figure


def fidelity(setting: Setting, drawn: Mapping[str, Look]) -> Figure | None:
    """Draw the error of the mean and the residual at the probed steps; None if no step was probed."""
    probed = {one.hook: [run for run in one.results.values() if run.probes] for one in setting.outcomes}
    if not any(probed.values()):
        return None
    figure, (left, right) = canvases("Gradients: what is lost, and what is kept back", "step", 9.6, 4.0, columns=2)
    for hook, runs in probed.items():
        if not runs:
            continue  # DiLoCo averages no gradients
        _probes(left, [[max(probe.error, EXACT) for probe in run.probes] for run in runs], runs, drawn[hook])
        kept = [[probe.residual for probe in run.probes if probe.residual is not None] for run in runs]
        if all(len(own) == len(run.probes) for own, run in zip(kept, runs, strict=True)):
            _probes(right, kept, runs, drawn[hook])
    if any(math.isfinite(probe.error) for runs in probed.values() for run in runs for probe in run.probes):
        left.set_yscale("log")  # of runs that diverged there is nothing to scale
    left.axhline(1, color=LIGHT.ink, linewidth=0.8, linestyle=(0, (4, 3)))  # as far off as a mean of zero
    left.yaxis.set_major_formatter(FuncFormatter(error_label))
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(0, 1.05 * setting.settings.steps)  # a single point would lie amid steps that were not run
    left.set_ylabel("error of the mean / norm of the mean")
    right.set_ylim(bottom=0)
    right.set_ylabel("norm of the residual / of the gradient")
    legend(figure, left, width=9.6)
    return figure


def error_label(value: float, _: object) -> str:
    """Return the text of a tick on an axis of errors, whose least one stands for all smaller ones."""
    return "≤ 10⁻⁵" if value <= EXACT else f"{value:g}"


def _probes(axes: Axes, values: Sequence[Sequence[float]], runs: Sequence[RunResult], look: Look) -> None:
    steps = [probe.step for probe in runs[0].probes]
    for own in values:
        axes.plot(steps[: len(own)], own, color=look.colour, linestyle=look.dashes, linewidth=0.6, alpha=0.45)
    if len({len(own) for own in values}) == 1:
        mean = np.mean(np.array(values), axis=0)
        axes.plot(
            steps, mean, color=look.colour, linestyle=look.dashes, linewidth=1.8, marker="o", markersize=3.5,
            label=look.label,
        )  # fmt: skip


def _losses(axes: Axes, one: Outcome, look: Look, measure: Measure) -> None:
    """Draw the smoothed training loss of each seed thinly, and the means over seeds as far as all of them went."""
    runs = list(one.results.values())
    xs = [np.cumsum(measure(run)) for run in runs]
    losses = [curve_of([step.loss for step in run.steps]) for run in runs]
    line: dict[str, Any] = {"color": look.colour, "linestyle": look.dashes}
    if len(runs) > 1:
        for x, loss in zip(xs, losses, strict=True):
            axes.plot(*_thinned(x, loss), linewidth=0.6, alpha=0.4, **line)
    axes.plot(*_thinned(_mean(xs), _mean(losses)), linewidth=1.8, label=look.label, **line)
    places, found = _evaluations(runs, lambda each: each.loss)
    axes.scatter(
        _mean(xs)[places],
        found.mean(axis=0),
        s=18,
        color=look.colour,
        edgecolor=LIGHT.paper,
        linewidth=0.6,
        zorder=3,
    )


def _mean(curves: Sequence[Numbers]) -> Numbers:
    """Return the mean at every step that all of them have: runs that go on do not end at the same one."""
    common = min(map(len, curves))
    found: Numbers = np.mean([each[:common] for each in curves], axis=0)
    return found


def _thinned(xs: Numbers, ys: Numbers) -> tuple[Numbers, Numbers]:
    kept = np.unique(np.linspace(0, len(xs) - 1, _POINTS).astype(int))
    return xs[kept], ys[kept]


def _evaluations(runs: Sequence[RunResult], value: Callable[[EvaluationRecord], float]) -> tuple[list[int], Numbers]:
    """Return the places of the steps after which all runs were evaluated, and the values, a row for each run."""
    common = set.intersection(*({each.step for each in run.evaluations} for run in runs))
    common &= set(range(1, min(len(run.steps) for run in runs) + 1))
    found = np.array([[value(each) for each in run.evaluations if each.step in common] for run in runs])
    return [step - 1 for step in sorted(common)], found


def _metrics(axes: Axes, one: Outcome, look: Look, measure: Measure, metric: str) -> None:
    runs = list(one.results.values())
    places, found = _evaluations(runs, lambda each: each.metrics.get(metric, np.nan))
    xs = _mean([np.cumsum(measure(run)) for run in runs])[places]
    line: dict[str, Any] = {"color": look.colour, "linestyle": look.dashes, "marker": "o", "markersize": 3.5}
    axes.plot(xs, found.mean(axis=0), linewidth=1.8, label=look.label, **line)


def _loss_limits(axes: Axes, setting: Setting) -> None:
    """Use a logarithmic axis for a wide range; let a diverging curve leave the picture, not flatten the others."""
    curves = [curve_of([step.loss for step in run.steps]) for one in setting.outcomes for run in one.results.values()]
    finite = [curve[np.isfinite(curve)] for curve in curves]
    starts = [float(curve[0]) for curve in finite if curve.size]
    if not starts:
        return
    low, high = min(float(curve.min()) for curve in finite if curve.size), max(float(c.max()) for c in finite if c.size)
    if high > 3 * max(starts):
        high = 1.5 * max(starts)
        axes.set_ylim(top=high)
    if high > 20 * low > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        logarithmic_ticks(axes.yaxis, low, high)


def logarithmic_ticks(axis: Axis, low: float, high: float) -> None:
    """Put numbers on a logarithmic axis at 1, 2 and 5 if it has few decades, and else at 1; nowhere else."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axis.set_minor_formatter(NullFormatter())
