"""Saving a checkpoint against `torch.save` of the same contents, on 2 ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn

import commhooks
from commhooks.experiments.launch import Tell
from commhooks.experiments.training.registration import wrap_in_ddp
from commhooks.units import seconds_in_words
from experiments.studies.bench.rows import AGAIN, OURS, THEIRS, Row, Seconds, beside
from experiments.studies.ranks import on_ranks
from experiments.studies.turns import in_turns

SENTENCE = (
    "`save_checkpoint` of a model of 12.5 million parameters, its optimizer and PowerSGD's state on 2 ranks, over "
    "`torch.save` of the same contents: each flushed to disk, and each without. Noise is `torch.save` against itself."
)
RANKS = 2
TARGET = 1.2
FLUSHED, PLAIN = "flushed", "not flushed"


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return a row with flushing, and one without."""
    tell("checkpoints: ours and torch.save in turns")
    with tempfile.TemporaryDirectory() as folder:
        seconds = on_ranks(partial(_take_turns, Path(folder), quick), RANKS, tell)
    return [_row(how, seconds) for how in (FLUSHED, PLAIN)]


def _row(how: str, seconds: Seconds) -> Row:
    whose = {OURS: "ours", THEIRS: "torch.save", AGAIN: "again"}
    turns = {who: seconds[f"{name}, {how}"] for who, name in whose.items()}
    return beside("torch.save", how, "time to save", turns, seconds_in_words, target=TARGET)


def _take_turns(folder: Path, quick: bool, tell: Tell) -> Seconds:
    saving = _Saving(folder, torch.distributed.get_rank(), 8 if quick else 1250)
    contenders = {}
    for how in (FLUSHED, PLAIN):
        contenders[f"ours, {how}"] = partial(saving.ours, how == FLUSHED)
        contenders[f"torch.save, {how}"] = contenders[f"again, {how}"] = partial(saving.theirs, how == FLUSHED)
    return in_turns(contenders, 2 if quick else 16, prepare=saving.make_room)


class _Saving:
    """A model that has taken two steps, and where it is saved: into a folder without anything else."""

    def __init__(self, folder: Path, rank: int, width: int) -> None:
        self._folder, self._rank = folder, rank
        self._ddp = wrap_in_ddp(nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]), "core", None)
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=0.01, momentum=0.9)
        self._hooks = commhooks.attach(self._ddp, "powersgd")
        for _ in range(2):
            self._ddp(torch.randn(2, width)).square().mean().backward()
            self._optimizer.step()
        self._saved = 0

    def make_room(self, _: str) -> None:
        """Remove what was saved last, which ranks that have met since no longer use, and make a new folder."""
        torch.distributed.barrier()
        if self._rank == 0:
            shutil.rmtree(self._place, ignore_errors=True)
        self._saved += 1
        self._place.mkdir(exist_ok=True)

    @property
    def _place(self) -> Path:
        return self._folder / str(self._saved)

    def ours(self, flush: bool) -> None:
        commhooks.save_checkpoint(
            self._place, step=0, flush=flush, model=self._ddp, optimizer=self._optimizer, hooks=self._hooks
        )

    def theirs(self, flush: bool) -> None:
        """Save the same contents: each rank its own, rank 0 also what all share."""
        snapshot = self._hooks.snapshot().as_dict()
        contents = {f"rank{self._rank}.pt": snapshot["local"]}
        if self._rank == 0:
            model = self._ddp.module.state_dict()  # type: ignore[union-attr]  # 'Item "Tensor"'
            contents["shared.pt"] = [model, self._optimizer.state_dict(), snapshot["replicated"]]
        for name, content in contents.items():
            torch.save(content, self._place / name)
            if flush:
                with open(self._place / name, "rb") as file:
                    os.fsync(file.fileno())
