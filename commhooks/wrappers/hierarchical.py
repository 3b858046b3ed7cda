"""Dense averaging inside a machine, compression between machines.

Idea: links inside a machine are fast, so its ranks first average their gradients uncompressed. Then the machine acts as
one rank: all of its ranks compress the same mean identically, and each carries 1/n of every message to the other
machines. Bytes on the wire, for n ranks per machine: between machines, each rank sends 1/n of `inner`'s messages, so a
machine sends as much as a single rank would; inside, the gradient and the answers from other machines. Bias and ω are
`inner`'s, applied to the machines' means. Weakness: every rank of a machine does all of the compressor's work, and all
must compute identical bits, as ranks with identical hardware do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from commhooks.errors import CompressorError, SettingsError
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Compressor, Context, Exchange, inner_of, loss_of_a_matrix, map_requests
from commhooks.language.entries import Declared
from commhooks.language.loss import Sends
from commhooks.language.place import Place
from commhooks.language.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Asked,
    Group,
    Judge,
    Part,
    ReduceScatter,
    Request,
)
from commhooks.language.settings import refusal, setting
from commhooks.wrappers.wrapper import Wrapper


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hierarchical(Wrapper):
    """Plain averaging inside each machine, and `inner` between machines, as if each machine were one rank.

    The state of `inner` belongs to a machine: all its ranks hold the same.
    """

    size: int = setting(least=1)
    """The number of consecutive ranks that form a machine; 1: `inner` unchanged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_hierarchical(self.inner):
            raise refusal(self, "inner", "must not hold another Hierarchical")

    sends = Sends.ANYTHING  # the ranks of a machine gather what each of them received

    def takes(self, gradient: Tensor) -> bool:
        """Return whether `inner` takes the gradient and it is dense and real."""
        return self.inner.takes(gradient) and not gradient.is_sparse and gradient.is_floating_point()

    def check(self, named: Mapping[str, Tensor], world_size: int | None) -> None:
        """Raise `SettingsError` if the number of ranks is not a multiple of `size`."""
        if world_size is not None and world_size % self.size:
            raise SettingsError(
                f"Hierarchical(size={self.size}): the number of ranks must be a multiple of size (got {world_size})."
            )
        self.inner.check(named, None if world_size is None else world_size // self.size)

    def state(self, place: Place) -> Declared:
        """Return the entries of `inner`, whose ranks are machines, each shared by a whole machine."""
        declared = self.inner.state(dataclasses.replace(place, world_size=max(1, place.world_size // self.size)))
        return {
            name: dataclasses.replace(entry, holders=entry.holders * self.size) if entry.is_own else entry
            for name, entry in declared.items()
        }

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Average inside the machine, then run `inner` as one of the machines."""
        if self.size == 1:
            yield from self.inner.compress(bucket, context)
            return
        inside = Group("inner", self.size)
        yield AllReduce(*(tile.part() for tile in bucket.tiles), average=True, group=inside)  # in place, for `inner`
        machine, place = divmod(context.rank, self.size)
        among_machines = dataclasses.replace(context, rank=machine, world_size=context.world_size // self.size)
        carrier = _Carrier(self.size, place, among_machines.world_size)
        yield from map_requests(carrier.carry, self.inner.compress(bucket, among_machines))

    # Refuses: a shard belongs to one rank, not to a machine.
    scatter: ClassVar[Callable[..., Exchange]] = Compressor.scatter


def is_hierarchical(compressor: Compressor) -> bool:
    """Return whether a compressor is a `Hierarchical` or holds one in its settings."""
    return isinstance(compressor, Hierarchical) or any(map(is_hierarchical, inner_of(compressor)))


def machines_send_slices(compressor: Compressor) -> bool:
    """Return whether each rank of a machine sends a slice of the machine's message, which all must compute alike."""
    if isinstance(compressor, Hierarchical) and compressor.size > 1:
        inner = compressor.inner
        return inner.sends is Sends.ANYTHING or loss_of_a_matrix(inner).is_worth_keeping
    return any(map(machines_send_slices, inner_of(compressor)))


class _Carrier:
    """A carrier of a machine's requests: each rank sends its slice of every part, and the machine gathers the answers.

    A slice is a range of a part's elements or, if a part has a row for each machine, of its columns. All slices of a
    part have the same length, so that they can be gathered; the last ones are padded with zeros.
    """

    def __init__(self, size: int, place: int, machines: int) -> None:
        self._size = size
        self._place = place
        self._machines = machines
        self._inside, self._between = Group("inner", size), Group("outer", size)

    def carry(self, asked: Asked) -> Generator[Asked, Any, Any]:
        """Ask the other machines, then gather inside this one."""
        if isinstance(asked, Judge):
            return (yield asked)
        requests = asked if isinstance(asked, tuple) else (asked,)
        if not all(isinstance(request, Request) for request in requests):
            return (yield asked)  # whoever runs the exchange reports what is wrong
        if any(request.group is not None for request in requests):
            raise CompressorError("Hierarchical: inner must ask all ranks, and not a group of them.")
        if self._machines == 1:
            answers = yield tuple(request.among(self._between, last=request.last) for request in requests)
        else:
            sliced = [one.with_parts([self._slice(one, part) for part in one.parts]) for one in requests]
            mine = yield tuple(request.among(self._between, last=False) for request in sliced)
            pairs = list(zip(requests, mine, strict=True))
            every = yield tuple(self._gather(request, slices) for request, slices in pairs)
            answers = [self._whole(request, slices) for request, slices in zip(requests, every, strict=True)]
        return answers if isinstance(asked, tuple) else answers[0]

    def _slice(self, request: Request, part: Part) -> Part:
        columns, tensor = _columns(request, part), part.tensor
        flat = tensor.reshape(len(tensor), columns) if _has_rows(request) else tensor.reshape(-1)
        width = -(-columns // self._size)
        own = flat[..., min(self._place * width, columns) : min((self._place + 1) * width, columns)]
        if own.shape[-1] < width:
            filled = flat.new_zeros((*flat.shape[:-1], width))
            filled[..., : own.shape[-1]] = own
            own = filled
        return Part(own, part.layout, part.wire)

    def _gather(self, request: Request, slices: list[Tensor]) -> AllGather:
        """Gather every rank's slices; sums are sent in the dtype in which they came, which loses nothing."""
        parts = []
        for part, own in zip(request.parts, slices, strict=True):
            is_cast = isinstance(request, AllReduce) and part.on_wire.itemsize < own.element_size()
            parts.append(Part(own.to(part.on_wire) if is_cast else own, part.layout))
        return AllGather(*parts, last=request.last, group=self._inside)

    def _whole(self, request: Request, slices: list[Tensor]) -> list[Tensor]:
        """Return the answers assembled from the slices, each [ranks of the machine, rows if there are any, width]."""
        answers = []
        for part, every in zip(request.parts, slices, strict=True):
            shape = part.tensor.shape
            if isinstance(request, AllGather):
                shape = torch.Size((self._machines, *shape))
            elif isinstance(request, ReduceScatter):
                shape = shape[1:]
            whole = every.movedim(0, -2).flatten(-2)[..., : _columns(request, part)].reshape(shape)
            whole = whole.contiguous()  # of slices of one element it is a view, with ranks side by side
            answers.append(part.tensor.copy_(whole) if part.in_place else whole.to(part.tensor.dtype))
        return answers


def _columns(request: Request, part: Part) -> int:
    """Return the number of a part's elements to cut into slices: a row's, if there is a row for each machine."""
    return part.tensor.shape[1:].numel() if _has_rows(request) else part.tensor.numel()


def _has_rows(request: Request) -> bool:
    return isinstance(request, (AllToAll, ReduceScatter))
