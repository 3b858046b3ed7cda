"""The bytes that compressors send for the paper's two models, counted while gradients of their shapes are averaged.

Every worker hands a gradient of random numbers to the compressor, and the engine's statistics count what it passes to
collectives. Nothing is trained, and no formula is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from commhooks.experiments.hooks import make_hook
from commhooks.experiments.report.words import listed
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks.images import ResNet18
from commhooks.experiments.tasks.lstm import LstmModel
from commhooks.lockstep import average_in_lockstep
from experiments.studies.blocks import Block, Table
from experiments.studies.lockstep import join_workers
from experiments.studies.reproduce.ablations import PAPER
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction

_MIB = 2**20
_WORD = 4


@dataclass(frozen=True)
class _Model:
    """A model of the paper."""

    words: str
    make: Callable[[], nn.Module]
    steps: int  # of an epoch with 16 workers and a batch of 128
    said: Mapping[str, str]  # MiB an epoch, by scheme; the digits are the source's


HOOKS = {"SGD": "all-reduce"} | {f"rank {r}": f"powersgd:min_compression_rate=1,rank={r}" for r in (1, 2, 4, 7)}
HOOKS |= {
    "sign + norm": "sign",
    "signum": "signum",
    "top-k 1/32": f"top-k:ratio={1 / 32}",
    "top-k 1/136": f"top-k:ratio={1 / 136}",
    "random k as rank 2": f"random-k:ratio={82_260 / 11_173_962}",
}
_MODELS = {
    "resnet18": _Model(
        "ResNet-18 on CIFAR-10",
        ResNet18,
        24,
        dict(zip(list(HOOKS)[:5], ("1023.01", "4.205", "7.531", "14.182", "24.159"), strict=True))
        | {"sign + norm": "31.97", "top-k 1/32": "31.97", "top-k 1/136": "7.52", "random k as rank 2": "7.53"},
    ),
    "lstm": _Model(
        "the LSTM on WikiText-2",
        lambda: LstmModel(650, 3, vocabulary=28_869),
        70,
        dict(zip(list(HOOKS)[:5], ("7730.30", "24.964", "38.053", "64.232", "103.50"), strict=True))
        | {"signum": "241.6"},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings: schemes for each model, and the number of workers."""

    schemes: Mapping[str, tuple[str, ...]]  # by model: keys of `HOOKS`, the dense one first
    workers: int = 16  # as many as in the paper; the bytes of two hops depend on it

    def __post_init__(self) -> None:
        for model, schemes in self.schemes.items():
            if unknown := set(schemes) - set(_MODELS[model].said):
                raise ValueError(f"the source has no figure for {', '.join(sorted(unknown))} on {model}")


def bytes_sent(model: nn.Module, hook: str, workers: int) -> float:
    """Return the bytes that one worker passes to collectives for one gradient of the model."""
    exchangers = join_workers(model, make_hook(Spec.parse(hook)), workers)
    generator = torch.Generator().manual_seed(0)
    gradient = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    average_in_lockstep(exchangers, [gradient] * workers)  # all write the same mean to the same place
    return float(exchangers[0].statistics().payload_bytes)


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return the bytes that each scheme sends for each model."""
    rows = []
    for name, schemes in settings.schemes.items():
        model = _MODELS[name].make()
        for scheme in schemes:
            sent = notes.once(f"{name}, {scheme}", partial(bytes_sent, model, HOOKS[scheme], settings.workers))
            notes.tell(f"{name}, {scheme}: {sent:,.0f} bytes a step")
            rows.append({"model": name, "scheme": scheme, "bytes": sent})
    return {"sent": rows}


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return a table for each model, and how many of its figures are the source's."""
    blocks: list[Block] = []
    for name in settings.schemes:
        of_model = [row for row in measured["sent"] if row["model"] == name]
        model, dense, cells = _MODELS[name], of_model[0]["bytes"], []
        for row in of_model:
            said, sent = model.said[row["scheme"]], row["bytes"]
            epoch = f"{sent * model.steps / _MIB:.{len(said.partition('.')[2])}f}"
            numbers = f"{sent / _WORD:,.0f}"
            cells.append([row["scheme"], numbers, epoch, said, "yes" if epoch == said else "no", f"{dense / sent:.2f}"])
        words = f"{model.words[0].upper()}{model.words[1:]}"
        title = f"{words}: {model.steps} steps an epoch, {settings.workers} workers; sent by one of them"
        columns = ("scheme", "4-byte words a step", "MiB an epoch", "source, MiB", "same", "ratio")
        others = [cell[0] for cell in cells if cell[4] == "no"]
        text = (
            f"For {model.words}, {len(cells) - len(others)} of {len(cells)} figures are the source's to its last digit"
        )
        blocks += [Table(title, columns, cells), f"{text}{f'; not {listed(others)}' if others else ''}."]
    return blocks


REPRODUCTION = Reproduction(
    name="powersgd-data-sent",
    title="The data that PowerSGD sends",
    source=f"{PAPER}, the columns of data sent in its tables, and the shapes of its models",
    said=(
        "A matrix of n×m is sent as (n + m)·r numbers, and a vector uncompressed.",
        "ResNet-18 sends 1,023 MiB an epoch uncompressed, and 4.2, 7.5 and 14.2 MiB at rank 1, 2 and 4.",
        "The LSTM sends 7,730 MiB an epoch uncompressed, and 25, 38 and 64 MiB at rank 1, 2 and 4.",
        "The figures in the column of the source follow from the shapes: for sign and signum one bit for each element, "
        "and for top-k and random k four bytes for each element that is kept.",
    ),
    sizes={
        "default": Settings(schemes={name: tuple(model.said) for name, model in _MODELS.items()}),
        "tiny": Settings(schemes={"resnet18": ("SGD", "rank 1", "rank 2")}, workers=2),
    },
    measure=measure,
    show=show,
)
