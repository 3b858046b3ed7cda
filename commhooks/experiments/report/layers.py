"""A hook's effect on each layer: a picture from the last probed step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from commhooks.experiments.report.curves import EXACT, error_label, logarithmic_ticks
from commhooks.experiments.report.plots import LIGHT, Look, canvases, legend
from commhooks.experiments.report.words import shortened
from commhooks.experiments.results.intervals import Estimate
from commhooks.experiments.results.outcomes import Outcome, Setting
from commhooks.experiments.runs import LayerRecord

_SHOWN = 14  # layers by name, the largest; the others are one row


@dataclass(frozen=True)
class Layer:
    """One layer, or what is left of them, under one hook: means over seeds."""

    name: str
    smaller: float | None  # bytes of the gradient over those in messages
    error: float  # of the mean, over its norm


def layers_of(one: Outcome) -> list[Layer]:
    """Return the largest layers in the model's order, and last the median of the others; nothing without probes."""
    by_seed = [run.probes[-1].layers for run in one.results.values() if run.probes]
    if not by_seed or not by_seed[0]:
        return []
    run = next(iter(one.results.values()))
    width = run.steps[-1].gradient_bytes / sum(layer.elements for layer in by_seed[0])  # bytes of an element
    largest = sorted(range(len(by_seed[0])), key=lambda n: -by_seed[0][n].elements)[:_SHOWN]
    found = [_mean_layer([layers[n] for layers in by_seed], width) for n in sorted(largest)]
    left = [n for n in range(len(by_seed[0])) if n not in largest]
    if left:
        found.append(_median_layer([_mean_layer([layers[n] for layers in by_seed], width) for n in left]))
    return found


def layer_picture(setting: Setting, drawn: Mapping[str, Look]) -> Figure | None:
    """Draw how many times smaller each layer became, and its error; None without probes."""
    by_hook = {one.hook: layers for one in setting.outcomes if (layers := layers_of(one))}
    if not by_hook:
        return None
    names = [shortened(layer.name, 42) for layer in next(iter(by_hook.values()))]
    height = 1.6 + max(0.3, 0.05 * len(by_hook)) * len(names)
    figure, (left, right) = canvases("By layer, at the last probed step", "", 9.6, height, columns=2, sharey=True)
    for place, (hook, layers) in enumerate(by_hook.items()):
        look = drawn[hook]
        # Side by side within a row, so that equal values do not hide each other.
        rows = [row + 0.6 * ((place + 0.5) / len(by_hook) - 0.5) for row in range(len(names))]
        sizes = [math.nan if layer.smaller is None else layer.smaller for layer in layers]
        errors = [max(layer.error, EXACT) if math.isfinite(layer.error) else math.nan for layer in layers]
        left.plot(sizes, rows, "o", color=look.colour, markersize=4, label=look.label)
        right.plot(errors, rows, "o", color=look.colour, markersize=4)
    left.set_xscale("log")
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    logarithmic_ticks(left.xaxis, *left.get_xlim())
    left.set_xlabel("times smaller in messages (logarithmic)")
    right.set_xscale("log")
    right.axvline(1, color=LIGHT.ink, linewidth=0.8, linestyle=(0, (4, 3)))  # as far off as a mean of zero
    right.xaxis.set_major_formatter(FuncFormatter(error_label))
    right.set_xlabel("error of the mean / norm of the mean (logarithmic)")
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.5, -0.5)
    for axes in (left, right):
        axes.grid(axis="y", visible=False)
        for row in range(1, len(names)):
            axes.axhline(row - 0.5, color=LIGHT.faint, linewidth=0.5)
    legend(figure, left, width=9.6)
    return figure


def _mean_layer(records: Sequence[LayerRecord], width: float) -> Layer:
    """Return one layer's means over seeds."""
    sent = [one.payload_bytes for one in records if one.payload_bytes]
    return Layer(
        records[0].name,
        width * records[0].elements / statistics.fmean(sent) if sent else None,
        Estimate.of(dict(enumerate(one.error for one in records))).mean,
    )


def _median_layer(layers: Sequence[Layer]) -> Layer:
    sizes = [one.smaller for one in layers if one.smaller is not None]
    errors = [one.error for one in layers if math.isfinite(one.error)]
    return Layer(
        f"{len(layers)} smaller ones (median)",
        statistics.median(sizes) if sizes else None,
        statistics.median(errors) if errors else math.nan,
    )
