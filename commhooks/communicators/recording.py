"""A communicator that counts what another one sends: bytes, collectives, seconds of waiting."""

from __future__ import annotations

import time

from torch import Tensor

from commhooks.communicators.collective import Collective
from commhooks.communicators.communicator import Communicator, Pending
from commhooks.communicators.traffic import Traffic


class RecordingCommunicator:
    """A communicator that passes every collective to `inner`, and counts it in `traffic`."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.traffic = Traffic()

    def start(self, collective: Collective) -> RecordedPending:
        """Start a collective, and count it."""
        self.traffic.count(collective, self.world_size)
        return RecordedPending(self.inner.start(collective), self.traffic)


class RecordedPending:
    """A pending collective whose waiting time is counted."""

    def __init__(self, inner: Pending, traffic: Traffic) -> None:
        self._inner = inner
        self._traffic = traffic

    @property
    def result(self) -> Tensor:
        """The inner answer."""
        return self._inner.result

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait as `inner` does; see `Pending.wait`."""
        begun = time.perf_counter()
        try:
            self._inner.wait(timeout_seconds)
        finally:
            self._traffic.seconds_waiting += time.perf_counter() - begun
