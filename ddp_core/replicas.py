"""Start every replica from the same place: compare the models, then copy one rank's tensors to the others."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

MESSAGE_BYTES = 250 * 1024 * 1024
MESSAGES_IN_FLIGHT = 2


@dataclass(frozen=True)
class Signature:
    """What must agree on all ranks for one parameter."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, parameter: Tensor) -> Signature:
        """Describe ``parameter``."""
        return cls(name, tuple(parameter.shape), tuple(parameter.stride()), str(parameter.dtype))


def verify_same_model(
    names: Sequence[str], parameters: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Check that all ranks of ``group`` bring the same parameters: number, sizes, strides, dtypes.

    One small all-gather of a digest; only if digests differ do the ranks exchange descriptions, so that each of them
    can say who differs in what.

    Raises RuntimeError on *every* rank if any rank differs from rank 0.
    """
    mine = [Signature.of(name, parameter) for name, parameter in zip(names, parameters, strict=True)]
    text = repr([astuple(signature)[1:] for signature in mine])
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    sent = torch.tensor([digest], dtype=torch.int64, device=device)
    received = [torch.zeros_like(sent) for _ in range(group.size())]
    dist.all_gather(received, sent, group=group)
    if len({int(tensor.item()) for tensor in received}) == 1:
        return
    everyone: list[list[Signature]] = [[] for _ in range(group.size())]
    dist.all_gather_object(everyone, mine, group=group)
    raise RuntimeError("; ".join(_differences(everyone)))


def _differences(everyone: Sequence[Sequence[Signature]]) -> list[str]:
    reference = everyone[0]
    said = []
    for rank, signatures in enumerate(everyone):
        if len(signatures) != len(reference):
            said.append(
                f"DDP expects same model across all ranks, but Rank 0 has {len(reference)} params, "
                f"while rank {rank} has inconsistent {len(signatures)} params" + _first_odd_name(reference, signatures)
            )
            continue
        for index, (expected, got) in enumerate(zip(reference, signatures, strict=True)):
            for what in ("shape", "strides", "dtype"):
                ours, theirs = getattr(got, what), getattr(expected, what)
                if ours != theirs:
                    said.append(
                        f"[{rank}]: params[{index}] ({got.name!r}) with {what} {ours} appears not to match {what} "
                        f"{theirs} of the same param on rank 0 ({expected.name!r})"
                    )
                    break
    return said


def _first_odd_name(reference: Sequence[Signature], signatures: Sequence[Signature]) -> str:
    odd = {s.name for s in reference} ^ {s.name for s in signatures}
    return f" (first that only one of them has: {min(odd)!r})" if odd else ""


@torch.no_grad()
def broadcast_coalesced(tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int) -> None:
    """Overwrite ``tensors`` on every rank of ``group`` with those of group rank ``source``.

    Tensors of one dtype and device travel together, at most 250 MiB a message and two messages in flight. Autograd
    does not see the write, so tensors saved for a backward pass still to come stay valid.
    """
    in_flight: deque[tuple[dist.Work, Tensor, list[Tensor]]] = deque()
    for chunk in _chunks(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        if len(in_flight) == MESSAGES_IN_FLIGHT:
            _receive(*in_flight.popleft())
        work = dist.broadcast(flat, group=group, group_src=source, async_op=True)
        assert work is not None, "broadcast(async_op=True) returns its work on every member of the group"
        in_flight.append((work, flat, chunk))
    while in_flight:
        _receive(*in_flight.popleft())


def _chunks(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    chunks: list[list[Tensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    nbytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        if key in filling and nbytes[key] + tensor.nbytes > MESSAGE_BYTES:
            chunks.append(filling.pop(key))
        if key not in filling:
            filling[key], nbytes[key] = [], 0
        filling[key].append(tensor.data)  # .data has its own version counter: see broadcast_coalesced
        nbytes[key] += tensor.nbytes
    return chunks + list(filling.values())


def _receive(work: dist.Work, flat: Tensor, chunk: list[Tensor]) -> None:
    work.wait()
    parts = flat.split([tensor.numel() for tensor in chunk])
    torch._foreach_copy_(chunk, [part.view(tensor.shape) for part, tensor in zip(parts, chunk, strict=True)])
