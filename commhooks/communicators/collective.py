"""A collective: one tensor, in which the parts of requests are packed, and what the ranks do with it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, get_args

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
    """The ranks that take part; None: all."""

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
        """Return how many of `world_size` ranks take part."""
        return ranks_in(self.group, world_size)

    def ring_bytes(self, world_size: int) -> int:
        """Return the bytes sent per rank, on average over the ranks; see the function of this name."""
        ranks = world_size if self.group is None else self.group.count(world_size)
        return ring_bytes(self.kind, self.payload_bytes, ranks, is_sparse=self.tensor.is_sparse)

    def room_for_answer(self, world_size: int) -> Tensor:
        """Return memory of the answer's shape: the tensor itself for an all-reduce."""
        if self.kind == "all-reduce":
            return self.tensor
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
