"""Start every replica from the same place: compare the models, then copy one rank's tensors to the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flatten  # a third of the time of cat and split: buffers are
from torch._utils import _unflatten_dense_tensors as unflatten  # copied before every forward pass

MESSAGE_BYTES = 250 * 1024 * 1024
MESSAGES_IN_FLIGHT = 2


class Signature(NamedTuple):
    """What must agree on all ranks for one parameter."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def verify_same_model(named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that all ranks of ``group`` bring the same parameters: number, sizes, strides, dtypes.

    One all-gather of a digest; only if digests differ do the ranks exchange descriptions. Raises RuntimeError on
    *every* rank if any differs from rank 0, saying which parameter of which rank differs in what.
    """
    mine = [(name, Signature(tuple(p.shape), tuple(p.stride()), str(p.dtype))) for name, p in named]
    text = repr([signature for _, signature in mine])
    digest = torch.tensor([int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")], device=device)
    digests = [torch.zeros_like(digest) for _ in range(group.size())]
    dist.all_gather(digests, digest, group=group)
    if len({int(other.item()) for other in digests}) > 1:
        everyone: list[list[tuple[str, Signature]]] = [[] for _ in range(group.size())]
        dist.all_gather_object(everyone, mine, group=group)
        raise RuntimeError(
            "; ".join(d for rank, other in enumerate(everyone) for d in _differences(rank, other, everyone[0]))
        )


def _differences(
    rank: int, mine: Sequence[tuple[str, Signature]], reference: Sequence[tuple[str, Signature]]
) -> Iterator[str]:
    if len(mine) != len(reference):
        odd = sorted({name for name, _ in mine} ^ {name for name, _ in reference})
        yield (
            f"DDP expects same model across all ranks, but Rank 0 has {len(reference)} params, while rank {rank} has "
            f"inconsistent {len(mine)} params (only one of them has: {', '.join(odd[:6]) or 'none by name'})"
        )
        return
    for index, ((name, got), (_, expected)) in enumerate(zip(mine, reference, strict=True)):
        for field, value, wanted in zip(Signature._fields, got, expected, strict=True):
            if value != wanted:
                yield f"[{rank}]: params[{index}] ({name!r}): {field} {value} appears not to match rank 0's {wanted}"
                break


@torch.no_grad()
def broadcast_coalesced(tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int) -> None:
    """Overwrite ``tensors`` on every rank of ``group`` with those of group rank ``source``.

    Tensors of one dtype and device travel together, at most 250 MiB a message and two messages in flight. Autograd
    does not see the write, so tensors saved for a backward pass still to come stay valid.
    """
    in_flight: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
    options = dist.BroadcastOptions()
    options.rootRank = source
    for chunk in _chunks(tensors):
        if len(in_flight) == MESSAGES_IN_FLIGHT:
            _receive(*in_flight.pop(0))
        flat = flatten(chunk)
        in_flight.append((group.broadcast([flat], options), flat, chunk))
    for message in in_flight:
        _receive(*message)


def _chunks(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    full: list[list[Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    nbytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        nbytes[key] = nbytes.get(key, 0) + tensor.nbytes
        if key in filling and nbytes[key] > MESSAGE_BYTES:
            full.append(filling.pop(key))
            nbytes[key] = tensor.nbytes
        filling.setdefault(key, []).append(tensor.data)  # .data counts its versions apart: autograd sees no write
    return full + list(filling.values())


def _receive(work: dist.Work, flat: Tensor, chunk: list[Tensor]) -> None:
    work.wait()
    torch._foreach_copy_(chunk, list(unflatten(flat, chunk)))
