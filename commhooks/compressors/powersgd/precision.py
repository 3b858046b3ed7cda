"""Products in full fp32, even if PyTorch is allowed to use fewer digits.

With `torch.set_float32_matmul_precision("high")`, products on CUDA round their operands to TF32, 11 significant bits;
with "medium", products on some CPUs round to bf16, 8 bits. A low-rank compressor can afford that in the factors that it
sends: their error stays in the residual. It cannot afford it in the products that compute the sent part, since no
residual holds their error. The setting belongs to the whole process, and a backward pass may be running under it, so it
is not changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commhooks.devices import matmul_settings

_LEADING = -(1 << 16)  # sign, exponent and the first 8 significant bits of an fp32 number, as bf16 has them


def in_full(P: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """Return matrices with the product of `P` n×r and `Q` r×m, or batches, in fp32 whatever precision is set.

    They are `P` and `Q` themselves if no precision would be lost. Otherwise each is split into three parts of 8
    significant bits, which TF32 and bf16 hold exactly, and all pairs of parts are placed side by side: n×9r and
    9r×m.
    """
    if not is_reduced(P):
        return P, Q
    left, right = _parts(P), _parts(Q)
    return torch.cat([part for part in left for _ in right], dim=-1), torch.cat([*right] * len(left), dim=-2)


def is_reduced(like: Tensor) -> bool:
    """Return whether products of matrices like this one may be computed with reduced precision."""
    if like.dtype != torch.float32:
        return False
    settings = matmul_settings(like)
    if not hasattr(settings, "fp32_precision"):  # before PyTorch 2.9
        return torch.get_float32_matmul_precision() != "highest"
    return settings.fp32_precision not in ("ieee", "none")


def _parts(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split numbers into three parts that add up to them exactly, each of at most 8 significant bits."""
    first = _leading(matrix)
    rest = matrix - first
    second = _leading(rest)
    return first, second, rest - second


def _leading(matrix: Tensor) -> Tensor:
    return (matrix.view(torch.int32) & _LEADING).view(matrix.dtype)
