"""The output of an ablation: a table for each task, the findings in sentences, and a picture of the differences."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from commhooks.experiments.report.plots import Theme, canvases
from commhooks.experiments.report.words import NEVER, bounds, folded, signed
from commhooks.experiments.results.intervals import Interval, differences
from experiments.studies.blocks import Block, Picture, Table
from experiments.studies.lockstep import ACCURACY, LOSS, SCORES, Score
from experiments.studies.reproduce.ablation import Ablation, task_and_optimizer


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One variant on one task, over all seeds, beside the baseline."""

    task: str
    score: Score
    label: str
    runs: int
    diverged: int  # runs whose loss stopped being finite
    mean: float | None  # of the score; None if a run diverged
    baseline: str  # its label
    difference: Interval | None  # in `score.unit`; None of the baseline, or if a run of either diverged
    payload_bytes: float  # of a worker and step, mean over the run


def compare(ablation: Ablation, rows: Sequence[Mapping[str, Any]], task: str) -> list[Compared]:
    """Return what every variant did on a task, in the order of the variants."""
    of_task = [row for row in rows if row["task"] == task]
    score, baseline = _score_of(task, of_task), ablation.baseline
    found = []
    for label in ablation.variants:
        own = [row for row in of_task if row["variant"] == label]
        scores = list(_scores(of_task, score, label).values())
        diverged = sum(not math.isfinite(value) for value in scores)
        found.append(
            Compared(
                task=task,
                score=score,
                label=label,
                runs=len(own),
                diverged=diverged,
                mean=None if diverged else statistics.fmean(scores),
                baseline=baseline,
                difference=None if label == baseline else between(of_task, score, label, baseline),
                payload_bytes=statistics.fmean(row["payload_bytes"] for row in own),
            )
        )
    return found


def between(rows: Sequence[Mapping[str, Any]], score: Score, label: str, other: str) -> Interval | None:
    """Return by how much one variant's score exceeds the other's, in `score.unit`; None if a run of either diverged."""
    ours, theirs = _scores(rows, score, label), _scores(rows, score, other)
    if not all(map(math.isfinite, (*ours.values(), *theirs.values()))):
        return None
    return Interval.of(list(differences(ours, theirs).values())).scaled(score.scale)


def table(ablation: Ablation, compared: Sequence[Compared]) -> Table:
    """Return a row for each variant of one task."""
    score = compared[0].score
    unit = "%" if score.scale == 100 else score.unit
    title = f"{compared[0].task}: means of {ablation.seeds} seeds, {ablation.workers} workers; bytes are those of one"
    against = f"against {ablation.baseline}, {score.unit} (95 %)"
    columns = ("variant", "kB a step", f"{score.name}, {unit}", against, "effect")
    return Table(title, columns, [_cells(one) for one in compared])


def finding(one: Compared) -> str:
    """Return what was seen, with its interval; "no difference seen" if that contains zero."""
    if one.diverged:
        return f"{one.diverged} of {one.runs} runs with {one.label} diverged, so no mean of them is given."
    if one.difference is None:
        return f"{one.label} cannot be compared with {one.baseline}, of which runs diverged."
    form, score, mean = _form(one.score), one.score, one.difference.mean
    if one.difference.sign == 0:
        within = bounds(one.difference, functools.partial(signed, form=form))
        text = f"no difference seen between {one.label} and {one.baseline}: {signed(mean, form)} {score.unit}"
    else:
        low, high = sorted(abs(bound) for bound in (one.difference.low, one.difference.high))
        within = f"{low:{form}} to {high:{form}}"
        direction = "higher" if mean > 0 else "lower"
        text = f"with {one.label}, {score.name} is {abs(mean):{form}} {score.unit} {direction} than with {one.baseline}"
    return f"{text} ({within}, {one.runs} seeds)."


def findings(compared: Sequence[Compared]) -> str:
    """Return a list of what was seen on one task."""
    seen = [finding(one) for one in compared if one.label != one.baseline or one.diverged]
    lines = "\n".join(f"- {text[0].upper()}{text[1:]}" for text in seen)
    return f"On {in_words(compared[0].task)}:\n\n{lines}"


def in_words(task: str) -> str:
    """Return the task's name, and its optimizer's if that is not the task's own."""
    named, optimizer = task_and_optimizer(task)
    return named.name if optimizer is None else f"{named.name} under {optimizer.name}"


def show_ablation(ablation: Ablation, measured: Mapping[str, Any]) -> list[Block]:
    """Return a table and what was seen for each task, and one picture of them all."""
    blocks: list[Block] = []
    for task in ablation.tasks:
        compared = compare(ablation, measured["runs"], task)
        blocks += [table(ablation, compared), findings(compared)]
    caption = f"Differences from {ablation.baseline}, with 95 % intervals, on {' and '.join(ablation.tasks)}"
    draw = functools.partial(draw_differences, ablation, measured["runs"])
    return [*blocks, Picture("differences", caption, draw)]


def draw_differences(ablation: Ablation, rows: Sequence[Mapping[str, Any]], theme: Theme) -> Figure:
    """Draw each variant's difference from the baseline, a panel for each task."""
    others = [label for label in ablation.variants if label != ablation.baseline]
    height = 1.4 + 0.36 * len(others)
    figure, panels = canvases("", "", 8.8, height, columns=len(ablation.tasks), sharey=True)
    for axes, task in zip(panels, ablation.tasks, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        score = _score_of(task, of_task)
        axes.set_title(in_words(task), loc="left", fontweight="bold", pad=8)
        better = "right" if score.higher_is_better else "left"
        label = f"{score.name}: difference from {ablation.baseline}, {score.unit}"
        label = folded(label, 26) if len(panels) > 2 else label
        axes.set_xlabel(f"{label}\n({better} is better)")
        axes.axvline(0, color=theme.first, linewidth=1.2)
        for place, label in enumerate(others):
            found = between(of_task, score, label, ablation.baseline)
            if found is None:
                axes.annotate(" diverged", (0, place), va="center", color=theme.hooks[1])
                continue
            axes.plot([found.low, found.high], [place, place], color=theme.hooks[0], linewidth=2)
            axes.plot([found.mean], [place], "o", color=theme.hooks[0], markersize=6)
        axes.set_yticks(range(len(others)), [folded(label, 30) for label in others])
        axes.set_ylim(len(others) - 0.5, -0.5)
    return figure


def _scores(rows: Sequence[Mapping[str, Any]], score: Score, label: str) -> dict[int, float]:
    """Return the score of each seed; NaN for a run that diverged, even if it still guesses some answers right."""
    own = {row["seed"]: row for row in rows if row["variant"] == label}
    lost = {seed for seed, row in own.items() if row["diverged"] is not None or row["loss"] is None}
    return {seed: math.nan if seed in lost else row[score.field] for seed, row in own.items()}


def _score_of(task: str, rows: Sequence[Mapping[str, Any]]) -> Score:
    """Return by what a task is judged: its accuracy if it has one, except the built-in language models'."""
    known = SCORES.get(task_and_optimizer(task)[0].name)
    return known or (ACCURACY if all(row["accuracy"] is not None for row in rows) else LOSS)


def _cells(one: Compared) -> list[str]:
    form = _form(one.score)
    mean = f"{one.diverged} of {one.runs} diverged" if one.mean is None else f"{one.mean * one.score.scale:{form}}"
    sent = f"{one.payload_bytes / 1e3:.2f}"
    if one.difference is None:
        return [one.label, sent, mean, NEVER, NEVER]
    signs = functools.partial(signed, form=form)
    difference = f"{signs(one.difference.mean)} ({bounds(one.difference, signs)})"
    better = (one.difference.sign > 0) == one.score.higher_is_better
    effect = ("better" if better else "worse") if one.difference.sign else "none seen"
    return [one.label, sent, mean, difference, effect]


def _form(score: Score) -> str:
    """Return how many decimals a score is given with: hundredths of a point, thousandths of a nat."""
    return ".2f" if score.scale == 100 else ".3f"
