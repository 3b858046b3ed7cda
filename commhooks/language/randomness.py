"""Random numbers that depend only on what they are used for.

Nothing here draws from a global generator, so bucket order, the user's own seeding and resuming a run do not change the
numbers.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from commhooks.devices import copied_to

_SUMMED = 8
_TO_ONE = np.float32(math.sqrt(12 / (_SUMMED * (2**32 - 1))))
"""One over the standard deviation of a sum, as fp32 holds it: the variance is 1 to 1e-7."""


def stable_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that is the same in every process and on every machine for the same parts."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seeded_places(elements: int, count: int, seed: int, like: Tensor) -> Tensor:
    """Return `count` distinct indices below `elements`, uniformly distributed, on the device of `like`.

    They are drawn on the CPU, so that they are the same on every device, and copied without making the host wait. NumPy
    draws without a permutation of all elements: 1 % of 2,359,296 in 0.4 ms instead of the 160 ms of `torch.randperm`.
    """
    places = np.random.Generator(np.random.PCG64(seed)).choice(elements, count, replace=False, shuffle=False)
    return copied_to(like.device, torch.from_numpy(places))


def seeded_normal(shape: tuple[int, ...], seed: int, like: Tensor) -> Tensor:
    """Return nearly normal numbers of mean 0 and variance 1, of the dtype and on the device of `like`.

    Each is a sum of eight uniform numbers of 16 bits, scaled: within 4.9, with a kurtosis of 2.85 instead of 3. Sums of
    integers and one rounded product are the same on every processor, while PyTorch's normal numbers depend on its
    kernels. They are computed on the CPU in fp32, so that they are the same on every device, and copied without making
    the host wait.
    """
    count = math.prod(shape)
    first, *others = np.random.PCG64(seed).random_raw(count * _SUMMED // 4).view(np.uint16).reshape(_SUMMED, count)
    sums = first.astype(np.int32)
    for pieces in others:
        sums += pieces
    sums -= _SUMMED * (2**16 - 1) // 2
    drawn = torch.from_numpy(sums.astype(np.float32) * _TO_ONE).view(shape)
    return copied_to(like.device, drawn).to(like.dtype)
