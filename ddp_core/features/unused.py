"""``find_unused_parameters`` and ``skip_all_reduce_unused_params``: parameters that an iteration does not use.

A parameter that this rank does not use gets no gradient, so it must count as ready from the start; otherwise its bucket
would wait forever. Such parameters are found by searching the graph after every forward pass. A parameter that *no*
rank uses keeps its gradient, if any, while all others get a mean: to identify these, an all-reduce counts the ranks
that used each parameter. Buckets keep their first layout, as PyTorch's do: an order of readiness is never learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from ddp_core import errors
from ddp_core.buckets import Bucket
from ddp_core.collectives import all_reduce, finish
from ddp_core.feature import Feature
from ddp_core.graph import unreachable
from ddp_core.hooks import Pending
from ddp_core.lifecycle import Phase
from ddp_core.listening import node_of
from ddp_core.reducer import Reducer


class Usage:
    """The number of ranks that used each parameter, counted by an all-reduce."""

    def __init__(self, used: Sequence[int], group: dist.ProcessGroup, device: torch.device):
        counts = torch.tensor(used, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        self.counts = counts.to(device, non_blocking=True)  # in the backward pass, where the host should not wait
        self.work = all_reduce(group, self.counts)

    def unused(self) -> set[int]:
        """Wait, and return the parameters that no rank used."""
        finish(self.work)
        return {index for index, count in enumerate(self.counts.tolist()) if count == 0}


class UsedParameters(Feature):
    """The parameters that this rank does not use (``here``), or that no rank uses (``everywhere``)."""

    def __init__(self, skips: bool) -> None:
        self.skips = skips  # a bucket without any used parameter is not reduced
        self.used: list[int] = []  # 1 for the parameters that this rank used
        self.here: list[int] = []  # these count as ready without firing
        self.everywhere: set[int] = set()
        self.passed_over: set[int] = set()  # by the latest reduction: expected to be used, and without a gradient
        self.usage: Usage | None = None  # of this iteration; None: the earlier answer still holds
        self.entered = -1  # the latest backward pass that came through the module's outputs

    def added(self, reducer: Reducer) -> None:
        """Forget the iterations so far."""
        self.used = [0] * len(reducer.layout.parameters)
        self.here, self.everywhere, self.passed_over, self.usage, self.entered = [], set(), set(), None, -1

    def enter(self) -> None:
        """Note that the current backward pass comes through the module's outputs."""
        self.entered = torch._C._current_graph_task_id()

    def on_gradient(self, reducer: Reducer, index: int) -> None:
        """Note that a parameter is used, also under no_sync: what was used there is reduced later.

        Raises RuntimeError for the first gradient of a parameter that the reduction before has passed over.
        """
        if reducer.layout.parameters[index].grad is not None:
            self.used[index] = 1
        is_late = reducer.iteration.phase is Phase.REDUCED and not reducer.paused
        if index in self.passed_over and is_late and self.entered == torch._C._current_graph_task_id():
            raise reducer.noted(errors.loss_in_parts(index, reducer.layout.names[index]))

    def on_begin(self, reducer: Reducer) -> None:
        """Let parameters that are not used arrive now, not in the forward pass: a launch needs a pass to end in."""
        for index in self.here:
            reducer.iteration.remaining[index] = 0
            reducer.arrive(index)

    def leaves_out(self, bucket: Bucket) -> bool:
        """Return True if none of a bucket's parameters is used, which must be so on every rank."""
        return self.skips and set(bucket.indices) <= set(self.here)

    def count(self, reducer: Reducer, used: Sequence[int]) -> Usage:
        """Start to count, for every parameter, the ranks that used it."""
        return Usage(used, reducer.process_group, reducer.layout.parameters[0].device)

    def untouched(self, bucket: Bucket) -> set[int]:
        """Return the parameters that no rank used; empty if this one used all of the bucket's.

        Reads ``usage`` only if necessary: on a GPU, that is a round trip.
        """
        if all(self.used[index] for index in bucket.indices):
            return set()
        if self.usage is not None:
            self.everywhere = self.usage.unused()
        return self.everywhere

    def finished(self, reducer: Reducer, in_flight: Sequence[Pending | None]) -> None:
        """Wait for the count."""
        if self.usage is not None:
            finish(self.usage.work)
        self.usage = None


class UnusedParameters(UsedParameters):
    """A search for unused parameters after every forward pass."""

    def __init__(self, skips: bool):
        super().__init__(skips)
        self.nodes: dict[Node, int] = {}  # in the graph, with their parameters
        self.searches = 0
        self.is_constant = True  # every search found the same as the one before

    def added(self, reducer: Reducer) -> None:
        """Forget the iterations so far."""
        super().added(reducer)
        reducer.layout.learns_order = False
        self.nodes = {node_of(parameter): index for index, parameter in enumerate(reducer.layout.parameters)}
        self.searches, self.is_constant = 0, True

    def after_forward(self, reducer: Reducer, outputs: Iterable[Tensor]) -> None:
        """Search for parameters that no tensor in ``outputs`` depends on."""
        with torch.autograd.profiler.record_function("search_unused_parameters"):
            here = unreachable(outputs, self.nodes)
        self.is_constant &= self.searches == 0 or here == self.here
        self.here, self.searches, self.usage = here, self.searches + 1, None

    def on_all_launched(self, reducer: Reducer) -> None:
        """Count the ranks, after the last bucket, as on joined ranks: collectives pair up in the order of launch."""
        self.usage = self.count(reducer, self.used)

    def finished(self, reducer: Reducer, in_flight: Sequence[Pending | None]) -> None:
        """Record the parameters that were passed over, and expect every other one to be used again."""
        super().finished(reducer, in_flight)
        self.passed_over = {index for index, used in enumerate(self.used) if not used}.difference(self.here)
        self.used = [0] * len(self.used)

    def why_unfinished(self, reducer: Reducer) -> RuntimeError:
        """Return the error for outputs that were not found, or not used."""
        return reducer.unfinished(errors.NOT_FOUND)
