"""Communication hooks that change when, or on which process group, a bucket is all-reduced.

PyTorch accepts a hook only if its annotations are types rather than strings, so this file has no
`from __future__ import annotations`.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

Groups = Sequence[dist.ProcessGroup]


def overlap(ddp: Any, groups: Groups) -> None:
    """Let a DDP all-reduce each bucket as soon as it is ready, with PyTorch's own hook."""
    ddp.register_comm_hook(groups[0], allreduce_hook)


def do_not_overlap(ddp: Any, groups: Groups) -> None:
    """Let a DDP all-reduce its buckets only when the last one is ready."""
    ddp.register_comm_hook(_HeldBack(groups[0]), _all_reduce_at_the_end)


def use_groups_in_turn(ddp: Any, groups: Groups, *, count: int) -> None:
    """Let a DDP all-reduce bucket k on the group k modulo `count`: in the same order on every rank."""
    ddp.register_comm_hook(groups[:count], _all_reduce_in_turn)


class _HeldBack:
    """The buckets of a backward pass that are ready, and wait for the last one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.waiting: list[tuple[Tensor, Future[Tensor]]] = []


def _all_reduce_at_the_end(held: _HeldBack, bucket: GradBucket) -> Future[Tensor]:
    outcome: Future[Tensor] = Future()
    held.waiting.append((bucket.buffer(), outcome))
    if bucket.is_last():  # buckets come in order, so that all are here
        buckets, held.waiting = held.waiting, []
        works = [
            dist.all_reduce(buffer.div_(held.group.size()), group=held.group, async_op=True) for buffer, _ in buckets
        ]
        for work, (buffer, waited_for) in zip(works, buckets, strict=True):
            assert work is not None, "async_op=True returns a work"
            work.wait()
            waited_for.set_result(buffer)
    return outcome


def _all_reduce_in_turn(groups: Groups, bucket: GradBucket) -> Future[Tensor]:
    return allreduce_hook(groups[bucket.index() % len(groups)], bucket)
