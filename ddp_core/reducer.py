"""The reducer: gradients become ready in any order, and buckets are reduced in one order.

Every parameter's AccumulateGrad node calls ``Reducer.gradient_ready`` once its gradient is in ``p.grad``. When all of a
bucket's gradients have arrived and every earlier bucket has been launched, the bucket is launched: passed to the
communication hook, or all-reduced. Gradients become ready at different times and in different orders on each rank, but
buckets are launched in the same order, so that their collectives pair up. When the last bucket is launched, a callback
at the end of the backward pass waits for all of them and gives every parameter its mean.

One iteration is: ``before_forward``, ``after_forward``, ``gradient_ready`` (once per parameter), ``_finish``. Its
progress is its ``Phase``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Parameter

from ddp_core import errors, stepping
from ddp_core.bucket import Bucket, GradBucket
from ddp_core.collectives import all_reduce, finish, number_of_ranks
from ddp_core.delayed import DelayedGradients
from ddp_core.graph import at_end_of_backward, at_entry_through, outside_transforms
from ddp_core.guard import WrapperGuard
from ddp_core.hooks import CommHook, Pending
from ddp_core.layout import Layout
from ddp_core.listening import Listener
from ddp_core.phase import Phase, Progress
from ddp_core.settings import ReducerSettings
from ddp_core.sparse import group_for_sparse_sums
from ddp_core.unused import UnusedParameters, Usage
from ddp_core.watch import watch

__all__ = ["Reducer", "Usage"]

REDUCING = Phase.REDUCING  # checked for every gradient, and ten times faster to look up than an enum's member (3.11)


class Reducer:
    """A counter of gradients that launches buckets in order and writes the means back; see the module's docstring."""

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Parameter]],
        sparse: set[int],
        process_group: dist.ProcessGroup,
        settings: ReducerSettings,
        delayed: DelayedGradients,
    ):
        self.settings = settings
        self.layout = Layout(named_parameters, sparse, settings)
        self.delayed = delayed
        self.process_group = process_group
        self.group_for_sparse = process_group
        if sparse:
            self.group_for_sparse = group_for_sparse_sums(process_group, self.layout.parameters[0].device)
        self.hook: CommHook | None = None
        self.paused = False  # no_sync: gradients accumulate and nothing is counted
        self.ends_by_hand = False  # the program calls end_reduction, not the end of the backward pass
        self.promised = False  # joined ranks were told that the coming backward pass synchronises
        self.join_work: dist.Work | None = None  # counts the ranks that still train, if those are to divide
        self.buffer_futures: list[torch.futures.Future[Any]] = []
        self.steps_in_backward = False  # whether an optimiser steps as soon as there is a mean
        self.guard: WrapperGuard | None = None  # is told which gradients are not averaged, and when all are
        self.progress = Progress()
        self.listener = Listener(self)
        accumulators = self.listener.listen(Reducer.gradient_ready, self.layout.parameters)
        self.listener.listen(Reducer.delayed_ready, [parameter for _, parameter in delayed.named])
        if delayed.trigger is not None:
            self.listener.listen(Reducer.trigger_ready, [delayed.trigger])  # last: its gradient is counted by then
        # without buckets, all gradients are delayed, and none is searched for
        searches = settings.find_unused_parameters and bool(self.layout.parameters)
        self.unused = UnusedParameters(self.layout.parameters, accumulators, searches)
        self.reset()
        watch(self)

    def all_parameters(self) -> list[Parameter]:
        """Return the parameters whose gradients are averaged, in buckets or delayed."""
        return self.layout.parameters + [parameter for _, parameter in self.delayed.named]

    def release_group(self) -> None:
        """Drop the process group and everything that may hold it, since the process is ending."""
        self.hook = self.join_work = None
        vars(self).pop("process_group", None)

    def reset(self) -> None:
        """Forget everything seen so far; buckets will be rebuilt in the order of the next backward pass."""
        self.iteration = 0  # synchronised forward passes begun
        self.buckets_reduced = 0  # in the latest iteration
        self.entered = -1  # the latest backward pass that came through the module's outputs, if they are observed
        self.warned_late = False
        self.progress.reset()
        self.layout.reset()
        self.unused.reset()
        self._forget_iteration()

    def _forget_iteration(self) -> None:
        self.in_flight: list[Pending | None] = []  # of the buckets launched, in order; None: not used at all
        self.usage: Usage | None = None
        self.delayed.reset()

    @property
    def unfinished(self) -> bool:
        """True if a reduction was begun that has not ended, or never will."""
        return self.progress.reducing or self.progress.phase is Phase.FAILED

    @property
    def graph_is_static(self) -> bool:
        """True as long as every search found the same unused parameters."""
        return self.unused.constant

    def require_finished(self) -> None:
        """Raise RuntimeError, naming the missing parameters, if a reduction was begun and not finished."""
        progress, unused = self.progress, self.unused
        if progress.phase is Phase.FAILED:
            raise progress.noted(errors.interrupted(progress.failure))
        if self.ends_by_hand and progress.reducing and len(self.in_flight) == len(self.layout.buckets):
            raise progress.noted(
                RuntimeError("gradients are not averaged yet: call finalize_backward after each backward pass")
            )
        if progress.phase is Phase.LEARNING:
            raise progress.noted(errors.unseen_outputs())
        if progress.phase is Phase.REDUCING:
            missing = [index for index, left in enumerate(self.remaining) if left > 0]
            rank, names = self.process_group.rank(), self.layout.names
            raise progress.noted(errors.unfinished(missing, names, rank, unused.searches, unused.static))

    def require_same_parameters(self) -> None:
        """Raise RuntimeError if a parameter no longer reports here because a conversion gave it another graph node."""
        self.listener.require_nodes(zip(self.layout.names, self.layout.parameters, strict=True))
        self.listener.require_nodes(self.delayed.named)

    def set_hook(self, hook: CommHook | None) -> None:
        """Reduce with ``hook`` from now on; None: with an all-reduce. Raises RuntimeError in a backward pass."""
        if self.progress.reducing:
            raise errors.amid_reduction("a communication hook cannot be registered, replaced or removed")
        self.hook = hook

    @property
    def wants_order(self) -> bool:
        """True until the order of readiness has been learned (never if unused parameters are searched for)."""
        return not self.layout.rebuilt and not self.unused.searches

    # ---------------------------------------------------------------- forward

    def before_forward(self) -> None:
        """Begin an iteration. Raises RuntimeError if the reduction of the previous one did not finish."""
        self.require_finished()
        if self.iteration == 0:
            with outside_transforms():
                self.require_same_parameters()
            self.steps_in_backward = stepping.take_over(self.all_parameters())
        self.iteration += 1

    def leave_iteration(self) -> None:
        """End the latest iteration; after the first one, lay buckets out in its order of readiness."""
        self.require_finished()
        if self.progress.phase is Phase.REDUCED:
            self.progress.enter(Phase.IDLE)
        if self.wants_order and self.layout.ready_order:
            with outside_transforms():
                self.layout.rebuild_in_order(self.process_group)

    def after_forward(self, outputs: Iterable[Tensor]) -> None:
        """Prepare for the backward pass of a module whose outputs hold ``outputs``."""
        self.progress.enter(Phase.EXPECTING)
        self._forget_iteration()  # an iteration that was expected but had no backward pass
        self.order: list[int] = []  # the order in which parameters became ready
        self.remaining = list(self.unused.firings) if self.unused.static else [1] * len(self.layout.parameters)
        for bucket in self.layout.buckets:
            bucket.reset()
        if self.unused.searches:
            self.unused.search(outputs, first=self.iteration <= 1)
        elif self.unused.learning:
            at_entry_through(outputs, self.entered_through_outputs)

    # ---------------------------------------------------------------- backward

    def gradient_ready(self, index: int) -> None:
        """Count one firing of the AccumulateGrad node of parameter ``index``."""
        unused = self.unused
        if unused.tracked and unused.parameters[index].grad is not None:
            unused.used[index] = 1  # also under no_sync: what was used there is reduced later
        if self.paused or self.progress.phase is not REDUCING:
            if self._belongs_to_reduced_iteration(index):
                raise self.progress.noted(errors.loss_in_parts(index, self.layout.names[index]))
            if not self._takes_part(self.layout.names[index]):
                self._tell_guard(self.layout.parameters[index])
                return
            if unused.learning:
                unused.firings[index] += 1
                return
        left = self.remaining[index] = self.remaining[index] - 1
        if left == 0:
            self.order.append(index)
            self._arrive(*self.layout.locations[index])
        elif left < 0:
            complaint = errors.static_graph_changed if unused.static else errors.marked_twice
            raise self.progress.noted(complaint(index, self.layout.names[index]))

    def entered_through_outputs(self) -> None:
        """Note that the current backward pass comes through the module's outputs, where these are observed."""
        self.entered = torch._C._current_graph_task_id()
        if self.unused.learning:
            at_end_of_backward(self.reduce_all_at_once)

    def _belongs_to_reduced_iteration(self, index: int) -> bool:
        """Return True for the first gradient of a parameter that should have been reduced, and was passed over."""
        late = self.progress.phase is Phase.REDUCED and not self.paused
        return late and index in self.unused.passed_over and self.entered == torch._C._current_graph_task_id()

    def _takes_part(self, name: str) -> bool:
        """Return True if this gradient must be reduced; if it is the iteration's first one, begin."""
        phase = self.progress.phase
        if phase is Phase.EXPECTING and not self.paused:
            self._begin()
        if self.progress.reducing and not self.paused:
            return True
        if self.promised and (phase is Phase.EXPECTING or self.progress.reducing):
            raise self.progress.noted(errors.broken_promise())
        if phase is Phase.REDUCED and not self.paused and not self.warned_late:
            self.warned_late = True
            warnings.warn(errors.late(name), stacklevel=2)
        return False  # in FAILED too: even if the module has been wrapped again, its gradients are still reported here

    def _tell_guard(self, parameter: Parameter) -> None:
        if self.guard is not None and parameter.grad is not None:
            self.guard.log.append(parameter)

    def _begin(self) -> None:
        self.progress.enter(Phase.LEARNING if self.unused.learning else Phase.REDUCING)
        self.divisor = number_of_ranks(self.process_group, self.join_work)
        if self.unused.learning:
            return
        # Unused ones arrive only now, not in the forward pass: a launch needs a backward pass to end in.
        for index in self.unused.here:
            self.remaining[index] = 0
            self._arrive(*self.layout.locations[index])
        if not self.layout.buckets:  # all are delayed: nothing else would request the end of the backward pass
            self._launch_complete_buckets()

    def _arrive(self, bucket: Bucket, place: int) -> None:
        if bucket.eager[place]:
            self._gather(bucket, (place,))
        bucket.pending -= 1
        if bucket.pending == 0:
            self._gather(bucket, bucket.batched)
            self._launch_complete_buckets()

    def _gather(self, bucket: Bucket, places: Sequence[int]) -> None:
        if not bucket.views:
            bucket.allocate()
        if self.layout.iterations_to_check:
            self.layout.check_strides(bucket, places)
        bucket.gather(places, None if self.hook else self.divisor, self.settings.gradient_as_bucket_view)

    def _launch_complete_buckets(self) -> None:
        """Launch, in order, every bucket that is complete and whose predecessors were launched."""
        for bucket in self.layout.buckets[len(self.in_flight) :]:
            if bucket.pending:
                return
            skip = self.settings.skip_all_reduce_unused_params and set(bucket.indices) <= set(self.unused.here)
            self.in_flight.append(None if skip else self.launch(bucket, bucket.flat))
        # After the last bucket, as on joined ranks (joining.py): collectives pair up in the order of their launch.
        if self.unused.searches:
            self.usage = self.count_usage(self.unused.used)
        self._launch_delayed_if_due()
        if not self.ends_by_hand:
            at_end_of_backward(self._finish)

    def launch(self, bucket: Bucket, memory: Tensor) -> Pending:
        """Start to reduce ``memory``, which represents ``bucket``, with the hook or an all-reduce."""
        window = GradBucket(bucket.index, bucket is self.layout.buckets[-1], memory, bucket.members, bucket.names)
        with self.progress.fatal(self.in_flight):
            if self.hook is not None:
                return self.hook.start(window, self.process_group)
            group = self.group_for_sparse if memory.is_sparse else self.process_group
            return Pending(all_reduce(group, memory), window, "all-reduce")

    def count_usage(self, used: Sequence[int]) -> Usage:
        """Start to count, for every parameter, the ranks that used it."""
        return Usage(used, self.process_group, self.layout.parameters[0].device)

    # ---------------------------------------------------------------- delayed gradients

    def delayed_ready(self, index: int) -> None:
        """Record the gradient of a delayed parameter."""
        name, parameter = self.delayed.named[index]
        if not self._takes_part(name):
            self._tell_guard(parameter)
            return
        if self.delayed.in_flight:
            raise self.progress.noted(errors.marked_twice(index, name))
        self.delayed.missing.discard(index)
        self._launch_delayed_if_due()

    def trigger_ready(self, _: int) -> None:
        """Launch the delayed gradients once all of them have arrived and every bucket has been launched."""
        if not self.paused:
            self.delayed.triggered = True
            self._launch_delayed_if_due()

    def _launch_delayed_if_due(self) -> None:
        early = self.hook is None and not self.unused.static  # in a static graph, another gradient may come
        if early and len(self.in_flight) == len(self.layout.buckets) and self.delayed.complete:
            self._launch_delayed()

    def _launch_delayed(self) -> None:
        self.delayed.gather(self.divisor)
        memories = [bucket.flat for bucket in self.delayed.buckets]
        with self.progress.fatal(self.in_flight):
            self.delayed.in_flight = self.delayed.launch(self.process_group, memories)

    def await_hook(self, in_flight: Sequence[Pending | None]) -> None:
        """Wait for a hook's results if gradients are delayed."""
        # Callbacks of its futures may issue their own collectives at any time, as those of PyTorch's PowerSGD do; the
        # delayed all-reduce would come between them, at a different point on every rank.
        if self.hook is not None and self.delayed.buckets:
            with self.progress.fatal(in_flight):
                for pending in filter(None, in_flight):
                    pending.result()

    # ---------------------------------------------------------------- the end of the backward pass

    @torch.no_grad()
    def reduce_all_at_once(self) -> None:
        """End the first iteration of a static graph: reduce everything, as the used parameters are known only now."""
        if self.paused or self.progress.phase is not Phase.LEARNING or self.in_flight:
            return  # already reduced; or no_sync, or an autograd.grad, which ends in no parameter
        self.unused.learn()
        self.usage = self.count_usage(self.unused.used)
        for bucket in self.layout.buckets:
            self._gather(bucket, range(len(bucket.members)))
            self.in_flight.append(self.launch(bucket, bucket.flat))
        if not self.ends_by_hand:
            self._finish()

    def set_ends_by_hand(self, by_hand: bool) -> None:
        """Let the program end reductions with ``end_reduction``, or each backward pass its own."""
        if self.progress.reducing:
            raise errors.amid_reduction("require_manual_backward_finalization cannot be set")
        if by_hand and self.delayed.named:
            raise NotImplementedError(
                "require_manual_backward_finalization: gradients of delay_all_reduce_named_params are reduced at the "
                "end of the backward pass; wrap the module without it."
            )
        self.ends_by_hand = by_hand

    def end_reduction(self) -> None:
        """Do what the end of a backward pass does if ``ends_by_hand``; raise RuntimeError if it has nothing to end."""
        if not self.ends_by_hand:
            raise self.progress.noted(
                RuntimeError(
                    "finalize_backward: set ddp.require_manual_backward_finalization = True before the forward pass"
                )
            )
        if not self.progress.reducing or len(self.in_flight) < len(self.layout.buckets):
            if self.progress.reducing and torch._C._current_graph_task_id() != -1:
                raise self.progress.noted(
                    RuntimeError(
                        "finalize_backward: called within the backward pass, before all gradients were there; the last "
                        "parameter's register_post_accumulate_grad_hook is too early: call it after the pass"
                    )
                )
            self.require_finished()  # raises, with the names of missing gradients, if a reduction was begun
            raise self.progress.noted(
                RuntimeError(
                    "finalize_backward: no reduction to end; call it once after each backward pass that synchronises"
                )
            )
        self._finish()

    @_disable_dynamo  # as in listening._on_node
    @torch.no_grad()
    def _finish(self) -> None:
        """Wait for every bucket in order, at the end of the backward pass, and give parameters their means."""
        if not self.delayed.in_flight:
            self.await_hook(self.in_flight)
            self._launch_delayed()
        # Cleared before waiting: if a wait raised, the reducer would keep what hooks returned forever.
        in_flight, delayed, usage = self.in_flight, self.delayed.in_flight, self.usage
        self._forget_iteration()
        self.buckets_reduced = len(in_flight) - in_flight.count(None)
        self.layout.iterations_to_check = max(0, self.layout.iterations_to_check - 1)
        if self.wants_order and not self.unused.learning:
            self.layout.ready_order = self.order + (self.unused.here if self.unused.static else [])
        self.progress.enter(Phase.REDUCED)
        if self.guard is not None:
            self.guard.finished = torch._C._current_graph_task_id()  # optimisers may step as soon as there is a mean
        with self.progress.fatal(in_flight):
            self._write_means(in_flight, delayed, usage)
        if self.guard is not None:
            self.guard.averaged(self._skipped(in_flight) if None in in_flight else ())
        self.unused.end_iteration()

    def _skipped(self, in_flight: Sequence[Pending | None]) -> list[Parameter]:
        buckets = zip(self.layout.buckets, in_flight, strict=True)
        return [parameter for bucket, pending in buckets if pending is None for parameter in bucket.members]

    def _write_means(
        self, in_flight: Sequence[Pending | None], delayed: Sequence[Pending], usage: Usage | None
    ) -> None:
        for bucket, pending in zip(self.layout.buckets, in_flight, strict=True):
            if pending is not None:
                mean = pending.result()
                untouched = self.unused.untouched(bucket.indices, usage)
                bucket.scatter(mean, untouched, self.settings.gradient_as_bucket_view)
                if self.steps_in_backward:
                    stepping.step(bucket.members)
            if bucket.lazy:
                bucket.release()
        for bucket, pending in zip(self.delayed.buckets, delayed, strict=True):
            bucket.scatter(pending.result(), set(), as_views=True)
            if self.steps_in_backward:
                stepping.step(bucket.members)
        for future in self.buffer_futures:
            future.wait()
        self.buffer_futures = []
        if usage is not None:
            finish(usage.work)
