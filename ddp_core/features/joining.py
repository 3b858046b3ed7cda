"""Uneven inputs: a rank that has run out of data takes part in the others' collectives.

``torch.distributed.algorithms.join`` calls ``ShadowHook.main_hook`` once for every iteration in which some rank still
trains; the hook issues the collectives of that rank's forward and backward passes, with zeros.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn import Parameter

from ddp_core import errors
from ddp_core.buckets import Bucket
from ddp_core.collectives import all_reduce, finish, number_of_ranks
from ddp_core.feature import Feature
from ddp_core.features.buffers import Buffers
from ddp_core.features.delayed import DelayedGradients
from ddp_core.features.sparse import SparseBucket
from ddp_core.features.static_graph import StaticGraph
from ddp_core.features.unused import UnusedParameters, UsedParameters
from ddp_core.lifecycle import Phase
from ddp_core.reducer import Reducer
from ddp_core.replicas import broadcast_coalesced


class UnevenInputs(Feature):
    """What a rank that still trains has told, and been told."""

    def __init__(self) -> None:
        self.divides_by_initial_world_size = True
        self.active: dist.Work | None = None  # counts the ranks that still train, if those are to divide
        self.has_promised = False  # joined ranks were told that the coming backward pass synchronises

    def on_begin(self, reducer: Reducer) -> None:
        """Divide by the number of ranks that still train, if so wanted."""
        reducer.iteration.divisor = number_of_ranks(reducer.process_group, self.active)

    def on_local(self, reducer: Reducer, parameter: Parameter) -> None:
        """Raise RuntimeError for a gradient that joined ranks wait for, within no_sync."""
        if self.has_promised and reducer.iteration.phase in (Phase.EXPECTING, Phase.REDUCING):
            raise reducer.noted(errors.broken_promise())


class MayRunOut(Joinable):
    """A wrapped module whose ranks may run out of inputs at different times; a base of ``DistributedDataParallel``."""

    module: Any
    reducer: Reducer
    module_buffers: Buffers
    require_forward_param_sync: bool
    require_backward_grad_sync: bool
    device: torch.device
    _authoritative_rank = 0  # whose model all ranks had after the latest join()

    @abstractmethod
    def replicated_parameters(self) -> list[tuple[str, Any]]: ...  # noqa: D102

    @abstractmethod
    def will_sync_module_buffers(self) -> bool: ...  # noqa: D102

    @abstractmethod
    def broadcast_module_buffers(self, source: int, buffers: Sequence[Tensor] | None = None) -> None: ...  # noqa: D102

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may run out of inputs at different times.

        A rank that leaves its loop early takes part in the others' collectives with zeros until all have left; then all
        receive the last one's model.

        Args:
            divide_by_initial_world_size: True divides by the number of all ranks, which gives every input the same
                weight; False by the number of ranks that still train.
            enable: False makes this context have no effect.
            throw_on_early_termination: raise RuntimeError on every rank instead of continuing.

        """
        if enable:
            self._require_mirrorable()
        options = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self], enable, throw_on_early_termination, **options)

    def _require_mirrorable(self) -> None:
        unused = self.reducer.find(UsedParameters)
        if (unused is not None and unused.skips) or self.module_buffers.hook is not None:
            raise NotImplementedError(
                "join() works neither with skip_all_reduce_unused_params=True nor with a buffer hook: a rank that has "
                "joined cannot know which collectives the others skip or issue"
            )

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        """Return the hook that ``torch.distributed.algorithms.join.Join`` runs on ranks that have joined."""
        self._uneven().divides_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return ShadowHook(self)

    def _uneven(self) -> UnevenInputs:
        uneven = self.reducer.find(UnevenInputs)
        if uneven is None:
            self.reducer.add(uneven := UnevenInputs(), first=True)  # it decides by what gradients are divided
        return uneven

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives that ``Join`` issues."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group of the collectives that ``Join`` issues."""
        return self.reducer.process_group

    def notify_joined_ranks(self) -> None:
        """Tell joined ranks that this one begins a forward pass."""
        active = Join.notify_join_context(self)
        if self._join_config.enable:
            self._uneven().active = None if self._uneven().divides_by_initial_world_size else active

    def promise_joined_ranks(self) -> None:
        """Tell joined ranks whether this iteration's backward pass synchronises."""
        if self._join_config.enable:
            self._uneven().has_promised = exchange_sync_flag(self, joined=False)


class ShadowHook(JoinHook):
    """Mirrors the collectives of one wrapped module on a rank that has joined."""

    def __init__(self, ddp: MayRunOut):
        self.ddp = ddp
        super().__init__()

    def main_hook(self) -> None:
        """Mirror one iteration."""
        ddp = self.ddp
        ddp.reducer.leave_iteration()
        if ddp.will_sync_module_buffers():
            ddp.broadcast_module_buffers(elect(ddp, candidate=False))
        ddp.require_forward_param_sync = exchange_sync_flag(ddp, joined=True)
        if ddp.require_forward_param_sync:
            _mirror_backward(ddp.reducer)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that trained to the end to all the others."""
        ddp = self.ddp
        ddp._authoritative_rank = elect(ddp, candidate=is_last_joiner)
        buffers = ddp.module_buffers.named(ddp.module) if ddp.module_buffers.every_forward else {}
        tensors = [*(p for _, p in ddp.replicated_parameters()), *buffers.values()]
        broadcast_coalesced(tensors, ddp.join_process_group, ddp._authoritative_rank)


@torch.no_grad()
def _mirror_backward(reducer: Reducer) -> None:
    """Issue the collectives of a backward pass, in the order in which the reducer and its features issue them.

    Usage is counted first if everything is reduced at once, otherwise after the buckets; delayed gradients come last.
    """
    nothing = [0] * len(reducer.layout.parameters)
    static, unused = reducer.find(StaticGraph), reducer.find(UnusedParameters)
    delayed = reducer.find(DelayedGradients)
    learns = static is not None and not static.firings
    usage = static.count(reducer, nothing) if static is not None and learns else None
    in_flight = [reducer.launch(bucket, zeros_for(bucket)) for bucket in reducer.layout.buckets]
    if unused is not None:
        usage = unused.count(reducer, nothing)
    if delayed is not None:
        delayed.await_hook(reducer, in_flight)
        in_flight += delayed.launch(reducer, [zeros_for(bucket) for bucket in delayed.buckets])
    with reducer.failing(in_flight):
        for pending in in_flight:
            pending.result()
    if usage is not None:
        finish(usage.work)
    if static is not None and learns:
        static.learn([1] * len(nothing))
    elif reducer.layout.learns_order and not reducer.layout.order:
        reducer.layout.order = list(range(len(nothing)))  # any order will do unless this is rank 0


def zeros_for(bucket: Bucket) -> Tensor:
    """Return what a rank without any gradient sends for a bucket."""
    if isinstance(bucket, SparseBucket):
        return bucket.zeros()
    return bucket.members[0].new_zeros(sum(member.numel() for member in bucket.members))


def elect(ddp: MayRunOut, candidate: bool) -> int:
    """Agree on the highest rank among the candidates, and return it."""
    own = ddp.join_process_group.rank() if candidate else -1
    rank = torch.tensor([own], dtype=torch.int64, device=ddp.join_device)
    finish(all_reduce(ddp.join_process_group, rank, dist.ReduceOp.MAX))
    assert rank.item() >= 0, "some rank has not joined, and it is a candidate"
    return int(rank.item())


def exchange_sync_flag(ddp: MayRunOut, joined: bool) -> bool:
    """Tell joined ranks, or learn as one of them, whether this iteration's backward pass synchronises."""
    synchronises = not joined and ddp.require_backward_grad_sync
    flag = torch.tensor([float(synchronises)], dtype=torch.float32, device=ddp.join_device)
    finish(all_reduce(ddp.join_process_group, flag))
    return bool(flag.item())
