"""Small non-negative integers as a stream of bits, packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack integers below 2**bits, of any shape, consecutively into as few bytes as possible, 1-D."""
    places = torch.arange(bits, dtype=torch.int32, device=numbers.device)
    stream = (numbers.reshape(-1, 1).int() >> places) & 1
    stream = pad(stream.view(-1), (0, -stream.numel() % 8)).view(-1, 8)
    return (stream << torch.arange(8, device=numbers.device)).sum(1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """Unpack the integers of a shape that `pack` packed, [..., bytes], to int64 [..., *shape]."""
    stream = (packed.unsqueeze(-1) >> torch.arange(8, device=packed.device).to(torch.uint8)) & 1
    numbers = torch.Size(shape).numel()
    stream = stream.flatten(-2)[..., : numbers * bits].reshape(*packed.shape[:-1], *shape, bits)
    return (stream.long() << torch.arange(bits, device=packed.device)).sum(-1)
