"""The parts of requests, packed into messages.

A message belongs to the task that sends it: taken from a pool, where its layout is computed once and its memory is
reused, and given back when the task has succeeded or failed. Sums with the same wire dtype are packed consecutively: in
the order of the requests or, if requests of many buckets are sent together, in the order of parameters' names. A ring
adds up an element's terms in an order that depends on its position in the message, so with more than two ranks the last
bits of a sum would otherwise depend on how parameters were divided into buckets. Gathers and exchanges are packed as
bytes: backends support neither messages of several dtypes nor every dtype.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commhooks.communicators import Collective
from commhooks.devices import runs_later
from commhooks.errors import CompressorError
from commhooks.language.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Group,
    Part,
    ReduceScatter,
    Reduction,
    Request,
    cuts_of,
    ranks_in,
)

_STEPS_UNTIL_UNUSED = 2
"""A message is dropped when this many steps have passed without it; compressors, and parts of a model, that alternate
keep theirs.
"""
_DTYPES_OF_BACKENDS = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
}
"""The dtypes that are sent unchanged if alone; all others are sent as bytes."""


class PlacedPart(NamedTuple):
    """A part, and the place of its answer: the request and the part's number in it."""

    request: int
    """The index of the request among those sent together."""
    number: int
    """The index of the part in its request."""
    part: Part


class PackedCollective(NamedTuple):
    """A collective and the parts that it carries."""

    places: Sequence[PlacedPart]
    collective: Collective
    message: Message | None
    """The memory that holds the parts side by side; None: a sum of one part, sent from its own memory or a copy."""

    def answers(self, result: Tensor) -> list[Tensor]:
        """Return the answer for each place, given the collective's answer."""
        if self.message is None:
            return [_answer_alone(self.places[0].part, result)]
        return self.message.unpack([place.part for place in self.places], result)


class Message(ABC):
    """Memory for parts of particular shapes and dtypes, owned by one task at a time."""

    memory: Tensor
    is_free: bool = False
    idle_steps = 0
    """The number of steps begun since a task took it."""

    def give_back(self) -> None:
        """Free the message for other tasks; answers, which may be views of it, must no longer be in use."""
        self.is_free = True

    @abstractmethod
    def pack(self, parts: Sequence[Part], request: Request, world_size: int) -> Collective:
        """Copy parts into the message, and return the collective that carries it."""

    @abstractmethod
    def unpack(self, parts: Sequence[Part], result: Tensor) -> list[Tensor]:
        """Return the answer for each part: a view of the message if the dtype is the part's own."""


class _Sum(Message):
    """Sums: consecutive parts in the widest of their dtypes, cast to the wire dtype as a whole."""

    def __init__(self, parts: Sequence[Part], *, by_name: bool) -> None:
        pieces = [(number, name, size) for number, part in enumerate(parts) for name, size in _pieces(part, by_name)]
        self._order = list(range(len(pieces)))
        if by_name:  # stable: equal names keep their order
            self._order.sort(key=lambda number: pieces[number][1])
        self._sizes = [[size for number, _, size in pieces if number == mine] for mine in range(len(parts))]
        dtypes = [dtype for part in parts for dtype in (part.tensor.dtype, part.on_wire)]
        widest = functools.reduce(torch.promote_types, dtypes)
        self._wire = parts[0].on_wire
        self.memory = parts[0].tensor.new_empty(sum(size for *_, size in pieces), dtype=widest)
        self._places = list(self.memory.split([pieces[number][2] for number in self._order]))
        back = sorted(range(len(pieces)), key=self._order.__getitem__)
        in_turn = iter(self._places[number] for number in back)
        self._of_parts = [[next(in_turn) for _ in sizes] for sizes in self._sizes]
        self._views = [
            places[0].view(part.tensor.shape) if len(places) == 1 and part.tensor.dtype == widest else None
            for part, places in zip(parts, self._of_parts, strict=True)
        ]
        """The place of a part's answer, if it is in one piece and of the part's own dtype."""

    def pack(self, parts: Sequence[Part], request: Request, world_size: int) -> Collective:
        pieces = [piece for part, sizes in zip(parts, self._sizes, strict=True) for piece in _split(part.tensor, sizes)]
        torch._foreach_copy_(self._places, [pieces[number] for number in self._order])
        if isinstance(request, Reduction) and request.average and world_size > 1:
            self.memory.div_(world_size)
        return Collective("all-reduce", self.memory.to(self._wire), group=request.group)

    def unpack(self, parts: Sequence[Part], result: Tensor) -> list[Tensor]:
        if result.data_ptr() != self.memory.data_ptr():
            self.memory.copy_(result)
        answers = []
        for part, sizes, places, view in zip(parts, self._sizes, self._of_parts, self._views, strict=True):
            if view is not None and not part.in_place:
                answers.append(view)
            elif len(places) == 1 and not part.in_place:
                answers.append(places[0].view(part.tensor.shape).to(part.tensor.dtype))
            else:
                own = part.tensor
                if not part.in_place or not own.is_contiguous():
                    own = torch.empty(own.shape, dtype=own.dtype, device=own.device)
                torch._foreach_copy_(list(_split(own, sizes)), places)
                answers.append(part.tensor.copy_(own) if part.in_place and own is not part.tensor else own)
        return answers


class _Rows(Message):
    """Gathers and exchanges: parts side by side, the widest elements first, so that all are aligned."""

    def __init__(self, parts: Sequence[Part], kind: type[Request], world_size: int) -> None:
        self._rows = 0 if kind is AllGather else world_size
        dtypes = {part.tensor.dtype for part in parts}
        as_bytes = kind is not ReduceScatter and (len(parts) > 1 or not dtypes <= _DTYPES_OF_BACKENDS)
        self._dtype = torch.uint8 if as_bytes else parts[0].tensor.dtype
        widths = [part.tensor.element_size() if as_bytes else 1 for part in parts]
        lengths = [part.tensor.numel() // (self._rows or 1) for part in parts]
        self._cuts, width = cuts_of([n * size for n, size in zip(lengths, widths, strict=True)], widths)
        self._shape = (self._rows, width) if self._rows else (width,)
        # Rows for all ranks are as large as all codes of a bucket; once sent, the memory is needed elsewhere.
        self._is_kept = kind is AllGather
        self.memory = parts[0].tensor.new_zeros(0, dtype=self._dtype)
        self._places: list[Tensor] = []

    def pack(self, parts: Sequence[Part], request: Request, world_size: int) -> Collective:
        memory, first, rows, room = self.memory, parts[0].tensor, parts[0].rows, None
        is_mean = isinstance(request, Reduction) and request.average and world_size > 1
        if rows is not None and rows.are_all_of(parts):
            memory, room = rows.memory.view(self._dtype), rows.room.view(self._dtype)
        elif not self._is_kept and len(parts) == 1 and first.dtype == memory.dtype and first.is_contiguous():
            memory = first.view(self._shape)  # it is its own message
            if is_mean:
                memory = memory.div_(world_size) if parts[0].in_place else memory / world_size
        else:
            if not self._places:
                memory = memory.new_zeros(self._shape)
            if self._is_kept and not self._places:
                self.memory, self._places = memory, self._places_in(memory, parts)
            for place, part in zip(self._places or self._places_in(memory, parts), parts, strict=True):
                place.copy_(part.tensor)
            if is_mean:
                memory /= world_size
        kind: Any = request.kind
        return Collective(kind, memory, sum(part.tensor.numel() for part in parts), request.group, room)

    def _places_in(self, memory: Tensor, parts: Sequence[Part]) -> list[Tensor]:
        cuts = zip(self._cuts, parts, strict=True)
        return [self._view(memory, cut, part.tensor.dtype).view(part.tensor.shape) for cut, part in cuts]

    def unpack(self, parts: Sequence[Part], result: Tensor) -> list[Tensor]:
        leading = result.shape[:-1]
        return [
            self._view(result, cut, part.tensor.dtype).view(
                (*leading, *(part.tensor.shape[1:] if self._rows else part.tensor.shape))
            )
            for cut, part in zip(self._cuts, parts, strict=True)
        ]

    @staticmethod
    def _view(memory: Tensor, cut: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """View some columns of a message in a given dtype."""
        return memory[..., cut[0] : cut[1]].view(dtype)


class Packer:
    """Packs requests; `by_name` if requests of many buckets are sent together.

    It keeps messages, which tasks take and give back, so that memory and its division are made once, not in every step.
    """

    def __init__(self, world_size: int, *, by_name: bool) -> None:
        self._world_size = world_size
        self._by_name = by_name
        self._messages: dict[Hashable, list[_Sum | _Rows]] = {}
        self._step = 0

    def pack(self, requests: Sequence[Request], way: int = 0, step: int = 0) -> list[PackedCollective]:
        """Return as few collectives as possible for requests made at the same time, in this step.

        The sender gives each message back once its answers are no longer needed. It is then reused only on the same
        `way`, on a GPU the number of the stream, which may still be reading it.
        """
        if step != self._step:
            self._step = step
            for layout, kept in list(self._messages.items()):  # drop what the last steps did not take
                for message in list(kept):
                    message.idle_steps += 1
                    if message.is_free and message.idle_steps > _STEPS_UNTIL_UNUSED:
                        kept.remove(message)
                if not kept:
                    del self._messages[layout]
        if len(requests) == 1 and len(requests[0].parts) == 1 and isinstance(requests[0], AllReduce):
            return [
                self._packed(requests[0], [PlacedPart(0, 0, requests[0].parts[0])], way)
            ]  # what most buckets request
        alike: dict[Hashable, list[PlacedPart]] = {}
        for number, request in enumerate(requests):
            for position, part in enumerate(request.parts):
                place = PlacedPart(number, position, part)
                alike.setdefault(self._kind_of(request, place), []).append(place)
        return [self._packed(requests[places[0].request], places, way) for places in alike.values()]

    def memories(self) -> list[Tensor]:
        """Return the messages' memory."""
        return [message.memory for alike in list(self._messages.values()) for message in alike]

    def _kind_of(self, request: Request, place: PlacedPart) -> Hashable:
        """Return a key that is equal for parts that can be sent together."""
        part, tensor = place.part, place.part.tensor
        if isinstance(request, AllReduce):
            # Large sums that need no additional memory are not copied just to be sent together.
            is_alone = part.in_place and len(request.parts) == 1
            goes_as_it_is = is_alone and self._by_name and part.on_wire == tensor.dtype
            if tensor.is_sparse or tensor.is_complex() or goes_as_it_is:
                return place
            return AllReduce, part.on_wire, tensor.device, request.average, request.group
        if isinstance(request, ReduceScatter):
            return ReduceScatter, tensor.dtype, tensor.device, request.average, request.group
        return type(request), tensor.device, request.group

    def _packed(self, request: Request, places: Sequence[PlacedPart], way: int) -> PackedCollective:
        part, ranks = places[0].part, ranks_in(request.group, self._world_size)
        if isinstance(request, AllReduce) and len(places) == 1:
            only_itself = part.tensor.is_sparse or part.tensor.is_complex()
            in_order = part.layout is None or list(part.layout.keys) == sorted(part.layout.keys)
            if only_itself or (part.in_place and (not self._by_name or in_order or part.on_wire == part.tensor.dtype)):
                return PackedCollective(places, _alone(part, request, ranks), None)
        parts = [place.part for place in places]
        # By content: plans that are made anew in every step bring layouts of their own, which are equal.
        of_parts = (
            (one.layout and (one.layout.keys, one.layout.sizes), one.tensor.shape, one.tensor.dtype, one.on_wire)
            for one in parts
        )

        def make() -> _Sum | _Rows:
            if isinstance(request, AllReduce):
                return _Sum(parts, by_name=self._by_name)
            return _Rows(parts, type(request), ranks)

        message = self._take((type(request), way, part.tensor.device, ranks, *of_parts), make)
        return PackedCollective(places, message.pack(parts, request, ranks), message)

    def _take(self, layout: Hashable, make: Callable[[], _Sum | _Rows]) -> _Sum | _Rows:
        """Return a message with this layout that no task owns, made if there is none."""
        alike = self._messages.setdefault(layout, [])
        for message in alike:
            if message.is_free:
                break
        else:
            message = make()
            alike.append(message)
        message.is_free, message.idle_steps = False, 0
        return message


def _alone(part: Part, request: AllReduce, world_size: int) -> Collective:
    """Return the sum of one part, which needs no message."""
    divisor = world_size if request.average else 1
    if part.tensor.is_sparse:
        return Collective("all-reduce", part.tensor / divisor, group=request.group)
    own, wire = part.tensor, part.on_wire
    if divisor > 1 and wire != own.dtype and not own.is_complex() and runs_later(own):
        # One kernel, which reads the memory and writes the message; on a CPU it would make a copy in between.
        payload = torch.div(own, divisor, out=own.new_empty(own.shape, dtype=wire))
        return Collective("all-reduce", payload, group=request.group)
    if not part.in_place:
        own = own.clone()
    if divisor > 1:
        own.div_(divisor)
    payload, wire = torch.view_as_real(own) if own.is_complex() else own, wire.to_real()
    if wire != payload.dtype:
        lent = payload.new_empty(payload.shape, dtype=wire) if part.borrow is None else part.borrow(payload.shape, wire)
        payload = lent.copy_(payload)
    return Collective("all-reduce", payload, group=request.group)


def _answer_alone(part: Part, result: Tensor) -> Tensor:
    own = part.tensor
    if own.is_complex() and not result.is_sparse:
        result = torch.view_as_complex(result.to(own.dtype.to_real()))
    if not part.in_place or own.is_sparse:
        return result.to(own.dtype)
    return own if result.data_ptr() == own.data_ptr() else own.copy_(result)


def check(request: Request, world_size: int) -> None:
    """Raise `CompressorError` for requests that cannot be packed."""
    if not isinstance(request, (AllReduce, AllGather, AllToAll, ReduceScatter)):
        raise CompressorError(
            f"expected a request for an all-reduce, all-gather, all-to-all or reduce-scatter (got {request!r})."
        )
    if request.group is not None:
        _check_group(request.group, request, world_size)
    if isinstance(request, Reduction) and request.average:
        for part in request.parts:
            if not (part.tensor.is_floating_point() or part.tensor.is_complex()):
                raise CompressorError(
                    f"{type(request).__name__}(average=True): a part of dtype {part.tensor.dtype} has no mean."
                )
    if isinstance(request, (AllToAll, ReduceScatter)):
        ranks = ranks_in(request.group, world_size)
        for shape in (part.tensor.shape for part in request.parts):
            if not shape or shape[0] != ranks:
                raise CompressorError(
                    f"{request.kind}: a part must have one row for each of {ranks} ranks (got shape {tuple(shape)})."
                )


def _check_group(group: Group, request: Request, world_size: int) -> None:
    if world_size % group.size:
        raise CompressorError(f"{group}: {world_size} ranks cannot be divided into machines of {group.size}.")
    if any(part.tensor.is_sparse for part in request.parts):
        raise CompressorError(f"{request.kind}: a sparse sum needs all ranks, not a group of them.")


def empty_answers(request: Request, world_size: int) -> list[Tensor]:
    """Return the answers to an empty request, for which nothing is sent."""
    if isinstance(request, AllGather):
        ranks = ranks_in(request.group, world_size)
        return [part.tensor.new_empty((ranks, *part.tensor.shape)) for part in request.parts]
    if isinstance(request, ReduceScatter):
        return [part.tensor.new_empty(part.tensor.shape[1:]) for part in request.parts]
    return [part.tensor for part in request.parts]


def _pieces(part: Part, by_name: bool) -> Sequence[tuple[str, int]]:
    """Return the ranges into which a part is divided: for each, the name to sort it by and its number of elements."""
    layout = part.layout
    if by_name and layout is not None and layout.elements == part.tensor.numel():
        return list(zip(layout.keys, layout.sizes, strict=True))
    return [(layout.keys[0] if layout is not None else "", part.tensor.numel())]


def _split(tensor: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    flat = tensor.reshape(-1)
    pieces: Sequence[Tensor] = flat.split(sizes) if len(sizes) > 1 else [flat]
    return pieces
