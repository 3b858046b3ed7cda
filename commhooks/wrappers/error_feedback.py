"""Remember what a compressor leaves out, and add it to the next gradient.

Source: Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML
2019, algorithm 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from commhooks.errors import CompressorError, SettingsError
from commhooks.language.compressor import (
    BucketView,
    Compressor,
    Context,
    Exchange,
    Result,
    Slot,
    add_owed,
    check_inner,
    residual_of,
)
from commhooks.state.table import LocalEntry
from commhooks.tensors import computing_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Compressor):
    """Give `inner` the gradient plus what this rank has not got through yet; keep what it leaves out this time.

    The residual is local, in fp32 at least, one for each parameter. A step whose mean is not finite commits nothing.
    Where the bucket's dtype is narrower than the residual's, `inner` works on a copy that is wide enough.
    """

    inner: Compressor

    def __post_init__(self) -> None:
        check_inner("ErrorFeedback", self.inner)
        if not self.inner.tells_unsent:
            raise SettingsError(
                f"ErrorFeedback(inner={self.inner!r}): inner must tell what it left out; this one either sends "
                "everything or, as PowerSGD does, keeps its own residual."
            )

    @property
    def fixes_wire(self) -> bool:
        """What is left out depends on the wire, so nobody may change it."""
        return True

    def takes(self, gradient: Tensor) -> bool:
        """Take what `inner` takes, if it is dense and real."""
        return self.inner.takes(gradient) and not gradient.is_sparse and gradient.is_floating_point()

    def check_parameters(self, names: Iterable[str]) -> None:
        """Let `inner` check its settings."""
        self.inner.check_parameters(names)

    def first_steps(self) -> tuple[int, ...]:
        """Return those of `inner`."""
        return self.inner.first_steps()

    def local_entries(self) -> Mapping[str, LocalEntry]:
        """Return those of `inner`."""
        return self.inner.local_entries()

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Run `inner` on the gradient plus the residual."""
        plan = bucket.plan(self, lambda: _Plan(bucket))
        plan.add_residuals(bucket.memory)
        result = yield from self.inner.compress(plan.inner, context)
        if result.unsent is None:
            raise CompressorError(f"{self.inner!r} must tell what it left out, as Result.unsent.")
        if plan.inner.memory is not bucket.memory:
            bucket.memory.copy_(result.mean)
        finite = context.all_finite(bucket.memory)  # in its own dtype, which may be too narrow for the mean
        for residual, unsent in zip(plan.residuals, plan.split(result.unsent), strict=True):
            context.commit(residual, unsent, finite)
        return Result(bucket.memory)


class _Plan:
    """Hold the bucket as `inner` sees it, and the residuals."""

    def __init__(self, bucket: BucketView) -> None:
        self._sizes = [slot.gradient.numel() for slot in bucket.slots]
        self.residuals = [residual_of(slot) for slot in bucket.slots]
        dtype = computing_dtype(bucket.memory.dtype)
        memory = bucket.memory if bucket.memory.dtype == dtype else torch.empty_like(bucket.memory, dtype=dtype)
        slots = [
            Slot(slot.parameter, gradient, slot.state)
            for slot, gradient in zip(bucket.slots, self.split(memory), strict=True)
        ]
        self.inner = BucketView(bucket.index, memory, slots, wants_unsent=True)

    def split(self, memory: Tensor) -> Sequence[Tensor]:
        """Cut memory of the bucket's size into its parameters' parts."""
        parts: tuple[Tensor, ...] = memory.split(self._sizes)
        return parts

    def add_residuals(self, gradient: Tensor) -> None:
        """Lay the gradient, plus what is owed, where `inner` will work on it."""
        if self.inner.memory is not gradient:
            self.inner.memory.copy_(gradient)
        add_owed([slot.gradient for slot in self.inner.slots], self.residuals)
