"""The models of the ranks' GPUs, whose products of matrices differ in the last bits; compared when ranks meet.

On a CPU there is nothing to compare: what all ranks must have alike has a fixed order there.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from commhooks.communicators.disagreement import ranks_by
from commhooks.devices import model_of

KERNELS_BYTES = 8
"""The size of a digest of kernels."""

_warned: set[str] = set()
"""The warnings given so far: one attachment may open many channels."""


class Kernels(NamedTuple):
    """A rank's part in a comparison of kernels."""

    what: str = ""
    """The computation whose results all ranks must have alike, in words; "": there is none."""
    digest: bytes = bytes(KERNELS_BYTES)
    """The result of `kernels_of` if there is one."""


def kernels_of(device: torch.device) -> bytes:
    """Return a digest of a device's model, of `KERNELS_BYTES` bytes, the same for all CPUs."""
    model = "" if device.type == "cpu" else model_of(device)
    return hashlib.blake2b(model.encode(), digest_size=KERNELS_BYTES).digest()


def warn_of_kernels(of_ranks: Sequence[bytes], what: str) -> None:
    """Warn, once, if ranks have different digests and `what` computes what they must have alike; "": nothing does."""
    apart = list(ranks_by(of_ranks).values())
    if not what or len(apart) == 1:
        return
    told = (
        f"commhooks: the devices of {' and of '.join(apart)} are of different models, whose arithmetic differs in the "
        f"last bits. {what} relies on it for what must be equal on all ranks, so the ranks will drift apart by "
        "roundings. Give all of them one kind of device, or read docs/guide/troubleshooting.md."
    )
    if told not in _warned:
        _warned.add(told)
        warnings.warn(told, stacklevel=2)
