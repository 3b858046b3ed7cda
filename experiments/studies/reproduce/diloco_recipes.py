"""The best outer optimizer of DiLoCo for each compressor and period, compared with data-parallel training.

Every run trains several workers in one process (`train_seldom_in_lockstep`), all for the same number of steps, and so
of tokens. One seed tunes: all recipes at the first period, and at the others the two that were best there. The other
seeds judge the best recipe of each compressor and period. What is judged is the held-out loss at the outer copies.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from commhooks.experiments.hooks import make_hook
from commhooks.experiments.report.plots import Theme, canvas, legend, looks
from commhooks.experiments.report.words import NEVER, percent, signed
from commhooks.experiments.results.intervals import Estimate, ratios
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.units import bytes_in_words, counted
from experiments.studies.blocks import Block, Picture, Table, with_bounds
from experiments.studies.lockstep import train_in_lockstep
from experiments.studies.reproduce.ablation import as_row, hook_for, rows_of
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction
from experiments.studies.seldom_lockstep import train_seldom_in_lockstep

_DENSE = "all-reduce"
_PARALLEL = "data-parallel"
_TUNING_SEED = 0
_GOALS = {"int4": 0.01, "sparse-loco": 0.03}
"""The fractions by which a compressor's loss may exceed uncompressed DiLoCo's."""
_GOAL_OF_A_START = 0.05


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the runs."""

    task: str = "gpt:size=small,steps=1200"
    workers: int = 4
    every: tuple[int, ...] = (30, 10, 100)
    """Numbers of steps in a round; all recipes are tried at the first."""
    compressors: tuple[str, ...] = (_DENSE, "int4", "codebook", "sparse-loco", "powersgd:rank=4")
    """Compressors of the rounds; the others are compared with the first."""
    recipes: tuple[tuple[float, float], ...] = ((0.7, 0.9), (0.4, 0.6), (1.0, 0.0), (0.4, 0.0))
    """Rate and Nesterov momentum of the outer SGD."""
    start: str = "10%"
    """The share of data-parallel steps at first, in runs "after a start"."""
    seeds: int = 3
    """The number of seeds that judge; seed 0 only tunes."""
    second_task: str = "lstm:size=small,steps=600"
    second_compressors: tuple[str, ...] = (_DENSE, "int4", "sparse-loco")
    """Compressors on the second task, at the first period, with the recipes of the first task."""
    second_seeds: int = 2
    processes: int = field(default=0)
    """The number of runs at a time; 0: one for each core."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run to be made; the process that receives it makes its models."""

    task: str
    hook: str  # "data-parallel", or DiLoCo
    seed: int
    workers: int
    start: str = "0%"

    @property
    def key(self) -> str:
        """The text that identifies the run."""
        return f"{self.task} · {self.hook}{f' after {self.start}' if self.start != '0%' else ''} · seed {self.seed}"

    def run(self) -> dict[str, Any]:
        """Train, and return a row of the results."""
        tasks = [load_task(self.task, self.seed) for _ in range(self.workers)]
        steps = tasks[0].steps
        if self.hook == _PARALLEL:
            trained = train_in_lockstep(tasks[0], make_hook(Spec(_DENSE)), steps=steps, workers=self.workers)
        else:
            start = int(hook_for(self.start, steps))
            trained = train_seldom_in_lockstep(tasks, Spec.parse(self.hook), steps=steps, start=start)
        return as_row(trained, key=self.key)


Recipe = tuple[float, float]
Rows = Mapping[str, Mapping[str, Any]]


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return a row for each run, by its key: the runs that tune, the runs that judge, and the second task's."""
    rows: dict[str, Any] = {}

    def make(runs: Sequence[Run]) -> None:
        rows.update({row["key"]: row for row in rows_of(runs, notes, settings.processes)})

    first, *others = settings.every
    tuning = [_run(settings, _PARALLEL, _TUNING_SEED)]
    for every, tried in [(first, None), *((every, 2) for every in others)]:
        for compressor in settings.compressors:
            recipes = settings.recipes if tried is None else _ranked(settings, rows, compressor, first)[:tried]
            tuning += [_run(settings, _hook(compressor, every, recipe), _TUNING_SEED) for recipe in recipes]
        make(tuning)
        tuning = []
    for seed in range(_TUNING_SEED + 1, _TUNING_SEED + 1 + settings.seeds):
        make([_run(settings, hook, seed, start) for hook, start in _judged(settings, rows)])
    for seed in range(settings.second_seeds):
        make([_second(settings, hook, seed) for hook in _of_second_task(settings, rows).values()])
    return {"runs": rows}


def _run(settings: Settings, hook: str, seed: int, start: str = "0%") -> Run:
    return Run(task=settings.task, hook=hook, seed=seed, workers=settings.workers, start=start)


def _second(settings: Settings, hook: str, seed: int) -> Run:
    return Run(task=settings.second_task, hook=hook, seed=seed, workers=settings.workers)


def _hook(compressor: str, every: int, recipe: Recipe) -> str:
    """Return DiLoCo as it is written in `commhooks compare`."""
    rate, momentum = recipe
    return f"diloco:every={every},compressor=({compressor}),outer=(sgd:rate={rate:g},momentum={momentum:g})"


def _loss(rows: Rows, run: Run) -> float:
    """Return a run's loss: inf if it diverged, NaN if it was not made."""
    row = rows.get(run.key)
    if row is None:
        return math.nan
    return math.inf if row["diverged"] is not None or row["loss"] is None else float(row["loss"])


def _ranked(settings: Settings, rows: Rows, compressor: str, every: int) -> list[Recipe]:
    """Return the recipes that were tried, the best first."""
    losses = {
        recipe: _loss(rows, _run(settings, _hook(compressor, every, recipe), _TUNING_SEED))
        for recipe in map(_pair, settings.recipes)
    }
    return sorted((recipe for recipe, loss in losses.items() if not math.isnan(loss)), key=losses.__getitem__)


def _pair(recipe: Sequence[float]) -> Recipe:
    rate, momentum = recipe
    return rate, momentum


def _best_hook(settings: Settings, rows: Rows, compressor: str, every: int) -> str:
    return _hook(compressor, every, _ranked(settings, rows, compressor, every)[0])


def _judged(settings: Settings, rows: Rows) -> list[tuple[str, str]]:
    """Return what the other seeds train: hooks, and the share of data-parallel steps before them."""
    cells = [(compressor, every) for every in settings.every for compressor in settings.compressors]
    started = [_best_hook(settings, rows, compressor, settings.every[0]) for compressor in settings.compressors[:2]]
    return [
        (_PARALLEL, "0%"),
        *((_best_hook(settings, rows, compressor, every), "0%") for compressor, every in cells),
        *((hook, settings.start) for hook in started),
    ]


def _of_second_task(settings: Settings, rows: Rows) -> dict[str, str]:
    """Return the hooks of the second task by their labels."""
    hooks = {one: _best_hook(settings, rows, one, settings.every[0]) for one in settings.second_compressors}
    return {_PARALLEL: _PARALLEL, **hooks}


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return what tuning found, what the judging seeds say of the best, the goals, and the second task."""
    found = _Found(settings, measured["runs"])
    curves = {
        compressor: {every: found.behind(found.best(compressor, every)) for every in settings.every}
        for compressor in settings.compressors
    }
    blocks: list[Block] = [_tuning_table(found), _judged_table(found), _verdict(found)]
    if settings.second_seeds:
        blocks.append(_second_table(found))
    if len(settings.every) > 1:
        caption = f"Held-out loss relative to {_PARALLEL} training by steps of a round, each with its best recipe"
        blocks.append(Picture("periods", caption, functools.partial(_draw, curves)))
    return blocks


class _Found:
    """The losses of the runs."""

    def __init__(self, settings: Settings, rows: Rows) -> None:
        self.settings, self.rows = settings, rows
        self.plain, *self.others = settings.compressors
        self.first = settings.every[0]
        self.seeds = range(_TUNING_SEED + 1, _TUNING_SEED + 1 + settings.seeds)

    def best(self, compressor: str, every: int | None = None) -> str:
        """Return DiLoCo with the recipe that tuning chose; without `every`, of the first period."""
        return _best_hook(self.settings, self.rows, compressor, every or self.first)

    def losses(self, hook: str, start: str = "0%") -> dict[int, float]:
        """Return the loss of each judging seed."""
        return {seed: _loss(self.rows, _run(self.settings, hook, seed, start)) for seed in self.seeds}

    def behind(self, hook: str, start: str = "0%", to: str = _PARALLEL) -> Estimate:
        """Return the fraction by which the loss exceeds another hook's, seed by seed."""
        return _excess(self.losses(hook, start), self.losses(to))

    def sent(self, hook: str, start: str = "0%") -> str:
        """Return the bytes that a worker sent in a run, in words."""
        run = _run(self.settings, hook, self.seeds[0], start)
        return bytes_in_words(self.rows[run.key]["moved_bytes"] * load_task(self.settings.task).steps)


def _excess(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate:
    return Estimate.of({seed: ratio - 1 for seed, ratio in ratios(ours, theirs).items()})


def _recipe(recipe: Recipe) -> str:
    rate, momentum = recipe
    return f"{rate:g}, {momentum:g}" if momentum else f"{rate:g}, none"


def _tuning_table(found: _Found) -> Table:
    settings, rows, seed = found.settings, found.rows, _TUNING_SEED
    recipes = [_pair(recipe) for recipe in settings.recipes]
    parallel = _loss(rows, _run(settings, _PARALLEL, seed))
    lines = []
    for every in settings.every:
        for compressor in settings.compressors:
            losses = [_loss(rows, _run(settings, _hook(compressor, every, recipe), seed)) for recipe in recipes]
            best = _ranked(settings, rows, compressor, every)[0]
            cells = [_more(loss / parallel - 1, is_best=one == best) for one, loss in zip(recipes, losses, strict=True)]
            lines.append([f"`{compressor}`", str(every), *cells])
    title = (
        f"Tuning, seed {seed}: held-out loss relative to {_PARALLEL} training ({parallel:.3f} nats), by the outer "
        "SGD's rate and momentum"
    )
    return Table(title, ["compressor", "H", *map(_recipe, recipes)], lines)


def _more(share: float, *, is_best: bool = False) -> str:
    if math.isnan(share):
        return NEVER
    text = "diverged" if math.isinf(share) else _signed_percent(share)
    return f"**{text}**" if is_best else text


def _signed_percent(share: float) -> str:
    return f"{_in_percent(share)} %"


def _in_percent(share: float) -> str:
    return signed(100 * share, ".1f")


def _judged_table(found: _Found) -> Table:
    settings = found.settings
    lines = [[f"{_PARALLEL}", NEVER, NEVER, _mean(found.losses(_PARALLEL)), NEVER, NEVER, found.sent(_PARALLEL)]]
    for every in settings.every:
        for compressor in settings.compressors:
            hook = found.best(compressor, every)
            plain = found.best(found.plain, every)
            beside = NEVER if hook == plain else with_bounds(found.behind(hook, to=plain), _in_percent)
            recipe = _recipe(_ranked(settings, found.rows, compressor, every)[0])
            lines.append([f"`{compressor}`", str(every), recipe, *_cells(found, hook), beside, found.sent(hook)])
    for compressor in settings.compressors[:2]:
        hook, recipe = found.best(compressor), _recipe(_ranked(settings, found.rows, compressor, found.first)[0])
        label = f"`{compressor}` after a start"
        cells = _cells(found, hook, settings.start)
        lines.append([label, str(found.first), recipe, *cells, NEVER, found.sent(hook, settings.start)])
    beside = f"from `{found.plain}`, %"
    columns = ["compressor", "H", "outer", "nats", f"from {_PARALLEL}, %", beside, "sent"]
    title = (
        f"Judged by {settings.seeds} other seeds: held-out loss, from that of others at the same H; bytes of a worker"
    )
    return Table(title, columns, lines)


def _cells(found: _Found, hook: str, start: str = "0%") -> list[str]:
    return [_mean(found.losses(hook, start)), with_bounds(found.behind(hook, start), _in_percent)]


def _mean(losses: Mapping[int, float]) -> str:
    mean = statistics.fmean(losses.values())
    return f"{mean:.3f}" if math.isfinite(mean) else "diverged"


def _verdict(found: _Found) -> str:
    """Return the goals of a loss, each with its interval, and whether it is met: by the whole interval."""
    settings, plain = found.settings, found.best(found.plain)
    said = [
        _goal(f"DiLoCo with `{one}`, relative to uncompressed DiLoCo", found.behind(found.best(one), to=plain), most)
        for one, most in _GOALS.items()
        if one in found.others
    ]
    said.append(
        _goal(
            f"uncompressed DiLoCo after {settings.start} of {_PARALLEL} steps, relative to {_PARALLEL} training",
            found.behind(plain, settings.start),
            _GOAL_OF_A_START,
        )
    )
    lines = "\n".join(f"- {text}" for text in said)
    return f"At H = {found.first}:\n\n{lines}"


def _goal(what: str, share: Estimate, most: float) -> str:
    low, high = share.ends
    met = "met" if high <= most else "not met" if low > most else "not settled by so few seeds"
    return f"{what}: {with_bounds(share, _signed_percent)}; the goal of at most {percent(most)} is {met}."


def _second_table(found: _Found) -> Table:
    settings = found.settings

    def losses(hook: str) -> dict[int, float]:
        return {seed: _loss(found.rows, _second(settings, hook, seed)) for seed in range(settings.second_seeds)}

    parallel = losses(_PARALLEL)
    lines = [
        [
            label if hook == _PARALLEL else f"`{label}`",
            _mean(losses(hook)),
            NEVER if hook == _PARALLEL else with_bounds(_excess(losses(hook), parallel), _in_percent),
        ]
        for label, hook in _of_second_task(settings, found.rows).items()
    ]
    title = (
        f"`{settings.second_task}`, H = {found.first}, with the recipes above; {counted(settings.second_seeds, 'seed')}"
    )
    return Table(title, ["compressor", "loss, nats", f"from {_PARALLEL}, %"], lines)


def _draw(curves: Mapping[str, Mapping[int, Estimate]], theme: Theme) -> Figure:
    """Draw each compressor's excess of loss over the period, with its interval."""
    figure, axes = canvas("What seldom communication costs", "steps of a round, H (logarithmic)", 6.4, 4.0)
    drawn = looks(list(curves), next(iter(curves)))
    for place, (compressor, by_period) in enumerate(curves.items()):
        look, periods = drawn[compressor], sorted(by_period)
        x = [period * 1.02 ** (place - len(curves) / 2) for period in periods]  # intervals must not hide each other
        means = [100 * by_period[period].mean for period in periods]
        ends = [by_period[period].ends for period in periods]
        below = [100 * (by_period[period].mean - low) for period, (low, _) in zip(periods, ends, strict=True)]
        above = [100 * (high - by_period[period].mean) for period, (_, high) in zip(periods, ends, strict=True)]
        axes.errorbar(
            x, means, yerr=[below, above], label=look.label, color=look.colour, linestyle=look.dashes, marker="o",
            markersize=4, capsize=3,
        )  # fmt: skip
    axes.axhline(0, color=theme.ink, linewidth=0.8)
    axes.set_xscale("log")
    every = sorted(next(iter(curves.values())))
    axes.set_xticks(every, [str(period) for period in every])
    axes.minorticks_off()
    axes.set_ylabel(f"loss above {_PARALLEL}, %")
    legend(figure, axes)
    return figure


REPRODUCTION = Reproduction(
    name="diloco-recipes",
    title="Outer optimizers for DiLoCo",
    source="DiLoCo (Douillard et al., 2023), section 3",
    said=("SGD with Nesterov momentum (rate 0.7, momentum 0.9) is the best outer optimizer of those tried.",),
    sizes={
        "default": Settings(
            task="gpt:size=small,steps=300",
            every=(30,),
            compressors=(_DENSE, "int4", "sparse-loco"),
            recipes=((0.7, 0.9), (1.0, 0.0)),
            second_seeds=0,
        ),
        "full": Settings(),
        "tiny": Settings(
            task="gpt:size=tiny,steps=6",
            workers=2,
            every=(2, 3),
            compressors=(_DENSE, "int4", "sparse-loco"),
            recipes=((0.7, 0.9), (1.0, 0.0)),
            seeds=2,
            second_task="digits:size=tiny,steps=4",
            second_seeds=1,
            processes=1,
        ),
    },
    measure=measure,
    show=show,
)
