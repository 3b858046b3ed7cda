"""``static_graph``: the same parameters are used equally often in every iteration.

The first iteration learns which, and how often each parameter's node fires; as nobody knows before its end what is
used, everything is reduced at once there. All further ones count down from what was learned, which allows a parameter
to be used several times, as by reentrant checkpoints.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ddp_core import errors
from ddp_core.features.unused import UsedParameters
from ddp_core.graph import at_end_of_backward, at_entry_through
from ddp_core.lifecycle import Phase
from ddp_core.reducer import Reducer

NEVER = sys.maxsize  # gradients that a countdown waits for in the first iteration, so that nothing is launched


class StaticGraph(UsedParameters):
    """What the first iteration has taught."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__(skips)
        self.firings: list[int] = []  # how many times each node fires in an iteration; empty until it is known
        self._reducer: Callable[[], Reducer | None] = _nothing

    def added(self, reducer: Reducer) -> None:
        """Forget the iterations so far."""
        super().added(reducer)
        self.firings, self._reducer = [], weakref.ref(reducer)

    def after_forward(self, reducer: Reducer, outputs: Iterable[Tensor]) -> None:
        """Expect what was learned; in the first iteration, nothing that would be launched."""
        self.usage = None
        reducer.iteration.remaining = self.firings.copy() or [NEVER] * len(reducer.layout.parameters)
        if not self.firings:
            at_entry_through(outputs, self.enter)

    def enter(self) -> None:
        """Note that the current backward pass comes through the module's outputs, and ends the first iteration."""
        super().enter()
        reducer = self._reducer()
        if reducer is not None and not self.firings:
            at_end_of_backward(functools.partial(self.reduce_all, reducer))

    def on_gradient(self, reducer: Reducer, index: int) -> None:
        """Note that a parameter is used; raise RuntimeError if it is used more often than in the first iteration."""
        super().on_gradient(reducer, index)
        step = reducer.iteration
        expects = not reducer.paused and step.phase in (Phase.EXPECTING, Phase.REDUCING)
        if expects and step.remaining[index] == 0:
            reducer.admit(reducer.layout.parameters[index])  # the reduction has begun, and must not be forgotten
            raise reducer.noted(errors.static_graph_changed(index, reducer.layout.names[index]))

    @torch.no_grad()
    def reduce_all(self, reducer: Reducer) -> None:
        """End the first iteration, whose used parameters are known only now."""
        step = reducer.iteration
        if reducer.paused or not reducer.is_reducing or self.firings:
            return  # already reduced; or no_sync, or an autograd.grad, which ends in no parameter
        self.learn([NEVER - left for left in step.remaining])
        self.usage = self.count(reducer, self.used)
        for bucket in reducer.layout.buckets:
            bucket.gather(range(len(bucket.members)), None if reducer.hook else step.divisor)
            step.in_flight.append(reducer.launch(bucket, bucket.flat))
        if reducer.queue is at_end_of_backward:
            reducer.finish()  # now: whatever else was queued in the backward pass sees means, as with PyTorch

    def learn(self, firings: list[int]) -> None:
        """Record how often nodes fire, and which parameters are unused."""
        self.firings = firings
        self.here = [index for index, times in enumerate(firings) if times == 0]
        self.passed_over = set(self.here)

    def at_end(self, reducer: Reducer) -> None:
        """Count unused parameters as the last that were ready; the first iteration, which counts them, tells no order.

        The rebuilt buckets must have every parameter, on every rank.
        """
        if self.usage is None:
            reducer.iteration.order += self.here

    def why_unfinished(self, reducer: Reducer) -> RuntimeError:
        """Return the error for outputs that were not found, or a graph that has changed."""
        return reducer.unfinished(errors.CHANGED) if self.firings else errors.unseen_outputs()


def _nothing() -> None:
    """Return None, as a dead reference does."""
