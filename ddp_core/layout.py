"""A model's buckets: laid out by size at first, then rebuilt in the order in which gradients became ready."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.nn import Parameter

from ddp_core.bucket import Bucket, SparseBucket
from ddp_core.bucketing import ParameterSpec, Plan, assign_buckets, plan_from_numbers, plan_to_numbers
from ddp_core.collectives import broadcast, finish
from ddp_core.errors import unannounced_sparse
from ddp_core.settings import ReducerSettings


class Layout:
    """The parameters whose gradients travel in buckets, those buckets, and every parameter's place in them.

    A parameter's *index*, here and in the reducer, is its position in ``parameters``.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, Parameter]], sparse: set[int], settings: ReducerSettings):
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.specs = [ParameterSpec(p.nbytes, (p.dtype, p.device), id(p) in sparse) for p in self.parameters]
        self.settings = settings
        # gradients become ready roughly from the last parameter to the first, so the last buckets go first
        self._build(assign_buckets(self.specs, settings.limits)[::-1])
        self.reset()

    def _build(self, plan: Plan) -> None:
        self.buckets: list[Bucket] = []
        self.locations: dict[int, tuple[Bucket, int]] = {}  # for each parameter: its bucket, and its place in it
        for position, indices in enumerate(plan):
            members, names = [self.parameters[i] for i in indices], [self.names[i] for i in indices]
            if self.specs[indices[0]].sparse:
                self.buckets.append(SparseBucket(position, indices, members, names))
            else:
                self.buckets.append(Bucket(position, indices, members, names, self.settings.lazy_bucket_allocation))
            self.locations |= {index: (self.buckets[-1], place) for place, index in enumerate(indices)}

    def reset(self) -> None:
        """Keep these buckets until the order of the next backward pass is known."""
        self.rebuilt = False
        self.ready_order: list[int] = []  # the order that the rebuilt buckets will follow
        self.iterations_to_check = 2  # before the buckets are rebuilt, and after

    @_disable_dynamo  # torch.compile cannot trace a process group's methods (tests/torch_suite)
    def rebuild_in_order(self, group: dist.ProcessGroup) -> None:
        """Lay out the buckets on every rank of ``group`` in the order in which rank 0's gradients became ready."""
        plan = assign_buckets(self.specs, self.settings.rebuilt_limits, self.ready_order)
        numbers = torch.tensor(plan_to_numbers(plan), dtype=torch.int64, device=self.parameters[0].device)
        finish(broadcast(group, numbers, source=0))
        self.rebuild(plan_from_numbers(numbers.tolist()))

    def rebuild(self, plan: Plan) -> None:
        """Lay out according to ``plan``, permanently: the order is no longer learned."""
        self._build(plan)
        self.rebuilt = True
        if self.settings.gradient_as_bucket_view and not self.settings.lazy_bucket_allocation:
            for bucket in self.buckets:
                bucket.adopt()

    def check_strides(self, bucket: Bucket, places: Sequence[int]) -> None:
        """Warn once about a gradient that is slow to copy; raise RuntimeError for a sparse one in a dense bucket."""
        for place in places:
            grad, view = bucket.members[place].grad, bucket.views[place]
            if grad is None or isinstance(bucket, SparseBucket):
                continue
            if grad.is_sparse:
                raise unannounced_sparse(bucket.names[place])
            if any(g != v for g, v, size in zip(grad.stride(), view.stride(), grad.shape, strict=True) if size > 1):
                self.iterations_to_check = 0
                warnings.warn(
                    f"the gradient of parameter {bucket.names[place]!r} has strides {grad.stride()}, its bucket view "
                    f"{view.stride()}: results are right, but copies are slow.",
                    stacklevel=2,
                )
                return
