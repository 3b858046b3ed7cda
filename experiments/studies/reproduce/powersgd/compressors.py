"""Compressors beside PowerSGD at about its bytes, at rank 2 and at rank 7: score, bytes, and time to compress.

Every variant trains both tasks with every seed, with error feedback except where the source has none. Afterwards each
is timed alone on the gradient of a larger model, relative to copying that gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from commhooks.experiments.hooks import make_hook
from commhooks.experiments.report.words import times
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from experiments.studies.blocks import Block, Table
from experiments.studies.jobs import run_jobs
from experiments.studies.lockstep import time_in_lockstep
from experiments.studies.reproduce.ablation import Ablation, train_variants
from experiments.studies.reproduce.ablations import PAPER, TASKS, TINY
from experiments.studies.reproduce.comparing import show_ablation
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction

_VARIANTS = {
    "all-reduce": "all-reduce",
    "rank 7": "powersgd:rank=7",
    "random block 15 %": "random-block:ratio=0.15",
    "random k 15 %": "random-k:ratio=0.15",
    "top-k 10 %": "top-k:ratio=0.1",
    "rank 2": "powersgd:rank=2",
    "random block 5 %": "random-block:ratio=0.05",
    "random k 5 %": "random-k:ratio=0.05",
    "top-k 4 %": "top-k:ratio=0.04",
    "sign + norm": "sign",
    "signum without feedback": "signum",
    "unbiased rank 2": "powersgd-unbiased:rank=2",
    "rank 2 by SVD": "svd:rank=2",
}
_AT_RANK_7 = ("random block 15 %", "random k 15 %", "top-k 10 %")


@dataclass(frozen=True, kw_only=True)
class Settings(Ablation):
    """An ablation whose variants are timed, too."""

    timed: str = "gpt:size=medium"
    """The task whose gradient they are timed on."""
    rounds: int = 5
    """Higher: a steadier time."""


@dataclass(frozen=True)
class _Timing:
    """One variant to be timed."""

    label: str
    settings: Settings

    def run(self) -> dict[str, Any]:
        """Time it, and return the quartiles."""
        hook = make_hook(Spec.parse(self.settings.variants[self.label]))
        task, workers = load_task(self.settings.timed), self.settings.workers
        spread = time_in_lockstep(task, hook, workers=workers, rounds=self.settings.rounds)
        return {"variant": self.label, **asdict(spread)}


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Train every variant, and then time each of them alone."""
    measured, timings = train_variants(settings, notes), list[Any]()
    notes.tell(f"timing {len(settings.variants)} compressors on {settings.timed}")
    run_jobs([_Timing(label, settings) for label in settings.variants], 1, timings.append)
    return {**measured, "timings": timings}


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return what an ablation shows, and a table of times."""
    rows = [
        [one["variant"], times(one["median"]), f"{times(one['low'])} to {times(one['high'])}"]
        for one in measured["timings"]
    ]
    title = f"Time for a worker to compress and decompress, in copies of the gradient ({settings.timed})"
    fastest = min(measured["timings"][1:], key=lambda one: one["median"])
    slowest = max(measured["timings"], key=lambda one: one["median"])
    return [
        *show_ablation(settings, measured),
        Table(title, ("variant", "median", "quartiles"), rows),
        f"The fastest, {fastest['variant']}, takes {times(fastest['median'])} as long as copying the gradient, and the "
        f"slowest, {slowest['variant']}, {times(slowest['median'])}.",
    ]


_DEFAULT = Settings(
    tasks=TASKS,
    variants=_VARIANTS,
    against={"rank 2": "all-reduce", "rank 7": "all-reduce"}
    | {label: "rank 7" if label in _AT_RANK_7 else "rank 2" for label in list(_VARIANTS)[2:] if label != "rank 2"},
)

REPRODUCTION = Reproduction(
    name="powersgd-compressors",
    title="PowerSGD beside other compressors",
    source=f"{PAPER}, tables 1 and 4",
    said=(
        "With about the bytes of rank 2, random blocks lose most accuracy on CIFAR-10, random k less, top-k little, "
        "and PowerSGD none (recalled).",
        "With about the bytes of rank 7, all of them are within about a point of SGD (recalled).",
        "Unbiased low-rank compression without feedback loses 20 points or so (recalled).",
        "PowerSGD compresses much faster than sorting by size or a full SVD (recalled).",
    ),
    sizes={
        "default": _DEFAULT,
        "tiny": Settings(variants=_VARIANTS, against=_DEFAULT.against, timed="digits:size=tiny", rounds=2, **TINY),
    },
    measure=measure,
    show=show,
)
