"""A device that comes late to what it is given, so that whoever does not wait for it is found out."""

from __future__ import annotations

import torch
from torch import Tensor

from commhooks.communicators import Collective, Communicator, Pending

LATE = 200_000_000
"""Cycles of about a tenth of a second."""


class LateCommunicator:
    """Let every collective take `cycles` more, on the stream that waits for it."""

    def __init__(self, inner: Communicator, cycles: int) -> None:
        self.rank, self.world_size = inner.rank, inner.world_size
        self._inner = inner
        self._cycles = cycles

    def start(self, collective: Collective) -> Pending:
        return _LatePending(self._inner.start(collective), self._cycles)


class _LatePending:
    def __init__(self, inner: Pending, cycles: int) -> None:
        self._inner = inner
        self._cycles = cycles

    @property
    def result(self) -> Tensor:
        return self._inner.result

    def wait(self, timeout_seconds: float | None = None) -> None:
        self._inner.wait(timeout_seconds)
        torch.cuda._sleep(self._cycles)


def very_late(inner: Communicator) -> Communicator:
    """Let collectives take some seconds."""
    return LateCommunicator(inner, 50 * LATE)


def late(inner: Communicator) -> Communicator:
    """Let collectives take a tenth of a second."""
    return LateCommunicator(inner, LATE)
