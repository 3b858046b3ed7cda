"""The last bits of ranks' arithmetic, which differ between processors and libraries; compared when ranks meet."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commhooks.communicators.disagreement import ranks_by
from commhooks.devices import model_of

KERNELS_BYTES = 8
"""The size of a digest of kernels."""
_N = 48

_warned: set[str] = set()
"""The warnings given so far: one attachment may open many lanes."""


class Kernels(NamedTuple):
    """A rank's part in a comparison of kernels."""

    what: str = ""
    """The computation whose results all ranks must have alike, in words; "": there is none."""
    digest: bytes = bytes(KERNELS_BYTES)
    """The result of `kernels_of` if there is one."""


def kernels_of(device: torch.device | None) -> bytes:
    """Return a digest of what a device's kernels compute, of `KERNELS_BYTES` bytes; None: the CPU.

    On the CPU that is a small fixed computation, which takes about a millisecond, once in a process for each precision
    that the user asks of products. On a GPU, where it would load libraries, it is the model's name.
    """
    if device is None or device.type == "cpu":
        return _of_cpu(_precision_of_products())
    return _digest(model_of(device).encode())


def _precision_of_products() -> str:
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if hasattr(matmul, "fp32_precision"):
        return str(matmul.fp32_precision)
    return torch.get_float32_matmul_precision()  # before PyTorch 2.9


@functools.cache
def _of_cpu(_precision: str) -> bytes:
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        generator = torch.Generator("cpu").manual_seed(0)
        drawn = torch.randn(_N, _N, generator=generator, dtype=torch.float32, device="cpu")
        numbers = torch.arange(_N * _N, dtype=torch.float64, device="cpu").view(_N, _N)
        M = ((numbers * 0.7390851).frac() - 0.5).float()
        basis, triangle = torch.linalg.qr(M[:16, :4])
        added = torch.add(M, M.t(), alpha=0.3)  # with or without a fused multiply-add
        computed = [drawn, M @ M, M @ M[0], basis, triangle, added, M.abs().sqrt()]
        return _digest(b"".join(map(_bytes_of, computed)))


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().numpy().tobytes())


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KERNELS_BYTES).digest()


def warn_of_kernels(of_ranks: Sequence[bytes], what: str) -> None:
    """Warn, once, if ranks have different digests and `what` computes what they must have alike; "": nothing does."""
    apart = list(ranks_by(of_ranks).values())
    if not what or len(apart) == 1:
        return
    told = (
        f"commhooks: the arithmetic of {' and of '.join(apart)} differs in the last bits, as that of other processors, "
        f"libraries or threads does. {what} relies on it for what must be equal on all ranks, so the ranks will drift "
        "apart by roundings. Give all of them one kind of processor and the same libraries, or read "
        "docs/guide/questions.md."
    )
    if told not in _warned:
        _warned.add(told)
        warnings.warn(told, stacklevel=2)
