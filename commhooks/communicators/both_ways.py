"""Exchanges over two Gloo groups of the same ranks, each of which carries data in one direction between any two ranks.

Over one group, an announcement "ready to receive" waits behind data for the same rank. Here `upward`
carries data to higher ranks, and `downward` data to lower ones, so data and announcements never share a direction of a
connection. Nor does the thread that sends hold the lock that Gloo's event loop needs to receive.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

_LEAST_ROW_OF_TWO = 16 * 1024  # bytes to the other one of two ranks, to go over two groups
_LEAST_ROW = 128 * 1024  # bytes to each of more


def goes_both_ways(kind: str, payload: int, ranks: int) -> bool:
    """Return whether private groups run a collective over two groups; the answer is the same on all ranks.

    For smaller exchanges a second group costs more than it gains: its threads must wake up too, and among more than two
    ranks every connection carries an empty message back. With more than two ranks, Gloo's ring is as fast for an
    all-gather.
    """
    if kind == "all-gather":
        return ranks == 2 and payload >= _LEAST_ROW_OF_TWO
    least = _LEAST_ROW_OF_TWO if ranks == 2 else _LEAST_ROW
    return kind == "all-to-all" and ranks > 1 and payload >= least * ranks


def all_to_all(upward: Any, downward: Any, tensor: Tensor, room: Tensor) -> list[dist.Work]:
    """Start to send row r of `tensor` to rank r, and to receive row r of `room`, of equal shape, from rank r."""
    rank, ranks = upward.rank(), upward.size()
    if ranks == 2:
        return _swap(upward, downward, tensor[1 - rank], tensor[rank], room)
    lower, higher = [1] * rank, [1] * (ranks - 1 - rank)
    none_lower, none_higher = [0] * rank, [0] * (ranks - 1 - rank)
    return [  # a rank's own row goes upward
        upward.alltoall_base(room[: rank + 1], tensor[rank:], [*lower, 1, *none_higher], [*none_lower, 1, *higher]),
        downward.alltoall_base(room[rank + 1 :], tensor[:rank], [*none_lower, 0, *higher], [*lower, 0, *none_higher]),
    ]


def gather_of_two(upward: Any, downward: Any, tensor: Tensor, room: Tensor) -> list[dist.Work]:
    """Start to fill row r of `room` with rank r's tensor; there are two ranks."""
    return _swap(upward, downward, tensor, tensor, room)


def _swap(upward: Any, downward: Any, sent: Tensor, kept: Tensor, room: Tensor) -> list[dist.Work]:
    """Start to send `sent` to the other of two ranks and to receive its tensor in `room`; copy `kept` there too."""
    rank = upward.rank()
    outward, inward = (upward, downward) if rank == 0 else (downward, upward)
    # The announcement should leave before the data: both pass the link in the order in which they are sent.
    receiving = _broadcast(inward, room[1 - rank], 1 - rank)
    room[rank].copy_(kept)
    return [receiving, _broadcast(outward, sent, rank)]


def _broadcast(group: Any, tensor: Tensor, root: int) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    work: dist.Work = group.broadcast([tensor], options)
    return work
