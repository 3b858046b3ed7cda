"""A bucket as a compressor sees it: one slot for each parameter, and the tiles to compute with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from commhooks.language.entries import RESIDUAL, ParameterState
from commhooks.language.memory import commit
from commhooks.language.requests import Layout, Part
from commhooks.language.tile import Scratch, Tile

Plan = TypeVar("Plan")


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

    def commit(self, name: str, value: Tensor, allowed: Tensor) -> None:
        """Store a value where `allowed`, a broadcastable bool, is true."""
        commit(self.remembered[name], value, allowed)


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
            return Layout(("gradients",), (self.memory.numel(),))
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
