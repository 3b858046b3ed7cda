"""Starting every replica in the same state: compare the models, then copy one rank's tensors to the others."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flatten  # a third of the time of cat and split: buffers are
from torch._utils import _unflatten_dense_tensors as unflatten  # copied before every forward pass

from ddp_core.collectives import all_gather, all_gather_object, broadcast, finish

MESSAGE_BYTES = 250 * 1024 * 1024
MESSAGES_IN_FLIGHT = 2
JOINED_BYTES = 1024 * 1024  # to put several dtypes into one message is to copy it once more


class Signature(NamedTuple):
    """The properties of a parameter or buffer that must agree on all ranks."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # of trained parameters: their gradients are reduced in memory order
    dtype: str
    requires_grad: bool
    kind: str  # of frozen tensors that answer operations themselves: they are not sent

    @classmethod
    def of(cls, tensor: Tensor) -> Signature:
        """Describe ``tensor``."""
        trained = tensor.requires_grad
        kind = type(tensor).__name__ if not trained and answers_itself(tensor) else "Tensor"
        return cls(tuple(tensor.shape), tuple(tensor.stride()) if trained else (), str(tensor.dtype), trained, kind)


def verify_same_model(named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that all ranks of ``group`` have the same parameters and buffers: number, sizes, strides, dtypes.

    Ranks gather each other's digests; if digests differ, they exchange descriptions. Raises RuntimeError on *every*
    rank if any differs from rank 0, naming the parameter, the rank and the difference.
    """
    mine = [(name, Signature.of(tensor)) for name, tensor in named]
    text = repr([signature for _, signature in mine])
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    digest = torch.tensor([number], dtype=torch.int64, device=device)
    if len({int(other.item()) for other in all_gather(group, digest)}) > 1:
        everyone: list[list[tuple[str, Signature]]] = all_gather_object(group, mine, device)
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
            f"inconsistent {len(mine)} params, buffers counted (on one only: {', '.join(odd[:6]) or 'none by name'})"
        )
        return
    for index, ((name, got), (_, expected)) in enumerate(zip(mine, reference, strict=True)):
        for field, value, wanted in zip(Signature._fields, got, expected, strict=True):
            if value != wanted:
                yield (
                    f"[{rank}]: params[{index}] ({name!r}) with {field} {value} appears not to match {field} of the "
                    f"same param in process 0: {wanted}"
                )
                break


@torch.no_grad()
def broadcast_coalesced(tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int) -> None:
    """Overwrite ``tensors`` on every rank of ``group`` with group rank ``source``'s.

    Tensors of one device are sent together as bytes, with two messages in flight: at most 250 MiB of one dtype in each,
    or 1 MiB of several. Frozen tensors that answer operations themselves are left as they are: see ``answers_itself``.
    Autograd does not see the write, so tensors saved for a pending backward pass stay valid.
    """
    in_flight: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
    for chunk in _chunks([tensor for tensor in tensors if tensor.requires_grad or not answers_itself(tensor)]):
        if len(in_flight) == MESSAGES_IN_FLIGHT:
            _unpack(*in_flight.pop(0))
        parts = [flatten(same).resolve_conj().resolve_neg().view(torch.uint8) for same in _by_dtype(chunk)]
        message = parts[0] if len(parts) == 1 else torch.cat(parts)
        in_flight.append((broadcast(group, message, source), message, chunk))
    for sent in in_flight:
        _unpack(*sent)


def answers_itself(tensor: Tensor) -> bool:
    """Return True for a subclass with a ``__torch_dispatch__`` of its own, such as weights quantised to codes.

    It may have no memory that could be sent as bytes, and may refuse to be flattened, viewed or overwritten.
    """
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _chunks(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split into messages; in each, the widest types come first, so that all of them stay aligned."""
    chunks: list[list[Tensor]] = []
    nbytes = 0
    devices = list(
        dict.fromkeys(tensor.device for tensor in tensors)
    )  # by first appearance: numbers may differ between ranks
    filled = [tensor for tensor in tensors if tensor.numel()]  # PyTorch 2.8 and older unflatten (n, 0) as (0,)
    for tensor in sorted(filled, key=lambda t: (devices.index(t.device), -t.element_size(), str(t.dtype))):
        nbytes += tensor.nbytes
        first = chunks[-1][0] if chunks else tensor
        most = MESSAGE_BYTES if first.dtype == tensor.dtype else JOINED_BYTES
        if not chunks or nbytes > most or first.device != tensor.device:
            chunks.append([])
            nbytes = tensor.nbytes
        chunks[-1].append(tensor.data)  # .data has its own version counter: autograd sees no write
    return chunks


def _by_dtype(chunk: list[Tensor]) -> list[list[Tensor]]:
    return [list(same) for _, same in itertools.groupby(chunk, key=lambda tensor: tensor.dtype)]


def _unpack(work: dist.Work, message: Tensor, chunk: list[Tensor]) -> None:
    finish(work)
    start = 0
    for same in _by_dtype(chunk):
        end = start + sum(tensor.nbytes for tensor in same)
        parts = list(unflatten(message[start:end].view(same[0].dtype), same))
        if any(tensor.is_conj() or tensor.is_neg() for tensor in same):  # _foreach_copy_ refuses such views
            for tensor, part in zip(same, parts, strict=True):
                tensor.copy_(part)
        else:
            torch._foreach_copy_(same, parts)
        start = end
