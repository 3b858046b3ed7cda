"""From gradients becoming ready, in any order, to buckets reduced in one order.

Every parameter's AccumulateGrad node calls :meth:`Reducer.gradient_ready` once its gradient is in ``p.grad``. When
all of a bucket's gradients are there and every bucket before it has been launched, the bucket is launched: handed to
the communication hook, or all-reduced. Ranks become ready at different times and in different orders; they launch in
the same order, which is what lets their collectives pair up. When the last bucket is launched, a callback at the end
of the backward pass waits for all of them and gives every parameter its mean.

One iteration is: ``before_forward``, ``after_forward``, ``gradient_ready`` (once per parameter), ``_finish``.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from ddp_core.bucket import Bucket, GradBucket, SparseBucket
from ddp_core.bucketing import (
    BucketLimits,
    BucketPlan,
    ParameterSpec,
    assign_buckets,
    plan_from_numbers,
    plan_to_numbers,
)
from ddp_core.errors import marked_twice, static_graph_changed, unfinished
from ddp_core.graph import at_end_of_backward, unreachable
from ddp_core.hooks import CommHook, Pending
from ddp_core.step_guard import watch


@dataclass(frozen=True, kw_only=True)
class ReducerSettings:
    """How a reducer works; see the arguments of the same names of ``DistributedDataParallel``."""

    limits: BucketLimits
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    skip_all_reduce_unused_params: bool


class Reducer:
    """Counts gradients, launches buckets in order, writes the means back. See the module's text."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        names: Sequence[str],
        sparse: Sequence[bool],
        process_group: dist.ProcessGroup,
        settings: ReducerSettings,
    ):
        self.parameters = list(parameters)
        self.names = list(names)
        self.settings = settings
        self.process_group = process_group
        self.hook: CommHook | None = None
        self.static_graph = False
        self.searches_graph = settings.find_unused_parameters  # after every forward pass, for unused parameters
        self.learns_graph = False  # a static graph's first iteration: firings are counted, all is reduced at the end
        self.paused = False  # no_sync: gradients accumulate and nothing is counted
        self.join_divisor: tuple[dist.Work, Tensor] | None = None
        self.buffer_futures: list[torch.futures.Future[Any]] = []
        self.last_error: str | None = None
        self.specs = [ParameterSpec.of(p, s) for p, s in zip(parameters, sparse, strict=True)]
        # gradients become ready roughly from the last parameter to the first, so the last buckets go first
        self._build_buckets(assign_buckets(self.specs, settings.limits.initial)[::-1])
        self._attach()
        self.reset()
        watch(self)

    # ---------------------------------------------------------------- construction

    def _attach(self) -> None:
        # Two models' backward passes on several devices run in several threads.
        self._lock = threading.RLock()
        # A node's own hook also fires when its gradient is undefined; a tensor's post-accumulate hook does not
        # (tests/ddp_core/test_reducer.py::test_an_output_left_out_of_the_loss). The nodes are ours to keep alive.
        with torch.enable_grad():
            self.accumulators = {get_gradient_edge(p).node: i for i, p in enumerate(self.parameters)}
        myself = weakref.ref(self)
        self._handles = [
            node.register_hook(functools.partial(_on_node, myself, index)) for node, index in self.accumulators.items()
        ]

    def detach(self) -> None:
        """Stop listening to the parameters, so that another wrapper can take the module over."""
        for handle in self._handles:
            handle.remove()

    def _build_buckets(self, plans: Sequence[BucketPlan]) -> None:
        self.plans = list(plans)
        self.buckets = []
        self.locations: list[tuple[Bucket, int]] = [None] * len(self.parameters)  # type: ignore[list-item]  # 'List item 0 has incompatible type "None"': all are set below
        for position, plan in enumerate(plans):
            kind = SparseBucket if self.specs[plan.indices[0]].sparse else Bucket
            members = [self.parameters[i] for i in plan.indices]
            bucket = kind(position, plan.indices, members, [self.names[i] for i in plan.indices])
            self.buckets.append(bucket)
            for place, index in enumerate(plan.indices):
                self.locations[index] = (bucket, place)

    def reset(self) -> None:
        """Forget everything seen so far; buckets will be rebuilt in the order of the next backward pass."""
        self.iteration = 0  # synchronised forward passes begun
        self.rebuilt = False
        self.graph_is_static = True  # the set of unused parameters never changed
        self.ready_order: list[int] = []  # of the iteration that decides the rebuilt buckets
        self.firings = [0] * len(self.parameters)  # static graph: how often each node fires in an iteration
        self.unused: list[int] = []
        self.globally_unused: set[int] = set()
        self.used = [0] * len(self.parameters)
        self.divisor: int | None = None
        self._layout_checks_left = 2
        self._end_iteration()

    def _end_iteration(self) -> None:
        self.expecting = False  # a forward pass has prepared for a backward pass that synchronises
        self.in_progress = False  # at least one gradient was counted, not all buckets were written back
        self.in_flight: list[Pending | None] = []
        self._usage: tuple[dist.Work, Tensor] | None = None

    # ---------------------------------------------------------------- forward

    def before_forward(self) -> None:
        """Begin an iteration. Raises RuntimeError if the reduction of the previous one did not finish."""
        self.require_finished()
        self.next_iteration()

    def next_iteration(self) -> None:
        """Count an iteration that this rank, or as seen by a rank that has joined, another one begins."""
        self.iteration += 1
        self.learns_graph = self.static_graph and self.iteration == 1

    def set_static_graph(self) -> None:
        """Learn the graph in the first iteration and rely on it in all others."""
        self.static_graph, self.searches_graph = True, False

    def noted(self, error: RuntimeError) -> RuntimeError:
        """Keep an error's text for the logging data, and return the error."""
        self.last_error = str(error)
        return error

    def require_finished(self) -> None:
        """Raise RuntimeError, naming the parameters still waited for, if a reduction was begun and not finished."""
        if self.in_progress:
            missing = [i for i, left in enumerate(self.remaining) if left > 0]
            rank = self.process_group.rank()
            raise self.noted(unfinished(missing, self.names, rank, self.settings, self.static_graph))

    def rebuild_if_due(self) -> bool:
        """Once, after the first backward pass: bucket again, in the order in which rank 0's gradients became ready.

        Returns True if buckets were rebuilt. Communicates: one broadcast of the plan.
        """
        self.require_finished()
        if not self.wants_order or not self.ready_order:
            return False
        order = [*self.ready_order, *sorted(set(range(len(self.parameters))) - set(self.ready_order))]
        plans = assign_buckets(self.specs, self.settings.limits.rebuilt, order)
        numbers = torch.tensor(plan_to_numbers(plans, len(self.parameters)), device=self.parameters[0].device)
        dist.broadcast(numbers, group=self.process_group, group_src=0)
        self._build_buckets(plan_from_numbers(numbers.tolist()))
        self.rebuilt = True
        return True

    @property
    def wants_order(self) -> bool:
        """True while the order of readiness is to be learned (never where unused parameters are searched for)."""
        return not self.rebuilt and (self.static_graph or not self.settings.find_unused_parameters)

    def after_forward(self, outputs: Iterable[Tensor]) -> None:
        """Prepare for the backward pass of a module whose outputs hold ``outputs``."""
        self.expecting = True
        self.in_flight = []
        self._order: list[int] = []
        self.remaining = list(self.firings) if self.static_graph else [1] * len(self.parameters)
        for bucket in self.buckets:
            bucket.reset()
        if self.searches_graph:
            unused = unreachable(outputs, self.accumulators)
            self.graph_is_static &= self.iteration <= 1 or unused == self.unused
            self.unused = unused

    # ---------------------------------------------------------------- backward

    def gradient_ready(self, index: int) -> None:
        """Count one firing of the AccumulateGrad node of parameter ``index``."""
        if (self.searches_graph or self.learns_graph) and self.parameters[index].grad is not None:
            self.used[index] = 1  # also under no_sync: what was used there is reduced later
        if self.paused or not self.expecting:
            return
        if self.learns_graph:
            self.firings[index] += 1
            return
        if not self.in_progress:
            self.in_progress = True
            for unused in self.unused:
                self.remaining[unused] = 0
                self._arrive(*self.locations[unused])
        left = self.remaining[index] = self.remaining[index] - 1
        if left:
            if left < 0:
                complain = static_graph_changed if self.static_graph else marked_twice
                raise self.noted(complain(index, self.names[index]))
            return
        self._order.append(index)
        self._arrive(*self.locations[index])

    def _arrive(self, bucket: Bucket, place: int) -> None:
        if bucket.eager[place]:
            self._gather(bucket, [place])
        bucket.pending -= 1
        if bucket.pending == 0:
            self._gather(bucket, bucket.batched)
            self._launch_complete_buckets()

    def _gather(self, bucket: Bucket, places: Sequence[int]) -> None:
        if self._layout_checks_left:
            self._check_layout(bucket, places)
        if self.divisor is None:
            self.divisor = self._choose_divisor()
        bucket.gather(places, None if self.hook else self.divisor, self.settings.gradient_as_bucket_view)

    def _choose_divisor(self) -> int:
        """Return the world size, or in ``join(divide_by_initial_world_size=False)`` the ranks that still train."""
        if self.join_divisor is None:
            return self.process_group.size()
        work, active = self.join_divisor
        work.wait()
        return int(active.item())

    def _check_layout(self, bucket: Bucket, places: Sequence[int]) -> None:
        for place in places:
            grad, view = bucket.members[place].grad, bucket.views[place]
            if grad is not None and not grad.is_sparse and grad.stride() != view.stride() and grad.numel() > 1:
                self._layout_checks_left = 0
                warnings.warn(
                    f"gradient strides {grad.stride()} of parameter {bucket.names[place]!r} do not match those of its "
                    f"bucket view, {view.stride()}: copies will be slow. Correct results are not affected.",
                    stacklevel=2,
                )
                return

    def _launch_complete_buckets(self) -> None:
        """Launch, in order, every bucket that is complete and whose predecessors were launched."""
        while len(self.in_flight) < len(self.buckets) and self.buckets[len(self.in_flight)].pending == 0:
            self.in_flight.append(self._launch(self.buckets[len(self.in_flight)]))
        if len(self.in_flight) == len(self.buckets):
            if self.searches_graph:
                self._usage = self.all_reduce_usage(self.used)
            at_end_of_backward(self._finish)

    def _launch(self, bucket: Bucket) -> Pending | None:
        if self.settings.skip_all_reduce_unused_params and set(bucket.indices) <= set(self.unused):
            return None
        return self.start(self.window(bucket, bucket.flat))

    def window(self, bucket: Bucket, memory: Tensor) -> GradBucket:
        """Return what a hook sees of ``bucket``, with ``memory`` as its buffer."""
        return GradBucket(bucket.index, bucket is self.buckets[-1], memory, bucket.members, bucket.names)

    def start(self, window: GradBucket) -> Pending:
        """Begin the reduction of one bucket: through the hook, or as an all-reduce of memory already divided."""
        if self.hook is not None:
            return self.hook.start(window)
        return Pending(dist.all_reduce(window.buffer(), group=self.process_group, async_op=True), window, "all-reduce")

    def all_reduce_usage(self, used: Sequence[int]) -> tuple[dist.Work, Tensor]:
        """Start to count, for every parameter, the ranks that used it."""
        counts = torch.tensor(used, dtype=torch.int32, device=self.parameters[0].device)
        work = dist.all_reduce(counts, group=self.process_group, async_op=True)
        assert work is not None, "all_reduce(async_op=True) returns its work on every member of the group"
        return work, counts

    @torch.no_grad()
    def reduce_all_at_once(self) -> None:
        """End the first iteration of a static graph: what fired is known only now, so all is reduced now."""
        if not self.expecting or self.paused or not self.learns_graph:
            return
        self.unused = [index for index, firings in enumerate(self.firings) if firings == 0]
        self._usage = self.all_reduce_usage(self.used)
        self.in_progress = True
        for bucket in self.buckets:
            self._gather(bucket, range(len(bucket.members)))
            self.in_flight.append(self.start(self.window(bucket, bucket.flat)))
        self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of the backward pass: wait for every bucket, in order, and give parameters their means."""
        in_flight, usage = self.in_flight, self._usage
        self._end_iteration()
        self.divisor = None
        if self.wants_order and not self.learns_graph:
            self.ready_order = self._order
        self._layout_checks_left = max(0, self._layout_checks_left - 1)
        for bucket, pending in zip(self.buckets, in_flight, strict=True):
            if pending is not None:
                mean = pending.result()
                # asked for only now, and only if someone needs it: waiting costs a round trip
                untouched = self._globally_unused(usage) if bucket.absent or self._locally_unused(bucket) else set()
                bucket.scatter(mean, untouched, self.settings.gradient_as_bucket_view)
        for future in self.buffer_futures:
            future.wait()
        self.buffer_futures = []
        if usage is not None:
            usage[0].wait()
        if self.searches_graph:
            self.used = [0] * len(self.parameters)

    def _locally_unused(self, bucket: Bucket) -> bool:
        return (self.searches_graph or self.static_graph) and not all(self.used[i] for i in bucket.indices)

    def _globally_unused(self, usage: tuple[dist.Work, Tensor] | None) -> set[int]:
        """Return the parameters that no rank used; their gradients stay as they were."""
        if usage is not None:
            usage[0].wait()
            self.used_counts = usage[1].tolist()
            self.globally_unused = {index for index, count in enumerate(self.used_counts) if count == 0}
        return self.globally_unused if self.settings.find_unused_parameters or self.static_graph else set()


def _on_node(reducer: weakref.ref[Reducer], index: int, _inputs: Any, _outputs: Any) -> None:
    """Tell the reducer, if it still lives: the hook itself must not keep it alive."""
    live = reducer()
    if live is None:
        return
    with live._lock:
        if torch.is_grad_enabled():  # create_graph=True: gradients have a history, which is not reduced
            with torch.no_grad():
                live.gradient_ready(index)
        else:
            live.gradient_ready(index)
