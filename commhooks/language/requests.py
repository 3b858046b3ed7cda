"""The requests of compressors. A compressor asks for a request; a collective is what then runs.

A request is made of parts: tensors of any dtype, each with the names of the parameters whose elements it holds. The
answer is a list with one tensor for each part, in the part's dtype. The scheduler packs parts into messages, so a
compressor packs nothing. An answer may be a view of a message, which another exchange reuses once this one has ended.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from commhooks.tensors import all_finite, tensor_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The parameters that own the ranges of a 1-D tensor, from its first element to its last.

    Layouts are compared by identity, so that counters and caches can look one up quickly.
    """

    keys: tuple[str, ...]
    """Parameter names, or placeholders; a name may occur twice."""
    sizes: tuple[int, ...]
    """The number of elements in each range; for a tensor that cannot be split, each name's share of its elements."""

    @functools.cached_property
    def elements(self) -> int:
        """The total number of elements."""
        return sum(self.sizes)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A tensor to send, which is only read unless `in_place`; of the same shape and dtype on every rank."""

    tensor: Tensor
    layout: Layout | None = None
    """The parameters that own the elements; None: the bucket's, in proportion to their sizes."""
    wire: torch.dtype | None = None
    """The dtype in which a sum is sent; None: the tensor's own."""
    in_place: bool = False
    """True if a sum may be written into the tensor, which is then the answer: nothing is copied if it is sent alone. No
    other part that is requested at the same time may share its memory."""
    rows: MessageBuffer | None = None
    """The memory in which the tensor is a place, if it is exchanged together with the other places there."""
    borrow: Borrow | None = None
    """A function that lends memory, until the exchange ends, for sending a sum in another dtype; None: it is
    allocated."""

    def __post_init__(self) -> None:
        if self.in_place and self.layout is not None and self.layout.elements != self.tensor.numel():
            raise ValueError(
                f"Part: the layout must describe the tensor's {self.tensor.numel()} elements "
                f"(got {self.layout.elements})."
            )

    @property
    def on_wire(self) -> torch.dtype:
        """The dtype in which it is sent."""
        return self.tensor.dtype if self.wire is None else self.wire


@dataclasses.dataclass(frozen=True, eq=False)
class Flags(Part):
    """A part of an all-to-all, [world size, 1], that tells every rank whether this one is sending inf or NaN.

    The answer is the same on every rank, 0 for each rank or NaN: pass it to `Judge`.
    """

    @classmethod
    def of(cls, sent: Iterable[Tensor], world_size: int) -> Flags:
        """Return the flags of a rank that sends these tensors, or codes of them."""
        return cls(torch.where(all_finite(sent), 0.0, torch.nan).expand(world_size, 1))


class MessageBuffer:
    """Memory for a message with several parts side by side, and for its answer.

    The message of an all-gather is one row of bytes, that of an all-to-all (with `ranks`) one for each rank. The widest
    elements come first, so that all are aligned. `borrow` returns memory, which is not initialised.
    """

    def __init__(
        self, kinds: Sequence[tuple[Sequence[int], torch.dtype]], world_size: int, borrow: Borrow, *, to_all: bool
    ) -> None:
        widths = [dtype.itemsize for _, dtype in kinds]
        cuts, width = cuts_of([math.prod(shape) * dtype.itemsize for shape, dtype in kinds], widths)
        self._answer = (world_size, width)
        self._borrow = borrow
        self.memory: Tensor = borrow(self._answer[1:] if to_all else self._answer, torch.uint8)
        """The message."""
        leading = self.memory.shape[:-1]
        self.places: list[Tensor] = [
            self.memory[..., first:end].view(dtype).view(*leading, *shape)
            for (first, end), (shape, dtype) in zip(cuts, kinds, strict=True)
        ]
        """A view of the message for each part: [*shape] or, in an all-to-all, [world size, *shape]."""

    @functools.cached_property
    def room(self) -> Tensor:
        """Memory for the answer, borrowed when the message is sent."""
        return self._borrow(self._answer, torch.uint8)

    def parts(self, layout: Layout) -> list[Part]:
        """Return the places as parts of a request."""
        return [Part(place, layout, rows=self) for place in self.places]

    def are_all_of(self, parts: Sequence[Part]) -> bool:
        """Return whether the parts are exactly these places."""
        return len(parts) == len(self.places) and all(
            part.tensor is place for part, place in zip(parts, self.places, strict=True)
        )


def cuts_of(sizes: Sequence[int], widths: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """Return the first and last bytes of parts side by side, the widest elements first, and the bytes of a row.

    Rows are a multiple of the widest elements' bytes.
    """
    cuts, end = [(0, 0)] * len(sizes), 0
    for number in sorted(range(len(sizes)), key=lambda number: -widths[number]):
        cuts[number] = (end, end + sizes[number])
        end += sizes[number]
    return cuts, end + -end % max(widths)


@dataclasses.dataclass(frozen=True)
class Group:
    """Some of the ranks, the only participants of a request; every `size` consecutive ranks form a machine.

    All groups of one kind work side by side: every rank is in one "inner" group, its machine, and in one "outer" group,
    which has the rank at the same position in every machine.
    """

    kind: Literal["inner", "outer"]
    size: int
    """Ranks per machine; the number of all ranks is a multiple of it."""

    def ranks(self, rank: int, world_size: int) -> range:
        """Return the members of this rank's group of the kind, in order."""
        if self.kind == "outer":
            return range(rank % self.size, world_size, self.size)
        return range(rank - rank % self.size, rank - rank % self.size + self.size)

    def count(self, world_size: int) -> int:
        """Return the number of members of each group."""
        return self.size if self.kind == "inner" else world_size // self.size


def ranks_in(group: Group | None, world_size: int) -> int:
    """Return the number of participating ranks: the group's, or all for None."""
    return world_size if group is None else group.count(world_size)


class Request(ABC):
    """A request for one collective over `parts`."""

    kind: ClassVar[str]
    is_sum: ClassVar[bool] = False
    """True if parts are added up, and therefore sent in the dtype `Part.wire`."""

    def __init__(self, *parts: Part, last: bool = False, group: Group | None = None) -> None:
        if not parts or not all(isinstance(part, Part) for part in parts):
            raise TypeError(
                f"{type(self).__name__}: expected one Part or more, such as slot.part(tensor) (got {parts!r})."
            )
        self.parts = parts
        self.last = last
        """True if no further collective follows for this bucket: the next bucket may begin before this request is
        answered."""
        self.group = group
        """The ranks that take part; None: all. Sums, rows and answers then cover the ranks of the group only."""

    def with_parts(self, parts: Sequence[Part]) -> Request:
        """Return the same request for other parts."""
        return type(self)(*parts, last=self.last, group=self.group)

    def among(self, group: Group, *, last: bool) -> Self:
        """Return the same request for the ranks of a group, with another `last`."""
        same = copy.copy(self)
        same.group, same.last = group, last
        return same

    def __bool__(self) -> bool:
        """Raise `TypeError`: a request has no value until it is yielded."""
        raise TypeError(f"{type(self).__name__} was not answered: write `yield {type(self).__name__}(...)`.")

    @functools.cached_property
    def part_bytes(self) -> tuple[int, ...]:
        """The bytes of each part, as this rank puts it in."""
        return tuple([tensor_bytes(part.tensor, part.wire if self.is_sum else None) for part in self.parts])

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to send. An empty sparse tensor is sent: other ranks' may be non-empty."""
        return not (self.parts[0].tensor.is_sparse or any(self.part_bytes))


class Reduction(Request):
    """A request for sums over the ranks or, with `average`, means."""

    is_sum: ClassVar[bool] = True

    def __init__(self, *parts: Part, average: bool = False, last: bool = False, group: Group | None = None) -> None:
        super().__init__(*parts, last=last, group=group)
        self.average = average

    def with_parts(self, parts: Sequence[Part]) -> Self:
        """Return the same request for other parts."""
        return type(self)(*parts, average=self.average, last=self.last, group=self.group)


class AllReduce(Reduction):
    """A request for the sum over the ranks of each part or, with `average`, its mean.

    For a mean, the division precedes the cast to `Part.wire`, and is done in the part's own dtype: a sum that the
    narrow dtype cannot hold does not overflow if the mean does not, but a rank's contribution (its tensor over the
    world size) becomes 0 if it is at most half of the narrow dtype's smallest number. A sparse tensor must be the only
    part of its request, and its answer is another tensor: autograd lets a sparse gradient's values share memory with
    gradients that the backward pass still uses (tests/commhooks/test_odd_parameters.py).
    """

    kind: ClassVar[str] = "all-reduce"


class AllGather(Request):
    """A request for every rank's parts, stacked in rank order: each answer is [world size, *the part's shape]."""

    kind: ClassVar[str] = "all-gather"


class AllToAll(Request):
    """A request for an exchange: row i of a part goes to rank i, and row i of its answer came from rank i.

    Every part is [world size, ...]. Ranks get different answers, so do not pass them to `Judge`.
    """

    kind: ClassVar[str] = "all-to-all"


class ReduceScatter(Reduction):
    """A request for sums or means, one for each rank: rank r's answer is the sum or mean of row r over the ranks.

    Every part is [world size, ...], and is sent in its own dtype; for a mean, the division comes first, as in
    `AllReduce`. Ranks get different answers, so do not pass them to `Judge`.
    """

    kind: ClassVar[str] = "reduce-scatter"


class Judge:
    """A request for a verdict: a 0-dim bool, true if no element of these tensors is inf or NaN.

    It must be the last request of an exchange, and nothing is sent. Under "fused" all buckets of a step share one
    verdict, given once all of them have asked; under "fifo" each bucket is judged separately. Pass only tensors that
    are identical on every rank and show inf and NaN: a mean in the bucket's own dtype, a code's scales.
    """

    kind: ClassVar[str] = "judge"

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __bool__(self) -> bool:
        """Raise `TypeError`: a verdict is the value of a `yield`."""
        raise TypeError("Judge was not answered: write `finite = yield Judge(...)`.")


Borrow = Callable[[Sequence[int], torch.dtype], Tensor]
"""A function that returns memory of a shape and dtype."""
Asked = Request | Judge | tuple[Request, ...]
"""The values that a compressor may yield: a request, several at once (answered together by a list of answers), or a
request for a verdict."""
