"""The largest elements of rows and of tiles, as `torch.topk` finds them, in less time; and four bins for values."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from commhooks.compressors.tiles import Tiling
from commhooks.devices import runs_later
from commhooks.native.largest import MOST, SparseKernels
from commhooks.tensors import has_numpy

_HEIGHT = 8
_WORTH_IT = 8192
"""The number of elements per row from which on two calls of `torch.topk` take less time than one."""
_PARTITION = 1 << 15
"""The number of elements in all from which on NumPy's partition takes less time than `torch.topk`."""
_AT_ONCE = 1 << 18
"""The number of elements of short rows to search at a time on a CPU, so that they and their magnitudes stay in its
cache.
"""
_AT_ONCE_ON_GPU = 1 << 26
"""The same on a GPU, so that magnitudes take little memory."""


def largest(rows: Tensor, k: int) -> Tensor:
    """Return the indices B×k of the k largest magnitudes in each row of B×n, in any order; NaN counts as largest.

    They are int64 or, if a compiled search has found them, int32.

    A row is arranged as an array of 8 lines. The columns with the k largest maxima contain all k elements, so only
    these are searched. If the columns are many, the whole row is searched at once.
    On a CPU, fp32 magnitudes are partitioned as integers, by NumPy: whatever the values, that takes a quarter of the
    time of `torch.topk` for k = 1 % of rows of 4,096 (one thread of an Intel Xeon with AVX-512, NumPy 2.4, PyTorch
    2.13), and it leaves a maximum's NaN unchanged, while PyTorch may set its sign bit.
    """
    native = SparseKernels.chosen(rows) if rows.shape[1] <= MOST else None
    if native is not None:
        return native.largest(rows.contiguous(), k)
    at_once = _AT_ONCE_ON_GPU if runs_later(rows) else _AT_ONCE
    if len(rows) > 1 and rows.numel() > at_once:
        return torch.cat([largest(some, k) for some in rows.split(max(1, at_once // rows.shape[1]))])
    as_integers = rows.numel() >= _PARTITION and has_numpy(rows) and rows.dtype == torch.float32
    width = rows.shape[1] // _HEIGHT
    if 4 * k > width or not (as_integers or rows.shape[1] >= _WORTH_IT):
        return _search(_magnitudes(rows, as_integers), k)
    end = width * _HEIGHT
    lines = rows[:, :end].split(width, dim=1)
    maxima = _magnitudes(lines[0], as_integers)
    for line in lines[1:]:
        torch.maximum(maxima, _magnitudes(line, as_integers), out=maxima)
    columns = _search(maxima, k)  # B×k
    starts = torch.arange(0, end, width, dtype=torch.int64, device=rows.device)
    candidates = (columns.unsqueeze(1) + starts.unsqueeze(1)).flatten(1)  # B×8k
    rest = torch.arange(end, rows.shape[1], dtype=torch.int64, device=rows.device).expand(len(rows), -1)
    candidates = torch.cat([candidates, rest], dim=1)
    found = _search(_magnitudes(rows.gather(1, candidates), as_integers), k)
    return candidates.gather(1, found)


def largest_of_tiles(tiling: Tiling, memory: Tensor, k: int) -> Tensor:
    """Return the places [T, k] in their tiles of the k largest magnitudes in each tile of 1-D memory."""
    native = SparseKernels.chosen(memory) if tiling.a * tiling.b <= MOST else None
    if native is not None:
        return native.largest_of_tiles(tiling.sending(k), memory)
    rows, columns = tiling.grid
    height = rows if runs_later(memory) else max(1, _AT_ONCE // (columns * tiling.a * tiling.b))
    found = [largest(band.flatten(1), k) for band in tiling.bands(memory, height)]
    return found[0] if len(found) == 1 else torch.cat(found)


def four_bins(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return each value's bin, and the means [4] of the bins, not finite if a value is not.

    A bin is 1 if the magnitude is above the mean magnitude, plus 2 if the value is negative.
    """
    native = SparseKernels.chosen(values)
    if native is not None:
        return native.bins(values)
    shrunk = torch.where(values.abs().amax() > 2**60, 2.0**-60, 1.0)  # no sum of values overflows
    values = values * shrunk
    bins = 2 * (values < 0).int() + (values.abs() > values.abs().mean())
    members = bins == torch.arange(4, dtype=torch.int64, device=bins.device).unsqueeze(1)  # 4×k
    means = torch.where(members, values, 0.0).sum(1) / members.sum(1).clamp_(min=1)
    return bins, means / shrunk


def _magnitudes(rows: Tensor, as_integers: bool) -> Tensor:
    """Return magnitudes, or integers in the same order, with NaN the largest."""
    return rows.abs().view(torch.int32) if as_integers else rows.abs()


def _search(magnitudes: Tensor, k: int) -> Tensor:
    """Return the indices B×k of the largest, in any order."""
    if magnitudes.dtype != torch.int32:
        return torch.topk(magnitudes, k, sorted=False).indices
    # No two keys are equal, so equal magnitudes take no longer than others.
    keys = np.left_shift(magnitudes.numpy(), 32, dtype=np.int64)
    keys |= np.arange(keys.shape[1])
    keys.partition(keys.shape[1] - k, axis=1)
    return torch.from_numpy(keys[:, -k:] & 0xFFFFFFFF)
