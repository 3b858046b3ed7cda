"""A network that exists only on a clock: collectives advance it by what they should take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from commhooks.communicators import Collective
from commhooks.experiments.planning.meter import Clocks


class FakeNetwork:
    """A communicator of ranks that are all alike; `seconds` says what a collective takes, and when it began."""

    rank = 0

    def __init__(self, world_size: int, seconds: Callable[[Collective, float], float], processor: float = 0.0) -> None:
        self.world_size = world_size
        self.now = 0.0
        self.started: list[Collective] = []
        self._seconds, self._processor = seconds, processor

    @property
    def clocks(self) -> Clocks:
        """Clocks that this network advances; `processor` is the part of a second in which it computes."""
        return Clocks(wall=lambda: self.now, processor=lambda: self._processor * self.now)

    def start(self, collective: Collective) -> Answered:
        """Advance the clock, and answer with what the other ranks, which are alike, would."""
        self.started.append(collective)
        self.now += self._seconds(collective, self.now)
        ranks = collective.ranks_in(self.world_size)
        answer = collective.tensor
        if collective.kind == "all-reduce":
            answer = answer * ranks
        elif collective.kind == "all-gather":
            answer = torch.stack([answer] * ranks)
        return Answered(answer)


class Answered:
    """A collective that is done."""

    def __init__(self, result: Tensor) -> None:
        self.result = result

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return."""
