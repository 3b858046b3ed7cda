"""Kernel, first half: which gradients are reduced together, and the memory in which they are sent.

A *bucket* holds gradients of one dtype on one device, one after another in one flat tensor, which one collective
reduces (Li et al., PyTorch Distributed, VLDB 2020, section 3.2.3). A parameter's *index* is its position in the model,
and its *place* the one in its bucket. A *plan* lists the buckets in the order of their launch, each as a tuple of
indices.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Container, Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Parameter

from ddp_core.collectives import all_reduce, broadcast, finish

Plan = list[tuple[int, ...]]
MIB = 1024 * 1024
# A gradient at least this long is copied as soon as it is ready, while it is in cache; shorter ones wait until their
# bucket is full and are copied together, since for them a call costs more than it saves (measured on fp32, one core).
EAGER_ELEMENTS = 131072


class ParameterSpec(NamedTuple):
    """A parameter's properties that decide its bucket."""

    nbytes: int
    kind: Hashable  # only parameters of one kind (dtype and device) may share a bucket
    alone: bool = False  # it shares with none


class Limits(NamedTuple):
    """The sizes, in bytes, at which buckets close; the k-th of a kind at the k-th limit, further ones at the last."""

    first: tuple[int, ...] = (sys.maxsize,)  # one bucket, until the order in which gradients come is known
    rebuilt: tuple[int, ...] = (MIB, 25 * MIB)  # a small first one: communication starts early in the backward pass


def assign_buckets(specs: Sequence[ParameterSpec], limits: Sequence[int], order: Sequence[int] | None = None) -> Plan:
    """Pack parameters into buckets, taking them in ``order`` (default: the given order).

    Every kind fills its own bucket, which closes once it reaches its limit. Returns the buckets in the order in which
    they closed, followed by those that never filled; without an ``order``, sorted by their first parameter.
    """
    plan: Plan = []
    filling: dict[Hashable, list[int]] = {}  # the bucket of each kind that is not full
    closed: dict[Hashable, int] = {}  # how many buckets of each kind are
    nbytes: dict[Hashable, int] = {}
    for index in range(len(specs)) if order is None else order:
        spec = specs[index]
        if spec.alone:
            plan.append((index,))
            continue
        filling.setdefault(spec.kind, []).append(index)
        nbytes[spec.kind] = nbytes.get(spec.kind, 0) + spec.nbytes
        count = closed.get(spec.kind, 0)
        if nbytes[spec.kind] >= limits[min(count, len(limits) - 1)]:
            plan.append(tuple(filling.pop(spec.kind)))
            closed[spec.kind], nbytes[spec.kind] = count + 1, 0
    plan += [tuple(bucket) for bucket in filling.values()]  # by their first parameter
    return plan if order is not None else sorted(plan)


def strides_for(member: Tensor) -> tuple[int, ...]:
    """Return the strides of a parameter's gradient: its own, if it covers one range of memory, each element once."""
    expected = 1
    for stride, size in sorted(zip(member.stride(), member.shape, strict=True)):
        if size != 1 and stride != expected and member.numel():
            return torch.empty(member.shape, dtype=member.dtype, device="meta").stride()
        expected *= size
    return member.stride()


def views_of(flat: Tensor, members: Sequence[Tensor]) -> list[Tensor]:
    """Split a 1-D tensor into views with the shapes and, where possible, the strides of ``members``."""
    views, offset = [], flat.storage_offset()
    for member in members:
        views.append(flat.as_strided(member.shape, strides_for(member), offset))
        offset += member.numel()
    return views


class Bucket:
    """Some parameters' gradients in one flat tensor, and the number of gradients still to come."""

    def __init__(self, index: int, indices: Sequence[int], members: Sequence[Parameter], names: Sequence[str]):
        self.index, self.indices, self.members, self.names = index, indices, members, names
        self.eager = [member.numel() >= EAGER_ELEMENTS for member in members]
        self.batched = [place for place, eager in enumerate(self.eager) if not eager]
        self.flat, self.views = members[0].new_empty(0), list[Tensor]()
        self.pending = len(members)
        self.absent: list[int] = []  # places without a gradient this time: zeros are sent instead
        self.allocate()

    def allocate(self) -> None:
        """Set memory aside for the gradients; no page of it is in use before the first of them are."""
        self.flat = self.members[0].new_empty(sum(member.numel() for member in self.members))
        self.views = views_of(self.flat, self.members)

    def reset(self) -> None:
        """Expect every gradient again."""
        self.pending, self.absent = len(self.members), []

    def gather(self, places: Sequence[int], divisor: int | None) -> None:
        """Copy the gradients at ``places`` into the bucket, divided by ``divisor`` if one is given."""
        into, grads = [], []
        for place in places:
            grad = self.members[place].grad
            if grad is None:
                self.views[place].zero_()
                self.absent.append(place)
            else:
                into.append(self.views[place])
                grads.append(grad)
        if divisor is not None and len(grads) == 1:  # one pass over the memory instead of two
            torch.mul(grads[0], 1.0 / divisor, out=into[0])  # PyTorch's reducer multiplies by the reciprocal, too
        elif grads:
            torch._foreach_copy_(into, grads)
            if divisor is not None:
                self.scale(into, Tensor.mul_, 1.0 / divisor)

    def scale(self, views: list[Tensor], operation: Callable[[Tensor, float], Tensor], factor: float) -> None:
        """Multiply or divide some of the views, or the whole memory at once."""
        # not torch._foreach_mul_: on the CPU it rounds the factor to the tensors' dtype (1/3 in bf16 is 0.2 % off)
        for tensor in [self.flat] if len(views) == len(self.members) else views:
            operation(tensor, factor)

    def launch(self, group: dist.ProcessGroup, memory: Tensor) -> dist.Work:
        """Start to sum ``memory`` over the ranks, as a reducer does without a communication hook."""
        return all_reduce(group, memory)

    def scatter(self, mean: Tensor, untouched: Container[int] = ()) -> None:
        """Set the ``p.grad`` of every parameter, except the ``untouched`` (by index), to its part of ``mean``.

        ``mean`` is 1-D, of the bucket's size; it may be the bucket's own memory.
        """
        kept = [place for place, index in enumerate(self.indices) if index not in untouched]
        views = self.views if self.holds(mean) else views_of(mean, self.members)
        grads = []
        for place in kept:
            member = self.members[place]
            if member.grad is None:
                member.grad = torch.empty_like(self.views[place])
            grads.append(member.grad)
        if kept:
            torch._foreach_copy_(grads, [views[place] for place in kept])

    def holds(self, mean: Tensor) -> bool:
        """Return True if ``mean`` is the bucket's own memory."""
        return mean.data_ptr() == self.flat.data_ptr() and mean.dtype == self.flat.dtype


class Layout:
    """The parameters whose gradients travel in buckets, those buckets, and every parameter's place in them."""

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Parameter]],
        limits: Limits,
        alone: Container[int] = (),
        make: Callable[..., Bucket] = Bucket,
    ):
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.specs = [ParameterSpec(p.nbytes, (p.dtype, p.device), id(p) in alone) for p in self.parameters]
        self.limits, self._make = limits, make
        self.learns_order = True  # until it is known; never if a feature says so
        self.order: list[int] = []  # the order in which gradients came, which the rebuilt buckets will follow
        self.rebuilt = False
        self.buckets: list[Bucket] = []
        self.places: dict[int, tuple[Bucket, int]] = {}
        # Gradients become ready roughly from the last parameter to the first, so the last buckets go first.
        self._build(assign_buckets(self.specs, limits.first)[::-1])

    def _build(self, plan: Plan) -> None:
        self.buckets, self.places = [], {}
        for number, indices in enumerate(plan):
            members, names = [self.parameters[i] for i in indices], [self.names[i] for i in indices]
            self.buckets.append(self._make(number, indices, members, names))
            self.places |= {index: (self.buckets[-1], place) for place, index in enumerate(indices)}

    @_disable_dynamo  # torch.compile cannot trace a process group's methods (tests/torch_suite)
    def rebuild_in_order(self, group: dist.ProcessGroup) -> None:
        """Lay out the buckets on every rank in the order in which rank 0's gradients became ready."""
        plan = assign_buckets(self.specs, self.limits.rebuilt, self.order)
        pairs = [(number, index) for number, bucket in enumerate(plan) for index in bucket]
        sent = torch.tensor(pairs, dtype=torch.int64, device=self.parameters[0].device)
        finish(broadcast(group, sent, source=0))  # the buckets, and not the order alone: limits may differ
        buckets = itertools.groupby(sent.tolist(), key=operator.itemgetter(0))
        self.rebuild([tuple(index for _, index in bucket) for _, bucket in buckets])

    def rebuild(self, plan: Plan) -> None:
        """Lay out according to ``plan``, permanently: the order is no longer learned."""
        self._build(plan)  # nothing is under way: a forward pass begins
        self.learns_order, self.rebuilt = False, True
