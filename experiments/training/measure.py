"""The split of a step's time: every moment counts as exactly one of compute, compression and waiting.

- compute: the training thread is in the forward pass, in the backward pass up to the last gradient, or in the
  optimizer.
- waiting: it has nothing to compute, and the hook waits for a collective (for the link, or for another rank); or the
  forward pass waits for rank 0's buffers.
- compression: it has nothing to compute, and the hook is at work: casting, factorising, packing, unpacking, or taking
  DiLoCo's outer step.

So compute + compression + waiting = the step. The hook and the link cost the step nothing while the backward pass
computes; their waiting in that time is reported separately as hidden.

FSDP2 on a CPU waits for each of its exchanges, in the forward pass too: these are waiting and compression, all other
time is compute, and nothing is hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from ..links.waits import Interval, WaitClock, overlap


@dataclass(frozen=True, kw_only=True)
class Split:
    """One step's seconds; compute + compression + waiting = seconds."""

    seconds: float
    compute: float
    compression: float
    waiting: float
    hidden: float  # time waiting for collectives during compute: not part of the sum


class Clock(Protocol):
    """A clock for the steps of a model; its methods are called in this order."""

    def begin(self) -> None:
        """Start a step."""
        ...

    def backward_ended(self) -> None:
        """Record that backward() has returned: every gradient is now the mean."""
        ...

    def optimizer_ended(self) -> None:
        """Record that the optimizer has taken its step: communication follows."""
        ...

    def end(self) -> Split:
        """End the step and return the split of its time."""
        ...

    def remove(self) -> None:
        """Remove the clock's hooks from the model."""
        ...


@dataclass(frozen=True)
class Held:
    """Seconds for which exchanges blocked the training thread, since the run began."""

    seconds: float
    waiting: float  # the part of them in which a collective was waited for


class ExchangeClock:
    """A clock for the steps of a model whose exchanges all block the training thread, from the counts of these."""

    def __init__(self, clock: Callable[[], float], held: Callable[[], Held]) -> None:
        self._clock, self._held = clock, held

    def begin(self) -> None:
        """Start a step."""
        self._before, self._begin = self._held(), self._clock()

    def backward_ended(self) -> None:
        """Record nothing: exchanges are counted wherever they are."""

    def optimizer_ended(self) -> None:
        """Record nothing, as above."""

    def end(self) -> Split:
        """End the step and return the split of its time."""
        seconds, held = self._clock() - self._begin, self._held()
        exchanging, waiting = held.seconds - self._before.seconds, held.waiting - self._before.waiting
        return Split(
            seconds=seconds,
            compute=seconds - exchanging,
            compression=exchanging - waiting,
            waiting=waiting,
            hidden=0.0,
        )

    def remove(self) -> None:
        """Remove nothing: the model has no hooks of this clock."""


class StepClock:
    """A clock for the steps of a model in its DDP, or of a model without a DDP (`ddp` is `model`)."""

    def __init__(self, ddp: nn.Module, model: nn.Module, waits: WaitClock) -> None:
        self._waits = waits
        self._clock = waits.clock
        self._begin = self._gradient = self._backward_end = 0.0
        self._stepped: float | None = None  # when the optimizer was done, if there is communication after it
        self._entered: float | None = None  # when the DDP was called that has not called the inner model yet
        self._for_buffers: list[Interval] = []
        self._handles = []
        if ddp is not model:  # a plain module waits for no buffers
            self._handles += [
                ddp.register_forward_pre_hook(self._mark_call, prepend=True),
                model.register_forward_pre_hook(self._mark_forward),
            ]
        self._handles += [
            p.register_post_accumulate_grad_hook(self._mark_gradient) for p in model.parameters() if p.requires_grad
        ]

    def _mark_call(self, module: nn.Module, inputs: object) -> None:
        """Record that the loss has called the DDP, which it may do several times, and after other work."""
        self._entered = self._clock()

    def _mark_forward(self, module: nn.Module, inputs: object) -> None:
        """Record that the DDP has called the inner model: until now, it waited for buffers."""
        if self._entered is not None:
            self._for_buffers.append((self._entered, self._clock()))
            self._entered = None

    def _mark_gradient(self, parameter: Tensor) -> None:
        """Record a finished gradient; the last one ends the backward pass's compute."""
        self._gradient = self._clock()

    def begin(self) -> None:
        """Start a step."""
        self._waits.take()
        self._for_buffers.clear()
        self._stepped = None
        self._begin = self._gradient = self._clock()

    def backward_ended(self) -> None:
        """Record that backward() has returned: every gradient is now the mean."""
        self._backward_end = self._clock()

    def optimizer_ended(self) -> None:
        """Record that the optimizer has taken its step: communication follows."""
        self._stepped = self._clock()

    def end(self) -> Split:
        """End the step and return the split of its time."""
        end = self._clock()
        waits = self._waits.take()
        for_buffers = sum(until - since for since, until in self._for_buffers)
        hidden = overlap(waits, (self._begin, self._gradient)) - sum(overlap(waits, one) for one in self._for_buffers)
        windows = [(self._gradient, self._backward_end), (end if self._stepped is None else self._stepped, end)]
        exposed = sum(until - since for since, until in windows)
        exposed_waiting = sum(overlap(waits, window) for window in windows)
        return Split(
            seconds=end - self._begin,
            compute=end - self._begin - for_buffers - exposed,
            compression=exposed - exposed_waiting,
            waiting=for_buffers + exposed_waiting,
            hidden=hidden,
        )

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
