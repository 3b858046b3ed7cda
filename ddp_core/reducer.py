"""From gradients becoming ready, in any order, to buckets reduced in one order.

Every parameter's AccumulateGrad node calls ``Reducer.gradient_ready`` once its gradient is in ``p.grad``. When
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter

from ddp_core.bucket import Bucket, GradBucket
from ddp_core.collectives import all_reduce, finish, result_of
from ddp_core.delayed import DelayedGradients
from ddp_core.errors import (
    broken_promise,
    converted,
    interrupted,
    late,
    marked_twice,
    static_graph_changed,
    unfinished,
    unseen_outputs,
)
from ddp_core.graph import at_end_of_backward, unreachable
from ddp_core.hooks import CommHook, Pending
from ddp_core.layout import Layout
from ddp_core.settings import ReducerSettings
from ddp_core.sparse import group_for_sparse_sums
from ddp_core.watch import give_up, watch


class Usage:
    """The ranks that used each parameter, being counted by an all-reduce."""

    def __init__(self, used: Sequence[int], group: dist.ProcessGroup, device: torch.device):
        counts = torch.tensor(used, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.counts = counts.to(device, non_blocking=True)  # in the backward pass, where the host is not to wait
        self.work = all_reduce(group, self.counts)

    def unused(self) -> set[int]:
        """Wait, and return the parameters that no rank used."""
        finish(self.work)
        return {index for index, count in enumerate(self.counts.tolist()) if count == 0}


class Reducer:
    """Counts gradients, launches buckets in order, writes the means back. See the module's text."""

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Parameter]],
        sparse: set[int],
        process_group: dist.ProcessGroup,
        settings: ReducerSettings,
        delayed: DelayedGradients,
    ):
        self.layout = Layout(named_parameters, sparse, settings)
        self.process_group = process_group
        self.group_for_sparse = process_group
        if sparse:
            self.group_for_sparse = group_for_sparse_sums(process_group, self.layout.parameters[0].device)
        self.settings = settings
        self.delayed = delayed
        self.hook: CommHook | None = None
        self.static_graph = False
        # after every forward pass, for unused parameters; not where all gradients are delayed
        self.searches_graph = settings.find_unused_parameters and bool(self.layout.parameters)
        self.paused = False  # no_sync: gradients accumulate and nothing is counted
        self.promised = False  # joined ranks were told that the coming backward pass synchronises
        self.join_work: dist.Work | None = None  # counts the ranks that still train, if these are to divide
        self.buffer_futures: list[torch.futures.Future[Any]] = []
        self.last_error: str | None = None
        self._attach()
        self.reset()
        watch(self)

    def _attach(self) -> None:
        self._lock = threading.RLock()  # a module on several devices has a backward thread for each
        # A node's own hook also fires when its gradient is undefined; a tensor's post-accumulate hook does not
        # (tests/ddp_core: an output left out of the loss). The nodes are ours to keep alive; we are not theirs.
        self.accumulators = {_node_of(parameter): index for index, parameter in enumerate(self.layout.parameters)}
        self._delayed_nodes = {_node_of(parameter): i for i, (_, parameter) in enumerate(self.delayed.named)}
        self._trigger_nodes = {_node_of(self.delayed.trigger): 0} if self.delayed.trigger is not None else {}
        myself = weakref.ref(self)
        self._handles = [
            node.register_hook(functools.partial(_on_node, myself, report, index))
            for report, nodes in (
                (Reducer.gradient_ready, self.accumulators),
                (Reducer.delayed_ready, self._delayed_nodes),
                (Reducer.trigger_ready, self._trigger_nodes),  # last: its gradient is counted by then
            )
            for node, index in nodes.items()
        ]

    def all_parameters(self) -> list[Parameter]:
        """Return the parameters whose gradients are averaged, in buckets or delayed."""
        return self.layout.parameters + [parameter for _, parameter in self.delayed.named]

    def release_group(self) -> None:
        """Let go of the process group, and of what may hold it: the process ends."""
        self.hook = self.join_work = None
        vars(self).pop("process_group", None)

    def detach(self) -> None:
        """Stop listening to the parameters, so that another wrapper can take the module over."""
        for handle in self._handles:
            handle.remove()

    def reset(self) -> None:
        """Forget everything seen so far; buckets will be rebuilt in the order of the next backward pass."""
        self.iteration = 0  # synchronised forward passes begun
        self.layout.reset()
        self.learned = False  # static graph: the first iteration is over
        self.graph_is_static = True  # the set of unused parameters never changed
        self.firings = [0] * len(self.layout.parameters)  # static graph: how often each node fires in an iteration
        self.used = [0] * len(self.layout.parameters)  # 1 for those that this rank used
        self.unused: list[int] = []  # those that count as ready without firing
        self.globally_unused: set[int] = set()
        self.buckets_reduced = 0  # in the latest iteration
        self.failure: str | None = None  # what cut a reduction short: it never ends
        self.reduced = False  # this iteration's gradients are means now: one that comes later is late
        self._warned_late = False
        self._end_iteration()

    def _end_iteration(self) -> None:
        self.expecting = False  # a forward pass has prepared for a backward pass that synchronises
        self.in_progress = False  # some gradient was counted, and not all buckets were waited for
        self.in_flight: list[Pending | None] = []
        self.usage: Usage | None = None
        self.delayed.reset()
        self._divisor: int | None = None

    # ---------------------------------------------------------------- forward

    def before_forward(self) -> None:
        """Begin an iteration. Raises RuntimeError if the reduction of the previous one did not finish."""
        self.require_finished()
        if self.iteration == 0:
            self.require_same_parameters()
            self._take_over_optimizers()
        self.iteration += 1

    def require_same_parameters(self) -> None:
        """Raise RuntimeError if a parameter no longer reports here: a conversion gave it another graph node."""
        for name, parameter in zip(self.layout.names, self.layout.parameters, strict=True):
            if parameter.requires_grad and _node_of(parameter) not in self.accumulators:
                raise converted(name)
        for name, parameter in self.delayed.named:
            if parameter.requires_grad and _node_of(parameter) not in self._delayed_nodes:
                raise converted(name)

    def require_finished(self) -> None:
        """Raise RuntimeError, naming the parameters still waited for, if a reduction was begun and not finished."""
        if self.failure is not None:
            raise self.noted(interrupted(self.failure))
        if self.in_progress and self.learns_graph:
            raise self.noted(unseen_outputs())
        if self.in_progress:
            missing = [index for index, left in enumerate(self.remaining) if left > 0]
            rank = self.process_group.rank()
            raise self.noted(unfinished(missing, self.layout.names, rank, self.searches_graph, self.static_graph))

    def noted(self, error: RuntimeError) -> RuntimeError:
        """Keep an error's text for the logging data, and return the error."""
        self.last_error = str(error)
        return error

    @property
    def wants_order(self) -> bool:
        """True while the order of readiness is to be learned (never where unused parameters are searched for)."""
        return not self.layout.rebuilt and not self.searches_graph

    def rebuild_if_due(self) -> None:
        """Once, after the first backward pass: bucket again, in the order in which rank 0's gradients became ready."""
        self.require_finished()
        if self.wants_order and self.layout.ready_order:
            self.layout.rebuild_in_order(self.process_group)

    def after_forward(self, outputs: Iterable[Tensor]) -> None:
        """Prepare for the backward pass of a module whose outputs hold ``outputs``."""
        self.expecting = True
        self.in_flight = []
        self.delayed.reset()
        self._order: list[int] = []
        self.remaining = list(self.firings) if self.static_graph else [1] * len(self.layout.parameters)
        for bucket in self.layout.buckets:
            bucket.reset()
        if self.searches_graph:
            with torch.autograd.profiler.record_function("search_unused_parameters"):
                unused = unreachable(outputs, self.accumulators)
            self.graph_is_static &= self.iteration <= 1 or unused == self.unused
            self.unused = unused

    # ---------------------------------------------------------------- backward

    @property
    def learns_graph(self) -> bool:
        """True in a static graph's first iteration: firings are counted, and all is reduced at the end."""
        return self.static_graph and not self.learned

    def gradient_ready(self, index: int) -> None:
        """Count one firing of the AccumulateGrad node of parameter ``index``."""
        if (self.searches_graph or self.static_graph) and self.layout.parameters[index].grad is not None:
            self.used[index] = 1  # also under no_sync: what was used there is reduced later
        if self.paused or not self.expecting:
            self._pass_over(self.layout.names[index])
            return
        if self.static_graph and not self.learned:
            self.firings[index] += 1
            self.in_progress = True
            return
        if not self.in_progress:
            self.in_progress = True
            self._begin()
        left = self.remaining[index] = self.remaining[index] - 1
        if left == 0:
            self._order.append(index)
            self._arrive(*self.layout.locations[index])
        elif left < 0:
            complaint = static_graph_changed if self.static_graph else marked_twice
            raise self.noted(complaint(index, self.layout.names[index]))

    def _begin(self) -> None:
        """Count what will not fire: the first gradient of the iteration has come."""
        if self.learns_graph:
            return
        for unused in self.unused:
            self.remaining[unused] = 0
            self._arrive(*self.layout.locations[unused])
        if not self.layout.buckets:
            # all gradients are delayed: nothing else would ask for the end of the backward pass
            self._launch_complete_buckets()

    def delayed_ready(self, index: int) -> None:
        """Take note of the gradient of a delayed parameter."""
        name = self.delayed.named[index][0]
        if self.paused or not self.expecting:
            self._pass_over(name)
            return
        if self.delayed.in_flight:
            raise self.noted(marked_twice(index, name))
        if not self.in_progress:
            self.in_progress = True
            self._begin()
        self.delayed.missing.discard(index)
        self._launch_delayed_if_due()

    def trigger_ready(self, _: int) -> None:
        """Let the delayed gradients go as soon as all of them are there and every bucket is on its way."""
        if self.expecting and not self.paused:
            self.delayed.triggered = True
            self._launch_delayed_if_due()

    def _launch_delayed_if_due(self) -> None:
        early = self.hook is None and not self.static_graph  # with the latter, another gradient may come
        if early and len(self.in_flight) == len(self.layout.buckets) and self.delayed.complete:
            self._launch_delayed()

    def await_hook(self, in_flight: Sequence[Pending | None]) -> None:
        """Wait for what a hook returned, if gradients are delayed.

        Callbacks of its futures may issue collectives of their own, at any time, as those of PyTorch's PowerSGD do; the
        delayed all-reduce would get between them, elsewhere on every rank.
        """
        if self.hook is not None and self.delayed.buckets:
            with self.fatal(in_flight):
                for pending in in_flight:
                    if pending is not None:
                        pending.result()

    def _launch_delayed(self) -> None:
        if self._divisor is None:
            self._divisor = self._choose_divisor()
        self.delayed.gather(self._divisor)
        memories = [bucket.flat for bucket in self.delayed.buckets]
        with self.fatal(self.in_flight):
            self.delayed.in_flight = self.delayed.launch(self.process_group, memories)

    def _pass_over(self, name: str) -> None:
        if self.expecting and self.promised:
            raise self.noted(broken_promise())
        if self.reduced and not self.expecting:
            self.reduced, self._warned_late = False, True
            warnings.warn(late(name), stacklevel=2)

    def _arrive(self, bucket: Bucket, place: int) -> None:
        if bucket.eager[place]:
            self._gather(bucket, (place,))
        bucket.pending -= 1
        if bucket.pending == 0:
            self._gather(bucket, bucket.batched)
            self._launch_complete_buckets()

    def _gather(self, bucket: Bucket, places: Sequence[int]) -> None:
        if self.layout.iterations_to_check:
            self.layout.check_strides(bucket, places)
        if self._divisor is None:
            self._divisor = self._choose_divisor()
        bucket.gather(places, None if self.hook else self._divisor, self.settings.gradient_as_bucket_view)

    def _choose_divisor(self) -> int:
        if self.join_work is None:
            return self.process_group.size()
        ranks = result_of(self.join_work)
        return int((self.join_work.result() if ranks is None else ranks)[0].item())

    def _launch_complete_buckets(self) -> None:
        """Launch, in order, every bucket that is complete and whose predecessors were launched."""
        for bucket in self.layout.buckets[len(self.in_flight) :]:
            if bucket.pending:
                return
            skip = self.settings.skip_all_reduce_unused_params and set(bucket.indices) <= set(self.unused)
            self.in_flight.append(None if skip else self.launch(bucket, bucket.flat))
        if self.searches_graph:
            self.usage = self.count_usage(self.used)
        self._launch_delayed_if_due()
        at_end_of_backward(self._finish)

    def launch(self, bucket: Bucket, memory: Tensor) -> Pending:
        """Begin the reduction of ``memory``, which stands for ``bucket``: through the hook, or by an all-reduce."""
        window = GradBucket(bucket.index, bucket is self.layout.buckets[-1], memory, bucket.members, bucket.names)
        with self.fatal(self.in_flight):
            if self.hook is not None:
                return self.hook.start(window, self.process_group)
            group = self.group_for_sparse if memory.is_sparse else self.process_group
            return Pending(all_reduce(group, memory), window, "all-reduce")

    @contextmanager
    def fatal(self, in_flight: Iterable[Pending | None]) -> Iterator[None]:
        """Let no later step run if what is done within raises: some gradients are means then, and some are not."""
        try:
            yield
        except BaseException as error:
            give_up(pending.future() for pending in in_flight if pending is not None and pending.group is not None)
            self.in_progress = True
            self.failure = f"{type(error).__name__}: {error}"  # the error itself holds frames, and these hold us
            raise

    def count_usage(self, used: Sequence[int]) -> Usage:
        """Start to count, for every parameter, the ranks that used it."""
        return Usage(used, self.process_group, self.layout.parameters[0].device)

    @torch.no_grad()
    def reduce_all_at_once(self) -> None:
        """End the first iteration of a static graph: what fires is known only now, so all is reduced now."""
        if not self.expecting or self.paused or not self.learns_graph or not self.in_progress:
            return  # reduced already; or no_sync, or an autograd.grad, which ends in no parameter
        self.unused = [index for index, firings in enumerate(self.firings) if firings == 0]
        self.usage = self.count_usage(self.used)
        for bucket in self.layout.buckets:
            self._gather(bucket, range(len(bucket.members)))
            self.in_flight.append(self.launch(bucket, bucket.flat))
        self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of the backward pass: wait for every bucket, in order, and give parameters their means."""
        if not self.delayed.in_flight:
            self.await_hook(self.in_flight)
            self._launch_delayed()
        in_flight, delayed, usage = self.in_flight, self.delayed.in_flight, self.usage
        self.buckets_reduced = len(in_flight) - in_flight.count(None)
        self._end_iteration()
        self.reduced = not self._warned_late
        self.layout.iterations_to_check = max(0, self.layout.iterations_to_check - 1)
        if self.learns_graph:
            self.learned = True
        elif self.wants_order:
            self.layout.ready_order = self._order + (self.unused if self.static_graph else [])
        with self.fatal(in_flight):
            self._write_means(in_flight, delayed, usage)
        if self.searches_graph:
            self.used = [0] * len(self.layout.parameters)

    def _write_means(
        self, in_flight: Sequence[Pending | None], delayed: Sequence[Pending], usage: Usage | None
    ) -> None:
        for bucket, pending in zip(self.layout.buckets, in_flight, strict=True):
            if pending is not None:
                mean = pending.result()
                bucket.scatter(mean, self._untouched(bucket, usage), self.settings.gradient_as_bucket_view)
                self._step_in_backward(bucket)
        for bucket, pending in zip(self.delayed.buckets, delayed, strict=True):
            bucket.scatter(pending.result(), set(), as_views=True)
            self._step_in_backward(bucket)
        for future in self.buffer_futures:
            future.wait()
        self.buffer_futures = []
        if usage is not None:
            finish(usage.work)

    def _untouched(self, bucket: Bucket, usage: Usage | None) -> set[int]:
        """Return what no rank used, and so keeps its gradient; asked only if needed, as it costs a round trip."""
        if not (self.searches_graph or self.static_graph) or all(self.used[i] for i in bucket.indices):
            return set()
        if usage is not None:
            self.globally_unused = usage.unused()
        return self.globally_unused

    # ---------------------------------------------------------------- optimisers that step in the backward pass

    def _take_over_optimizers(self) -> None:
        """Let optimisers of ``_apply_optimizer_in_backward`` step on means: until now they step on local gradients."""
        parameters = self.all_parameters()
        self._steps = any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters)
        if self._steps:
            from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

            for parameter in parameters:
                for handle in param_to_optim_hook_handle_map.get(parameter, []):
                    handle.remove()

    def _step_in_backward(self, bucket: Bucket) -> None:
        for member in bucket.members if self._steps else []:
            for optimizer in getattr(member, "_in_backward_optimizers", []):
                optimizer.step()
                member.grad = None


@torch.enable_grad()
def _node_of(parameter: Parameter) -> Node:
    return get_gradient_edge(parameter).node


def _on_node(
    reducer: weakref.ref[Reducer], report: Callable[[Reducer, int], None], index: int, _inputs: Any, _outputs: Any
) -> None:
    """Report to the reducer, if it still lives: the hook itself must not keep it alive."""
    live = reducer()
    if live is None:
        return
    with live._lock:
        if torch.is_grad_enabled():  # create_graph=True: gradients have a history, which is not reduced
            with torch.no_grad():
                report(live, index)
        else:
            report(live, index)
