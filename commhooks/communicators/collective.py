"""Collectives, the interface of the communicators that run them, and a communicator that counts them."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Literal, Protocol, get_args

from torch import Tensor

from commhooks.errors import CollectiveError
from commhooks.language.requests import Group, ranks_in
from commhooks.tensors import tensor_bytes, tensor_elements

CollectiveKind = Literal["all-reduce", "all-gather", "all-to-all", "reduce-scatter"]
KINDS: tuple[str, ...] = get_args(CollectiveKind)


@dataclasses.dataclass(frozen=True, eq=False)
class Collective:
    """A collective over `tensor`, which has the same shape and dtype on every rank.

    - "all-reduce": the sum over the ranks, written into the tensor itself if it is dense.
    - "all-gather": every rank's tensor, stacked in rank order.
    - "all-to-all": row i of the tensor goes to rank i, and row i of the answer came from rank i.
    - "reduce-scatter": row i of the tensor, summed over the ranks, goes to rank i.
    """

    kind: CollectiveKind
    tensor: Tensor
    elements: int = -1
    """The number of elements that were put in, if not the tensor's own: a message of bytes holds fewer, larger
    elements."""
    group: Group | None = None
    """The participating ranks; None: all."""
    room: Tensor | None = None
    """Memory for the answer, of its shape; None: new memory. An all-reduce needs none."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CollectiveError(f"Collective(kind={self.kind!r}): kind must be one of {', '.join(KINDS)}.")

    @functools.cached_property
    def payload_bytes(self) -> int:
        """Bytes that this rank puts in."""
        return tensor_bytes(self.tensor)

    @property
    def payload_elements(self) -> int:
        """Elements that this rank puts in."""
        return self.elements if self.elements >= 0 else tensor_elements(self.tensor)

    def ranks_in(self, world_size: int) -> int:
        """Return the number of participating ranks, of `world_size` in all."""
        return ranks_in(self.group, world_size)

    def ring_bytes(self, world_size: int) -> int:
        """Return the bytes sent per rank, on average over the ranks; see the function of this name."""
        ranks = world_size if self.group is None else self.group.count(world_size)
        return ring_bytes(self.kind, self.payload_bytes, ranks, is_sparse=self.tensor.is_sparse)

    def room_for_answer(self, world_size: int) -> Tensor:
        """Return memory of the answer's shape: the tensor itself for an all-reduce."""
        if self.kind == "all-reduce":
            return self.tensor
        if self.room is not None:
            return self.room
        if self.kind == "all-gather":
            return self.tensor.new_empty((self.ranks_in(world_size), *self.tensor.shape))
        return self.tensor.new_empty(self.tensor.shape if self.kind == "all-to-all" else self.tensor.shape[1:])


def ring_bytes(kind: str, payload: int, world_size: int, *, is_sparse: bool = False) -> int:
    """Return the bytes sent per rank for a payload, on average over the ranks.

    An all-reduce is a reduce-scatter and an all-gather around the ring (an all-gather if sparse); in an all-gather a
    rank passes on what it receives; in an all-to-all it sends every row but its own.
    """
    if kind == "all-gather" or is_sparse:
        return (world_size - 1) * payload
    return (2 if kind == "all-reduce" else 1) * (world_size - 1) * payload // world_size


class Pending(Protocol):
    """A collective that has been started."""

    @property
    def result(self) -> Tensor:
        """The answer: the collective's own tensor for a dense all-reduce, otherwise another one. Valid after `wait`."""
        ...

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until the result is ready.

        Raises `TimeoutError` if `timeout_seconds` pass first: nothing is lost, and `wait` may be called again. Raises
        `CollectiveError` if the collective failed.
        """
        ...


class Communicator(Protocol):
    """The interface for starting collectives.

    A single thread calls it, in the same order on every rank. Several collectives may be under way at once: the next
    bucket's may start before this bucket's last one has finished.
    """

    @property
    def rank(self) -> int:
        """The number of this worker, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """The number of workers."""
        ...

    def start(self, collective: Collective) -> Pending:
        """Start a collective, and return without waiting for it."""
        ...


@dataclasses.dataclass
class KindTraffic:
    """Counts for the collectives of one kind."""

    collectives: int = 0
    payload_bytes: int = 0
    moved_bytes: int = 0


@dataclasses.dataclass
class Traffic:
    """Counts of what a communicator has sent, in total and for each kind of collective."""

    collectives: int = 0
    payload_elements: int = 0
    payload_bytes: int = 0
    moved_bytes: int = 0
    seconds_waiting: float = 0.0
    by_kind: dict[str, KindTraffic] = dataclasses.field(default_factory=dict)
    by_group: dict[str, KindTraffic] = dataclasses.field(default_factory=dict)
    """The traffic among some of the ranks: "inner" inside machines, "outer" between them."""

    def count(self, collective: Collective, world_size: int) -> None:
        """Add one collective."""
        payload = collective.payload_bytes
        moved = collective.ring_bytes(world_size)
        self.payload_elements += collective.payload_elements
        counted: list[Traffic | KindTraffic] = [self, self.by_kind.setdefault(collective.kind, KindTraffic())]
        if collective.group is not None:
            counted.append(self.by_group.setdefault(collective.group.kind, KindTraffic()))
        for counts in counted:
            counts.collectives += 1
            counts.payload_bytes += payload
            counts.moved_bytes += moved


class RecordingCommunicator:
    """A communicator that passes every collective to `inner`, and counts it in `traffic`."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.rank: int = inner.rank
        self.world_size: int = inner.world_size
        self.traffic: Traffic = Traffic()

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
