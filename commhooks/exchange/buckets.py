"""Buckets that no DistributedDataParallel makes: named tensors side by side in flat memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from commhooks.devices import Mark, mark_of
from commhooks.errors import CompressorError, SettingsError
from commhooks.tensors import is_dense


class User(Protocol):
    """An exchanger, as seen by the memory that it shares with others."""

    @property
    def name(self) -> str:
        """Its name in errors."""
        ...

    @property
    def is_in_use(self) -> bool:
        """True while a round's tensors are being written, averaged or read."""
        ...


class InTurns:
    """Memory shared by exchangers whose rounds never overlap, as large as the largest of them needs."""

    def __init__(self) -> None:
        self._memories: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._user: weakref.ref[User] | None = None
        self._read: list[Mark] = []

    def reserve(self, tensors: Iterable[Tensor]) -> None:
        """Provide memory for an exchanger of these tensors; call it for all exchangers before any of them begins."""
        needed: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            needed.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for key, alike in needed.items():
            elements = sum(tensor.numel() for tensor in alike)
            if key not in self._memories or elements > self._memories[key].numel():
                self._memories[key] = allocated(alike[0], elements)

    def take(self, user: User) -> None:
        """Give the memory to an exchanger for its next round; raise `CompressorError` if a round still uses it.

        The current stream waits until the last round's means are `read`, perhaps on another one.
        """
        before = self._user() if self._user is not None else None
        if before is not None and before.is_in_use:
            raise CompressorError(
                f"{user.name}: the memory is in use by a round of {before.name}; exchangers that share memory must not "
                "begin a round before the last one's means are written, or no longer needed."
            )
        self._user = weakref.ref(user)
        while self._read:
            self._read.pop().wait()

    def read(self) -> None:
        """Record that means are no longer needed after the work queued so far in the current stream."""
        marks = map(mark_of, {device for _, device in self._memories})
        self._read = [mark for mark in marks if mark is not None]

    def part(self, like: Tensor, elements: int) -> Tensor:
        """Return the beginning of the memory of a tensor's dtype and device, 1-D."""
        return self._memories[like.dtype, like.device][:elements]


def allocated(like: Tensor, elements: int) -> Tensor:
    """Return memory of a tensor's dtype and device, 1-D, pinned if the tensor is."""
    return torch.zeros(elements, dtype=like.dtype, device=like.device, pin_memory=like.is_pinned())


class FlatBucket:
    """Tensors of one dtype and device, presented as a bucket; `take` provides its memory.

    - `number`: its place in the channel's step, from 0 on; a bucket with a lower number than the last begins a step.
    - `names`: its tensors' names, in the order in which they lie in memory.
    - `tensors`: the tensors that state is kept for, by name: those that the feed's `like` returns. Only their shapes,
      strides, dtype and device are read; others than those of `names` are ignored.
    - `is_last`: the channel's step ends with it.
    - `take`: a function of a tensor and a number of elements, which returns 1-D memory for so many elements of that
      tensor's dtype and device, such as `allocated`.

    `places` are views of the memory with the tensors' shapes, in the order of `names`, and `weight` is this rank's
    weight in the mean; None: equal weights. Raises `SettingsError` for tensors of several dtypes or devices, or none.
    """

    def __init__(
        self,
        number: int,
        names: Sequence[str],
        tensors: Mapping[str, Tensor],
        is_last: bool,
        take: Callable[[Tensor, int], Tensor],
    ) -> None:
        self._number = number
        self._names = list(names)
        self._tensors = [tensors[name] for name in names]
        self._is_last = is_last
        self.weight: float | None = None
        sizes = [tensor.numel() for tensor in self._tensors]
        kinds = dict.fromkeys(f"{tensor.dtype} on {tensor.device}" for tensor in self._tensors)
        if len(kinds) != 1:
            raise SettingsError(
                f"FlatBucket of {', '.join(self._names[:8])}: its tensors must be of one dtype, on one device (got "
                f"{', '.join(kinds) or 'no tensors'}); make one bucket for each kind."
            )
        self._memory = take(self._tensors[0], sum(sizes))
        # In the order of each tensor's memory, as a DDP lays out gradients: state is saved in that order.
        flat = zip(self._memory.split(sizes), self._tensors, strict=True)
        self.places: list[Tensor] = [_in_order_of(tensor, part) for part, tensor in flat]

    def index(self) -> int:
        """Return its place in the step."""
        return self._number

    def buffer(self) -> Tensor:
        """Return the tensors' memory, 1-D."""
        return self._memory

    def parameters(self) -> list[Tensor]:
        """Return the tensors that state is kept for, one for each name."""
        return self._tensors

    def names(self) -> list[str]:
        """Return the tensors' names."""
        return self._names

    def is_last(self) -> bool:
        """Return whether this is the step's last bucket."""
        return self._is_last


def _in_order_of(tensor: Tensor, memory: Tensor) -> Tensor:
    if not is_dense(tensor):
        return memory.view(tensor.shape)
    return memory.as_strided(tensor.shape, tensor.stride(), memory.storage_offset())


def places_of(buckets: Iterable[FlatBucket]) -> dict[str, Tensor]:
    """Return the tensors that buckets hold, by name."""
    return {name: place for bucket in buckets for name, place in zip(bucket.names(), bucket.places, strict=True)}
