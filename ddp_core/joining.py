"""Uneven inputs: what a rank that has run out of data does so that the others can go on.

``torch.distributed.algorithms.join`` calls ``ShadowHook.main_hook`` once for every iteration that some rank still
trains, and the hook issues the collectives which that rank's forward and backward passes issue, with zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from ddp_core.collectives import all_reduce, finish
from ddp_core.replicas import broadcast_coalesced

if TYPE_CHECKING:
    from ddp_core.distributed import DistributedDataParallel


class ShadowHook(JoinHook):
    """Mirrors the collectives of one wrapped module on a rank that has joined."""

    def __init__(self, ddp: DistributedDataParallel):
        self.ddp = ddp
        super().__init__()

    def main_hook(self) -> None:
        """Mirror one iteration."""
        ddp = self.ddp
        ddp.reducer.rebuild_if_due()
        if ddp.will_sync_module_buffers():
            ddp.broadcast_module_buffers(elect(ddp, candidate=False))
        ddp.require_forward_param_sync = exchange_sync_flag(ddp, joined=True)
        if ddp.require_forward_param_sync:
            self._mirror_backward()

    @torch.no_grad()
    def _mirror_backward(self) -> None:
        reducer = self.ddp.reducer
        nothing = [0] * len(reducer.parameters)
        usage = reducer.count_usage(nothing) if reducer.learns_graph else None
        in_flight = [reducer.launch(bucket, bucket.zeros()) for bucket in reducer.buckets]
        if reducer.searches_graph:
            usage = reducer.count_usage(nothing)
        reducer.await_hook(in_flight)
        in_flight += reducer.delayed.launch(
            reducer.process_group, [bucket.zeros() for bucket in reducer.delayed.buckets]
        )
        with reducer.fatal(in_flight):
            for pending in in_flight:
                pending.result()
        if usage is not None:
            finish(usage.work)
        if reducer.learns_graph:
            reducer.learned = True
        elif reducer.wants_order and not reducer.ready_order:
            reducer.ready_order = list(range(len(reducer.parameters)))  # any will do unless this is rank 0

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that trained to the end to all the others."""
        ddp = self.ddp
        ddp._authoritative_rank = elect(ddp, candidate=is_last_joiner)
        buffers = ddp.module_buffers() if ddp.forward_sync_buffers else {}
        tensors = [*(p for _, p in ddp.replicated_parameters()), *buffers.values()]
        broadcast_coalesced(tensors, ddp.process_group, ddp._authoritative_rank)


def elect(ddp: DistributedDataParallel, candidate: bool) -> int:
    """Agree on the highest rank among those that are candidates."""
    rank = torch.tensor([ddp.process_group.rank() if candidate else -1], device=ddp.device)
    finish(all_reduce(ddp.process_group, rank, dist.ReduceOp.MAX))
    assert rank.item() >= 0, "some rank has not joined, and it is a candidate"
    return int(rank.item())


def exchange_sync_flag(ddp: DistributedDataParallel, joined: bool) -> bool:
    """Tell the joined ranks, or as one of them learn, whether this iteration's backward pass synchronises."""
    flag = torch.full((1,), float(not joined and ddp.require_backward_grad_sync), device=ddp.device)
    finish(all_reduce(ddp.process_group, flag))
    return bool(flag.item())
