"""A bucket as a compressor sees it: one slot for each parameter, and the tiles to compute with."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from commhooks.language.entries import RESIDUAL, ParameterState
from commhooks.language.memory import commit, surely
from commhooks.language.place import Place
from commhooks.language.requests import Layout, Part
from commhooks.language.tile import Scratch, Tile

Plan = TypeVar("Plan")


class Slot:
    """A parameter's place in a bucket."""

    def __init__(
        self, parameter: Tensor, gradient: Tensor, remembered: ParameterState, mean: Tensor | None = None
    ) -> None:
        self.parameter = parameter
        self.gradient = gradient
        """1-D view of the bucket's memory: the gradient's elements in the memory order of the parameter. In a bucket of
        shards: [world size, chunk], with rank r's elements, and padding, in row r."""
        self.mean: Tensor = gradient if mean is None else mean
        """1-D view of the bucket's output, for the mean: by default the same as `gradient`."""
        self.remembered = remembered
        self.tile: Tile
        """The whole gradient; a bucket of shards has `shards` instead."""
        self.shards: Sequence[Tile] = ()
        """For a bucket of shards: each rank's elements, without padding."""
        self.scratch: Scratch
        """The scratch memory and counters that the bucket's tiles share."""
        self._layouts: dict[int, Layout] = {}

    @property
    def name(self) -> str:
        """The parameter's name, or a placeholder for it."""
        return self.remembered.key

    def layout(self, elements: int) -> Layout:
        """Return the layout of `elements` elements, all of this parameter; the same object in every step."""
        if elements not in self._layouts:
            self._layouts[elements] = Layout((self.name,), (elements,))
        return self._layouts[elements]

    def part(self, tensor: Tensor, wire: torch.dtype | None = None) -> Part:
        """Return a part of a request that belongs to this parameter."""
        return Part(tensor, self.layout(tensor.numel()), wire)

    def form(self) -> Tensor:
        """Return gradient + residual, 1-D; see `Tile.form`."""
        return self.tile.form()

    @property
    def room(self) -> Tensor:
        """1-D memory to compute a mean in; see `Tile.room`."""
        return self.tile.room

    def keep(self, unsent: Tensor, finite: Tensor) -> None:
        """Keep the unsent part, 1-D; call it before using `room` or `write` for the mean. See `Tile.keep`."""
        self.tile.keep(unsent, finite)

    def write(self, mean: Tensor) -> None:
        """Write the mean, 1-D; see `Tile.write`."""
        self.tile.write(mean)

    def state(self, name: str) -> Tensor:
        """Return the state declared under a name by `Compressor.state`; it must not be modified."""
        return self.remembered[name]

    @property
    def choice(self) -> int:
        """The last choice of `Compressor.choose` for the parameter; 0 at first."""
        return self.remembered.choice

    def commit(self, name: str, value: Tensor, allowed: Tensor) -> None:
        """Store a value where `allowed`, a broadcastable bool, is true."""
        kept = self.remembered[name]
        commit(kept, value, self.scratch.permits(kept, allowed))


@dataclasses.dataclass(eq=False)
class BucketView:
    """A bucket as a compressor sees it; it may hold only some of the slots of a DDP's bucket."""

    index: int
    memory: Tensor
    """1-D and dense, or one parameter's sparse gradient; [world size, width] if it consists of shards. It holds this
    rank's gradient, and the compressor may overwrite it."""
    slots: Sequence[Slot] = ()
    """A slot for each parameter, in memory order; none if parameters are not known."""
    feeds_back: Callable[[Slot], bool] | None = None
    """A function that is true for slots whose residual `form` adds; None: no slot's."""
    decay: float = 1.0
    """The fraction of a residual that remains after a step in which it was not sent."""
    scratch: Scratch = None  # type: ignore[assignment]  # "None": made below unless taken from another view
    is_whole: bool = True
    """True if the slots fill the memory."""
    plans: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)
    """The results of `plan`, by compressor."""
    output: Tensor | None = None
    """Memory for the mean: of `memory`'s shape, or [width] for shards; None: the mean overwrites the gradient."""
    future: torch.futures.Future[Tensor] | None = dataclasses.field(default=None, repr=False)
    """The future of the last mean of these parameters; None before the first."""
    joined: Sequence[BucketView] = dataclasses.field(default=(), repr=False)
    """The buckets of which this one consists, each with memory of its own; `memory` is then the first one's."""

    def __post_init__(self) -> None:
        self.is_sharded: bool = self.memory.dim() == 2 and not self.memory.is_sparse
        """True if row r of the memory holds rank r's shards; see `Compressor.scatter`."""
        self.scratch = self.scratch or Scratch(self.memory)
        for slot in self.slots:
            slot.scratch = self.scratch
            residual = slot.remembered[RESIDUAL] if self._has_residual(slot) else None
            if self.is_sharded:
                slot.shards = list(self._shards(slot, residual))
                continue
            residuals = [(0, residual)] if residual is not None else []
            layout = slot.layout(slot.gradient.numel())
            slot.tile = Tile(self.scratch, slot.gradient, layout, residuals, self.decay, slot.mean)

    @classmethod
    def of_several(cls, buckets: Sequence[BucketView]) -> BucketView:
        """Return buckets of one dtype and device as one, which holds their slots, as if each were only a part of it."""
        first = buckets[0]
        slots = [slot for bucket in buckets for slot in bucket._copies(bucket.slots)]
        return cls(first.index, first.memory, slots, is_whole=False, joined=buckets)

    @property
    def members(self) -> Sequence[BucketView]:
        """The buckets that were handed in: those that were joined, or this one."""
        return self.joined or (self,)

    @property
    def mean(self) -> Tensor:
        """The mean, once written: `output` if there is one, otherwise `memory`, or a tensor of its own if sparse."""
        if self.scratch.sparse_mean is not None:
            return self.scratch.sparse_mean
        return self.memory if self.output is None else self.output

    @functools.cached_property
    def filled(self) -> Sequence[Slot]:
        """The slots whose gradients have elements."""
        return [slot for slot in self.slots if slot.gradient.numel()]

    @functools.cached_property
    def layout(self) -> Layout:
        """The parameters' layout of `memory`; the bucket's own layout if parameters are not known."""
        if not self.slots:
            return Layout(("gradients",), (self.memory.numel(),))
        return Layout(tuple(slot.name for slot in self.slots), tuple(slot.gradient.numel() for slot in self.slots))

    @functools.cached_property
    def tiles(self) -> list[Tile]:
        """All gradients, as one tile if the slots fill the memory, otherwise as one for each slot."""
        if not self.is_whole:
            return [slot.tile for slot in self.slots]
        return [Tile(self.scratch, self.memory, self.layout, self._residuals(self.slots), self.decay, self.output)]

    def run(self, slots: Sequence[Slot]) -> Tile:
        """Return slots that are next to each other in dense memory as one tile."""
        elements = sum(slot.gradient.numel() for slot in slots)
        first = slots[0].gradient.storage_offset() - self.memory.storage_offset()
        own = slice(first, first + elements)
        layout = Layout(tuple(slot.name for slot in slots), tuple(slot.gradient.numel() for slot in slots))
        output = None if self.output is None else self.output[own]
        return Tile(self.scratch, self.memory[own], layout, self._residuals(slots), self.decay, output)

    @functools.cached_property
    def rows(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Pairs, in a bucket of shards: rows to send, [world size, n], and memory for the mean of this rank's row, 1-D.

        There is one pair if the slots fill the memory, otherwise one for each slot. The rows may end with padding,
        which has no place in the mean.
        """
        return [(self.memory, self.mean)] if self.is_whole else [(slot.gradient, slot.mean) for slot in self.slots]

    @property
    def keeps(self) -> bool:
        """True if any tile keeps its unsent part; see `Tile.keeps`."""
        return any(tile.keeps for slot in self.slots for tile in slot.shards or (slot.tile,))

    def with_residuals(self, loses: Callable[[Slot], bool], decay: float = 1.0) -> BucketView:
        """Return the bucket, with `form` adding the residuals of the slots for which `loses` is true."""
        return self._derived(self.slots, loses, decay, is_whole=self.is_whole)

    def subset(self, slots: Sequence[Slot]) -> BucketView:
        """Return a bucket of some of the slots."""
        return self._derived(slots, self.feeds_back, self.decay, is_whole=False)

    def places(self, world_size: int) -> Sequence[Place]:
        """Return the places of the slots' state among `world_size` ranks; the first leads the bucket if it is whole."""
        led = [self.layout if self.is_whole else None, *[None] * len(self.slots)]
        return [
            Place(slot.name, slot.parameter, world_size, bucket=bucket, is_sharded=self.is_sharded)
            for slot, bucket in zip(self.slots, led, strict=False)
        ]

    def renamed(self, names: Sequence[Mapping[str, str]]) -> BucketView:
        """Return the bucket with its slots' state under other names, for each slot; see `ParameterState.renamed`."""
        slots = [
            Slot(slot.parameter, slot.gradient, slot.remembered.renamed(of_slot), slot.mean)
            for slot, of_slot in zip(self.slots, names, strict=True)
        ]
        return self._derived(slots, self.feeds_back, self.decay, is_whole=self.is_whole)

    def borrow(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory on the bucket's device, not initialised, for this exchange; see `give_back`."""
        return self.scratch.loans.borrow(torch.Size(shape), dtype, self.memory.device)

    def took(self, state: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Record that a pass has overwritten state on a CPU before the verdict, and where its old values are.

        Call `settle` with the verdict; see `Tile.took`.
        """
        self.scratch.taken.append((state, before))

    def settle(self, finite: Tensor) -> None:
        """Accept what passes have overwritten before the verdict, or put the old values back if `finite` is false."""
        if self.scratch.taken:
            self.scratch.settle(surely(finite))

    def give_back(self, *borrowed: Tensor) -> None:
        """Give back borrowed memory that is no longer read; otherwise the end of the exchange gives it back."""
        self.scratch.loans.give_back(*borrowed)

    def plan(self, compressor: object, make: Callable[[], Plan]) -> Plan:
        """Return the result of `make`, called once for bucket and compressor: views and scratch memory, never state."""
        if compressor not in self.plans:
            self.plans[compressor] = make()
        return cast(Plan, self.plans[compressor])

    def _derived(
        self, slots: Sequence[Slot], loses: Callable[[Slot], bool] | None, decay: float, *, is_whole: bool
    ) -> BucketView:
        copies, joined = self._copies(slots), self.joined
        return BucketView(
            self.index, self.memory, copies, loses, decay, self.scratch, is_whole, output=self.output, joined=joined
        )

    @staticmethod
    def _copies(slots: Sequence[Slot]) -> list[Slot]:
        return [Slot(slot.parameter, slot.gradient, slot.remembered, slot.mean) for slot in slots]

    def _shards(self, slot: Slot, residual: Tensor | None) -> Iterator[Tile]:
        chunk = slot.gradient.shape[1]
        for rank, row in enumerate(slot.gradient):
            first, end = (min(place * chunk, slot.parameter.numel()) for place in (rank, rank + 1))
            residuals = [(0, residual[first:end])] if residual is not None else []
            yield Tile(self.scratch, row[: end - first], slot.layout(end - first), residuals, self.decay)

    def _residuals(self, slots: Sequence[Slot]) -> list[tuple[int, Tensor]]:
        """Return the residuals of consecutive slots, each after its offset."""
        ends = itertools.accumulate(slot.gradient.numel() for slot in slots)
        pairs = zip(slots, itertools.chain([0], ends), strict=False)
        return [(first, slot.remembered[RESIDUAL]) for slot, first in pairs if self._has_residual(slot)]

    def _has_residual(self, slot: Slot) -> bool:
        return self.feeds_back is not None and self.feeds_back(slot)
