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
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ddp_core.bucket import Bucket, GradBucket
from ddp_core.collectives import all_reduce
from ddp_core.hooks import Pending


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


class DelayedGradients:
    """The memory of delayed gradients, one piece for each dtype and device, and their pending all-reduces."""

    def __init__(self, delay: Delay):
        self.named = [(name, parameter) for name, parameter in delay.named if parameter.requires_grad]
        self.trigger = delay.trigger if self.named else None
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, (_, parameter) in enumerate(self.named):
            kinds.setdefault((parameter.dtype, parameter.device), []).append(index)
        self.buckets = [self._bucket(number, indices) for number, indices in enumerate(kinds.values())]
        self.reset()

    def _bucket(self, number: int, indices: Sequence[int]) -> Bucket:
        return Bucket(number, indices, [self.named[i][1] for i in indices], [self.named[i][0] for i in indices])

    def reset(self) -> None:
        """Expect every gradient, including the trigger's, again."""
        self.triggered = False
        self.missing = set(range(len(self.named)))
        self.in_flight: list[Pending] = []

    @property
    def complete(self) -> bool:
        """True if all of them and the trigger's gradient are ready, and not launched yet."""
        return self.triggered and not self.missing and not self.in_flight

    def lend_memory(self) -> None:
        """Make the next backward pass accumulate in this memory, which is zeroed for gradients that are None."""
        for bucket in self.buckets:
            for member, view in zip(bucket.members, bucket.views, strict=True):
                if member.grad is None:
                    member.grad = view.zero_()

    def gather(self, divisor: int) -> None:
        """Move gradients that autograd has put elsewhere into this memory, and divide all of them."""
        for bucket in self.buckets:
            bucket.reset()
            for member in bucket.members:
                if member.grad is not None and member.grad.is_sparse:  # its memory was released by zero_grad()
                    member.grad = member.grad.to_dense()
            bucket.gather(range(len(bucket.members)), divisor, as_views=True)

    def launch(self, group: dist.ProcessGroup, memories: Sequence[Tensor]) -> list[Pending]:
        """Start to sum ``memories``, one for each bucket, over the ranks of ``group``; no hook sees them."""
        return [
            Pending(
                all_reduce(group, memory),
                GradBucket(bucket.index, bucket is self.buckets[-1], memory, bucket.members, bucket.names),
                "delayed all-reduce",
            )
            for bucket, memory in zip(self.buckets, memories, strict=True)
        ]
