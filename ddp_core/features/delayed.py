"""``delay_all_reduce_named_params``: gradients outside the buckets, averaged together by one all-reduce.

They accumulate in their own memory. The all-reduce starts once all of them and the gradient of one chosen parameter are
ready, and every bucket has been launched; at the latest, at the end of the backward pass. With a communication hook it
starts at the end of the backward pass, after the hook's futures are done, since their callbacks may issue collectives
too. So it is always the iteration's last collective, and all ranks issue collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ddp_core import errors
from ddp_core.buckets import Bucket
from ddp_core.feature import Feature
from ddp_core.features.bucket_memory import ViewBucket
from ddp_core.features.static_graph import StaticGraph
from ddp_core.hooks import GradBucket, Pending
from ddp_core.reducer import Reducer


class Delay(NamedTuple):
    """The delayed parameters, and the parameter whose gradient they wait for."""

    named: tuple[tuple[str, Parameter], ...] = ()
    trigger: Parameter | None = None


def choose_delay(module: nn.Module, named: Iterable[tuple[str, Parameter]] | None, trigger: Parameter | None) -> Delay:
    """Check the constructor's two arguments, and return them as one.

    Raises ValueError if only one of them is given, a name does not belong to its parameter in ``module``, or
    ``trigger`` gets no gradient.
    """
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time: which "
            "parameters are delayed, and the parameter whose gradient they wait for."
        )
    if named is None or trigger is None:
        return Delay()
    if not isinstance(trigger, Tensor) or not trigger.requires_grad:
        got = f"one of shape {tuple(trigger.shape)}" if isinstance(trigger, Tensor) else repr(trigger)
        raise ValueError(f"param_to_hook_all_reduce must be a parameter that requires a gradient (got {got})")
    known = dict(module.named_parameters(remove_duplicate=False))
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    delayed = {}
    for name, parameter in named:
        if known.get(name) is not parameter:
            raise ValueError(
                f"delay_all_reduce_named_params: {name!r} must come with the parameter of that name in the wrapped "
                "module; take pairs from module.named_parameters() before wrapping it"
            )
        delayed[first_names[id(parameter)]] = parameter  # a shared parameter is known by its first name
    return Delay(tuple(delayed.items()), trigger)


class DelayedGradients(Feature):
    """The memory of delayed gradients, one piece for each dtype and device, and their pending all-reduces."""

    def __init__(self, delay: Delay):
        self.named = [(name, parameter) for name, parameter in delay.named if parameter.requires_grad]
        self.trigger = delay.trigger
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, (_, parameter) in enumerate(self.named):
            kinds.setdefault((parameter.dtype, parameter.device), []).append(index)
        self.buckets = [self._bucket(number, indices) for number, indices in enumerate(kinds.values())]
        self.is_triggered = False
        self.missing = set(range(len(self.named)))
        self.in_flight: list[Pending] = []

    def _bucket(self, number: int, indices: Sequence[int]) -> Bucket:
        return ViewBucket(number, indices, [self.named[i][1] for i in indices], [self.named[i][0] for i in indices])

    def added(self, reducer: Reducer) -> None:
        """Expect every gradient, including the trigger's."""
        self.is_triggered, self.missing, self.in_flight = False, set(range(len(self.named))), []

    def listen(self, reducer: Reducer) -> None:
        """Hear of every gradient."""
        reducer.listener.listen(_delayed_ready, [parameter for _, parameter in self.named])
        if self.trigger is not None:
            reducer.listener.listen(_trigger_ready, [self.trigger])  # last: its gradient is counted by then

    def lend_memory(self) -> None:
        """Make the next backward pass accumulate in this memory, which is zeroed for gradients that are None."""
        for bucket in self.buckets:
            for member, view in zip(bucket.members, bucket.views, strict=True):
                if member.grad is None:
                    member.grad = view.zero_()

    def after_forward(self, reducer: Reducer, outputs: Iterable[Tensor]) -> None:
        """Expect every gradient, including the trigger's, again."""
        self.added(reducer)

    def on_begin(self, reducer: Reducer) -> None:
        """If all gradients are delayed, launch nothing, but request the end of the backward pass."""
        if not reducer.layout.buckets:
            reducer.launch_complete_buckets()

    def ready(self, reducer: Reducer, index: int) -> None:
        """Record the gradient of a delayed parameter."""
        name, parameter = self.named[index]
        if not reducer.admit(parameter):
            return
        if self.in_flight:
            raise reducer.noted(errors.marked_twice(index, name))
        self.missing.discard(index)
        self.on_all_launched(reducer)

    def on_all_launched(self, reducer: Reducer) -> None:
        """Launch, if all gradients and the trigger's have come, and every bucket has been launched."""
        # Not before the end with a hook, see below, nor in a static graph, where another gradient may come.
        early = reducer.hook is None and reducer.find(StaticGraph) is None
        launched = len(reducer.iteration.in_flight) == len(reducer.layout.buckets)
        if early and launched and self.is_triggered and not self.missing and not self.in_flight:
            self.launch_own(reducer)

    def at_end(self, reducer: Reducer) -> None:
        """Launch, at the latest."""
        if not self.in_flight:
            self.await_hook(reducer, reducer.iteration.in_flight)
            self.launch_own(reducer)

    def await_hook(self, reducer: Reducer, in_flight: Sequence[Pending | None]) -> None:
        """Wait for a hook's results.

        Callbacks of its futures may issue collectives of their own at any time, as those of PyTorch's PowerSGD do; the
        delayed all-reduce would come between them, at a different point on every rank.
        """
        if reducer.hook is not None:
            with reducer.failing(in_flight):
                for pending in filter(None, in_flight):
                    pending.result()

    def launch_own(self, reducer: Reducer) -> None:
        """Move gradients that autograd has put elsewhere into this memory, and sum them over the ranks."""
        for bucket in self.buckets:
            bucket.reset()
            for member in bucket.members:
                if member.grad is not None and member.grad.is_sparse:  # its memory was released by zero_grad()
                    member.grad = member.grad.to_dense()
            bucket.gather(range(len(bucket.members)), reducer.iteration.divisor)
        with reducer.failing(reducer.iteration.in_flight):
            self.in_flight = self.launch(reducer, [bucket.flat for bucket in self.buckets])

    def launch(self, reducer: Reducer, memories: Sequence[Tensor]) -> list[Pending]:
        """Start to sum ``memories``, one for each bucket, over the ranks; no hook sees them."""
        return [
            Pending(
                bucket.launch(reducer.process_group, memory),
                GradBucket(bucket.index, bucket is self.buckets[-1], memory, bucket.members, bucket.names),
                "delayed all-reduce",
            )
            for bucket, memory in zip(self.buckets, memories, strict=True)
        ]

    def finished(self, reducer: Reducer, in_flight: Sequence[Pending | None]) -> None:
        """Give the delayed parameters their means."""
        own = self.in_flight
        self.added(reducer)  # without buckets, a late gradient of the trigger would launch again
        for bucket, pending in zip(self.buckets, own, strict=True):
            bucket.scatter(pending.result())
            for feature in reducer.features:
                feature.on_mean(bucket)


def _delayed_ready(reducer: Reducer, index: int) -> None:
    delayed = reducer.find(DelayedGradients)
    assert delayed is not None, "it listens"
    delayed.ready(reducer, index)


def _trigger_ready(reducer: Reducer, _: int) -> None:
    delayed = reducer.find(DelayedGradients)
    if delayed is not None and not reducer.paused:
        delayed.is_triggered = True
        delayed.on_all_launched(reducer)
