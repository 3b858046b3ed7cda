"""Collectives as methods of a process group, called in a way that a group written in Python supports too.

Such a group (a subclass of ``ProcessGroup``) takes its options as an argument, need not be known to
``torch.distributed``, whose functions look groups up in tables, and returns its own works, whose ``wait`` may require a
timeout. PyTorch's reducer calls both from C++, which passes everything on; these functions do the same.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions


def all_reduce(group: dist.ProcessGroup, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> dist.Work:
    """Start to reduce ``tensor`` over the ranks of ``group``, in place."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([tensor], options)


def broadcast(group: dist.ProcessGroup, tensor: Tensor, source: int) -> dist.Work:
    """Start to overwrite ``tensor`` with group rank ``source``'s."""
    options = dist.BroadcastOptions()
    options.rootRank = source
    return group.broadcast([tensor], options)


def all_gather(group: dist.ProcessGroup, tensor: Tensor) -> list[Tensor]:
    """Return every rank's ``tensor``, in rank order; shapes must be equal."""
    gathered = [torch.zeros_like(tensor) for _ in range(group.size())]
    finish(group.allgather([gathered], [tensor], AllgatherOptions()))
    return gathered


def all_gather_object(group: dist.ProcessGroup, value: Any, device: torch.device) -> list[Any]:
    """Return every rank's ``value``, in rank order; values are pickled and padded to the longest."""
    pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    length = torch.tensor([len(pickled)], dtype=torch.int64, device=device)
    sizes = [int(size.item()) for size in all_gather(group, length)]
    padded = torch.nn.functional.pad(pickled, (0, max(sizes) - len(pickled)))
    texts = all_gather(group, padded)
    return [pickle.loads(bytes(text[:size].tolist())) for text, size in zip(texts, sizes, strict=True)]


def finish(work: dist.Work) -> None:
    """Wait until ``work`` is done; raise its error if it fails."""
    # Called "wait", this function would look to pybind11 like a super().wait(), so it would call the base class.
    kind: Any = type(work)
    if kind.wait is dist.Work.wait and kind.get_future is not dist.Work.get_future:
        work.get_future().wait()  # its class is written in Python, and only its future shows when it is done
    else:
        dist.Work.wait(work)  # not work.wait(): through C++, which passes a timeout if wait() requires one


def future_of(work: dist.Work) -> torch._C.Future[Any] | None:
    """Return the future of ``work``; None if it has none."""
    with contextlib.suppress(RuntimeError):  # 'getFuture not implemented'
        return work.get_future()
    return None


def result_of(work: dist.Work) -> Any:
    """Wait for ``work``, and return the value of its future, as PyTorch's reducer does; None if it holds nothing.

    A group written in Python may deliver its result there instead of in place, and after its ``wait`` has returned.
    """
    finish(work)
    future = future_of(work)
    return None if future is None else future.wait()


def number_of_ranks(group: dist.ProcessGroup, count: dist.Work | None) -> int:
    """Return the number of ranks to divide by: the sum that ``count`` all-reduces, or the size of ``group``."""
    if count is None:
        return group.size()
    ranks = result_of(count)
    return int((count.result() if ranks is None else ranks)[0].item())


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store through which the ranks of ``group`` met; None if it has none."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))  # torch 2.8 and older
    return store
