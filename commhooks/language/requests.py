"""What a compressor may ask for. A request is asked for; a collective is what then runs.

A request knows its bytes: the payload, and what one rank moves (sends) for it. It also knows how its tensor becomes the
tensor on the wire, so the division of an average and the cast to a narrow dtype are written here, once, for every
communicator.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from commhooks.tensors import tensor_bytes, tensor_elements


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Which parameter owns which stretch of a 1-D tensor, from its first element to its last.

    Compared by identity, so that counters and caches look one up quickly.
    """

    keys: tuple[str, ...]
    """Parameters' names, or what stands for one; a name may come twice."""
    sizes: tuple[int, ...]
    """Elements of each stretch."""

    @functools.cached_property
    def elements(self) -> int:
        """Elements of the whole."""
        return sum(self.sizes)


@dataclasses.dataclass(frozen=True, eq=False)
class Request(ABC):
    """A request for one collective over `tensor`, which has the same shape and dtype on every rank."""

    kind: ClassVar[str]
    answers_alike: ClassVar[bool] = True
    """Every rank gets the same answer, so that what is judged on it is judged alike."""

    tensor: Tensor
    last: bool = dataclasses.field(default=False, kw_only=True)
    """No further request follows for this bucket: the next bucket may begin before this one is answered."""
    layout: Layout | None = dataclasses.field(default=None, kw_only=True)
    """Whose elements these are, for accounting, and for packing in an order that no bucket decides."""

    def __post_init__(self) -> None:
        if self.layout is not None and not self.tensor.is_sparse and self.layout.elements != self.tensor.numel():
            raise ValueError(
                f"{type(self).__name__}: the layout must describe the tensor's {self.tensor.numel()} elements "
                f"(got {self.layout.elements})."
            )

    @property
    def payload_bytes(self) -> int:
        """Bytes that this rank puts in."""
        return tensor_bytes(self.tensor)

    @property
    def payload_elements(self) -> int:
        """Elements that this rank puts in."""
        return tensor_elements(self.tensor)

    @abstractmethod
    def ring_bytes(self, world_size: int) -> int:
        """Bytes that one rank sends for this request, on average over the ranks."""

    def room_for_answer(self, world_size: int) -> Tensor:
        """Return memory of the answer's shape; for an empty request that is the answer."""
        return torch.empty_like(self.tensor)


@dataclasses.dataclass(frozen=True, eq=False)
class AllReduce(Request):
    """A request for the sum over ranks, or with `average` the mean, written into `tensor` itself if that is dense.

    A sparse one is only read, and the answer is another: autograd lets a sparse gradient's values share memory with
    gradients that are still on their way through the backward pass (tests/commhooks/test_odd_parameters.py).

    With `wire` the payload travels, and is summed, in that dtype. The division of a mean happens before the cast, in
    the tensor's own dtype: a sum that the narrow dtype cannot hold does not overflow if the mean fits, but a rank's
    share (its tensor over the world size) becomes 0 if it is at most half of the narrow dtype's smallest number.
    """

    kind: ClassVar[str] = "all-reduce"

    average: bool = False
    wire: torch.dtype | None = dataclasses.field(default=None, kw_only=True)

    @property
    def payload_bytes(self) -> int:
        """Bytes that this rank puts in: those of the wire's dtype."""
        return tensor_bytes(self.tensor, self.wire)

    def ring_bytes(self, world_size: int) -> int:
        """Bytes that one rank sends: a reduce-scatter and an all-gather round the ring (an all-gather if sparse)."""
        if self.tensor.is_sparse:
            return (world_size - 1) * self.payload_bytes
        return 2 * (world_size - 1) * self.payload_bytes // world_size

    def to_wire(self, world_size: int) -> Tensor:
        """Return the tensor to sum over the ranks; `tensor` itself where it is dense and nothing is cast."""
        divisor = world_size if self.average else 1
        if self.tensor.is_sparse:
            payload = self.tensor / divisor
        else:
            own = self.tensor.div_(divisor) if divisor > 1 else self.tensor
            payload = torch.view_as_real(own) if own.is_complex() else own
        return payload if self.wire is None else payload.to(self.wire)

    def from_wire(self, summed: Tensor) -> Tensor:
        """Write what came back into `tensor`, and return it; return what came back if it is sparse."""
        if summed.is_sparse:
            return summed.to(self.tensor.dtype)
        target = torch.view_as_real(self.tensor) if self.tensor.is_complex() else self.tensor
        if summed.data_ptr() != target.data_ptr():
            target.copy_(summed)
        return self.tensor

    def room_for_answer(self, world_size: int) -> Tensor:
        """Return the tensor itself, which a dense sum is written into."""
        return self.tensor


@dataclasses.dataclass(frozen=True, eq=False)
class AllGather(Request):
    """A request for every rank's tensor, stacked in rank order: world size × the tensor's shape."""

    kind: ClassVar[str] = "all-gather"

    def ring_bytes(self, world_size: int) -> int:
        """Bytes that one rank sends: its own payload and those that it passes on."""
        return (world_size - 1) * self.payload_bytes

    def room_for_answer(self, world_size: int) -> Tensor:
        """Return memory for one tensor of each rank."""
        return self.tensor.new_empty((world_size, *self.tensor.shape))


@dataclasses.dataclass(frozen=True, eq=False)
class AllToAll(Request):
    """A request for an exchange: row i of `tensor` goes to rank i, and row i of the result came from rank i.

    The tensor's first dimension is the world size.
    """

    kind: ClassVar[str] = "all-to-all"
    answers_alike: ClassVar[bool] = False

    def ring_bytes(self, world_size: int) -> int:
        """Bytes that one rank sends: every row but its own."""
        return (world_size - 1) * self.payload_bytes // world_size
