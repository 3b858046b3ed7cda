"""Pictures with a curve for each hook: loss and accuracy, and what the probes found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from ..results.outcomes import ACCURACY, Outcome, Setting
from ..results.summary import curve_of, total_seconds
from ..runs import EvaluationRecord, RunResult
from .plots import LIGHT, Look, canvases, legend, png, style
from .words import percent

_POINTS = 400  # of a curve, at most
_WIDE = 5  # times by which hooks' training times differ before their axis is logarithmic
_LOGARITHMIC = " (logarithmic)"
EXACT = 1e-5  # errors below this are drawn here

Numbers = npt.NDArray[np.float64]
Measure = Callable[[RunResult], Sequence[float]]


def against_bytes(setting: Setting, drawn: Mapping[str, Look]) -> bytes:
    """Return a PNG: loss and accuracy over the bytes moved by a rank, on a logarithmic axis."""
    with matplotlib.rc_context(style(LIGHT)):
        label = f"bytes moved by a rank so far{_LOGARITHMIC}"
        return _progress(setting, drawn, "bytes", label, lambda run: [step.moved_bytes for step in run.steps])


def against_steps(setting: Setting, drawn: Mapping[str, Look]) -> bytes:
    """Return a PNG: loss and accuracy over steps, those of going on too."""
    with matplotlib.rc_context(style(LIGHT)):
        return _progress(setting, drawn, "steps", "step", lambda run: [1.0] * len(run.steps))


def against_time(setting: Setting, drawn: Mapping[str, Look]) -> bytes:
    """Return a PNG: loss and accuracy over training time."""
    with matplotlib.rc_context(style(LIGHT)):
        totals = [total_seconds(run.steps) for one in setting.outcomes for run in one.results.values()]
        label = "training time" + (_LOGARITHMIC if max(totals) > _WIDE * min(totals) else "")
        return _progress(setting, drawn, "time", label, lambda run: [step.seconds for step in run.steps])


def fidelity(setting: Setting, drawn: Mapping[str, Look]) -> bytes | None:
    """Return a PNG: the error of the mean and the residual, at the probed steps; None if no step was probed."""
    if not any(run.probes for one in setting.outcomes for run in one.results.values()):
        return None
    residuals = any(
        probe.residual is not None for one in setting.outcomes for run in one.results.values() for probe in run.probes
    )
    with matplotlib.rc_context(style(LIGHT)):
        title = "Gradients: what is lost, and what is kept back"
        figure, every = canvases(title, "step", 9.6, 4.0, columns=1 + residuals)
        for one in setting.outcomes:
            look, runs = drawn[one.hook], [run for run in one.results.values() if run.probes]
            if not runs:
                continue  # DiLoCo averages no gradients
            _probes(every[0], [[max(probe.error, EXACT) for probe in run.probes] for run in runs], runs, look)
            if residuals and all(probe.residual is not None for run in runs for probe in run.probes):
                found = [[probe.residual or 0.0 for probe in run.probes] for run in runs]
                _probes(every[1], found, runs, look)
        every[0].set_yscale("log")
        every[0].axhline(1, color=LIGHT.ink, linewidth=0.8, linestyle=(0, (4, 3)))  # as far off as a mean of zero
        every[0].yaxis.set_major_formatter(FuncFormatter(error_label))
        every[0].set_xlabel("step")
        for axes in every:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_xlim(0, 1.05 * setting.settings.steps)  # a single point would lie amid steps that were not run
        every[0].set_ylabel("error of the mean\n/ norm of the mean")
        if residuals:
            every[1].set_ylim(bottom=0)
            every[1].set_ylabel("norm of the residual\n/ norm of the gradient")
        legend(figure, every[0], width=9.6)
        return png(figure)


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


def _progress(setting: Setting, drawn: Mapping[str, Look], against: str, x_label: str, measure: Measure) -> bytes:
    """Draw the training loss and the held-out loss, and below them, or beside, the accuracy if the task has one."""
    rows, wide = 1 + (ACCURACY in setting.metrics), against == "bytes"
    what = "Loss and accuracy" if rows == 2 else "Loss"
    width, height = (9.6, 4.2) if wide else (6.4, 2.4 + 2.6 * rows)
    down, across = (1, rows) if wide else (rows, 1)
    figure, every = canvases(f"{what} against {against}", x_label, width, height, rows=down, columns=across)
    for one in setting.outcomes:
        _losses(every[0], one, drawn[one.hook], measure)
        if rows == 2:
            _accuracies(every[1], one, drawn[one.hook], measure)
    ends = {"steps": float(setting.settings.steps)}
    if setting.baseline is not None:
        ends["time"] = setting.baseline.seconds.mean
    if against in ends:  # what lies beyond is going on
        for axes in every:
            axes.axvline(ends[against], color=LIGHT.ink, linewidth=0.8, linestyle=(0, (1, 2)))
    every[0].set_ylabel("loss (line: training,\ndots: held out)")
    _target(every[0], setting.target)
    _loss_limits(every[0], setting)
    if rows == 2:
        every[1].set_ylabel("held-out accuracy")
        every[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value).replace(".0 ", " ")))
    first = [measure(run)[0] for one in setting.outcomes for run in one.results.values()]
    units = {"bytes": EngFormatter(unit="B"), "time": FuncFormatter(lambda value, _: f"{value:g} s")}
    for axes in every if wide else every[-1:]:
        axes.set_xlabel(x_label)
        if x_label.endswith(_LOGARITHMIC) and min(first) > 0:
            axes.set_xscale("log")
            logarithmic_ticks(axes.xaxis, *axes.get_xlim())
        else:
            axes.set_xlim(left=0)
        if against in units:
            axes.xaxis.set_major_formatter(units[against])
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, every[0], width=width)
    return png(figure)


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


def _accuracies(axes: Axes, one: Outcome, look: Look, measure: Measure) -> None:
    runs = list(one.results.values())
    places, found = _evaluations(runs, lambda each: each.metrics.get(ACCURACY, np.nan))
    xs = [np.cumsum(measure(run))[places] for run in runs]
    line: dict[str, Any] = {"color": look.colour, "linestyle": look.dashes}
    if len(runs) > 1:
        for x, values in zip(xs, found, strict=True):
            axes.plot(x, values, linewidth=0.6, alpha=0.4, **line)
    axes.plot(_mean(xs), found.mean(axis=0), linewidth=1.8, marker="o", markersize=3.5, **line)


def _target(axes: Axes, target: float) -> None:
    if not np.isfinite(target):
        return
    axes.axhline(target, color=LIGHT.ink, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.7)
    axes.annotate(
        f"target {target:.3g}",
        (0.01, target),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color=LIGHT.ink,
    )


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
