"""Checkpoints of a comparison group's runs, from which a comparison that was stopped continues."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from commhooks.experiments.runs import RunSettings
from commhooks.experiments.training.stock import is_stock

PROGRESS = "progress"  # the folder, in that of --out: one folder for each run, and STOP
STOP = "stop"  # the file that tells the ranks to save and end

_EVERY = 60.0  # seconds between two saves
_SHARE = 1 / 20  # of the time, at most, that is spent on saving
_GO_ON, _SAVE, _STOP = range(3)


class StoppedError(Exception):
    """The runs were told to stop, and are saved."""


class Savable(Protocol):
    """A run that can save its progress."""

    def save(self, folder: Path) -> None:
        """Write the run into the folder; every rank calls this."""


class Progress:
    """The schedule of saving runs that take turns, decided by rank 0: once a minute, and when they are told to stop.

    Each run has a checkpoint of its own. If saving is interrupted in the middle, some are a few steps behind the
    others, and catch up before they take turns again.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder  # None: these runs cannot be continued, and are not saved
        self._due = time.monotonic() + _EVERY

    def keep(self, runs: Sequence[Savable]) -> None:
        """Save the runs if a save is due; every rank calls this between two steps.

        Raises:
            StoppedError: They were told to stop, on all ranks at once.

        """
        if self._folder is None:
            return
        said = torch.tensor(self._decide() if dist.get_rank() == 0 else _GO_ON)
        dist.broadcast(said, 0)
        if said.item() == _GO_ON:
            return
        began = time.monotonic()
        for run in runs:
            run.save(self._folder)
        ended = time.monotonic()
        self._due = ended + max(_EVERY, (ended - began) / _SHARE)
        if said.item() == _STOP:
            raise StoppedError

    def _decide(self) -> int:
        assert self._folder is not None, "asked only if there is one"
        if (self._folder / STOP).exists():
            return _STOP
        return _SAVE if time.monotonic() >= self._due else _GO_ON


def can_continue(settings: RunSettings) -> bool:
    """Return whether a run can continue in other processes as if it had not been stopped.

    Four kinds cannot: PyTorch's own hooks, whose state is keyed by the number of a bucket; sharded models, which no
    rank can save alone; runs whose compute is stated in seconds, because it is measured again in every attempt; and
    runs on hosts whose rates change, by a clock that begins with the ranks.
    """
    hosts_change = settings.link.kind == "hosts" and settings.link.schedule
    return not (is_stock(settings.hook) or settings.is_sharded or settings.states_seconds or hosts_change)
