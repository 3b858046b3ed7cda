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

On a GPU all of these are moments of the device (`commhooks.experiments.devices.Stopwatch`), where the hook's own work
and its collectives are queued together. What they add to the step counts as waiting. Of FSDP2's exchanges only those
for which the host waits are seen (Gloo's); the others are part of compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from commhooks.experiments.devices import Moment, Stopwatch
from commhooks.experiments.links.waits import WaitClock, overlap


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

    def __init__(self, stopwatch: Stopwatch, held: Callable[[], Held]) -> None:
        self._stopwatch, self._held = stopwatch, held

    def begin(self) -> None:
        """Start a step."""
        self._before, self._begin = self._held(), self._stopwatch.start()

    def backward_ended(self) -> None:
        """Record nothing: exchanges are counted wherever they are."""

    def optimizer_ended(self) -> None:
        """Record nothing, as above."""

    def end(self) -> Split:
        """End the step and return the split of its time."""
        end, at, held = self._stopwatch.now(), self._stopwatch.seconds_at, self._held()
        seconds = at(end) - at(self._begin)
        exchanging, waiting = held.seconds - self._before.seconds, held.waiting - self._before.waiting
        if self._stopwatch.is_queued:  # the host may wait for compute too, and before the device begins
            exchanging = waiting = min(waiting, seconds)
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

    def __init__(self, ddp: nn.Module, model: nn.Module, waits: WaitClock, stopwatch: Stopwatch) -> None:
        self._waits, self._stopwatch = waits, stopwatch
        self._begin: Moment = 0.0
        self._gradient: Moment = 0.0
        self._backward_end: Moment = 0.0
        self._stepped: Moment | None = None  # when the optimizer was done, if there is communication after it
        self._entered: Moment | None = None  # when the DDP was called that has not called the inner model yet
        self._for_buffers: list[tuple[Moment, Moment]] = []
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
        self._entered = self._stopwatch.now()

    def _mark_forward(self, module: nn.Module, inputs: object) -> None:
        """Record that the DDP has called the inner model: until now, it waited for buffers."""
        if self._entered is not None:
            self._for_buffers.append((self._entered, self._stopwatch.now()))
            self._entered = None

    def _mark_gradient(self, parameter: Tensor) -> None:
        """Record a finished gradient; the last one ends the backward pass's compute."""
        self._gradient = self._stopwatch.now()

    def begin(self) -> None:
        """Start a step."""
        self._waits.take()
        self._for_buffers.clear()
        self._stepped = None
        self._begin = self._gradient = self._stopwatch.start()

    def backward_ended(self) -> None:
        """Record that backward() has returned: every gradient is now the mean."""
        self._backward_end = self._stopwatch.now()

    def optimizer_ended(self) -> None:
        """Record that the optimizer has taken its step: communication follows."""
        self._stepped = self._stopwatch.now()

    def end(self) -> Split:
        """End the step and return the split of its time."""
        last, at = self._stopwatch.now(), self._stopwatch.seconds_at
        end, begin, gradient = at(last), at(self._begin), at(self._gradient)
        waits = self._waits.take()
        buffers = [(at(since), at(until)) for since, until in self._for_buffers]
        for_buffers = sum(until - since for since, until in buffers)
        hidden = overlap(waits, (begin, gradient)) - sum(overlap(waits, one) for one in buffers)
        windows = [(gradient, at(self._backward_end)), (end if self._stepped is None else at(self._stepped), end)]
        exposed = sum(until - since for since, until in windows)
        exposed_waiting = sum(overlap(waits, window) for window in windows)
        if self._stopwatch.is_queued:
            exposed_waiting = exposed
        return Split(
            seconds=end - begin,
            compute=end - begin - for_buffers - exposed,
            compression=exposed - exposed_waiting,
            waiting=for_buffers + exposed_waiting,
            hidden=hidden,
        )

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
