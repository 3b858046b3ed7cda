"""PyTorch's PowerSGD hook beside ours, on data spread evenly over the ranks and on data that is not.

PyTorch's hook keeps as its residual the distance of what it compressed from the *mean over all ranks*; ours keeps what
this rank itself did not get through. Both train the same models on the same batches in PyTorch's DDP,
with the same rank, start step and `min_compression_rate`, so that they compress the same matrices.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

import commhooks
from commhooks.experiments.hooks import make_hook
from commhooks.experiments.launch import Send, run_world
from commhooks.experiments.report.plots import Theme, canvases, legend
from commhooks.experiments.report.words import NEVER, signed, spread_of
from commhooks.experiments.results.intervals import Estimate, differences
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.training.registration import wrap_in_ddp
from commhooks.experiments.training.stepper import Stepper
from commhooks.experiments.training.stock import is_stock, register_stock
from commhooks.language.entries import RESIDUAL
from commhooks.units import counted
from experiments.studies.blocks import Block, Picture, Table, with_bounds
from experiments.studies.reproduce.ablations import PAPER
from experiments.studies.reproduce.comparing import by_seed
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction

_POINTS = partial(signed, form=".2f")
_ONE_BUCKET_MB = 1024.0  # PyTorch's hook does not survive several over Gloo
_SILENCE_SECONDS = 300.0
_STOCK, _OURS = "PyTorch's", "ours"

Run = tuple[str, float, int]
"""The hook's label, the skew and the seed of a run."""
Registered = commhooks.Handle[Any] | PowerSGDState
"""The object that keeps the residuals of our hook, or of PyTorch's."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the runs."""

    task: str = "digits:size=tiny"
    skews: tuple[float, ...] = (0.0, 1.0)
    rank: int = 1  # of the matrices
    start: int = 10  # the step at which compression begins
    steps: int = 400
    every: int = 10  # steps from one look at the residual to the next
    ranks: int = 4
    seeds: int = 5

    @property
    def hooks(self) -> dict[str, str]:
        """The hooks, by label."""
        stock = f"torch.powersgd:matrix_approximation_rank={self.rank},start_powerSGD_iter={self.start}"
        return {_STOCK: stock, _OURS: f"powersgd:rank={self.rank},start_after={self.start}"}


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return a row for each hook, skew and seed."""
    runs = {
        f"{label}, skew {skew:g}, seed {seed}": (label, skew, seed)
        for skew in settings.skews
        for seed in range(settings.seeds)
        for label in settings.hooks
    }
    missing = {key: run for key, run in runs.items() if notes.get(key) is None}
    if missing:
        keep = lambda row: notes.keep(
            row["key"], row, f"accuracy {row['accuracy']:.3f}, residual / gradient {row['residuals'][-1]:.3g}"
        )
        run_world(train_each, settings.ranks, (settings, missing), keep, timeout=_SILENCE_SECONDS)
    return {"runs": list(map(notes.get, runs))}


def train_each(rank: int, ranks: int, argument: tuple[Settings, Mapping[str, Run]], send: Send) -> None:
    """Make the runs one after the other; rank 0 sends a row for each."""
    torch.set_num_threads(1)
    settings, runs = argument
    for key, run in runs.items():
        row = _train(settings, *run, ranks)
        gc.collect()  # a DDP that outlives its process group may abort the process
        if rank == 0:
            send({"key": key, **row})


def _train(settings: Settings, label: str, skew: float, seed: int, ranks: int) -> dict[str, Any]:
    """Train one model, and look at the residuals every few steps."""
    spec = Spec.parse(settings.task, "task")
    spec = spec if spec.has("skew") else spec.having(skew=skew)
    task = load_task(spec, seed)
    squares: list[float] = []  # of this rank's gradients since the last look
    for parameter in task.model.parameters():
        parameter.register_hook(lambda own: squares.append(own.square().sum().item()))  # before DDP averages it
    ddp = wrap_in_ddp(task.model, "torch", _ONE_BUCKET_MB)
    hook = Spec.parse(settings.hooks[label])
    registered = _register(ddp, hook, seed)
    stepper = Stepper(task, ddp)
    looks = list[dict[str, float]]()
    for step in range(settings.steps):
        task.set_learning_rate(stepper.optimizer, step, settings.steps)
        stepper()
        if (step + 1) % settings.every == 0:
            if step >= settings.start:
                looks.append(_look(_residual(registered), sum(squares) / settings.every, ranks))
            squares.clear()
    elements = _elements(registered, settings.steps - settings.start)
    if isinstance(registered, commhooks.Handle):  # PyTorch has no way to remove a hook
        registered.close()
    return {
        "label": label,
        "skew": skew,
        "seed": seed,
        "steps": [s for s in range(settings.every, settings.steps + 1, settings.every) if s > settings.start],
        "residuals": [look["residual"] for look in looks],
        "common": [look["common"] for look in looks],
        "norms": [look["norm"] for look in looks],
        "elements": elements,
        **task.evaluate(),
    }


def _register(ddp: nn.Module, hook: Spec, seed: int) -> Registered:
    """Put a hook on a DDP, ours or PyTorch's."""
    if not is_stock(hook):
        return commhooks.attach(ddp, make_hook(hook, seed))
    assert dist.group.WORLD is not None, "ranks have a group"
    state = register_stock(ddp, hook, dist.group.WORLD)
    assert state is not None, "PowerSGD has a state"
    return state


def _look(residual: Tensor, own: float, ranks: int) -> dict[str, float]:
    """Return the norms of a rank's residual and of the ranks' mean residual, both over the norm of a rank's gradient.

    Norms of one rank are root mean squares over the ranks. Every rank calls this.
    """
    both = torch.tensor([float(residual.square().sum()), own], dtype=torch.float64)
    dist.all_reduce(both)
    mean = residual / ranks
    dist.all_reduce(mean)
    norm, gradient = (both / ranks).sqrt().tolist()
    return {"residual": norm / gradient, "common": float(mean.norm()) / gradient, "norm": norm}


def _residual(registered: Registered) -> Tensor:
    """Return this rank's residual, all parameters that have one in a row."""
    if isinstance(registered, commhooks.Handle):
        (own,) = registered.state_dict()["local"].values()
        return torch.cat([entries[RESIDUAL].flatten() for entries in own.values() if RESIDUAL in entries])
    found: Tensor = registered.error_dict[0]
    return found


def _elements(registered: Registered, steps: int) -> float:
    """Return the elements sent in a compressed step, of which there were `steps`."""
    if isinstance(registered, commhooks.Handle):
        return registered.last_step().payload_bytes / torch.float32.itemsize
    return float(registered.compression_stats()[2] / steps)


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return a table, a sentence for each skew, and a picture of the residuals."""
    rows = measured["runs"]
    columns = (
        "data, hook",
        "elements sent a step",
        "residual / gradient, last look",
        "mean residual / gradient, last look",
        "residual, last look / first look",
        "accuracy, %",
        "difference, points (95 %)",
    )
    title = f"Rank {settings.rank}, {settings.ranks} ranks, {settings.steps} steps, {settings.seeds} seeds"
    cells = [_cells(rows, skew, label) for skew in settings.skews for label in settings.hooks]
    caption = "Norm of a rank's residual, and of the mean of all ranks' residuals, over the norm of a rank's gradient"
    return [
        Table(title, columns, cells),
        " ".join(_sentences(rows, skew) for skew in settings.skews),
        Picture("residuals", caption, partial(_draw, settings, rows)),
    ]


def _data(skew: float) -> str:
    return "even" if skew == 0 else "skewed" if skew == 1 else f"{100 * skew:.0f} % skewed"


def _mean(rows: Mapping[int, Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]) -> float:
    return statistics.fmean(map(value, rows.values()))


def _diverged(rows: Sequence[Mapping[str, Any]], skew: float) -> int:
    """Return the number of runs on data of this skew that ended with a loss that is not finite."""
    return sum(row["skew"] == skew and not math.isfinite(row["loss"]) for row in rows)


def _accuracies(rows: Sequence[Mapping[str, Any]], skew: float) -> Estimate:
    """Return the points by which our accuracy exceeds PyTorch's hook's, seed by seed."""
    ours, theirs = (
        {s: 100 * row["accuracy"] for s, row in by_seed(rows, skew=skew, label=one).items()} for one in (_OURS, _STOCK)
    )
    return Estimate.of(differences(ours, theirs))


def _cells(rows: Sequence[Mapping[str, Any]], skew: float, label: str) -> list[str]:
    own = by_seed(rows, skew=skew, label=label)
    found = _accuracies(rows, skew)
    last = [_mean(own, lambda row: row["residuals"][-1]), _mean(own, lambda row: row["common"][-1])]
    is_compared = label == _OURS and not _diverged(rows, skew)
    return [
        f"{_data(skew)}, {label}",
        f"{_mean(own, lambda row: row['elements']):,.0f}",
        *(f"{value:.3g}" for value in last),
        f"{_mean(own, lambda row: row['norms'][-1] / row['norms'][0]):.3g}",
        f"{_mean(own, lambda row: 100 * row['accuracy']):.2f}",
        with_bounds(found, _POINTS) if is_compared else NEVER,
    ]


def _sentences(rows: Sequence[Mapping[str, Any]], skew: float) -> str:
    """Return what the residuals and the accuracies did on data of this skew."""
    data = _data(skew)
    if diverged := _diverged(rows, skew):
        return f"On {data} data {counted(diverged, 'run')} diverged, so the two hooks are not compared."
    ratios = Estimate.of_ratios(
        {
            seed: row["norms"][-1] / by_seed(rows, skew=skew, label=_OURS)[seed]["norms"][-1]
            for seed, row in by_seed(rows, skew=skew, label=_STOCK).items()
        }
    )
    size = (
        f"On {data} data PyTorch's residual ends {ratios.mean:.3g} times as large as ours "
        f"({spread_of(ratios, '{:.3g}'.format)}, {ratios.seeds} seeds)"
    )
    found = _accuracies(rows, skew)
    if found.sign == 0:
        return f"{size}; no difference seen in accuracy ({spread_of(found, _POINTS)} points)."
    word = "more" if found.mean > 0 else "less"
    return f"{size}; ours is {abs(found.mean):.2f} points {word} accurate ({spread_of(found, _POINTS)})."


def _draw(settings: Settings, rows: Sequence[Mapping[str, Any]], theme: Theme) -> Figure:
    """Draw a panel for each skew."""
    figure, panels = canvases("", "step", 8.4, 3.6, columns=len(settings.skews), sharey=True)
    for axes, skew in zip(panels, settings.skews, strict=True):
        axes.set_title(_data(skew) + " data", loc="left", fontweight="bold", pad=8)
        axes.set_xlabel("step")
        axes.set_yscale("log")
        for field, words, dashes in (("residuals", "one rank", "-"), ("common", "the mean", ":")):
            for label, colour in ((_STOCK, theme.hooks[1]), (_OURS, theme.hooks[0])):
                own = list(by_seed(rows, skew=skew, label=label).values())
                _curve(axes, own, field, f"{label}: {words}", colour, dashes)
    panels[0].set_ylabel("norm of the residual / of a rank's gradient")
    legend(figure, panels[0], width=8.4)
    return figure


def _curve(axes: Axes, rows: Sequence[Mapping[str, Any]], field: str, label: str, colour: str, dashes: str) -> None:
    values = torch.tensor([row[field] for row in rows], dtype=torch.float64).log().mean(dim=0).exp()
    axes.plot(rows[0]["steps"], values.tolist(), dashes, color=colour, label=label, linewidth=1.6)


REPRODUCTION = Reproduction(
    name="powersgd-global-residual",
    title="The residual against the global mean, and the local one",
    source=f"PyTorch's `powerSGD_hook`, and the {PAPER}, algorithm 2",
    said=(
        "The paper's workers memorize local errors: what the decompression of a worker's own message lacks (recalled).",
        "PyTorch's hook says the same in its comments, but subtracts the mean over all ranks instead.",
    ),
    sizes={
        "default": Settings(),
        "tiny": Settings(skews=(1.0,), start=2, steps=8, every=2, ranks=2, seeds=2),
    },
    measure=measure,
    show=show,
)
