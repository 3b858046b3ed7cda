"""The interface of a compressor, and what it is handed.

A compressor is tensor maths written as a generator: it *yields* the collectives it wants, and the answer comes back
from the `yield`. It never calls one itself, so it can be run over a process group or over many workers in one
process, be counted, and be reordered.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from commhooks.requests import Request
from commhooks.state import ParameterState

Plan = TypeVar("Plan")

Exchange = Generator[Request, Tensor, "Result"]
"""What `Compressor.compress` returns: yields requests, is sent their answers, returns a `Result`."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Say what was left in the bucket's memory."""

    mean: Tensor
    """The mean of the gradient over the ranks, as the compressor could tell it; the bucket's own memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """Be one parameter's place in a bucket."""

    parameter: Tensor
    gradient: Tensor
    """1-D view of the bucket's memory: the gradient's elements in the order in which the parameter's lie in memory."""
    state: ParameterState

    def matrix(self) -> Tensor:
        """View the gradient as a matrix n×m, first dimension against the rest, without copying.

        Columns come in memory order, so a channels-last tensor is a matrix too. Where the first dimension is neither
        the outermost nor the innermost in memory, the outermost one stands in for it.
        """
        shape, strides = self.parameter.shape, self.parameter.stride()
        if not _is_dense(self.parameter):
            return self.gradient.view(shape[0], -1)
        outermost = max(range(len(shape)), key=lambda dimension: (strides[dimension], -dimension))
        if outermost != 0 and strides[0] == 1:
            return self.gradient.view(-1, shape[0]).t()
        return self.gradient.view(shape[outermost], -1)


@dataclasses.dataclass(eq=False)
class BucketView:
    """Be what a compressor sees of a bucket: flat memory, and which parameter owns which part of it."""

    index: int
    memory: Tensor
    """1-D and dense, or one parameter's sparse gradient. It holds this rank's gradient, and in the end the mean."""
    slots: Sequence[Slot] = ()
    """One for each parameter, in memory order; empty unless the compressor sets `uses_slots`."""
    _plans: dict[Compressor, Any] = dataclasses.field(default_factory=dict, repr=False)

    def plan(self, compressor: Compressor, make: Callable[[], Plan]) -> Plan:
        """Return what `make` returned for this bucket the first time: views and scratch memory, never state."""
        if compressor not in self._plans:
            self._plans[compressor] = make()
        return cast(Plan, self._plans[compressor])


@dataclasses.dataclass(frozen=True)
class Context:
    """Tell a compressor where it runs."""

    rank: int
    world_size: int
    step: int
    """Steps before this one, warm-up included."""

    def all_finite(self, *received: Tensor) -> Tensor:
        """Return a 0-dim bool: no inf and no NaN in what came back, which is the same on every rank.

        It stays a tensor, so that on a GPU nobody waits for it.
        """
        checks = [torch.isfinite(tensor).all() for tensor in received]
        return torch.stack(checks).all()

    def commit(self, memory: Tensor, value: Tensor, allowed: Tensor) -> None:
        """Write `value` into `memory` where `allowed` (a broadcastable bool) holds."""
        if allowed.numel() == 1 and not allowed.is_cuda:
            if allowed:
                memory.copy_(value)
        else:
            torch.where(allowed, value, memory, out=memory)


class Compressor(ABC):
    """Average gradients over ranks by way of something smaller.

    Subclasses are frozen dataclasses: their fields are settings, checked when built. They keep no tensors; what is to
    be remembered lives in `Slot.state`.
    """

    @property
    def uses_slots(self) -> bool:
        """Say whether `compress` looks at single parameters; a compressor that does not is spared finding them."""
        return False

    def takes(self, gradient: Tensor) -> bool:
        """Say whether `compress` can handle this kind of gradient; the others are averaged by a plain all-reduce."""
        return not gradient.is_sparse and gradient.is_floating_point()

    @abstractmethod
    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Yield requests until `bucket.memory` holds the mean.

        A collective that fails is thrown into the generator at its `yield`; it may clean up, and must let the exception
        pass. State is written only after the last answer came, and only if all answers were finite.
        """


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which state is kept and mathematics is done for a gradient of `dtype`: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def _is_dense(tensor: Tensor) -> bool:
    """Say whether the elements fill a stretch of memory without gaps and overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
