"""Uneven inputs: a rank that has run out of data takes part in the others' collectives.

``torch.distributed.algorithms.join`` calls ``ShadowHook.main_hook`` once for every iteration in which some rank still
trains; the hook issues the collectives of that rank's forward and backward passes, with zeros.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ddp_core.collectives import all_reduce, finish
from ddp_core.reducer import Reducer
from ddp_core.replicas import broadcast_coalesced


class MayRunOut(Joinable):
    """A wrapped module whose ranks may run out of inputs at different times; a base of ``DistributedDataParallel``."""

    reducer: Reducer
    buffer_hook: tuple[object, Callable[..., Any]] | None
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    require_backward_grad_sync: bool
    device: torch.device
    _divides_by_initial_world_size = True
    _authoritative_rank = 0  # whose model all ranks had after the latest join()

    @abstractmethod
    def replicated_parameters(self) -> list[tuple[str, Any]]: ...  # noqa: D102

    @abstractmethod
    def module_buffers(self) -> dict[str, Tensor]: ...  # noqa: D102

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
        if self.reducer.settings.skip_all_reduce_unused_params or self.buffer_hook is not None:
            raise NotImplementedError(
                "join() works neither with skip_all_reduce_unused_params=True nor with a buffer hook: a rank that has "
                "joined cannot know which collectives the others skip or issue"
            )

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        """Return the hook that ``torch.distributed.algorithms.join.Join`` runs on ranks that have joined."""
        self._divides_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return ShadowHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives that ``Join`` issues."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group of the collectives that ``Join`` issues."""
        return self.reducer.process_group


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
            self._mirror_backward()

    @torch.no_grad()
    def _mirror_backward(self) -> None:
        reducer = self.ddp.reducer
        # In the order of the reducer's collectives, with which these pair up: usage is counted first if everything is
        # reduced at once, otherwise after the buckets; delayed gradients come last.
        nothing = [0] * len(reducer.layout.parameters)
        usage = reducer.count_usage(nothing) if reducer.unused.learning else None
        in_flight = [reducer.launch(bucket, bucket.zeros()) for bucket in reducer.layout.buckets]
        if reducer.unused.searches:
            usage = reducer.count_usage(nothing)
        reducer.await_hook(in_flight)
        in_flight += reducer.delayed.launch(
            reducer.process_group, [bucket.zeros() for bucket in reducer.delayed.buckets]
        )
        with reducer.progress.fatal(in_flight):
            for pending in in_flight:
                pending.result()
        if usage is not None:
            finish(usage.work)
        if reducer.unused.learning:
            reducer.unused.learned = True
        elif reducer.wants_order and not reducer.layout.ready_order:
            reducer.layout.ready_order = list(range(len(nothing)))  # any order will do unless this is rank 0

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that trained to the end to all the others."""
        ddp = self.ddp
        ddp._authoritative_rank = elect(ddp, candidate=is_last_joiner)
        buffers = ddp.module_buffers() if ddp.forward_sync_buffers else {}
        tensors = [*(p for _, p in ddp.replicated_parameters()), *buffers.values()]
        broadcast_coalesced(tensors, ddp.join_process_group, ddp._authoritative_rank)


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
