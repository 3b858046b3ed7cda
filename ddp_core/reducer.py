"""The kernel's second half: gradients become ready in any order, and buckets are reduced in one order.

Every parameter's AccumulateGrad node calls ``gradient_ready`` once its gradient is in ``p.grad``. When a bucket has all
of its gradients and every earlier bucket has been launched, it is launched: passed to the communication hook, or
all-reduced. Ranks compute gradients at different times and in different orders, but launch buckets in one order, so
that their collectives pair up. With the last bucket, ``finish`` is queued for the end of the backward pass: it waits
for all buckets, and gives every parameter its mean.

An iteration is ``before_forward``, ``leave_iteration``, the module's forward pass, ``after_forward``, the backward pass
with ``gradient_ready`` for each parameter, and ``finish``. Everything else is a `Feature`, called at named moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Parameter

from ddp_core import errors
from ddp_core.buckets import Bucket, Layout
from ddp_core.graph import at_end_of_backward
from ddp_core.hooks import GradBucket, Pending
from ddp_core.lifecycle import Iteration, Lifecycle, Phase
from ddp_core.listening import Listener

REDUCING = Phase.REDUCING  # checked for every gradient, and ten times faster to look up than an enum's member (3.11)


class Reducer(Lifecycle):
    """A counter of gradients that launches buckets in order and writes the means back; see the module's docstring."""

    def __init__(self, layout: Layout, process_group: dist.ProcessGroup):
        super().__init__(layout, process_group)
        self.paused = False  # no_sync: gradients accumulate and nothing is counted
        self.queue: Callable[[Callable[[], None]], None] = at_end_of_backward  # takes what ends the reduction
        self.listener = Listener(self)
        self.listener.listen(Reducer.gradient_ready, layout.parameters)

    def before_forward(self) -> None:
        """Check that the reduction before has ended, and count the iteration. Raises RuntimeError if it has not."""
        self.require_finished()
        self.iteration.number += 1

    def leave_iteration(self) -> None:
        """End the latest iteration; the first one that has an order of readiness then decides the buckets."""
        self.require_finished()
        if self.iteration.phase is Phase.REDUCED:
            self.iteration.phase = Phase.IDLE
        # Here, and not at the end of the backward pass: all ranks come here, and none uses the old buckets any more.
        if self.layout.learns_order and self.layout.order:
            self.layout.rebuild_in_order(self.process_group)

    def after_forward(self, outputs: Iterable[Tensor] = ()) -> None:
        """Prepare for the backward pass of a module whose outputs hold ``outputs``."""
        # Anew: the iteration before may have been expected, and have had no backward pass. A failure stays.
        if self.iteration.phase is not Phase.FAILED:
            self.iteration = Iteration(self.iteration.number, Phase.EXPECTING, [1] * len(self.layout.parameters))
        for bucket in self.layout.buckets:
            bucket.reset()
        for feature in self.features:
            feature.after_forward(self, outputs)

    def gradient_ready(self, index: int) -> None:
        """Count one firing of the AccumulateGrad node of parameter ``index``."""
        for feature in self.observers:  # none, as a rule
            feature.on_gradient(self, index)
        step = self.iteration
        if (self.paused or step.phase is not REDUCING) and not self.admit(self.layout.parameters[index]):
            return
        left = step.remaining[index] = step.remaining[index] - 1
        if left == 0:  # after its only gradient; in a static graph a parameter may have several
            step.order.append(index)
            self.arrive(index)
        elif left < 0:
            raise self.noted(errors.marked_twice(index, self.layout.names[index]))

    def admit(self, parameter: Parameter) -> bool:
        """Begin the iteration with its first gradient; return False for one that is not to be reduced."""
        step = self.iteration
        if self.paused or step.phase not in (Phase.EXPECTING, REDUCING):
            # FAILED, too: even if the module has been wrapped again, its gradients are still reported here.
            for feature in self.features:
                feature.on_local(self, parameter)
            return False
        if step.phase is Phase.EXPECTING:
            # Only now: a forward pass may be followed by no backward pass, and nothing must then have been launched.
            step.phase, step.divisor = REDUCING, self.process_group.size()
            for feature in self.features:
                feature.on_begin(self)
        return True

    def arrive(self, index: int) -> None:
        """Move a gradient that is ready into its bucket, and launch what is complete."""
        bucket, place = self.layout.places[index]
        divisor = None if self.hook else self.iteration.divisor  # a hook divides by itself
        if bucket.eager[place]:  # long, and in cache
            bucket.gather((place,), divisor)
        bucket.pending -= 1
        if bucket.pending == 0:
            bucket.gather(bucket.batched, divisor)
            self.launch_complete_buckets()

    def launch_complete_buckets(self) -> None:
        """Launch, in order, every bucket that is complete and whose predecessors were launched."""
        in_flight = self.iteration.in_flight
        for bucket in self.layout.buckets[len(in_flight) :]:
            if bucket.pending:
                return  # a later bucket may be complete, but on another rank this one may come before it
            is_left_out = any(feature.leaves_out(bucket) for feature in self.features)
            in_flight.append(None if is_left_out else self.launch(bucket, bucket.flat))
        for feature in self.features:
            feature.on_all_launched(self)
        self.queue(self.finish)  # autograd may still compute: gradients of inputs, or of another module

    def launch(self, bucket: Bucket, memory: Tensor) -> Pending:
        """Start to reduce ``memory``, which represents ``bucket``, with the hook or an all-reduce."""
        window = GradBucket(bucket.index, bucket is self.layout.buckets[-1], memory, bucket.members, bucket.names)
        with self.failing(self.iteration.in_flight):
            if self.hook is not None:
                return self.hook.start(window, self.process_group)
            return Pending(bucket.launch(self.process_group, memory), window, "all-reduce")

    @_disable_dynamo  # a compiled training step, with its backward pass, would trace the reducer
    @torch.no_grad()
    def finish(self) -> None:
        """Wait for every bucket in order, at the end of the backward pass, and give parameters their means."""
        for feature in self.features:  # first: their collectives follow the buckets' on every rank
            feature.at_end(self)
        step = self.iteration
        # Cleared before waiting: if a wait raised, the reducer would keep what hooks returned forever.
        in_flight, step.in_flight = step.in_flight, []
        if self.layout.learns_order:
            self.layout.order = step.order
        step.phase = Phase.REDUCED  # before waiting, too: a hook of the user's may run while this thread waits
        with self.failing(in_flight):
            for bucket, pending in zip(self.layout.buckets, in_flight, strict=True):
                if pending is not None:
                    mean = pending.result()
                    bucket.scatter(mean, {index for feature in self.features for index in feature.untouched(bucket)})
                    for feature in self.features:
                        feature.on_mean(bucket)
            for feature in self.features:
                feature.finished(self, in_flight)
