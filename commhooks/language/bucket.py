"""A bucket as a compressor sees it: one slot for each parameter, and tiles, the ranges of memory to compute with.

A tile combines gradient and residual. `form` returns their sum, `keep` takes what was not sent, and `write` takes the
mean. The compressor need not know whether there is a residual, or its dtype and location.

Finish with a tile before forming the next one, in the order form, keep, room, write. If gradients are fp32 or wider,
`form` and `room` are the bucket's own memory. If they are narrower, all tiles share one scratch buffer, so forming
another tile overwrites it: copy what is to be sent, and call `form` again after a `yield`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from commhooks.errors import CompressorError
from commhooks.language.entries import RESIDUAL, ParameterState
from commhooks.language.memory import add_residuals, commit, surely
from commhooks.language.requests import Layout, Part
from commhooks.tensors import computing_dtype

Plan = TypeVar("Plan")


class Form(Protocol):
    """How a range of memory forms a matrix of n rows."""

    @property
    def n(self) -> int:
        """Rows."""
        ...

    @property
    def m(self) -> int:
        """Columns."""
        ...

    def view(self, memory: Tensor) -> Tensor:
        """View 1-D memory as the matrix, without copying."""
        ...


class Scratch:
    """What a bucket's tiles share: memory of the computing dtype, a step counter, and the mean if it is sparse.

    Tiles hold this rather than the bucket, which would otherwise refer to itself through them: its memory would then be
    freed only by the cyclic garbage collector, which some training loops turn off.
    """

    def __init__(self, memory: Tensor) -> None:
        self.turn = 0
        """Counts steps: a sum formed in an earlier step is no longer valid."""
        self.sparse_mean: Tensor | None = None
        self._device = memory.device
        self._dtype = computing_dtype(memory.dtype)
        self.is_needed = memory.dtype != self._dtype and not memory.is_sparse
        self._memory: Tensor | None = None

    def room(self, shape: torch.Size) -> Tensor:
        """Return memory of a shape; its contents last until the next call."""
        if self._memory is None or self._memory.numel() < shape.numel():
            self._memory = torch.empty(shape.numel(), dtype=self._dtype, device=self._device)
        return self._memory[: shape.numel()].view(shape)


class Tile:
    """A range of a bucket's gradients, together with its residual."""

    def __init__(
        self,
        scratch: Scratch,
        gradient: Tensor,
        layout: Layout,
        residuals: Sequence[tuple[int, Tensor]],
        decay: float,
    ) -> None:
        self.gradient = gradient
        """A view of the bucket's memory, of any shape; or one parameter's sparse gradient."""
        self.layout = layout
        self._scratch = scratch
        self._residuals = residuals
        """Each residual's offset in the tile, and its memory: 1-D, or of the gradient's shape if it is the only one."""
        self._whole = residuals[0][1] if len(residuals) == 1 and residuals[0][1].shape == gradient.shape else None
        """The residual, if there is exactly one and it covers the tile."""
        self._decay = decay
        self._formed_in = -1

    @property
    def keeps(self) -> bool:
        """Whether `keep` keeps anything; if not, what is not sent is lost and need not be computed."""
        return bool(self._residuals)

    @property
    def has_short_range(self) -> bool:
        """Whether a mean that is finite in fp32 may be inf in the bucket's own dtype, so that it must be judged there.

        True for fp16; bf16 has the range of fp32.
        """
        return torch.finfo(self.gradient.dtype).max < torch.finfo(torch.bfloat16).max

    @property
    def room(self) -> Tensor:
        """Memory of the tile's shape and the computing dtype: the bucket's own, if that is wide enough.

        Otherwise all tiles of a bucket share one scratch buffer.
        """
        return self._scratch.room(self.gradient.shape) if self._scratch.is_needed else self.gradient

    def form(self) -> Tensor:
        """Return gradient + residual in `room`; may be called repeatedly in a step until `write` is called.

        The result may be overwritten; a bucket of fp32 or wider has no other copy.
        """
        room, scratch = self.room, self._scratch
        if scratch.is_needed:
            room.copy_(self.gradient)
        elif self._formed_in == scratch.turn:
            return room
        self._formed_in = scratch.turn
        if self._whole is not None:
            add_residuals([room], [self._whole], self._decay)
        elif self._residuals:
            add_residuals(self._places(room), [kept for _, kept in self._residuals], self._decay)
        return room

    def part(self, tensor: Tensor | None = None, wire: torch.dtype | None = None) -> Part:
        """Return a part of a request: the tile itself, to be averaged in place, or a tensor that represents it."""
        if tensor is None:
            return Part(self.gradient, self.layout, wire, in_place=True)
        return Part(tensor, self.layout, wire, in_place=tensor.data_ptr() == self.room.data_ptr())

    def residual_room(self, finite: Tensor) -> Tensor:
        """Return memory in which to compute what was not sent: the residual's own memory if it may be overwritten now.

        Pass it to `keep` afterwards.
        """
        room, whole = self.room, self._whole
        if whole is not None and whole.dtype == room.dtype and whole.device == room.device and surely(finite):
            return whole
        return room

    def keep(self, unsent: Tensor, finite: Tensor) -> None:
        """Keep what was not sent, of the tile's shape, for the next step; if `finite` is false, change nothing."""
        if unsent.shape != self.gradient.shape:
            raise CompressorError(
                f"what was not sent, of shape {tuple(unsent.shape)}, was kept for gradients of shape "
                f"{tuple(self.gradient.shape)}."
            )
        if self._whole is not None:
            commit(self._whole, unsent, finite)
            return
        for (_, kept), piece in zip(self._residuals, self._places(unsent), strict=True):
            commit(kept, piece, finite)

    def write(self, mean: Tensor) -> None:
        """Write the mean over the gradient; this overwrites whatever was formed there."""
        if mean is self.gradient:
            return
        if mean.shape != self.gradient.shape:
            raise CompressorError(
                f"a mean of shape {tuple(mean.shape)} was written for gradients of shape {tuple(self.gradient.shape)}."
            )
        if self.gradient.is_sparse:
            self._scratch.sparse_mean = mean
        else:
            self.gradient.copy_(mean)

    def rows(self, form: Form, rows: int) -> list[Tile]:
        """Return the tile, viewed as a matrix by `form`, in tiles of so many rows, leaving out a remainder at the end.

        In one step, form either these tiles or the whole, not both.
        """
        inside = form.n * form.m
        blocks = form.view(self.gradient.view(-1)[:inside]).split(rows)
        if len(self._residuals) == 1:
            kept = form.view(self._residuals[0][1].view(-1)[:inside]).split(rows)
            residuals: list[Sequence[tuple[int, Tensor]]] = [[(0, block)] for block in kept]
        else:  # several parameters in one matrix: its rows are contiguous
            ends = [min(first + rows, form.n) * form.m for first in range(0, form.n, rows)]
            residuals = [self._overlap(end - block.numel(), end) for end, block in zip(ends, blocks, strict=True)]
        pairs = zip(blocks, residuals, strict=True)
        return [Tile(self._scratch, block, self.layout, own, self._decay) for block, own in pairs]

    def rest(self, start: int) -> list[Tile]:
        """Return everything from an element on as one tile with the layout of the whole; no tile if nothing is left."""
        end = self.gradient.numel()
        if start == end:
            return []
        own = self._overlap(start, end)
        return [Tile(self._scratch, self.gradient.view(-1)[start:], self.layout, own, self._decay)]

    def _overlap(self, start: int, end: int) -> list[tuple[int, Tensor]]:
        """Return the parts of the residuals that lie within a range of this tile."""
        found = []
        for first, kept in self._residuals:
            low, high = max(start, first), min(end, first + kept.numel())
            if low < high:
                found.append((low - start, kept[low - first : high - first]))
        return found

    def _places(self, memory: Tensor) -> list[Tensor]:
        """Return the views of memory of the tile's shape that correspond to its residuals."""
        flat = memory.view(-1)
        return [flat[first : first + kept.numel()] for first, kept in self._residuals]


class Slot:
    """One parameter's place in a bucket."""

    def __init__(self, parameter: Tensor, gradient: Tensor, remembered: ParameterState) -> None:
        self.parameter = parameter
        self.gradient = gradient
        """1-D view of the bucket's memory: the gradient's elements in the memory order of the parameter."""
        self.remembered = remembered
        self.tile: Tile
        self._layouts: dict[int, Layout] = {}

    @property
    def name(self) -> str:
        """The parameter's name, or a placeholder for it."""
        return self.remembered.key

    def layout(self, elements: int) -> Layout:
        """Return the layout of so many elements, all of this parameter; the same object in every step."""
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
        """Keep what was not sent, 1-D; call it before using `room` or `write` for the mean. See `Tile.keep`."""
        self.tile.keep(unsent, finite)

    def write(self, mean: Tensor) -> None:
        """Write the mean; see `Tile.write`."""
        self.tile.write(mean)

    def state(self, name: str) -> Tensor:
        """Return the state declared under a name by `Compressor.state`; it must not be modified."""
        return self.remembered[name]

    @property
    def choice(self) -> int:
        """What `Compressor.choose` last returned for the parameter; 0 at first."""
        return self.remembered.choice

    def commit(self, name: str, value: Tensor, allowed: Tensor, rows: int | None = None) -> None:
        """Store a value, or its first `rows`, where `allowed`, a broadcastable bool, is true."""
        commit(self.remembered[name][:rows] if rows is not None else self.remembered[name], value, allowed)


@dataclasses.dataclass(eq=False)
class BucketView:
    """A bucket as a compressor sees it; it may hold only some of the slots of a DDP's bucket."""

    index: int
    memory: Tensor
    """1-D and dense, or one parameter's sparse gradient. It holds this rank's gradient first, then the mean."""
    slots: Sequence[Slot] = ()
    """One for each parameter, in memory order; none if parameters are not known."""
    feeds_back: Callable[[Slot], bool] | None = None
    """Which slots have their residual added by `form`; None: none."""
    decay: float = 1.0
    """The fraction of a residual that remains after a step in which it was not sent."""
    scratch: Scratch = None  # type: ignore[assignment]  # "None": made below unless taken from another view
    is_whole: bool = True
    """Whether the slots fill the memory."""
    plans: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)
    """What `plan` returned, by compressor."""

    def __post_init__(self) -> None:
        self.scratch = self.scratch or Scratch(self.memory)
        for slot in self.slots:
            residuals = [(0, slot.remembered[RESIDUAL])] if self._has_residual(slot) else []
            slot.tile = Tile(self.scratch, slot.gradient, slot.layout(slot.gradient.numel()), residuals, self.decay)

    @property
    def mean(self) -> Tensor:
        """Where the mean ends up: `memory` itself unless that is sparse."""
        return self.memory if self.scratch.sparse_mean is None else self.scratch.sparse_mean

    @functools.cached_property
    def layout(self) -> Layout:
        """Whose elements `memory` holds; the bucket's own layout if parameters are not known."""
        if not self.slots:
            return Layout((f"bucket {self.index}",), (self.memory.numel(),))
        return Layout(tuple(slot.name for slot in self.slots), tuple(slot.gradient.numel() for slot in self.slots))

    @functools.cached_property
    def tiles(self) -> list[Tile]:
        """All gradients, in as few tiles as possible: one if the slots fill the memory, otherwise one for each slot."""
        if not self.is_whole:
            return [slot.tile for slot in self.slots]
        residuals, first = [], 0
        for slot in self.slots:
            if self._has_residual(slot):
                residuals.append((first, slot.remembered[RESIDUAL]))
            first += slot.gradient.numel()
        return [Tile(self.scratch, self.memory, self.layout, residuals, self.decay)]

    def with_residuals(self, loses: Callable[[Slot], bool], decay: float = 1.0) -> BucketView:
        """Return the bucket, with `form` adding the residuals of those slots that lose something."""
        return self._derived(self.slots, loses, decay, is_whole=self.is_whole)

    def subset(self, slots: Sequence[Slot]) -> BucketView:
        """Return a bucket of some of the slots."""
        return self._derived(slots, self.feeds_back, self.decay, is_whole=False)

    def renamed(self, names: Callable[[Slot], Mapping[str, str]]) -> BucketView:
        """Return the bucket with its slots' state under other names; see `ParameterState.renamed`."""
        slots = [Slot(slot.parameter, slot.gradient, slot.remembered.renamed(names(slot))) for slot in self.slots]
        return self._derived(slots, self.feeds_back, self.decay, is_whole=self.is_whole)

    def plan(self, compressor: object, make: Callable[[], Plan]) -> Plan:
        """Return what `make` returned for this bucket the first time: views and scratch memory, never state."""
        if compressor not in self.plans:
            self.plans[compressor] = make()
        return cast(Plan, self.plans[compressor])

    def _derived(
        self, slots: Sequence[Slot], loses: Callable[[Slot], bool] | None, decay: float, *, is_whole: bool
    ) -> BucketView:
        copies = [Slot(slot.parameter, slot.gradient, slot.remembered) for slot in slots]
        return BucketView(self.index, self.memory, copies, loses, decay, self.scratch, is_whole)

    def _has_residual(self, slot: Slot) -> bool:
        return self.feeds_back is not None and self.feeds_back(slot)
