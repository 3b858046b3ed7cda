"""PowerSGD at rank 1, 2, 4 and at a rank that changes, on a network without shortcuts and on one with them.

Accordion's published logs train VGG-19 and ResNet-18 on CIFAR-10. Here a plain and a residual network, with 15 and 13
convolutions in a row, train on handwritten digits for a few hundred steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from commhooks.experiments.report.plots import Theme, canvases
from commhooks.experiments.report.words import bounds, signed
from experiments.studies.blocks import Block, Picture
from experiments.studies.reproduce.ablation import Ablation, train_variants
from experiments.studies.reproduce.comparing import Compared, between, compare, finding, table
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction

_DENSE, _ONE, _TWO, _FOUR, _ADAPTIVE = "all-reduce", "rank 1", "rank 2", "rank 4", "adaptive rank"
_VARIANTS = {
    _DENSE: "all-reduce",
    _ONE: "powersgd:rank=1",
    _TWO: "powersgd:rank=2",
    _FOUR: "powersgd:rank=4",
    _ADAPTIVE: "adaptive-rank:rule=accordion,rank=1,min_rank=1,max_rank=4,every=10",
}
_NETWORKS = {"vgg": "the plain network", "resnet": "the residual network"}


@dataclass(frozen=True, kw_only=True)
class Settings(Ablation):
    """The settings of an ablation, and a task that is trained once more for longer."""

    tasks: tuple[str, ...] = tuple(f"digits:size=small,network={name},steps=120" for name in _NETWORKS)
    variants: Mapping[str, str]
    longer: str = "digits:size=small,network=vgg,steps=240"

    def again(self) -> Ablation:
        """Return the longer runs: of rank 1 and rank 4 alone."""
        variants = {label: self.variants[label] for label in (_FOUR, _ONE)}
        return replace(self, tasks=(self.longer,), variants=variants, against={})


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Train all variants of both networks, and two of them for longer."""
    return {name: train_variants(of, notes)["runs"] for name, of in (("runs", settings), ("longer", settings.again()))}


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return a table and sentences for each network, a picture, and what more steps changed."""
    rows, blocks = measured["runs"], list[Block]()
    for task, network in zip(settings.tasks, _NETWORKS.values(), strict=True):
        compared = compare(settings, rows, task)
        blocks += [table(settings, compared), f"{_sentences(compared, network)} {_adaptive(rows, compared)}"]
    caption = "Accuracy on held-out digits after training: each seed, and the mean, for each network and rank"
    blocks.append(Picture("accuracy", caption, partial(_draw, settings, rows)))
    longer = settings.again()
    compared = compare(longer, measured["longer"], settings.longer)
    return [*blocks, table(longer, compared), _sentences(compared, f"{_NETWORKS['vgg']}, trained for longer")]


def _sentences(compared: Sequence[Compared], network: str) -> str:
    """Return what was seen of each variant that is compared with another one."""
    seen = (finding(one) for one in compared if one.to is not None or one.diverged)
    return f"On {network}: {' '.join(text[0].upper() + text[1:] for text in seen)}"


def _adaptive(rows: Sequence[Mapping[str, Any]], compared: Sequence[Compared]) -> str:
    """Return how the adaptive rank compares with rank 1, and what it sends."""
    by_label = {one.label: one for one in compared}
    adaptive, least, most = by_label[_ADAPTIVE], by_label[_ONE], by_label[_FOUR]
    of_task = [row for row in rows if row["task"] == adaptive.task]
    found = between(of_task, adaptive.score, _ADAPTIVE, _ONE)
    sent = (
        f"sends {adaptive.payload_bytes / most.payload_bytes:.2f} of the bytes of {_FOUR} "
        f"({_ONE}: {least.payload_bytes / most.payload_bytes:.2f})."
    )
    if found is None:
        return f"The adaptive rank {sent}"
    within = bounds(found, partial(signed, form=".2f"))
    if found.sign == 0:
        return f"No difference seen between the adaptive rank and {_ONE} ({within} points). It {sent}"
    word = "above" if found.sign > 0 else "below"
    return f"The adaptive rank ends {abs(found.mean):.2f} points {word} {_ONE} ({within}). It {sent}"


def _draw(settings: Settings, rows: Sequence[Mapping[str, Any]], theme: Theme) -> Figure:
    """Draw a panel for each network, with a dot for each seed and a line for the mean."""
    figure, panels = canvases("", "", 8.4, 3.6, columns=len(settings.tasks), sharey=True)
    for axes, task, network in zip(panels, settings.tasks, _NETWORKS.values(), strict=True):
        axes.set_title(network.removeprefix("the ").capitalize(), loc="left", fontweight="bold", pad=8)
        for place, label in enumerate(settings.variants):
            own = [row for row in rows if (row["task"], row["variant"]) == (task, label)]
            found = [100 * row["accuracy"] for row in own if row["accuracy"] is not None]
            mean = statistics.fmean(found)
            axes.plot([place - 0.3, place + 0.3], [mean, mean], color=theme.hooks[0], linewidth=2.4)
            axes.plot([place] * len(found), found, "o", color=theme.first, markersize=4, alpha=0.8)
        axes.set_xticks(
            range(len(settings.variants)), [label.replace("adaptive ", "adaptive\n") for label in settings.variants]
        )
    panels[0].set_ylabel("held-out accuracy, %")
    return figure


REPRODUCTION = Reproduction(
    name="accordion",
    title="A plain network on which rank 1 fails, and a residual one on which it does not",
    source="The published training logs of Accordion (Agarwal et al., MLSys 2021), PowerSGD on CIFAR-10, one seed",
    said=(
        "VGG-19: 67.0 % at rank 1, 93.5 % at rank 4, 92.35 % with its adaptive rank.",
        "ResNet-18: 94.25 % at rank 1, 94.49 % at rank 2, 94.72 % with its adaptive rank.",
    ),
    sizes={
        "default": Settings(variants=_VARIANTS, against=dict.fromkeys((_ONE, _TWO, _ADAPTIVE), _FOUR)),
        "tiny": Settings(
            variants=_VARIANTS,
            against=dict.fromkeys((_ONE, _TWO, _ADAPTIVE), _FOUR),
            tasks=tuple(f"digits:size=small,network={name},channels=4,batch_size=4,steps=3" for name in _NETWORKS),
            longer="digits:size=small,network=vgg,channels=4,batch_size=4,steps=4",
            seeds=2,
            workers=2,
            processes=1,
        ),
    },
    measure=measure,
    show=show,
)
