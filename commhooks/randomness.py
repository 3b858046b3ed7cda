"""Random numbers that depend on what they are for, and on nothing else.

Nothing here draws from a global generator, so neither bucket order, nor the user's own seeding, nor a resume changes
them.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def stable_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that is the same in every process and on every machine for the same parts."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seeded_normal(shape: tuple[int, ...], seed: int, like: Tensor) -> Tensor:
    """Return standard normal numbers, drawn on the CPU in fp32 and moved to the dtype and device of `like`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(like)
