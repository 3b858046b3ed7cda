"""What a reducer calls at named moments of an iteration, for whatever the kernel does not do itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.nn import Parameter

from ddp_core.buckets import Bucket
from ddp_core.hooks import Pending


class Feature:
    """Something that some programs need of a reducer; each method is a moment, at which this one does nothing.

    A reducer calls its features in the order in which they were added, and works without any. All ranks have the same,
    so a feature may issue collectives where all ranks do: in ``on_all_launched`` and ``at_end``.
    """

    def added(self, reducer: Any) -> None:
        """Begin, or start over: `Reducer.add` was called, or the reducer was given other ranks."""

    def after_forward(self, reducer: Any, outputs: Iterable[Tensor]) -> None:
        """Prepare for a backward pass that synchronises, of a module whose outputs hold ``outputs``."""

    def on_gradient(self, reducer: Any, index: int) -> None:
        """Look at a gradient that is in ``p.grad``, before it is counted, also under ``no_sync``."""

    def on_begin(self, reducer: Any) -> None:
        """Change what the iteration expects: its first gradient has come."""

    def on_local(self, reducer: Any, parameter: Parameter) -> None:
        """Look at a gradient that is not reduced: under ``no_sync``, or after the reduction."""

    def leaves_out(self, bucket: Bucket) -> bool:
        """Return True if a complete bucket is not to be reduced, on any rank."""
        return False

    def on_all_launched(self, reducer: Any) -> None:
        """Follow the last bucket, within the backward pass."""

    def at_end(self, reducer: Any) -> None:
        """Act at the end of the backward pass, before anything is waited for."""

    def untouched(self, bucket: Bucket) -> Collection[int]:
        """Return the parameters of a bucket, by index, that keep the gradients that they have."""
        return ()

    def on_mean(self, bucket: Bucket) -> None:
        """Use the gradients of a bucket, which are means now."""

    def finished(self, reducer: Any, in_flight: Sequence[Pending | None]) -> None:
        """Complete the iteration: every bucket's gradients are means. None stands for a bucket that was left out."""

    def on_failure(self, in_flight: Sequence[Pending | None]) -> None:
        """Learn that a hook or a collective raised, while these buckets were being reduced."""

    def why_unfinished(self, reducer: Any) -> RuntimeError | None:
        """Return what to raise in place of the plain error if a reduction has begun and not ended."""
        return None


Found = TypeVar("Found", bound=Feature)
