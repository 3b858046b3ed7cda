"""PowerSGD's compiled passes over many matrices in one call each, and its bases, in fp32 on a CPU.

All results are the same, bit for bit, at every level and with any number of threads. Products of factors add up
p0·q0 + p1·q1 + ... from left to right, each operation rounded: the sequence of `mul`, then `mul` and `add_`.

Legend: M n×m a gradient plus its residual; P r×n and Q r×m its factors, both kept transposed; r the rank; k the number
of matrices in a group, which have one shape and one rank, and factors in one batch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.errors import CompressorError
from commhooks.native import library
from commhooks.native.passes import over_threads, unsuited

MOST_RANK = 8
"""The highest rank for which there are passes."""
_MATRIX = struct.Struct("5q3P")
_LEFT = struct.Struct("Pq4Pqd")
_RIGHT = struct.Struct("Pq2P")
_FINISH = struct.Struct("Pq3Pq")
_BATCH = struct.Struct("3q2P")
_ORTHONORMAL = struct.Struct("Pqd")
_BASES = struct.Struct("3q2Pq")
_KEEP = struct.Struct("Pq")
"""The structs in low_rank.h and orthonormal.h."""


class MatrixMemory(NamedTuple):
    """The memory of a matrix n×m, or of several, k×n×m: contiguous, in fp32, on a CPU."""

    gradient: Tensor
    """M takes its place when it is formed."""
    residual: Tensor | None
    mean: Tensor
    """The memory for the mean, which may be the gradient's."""


class MatrixGroup(NamedTuple):
    """Matrices of one shape and one rank, in the order of their factors."""

    r: int
    matrices: Sequence[MatrixMemory]


class Probes(NamedTuple):
    """One more direction for each group, and each M times it."""

    directions: Sequence[Tensor]
    """Of each group [m]."""
    shown: Sequence[Tensor]
    """Of each group k×n."""


def level_for(memory: Tensor, rank: int = 1) -> str | None:
    """Return the level of the passes for memory of this kind and a rank, or None if they run eagerly.

    Raises `SettingsError` as `commhooks.native.compiled` does.
    """
    if type(memory) is not Tensor or not memory.is_cpu or memory.dtype is not torch.float32 or rank > MOST_RANK:
        return None
    return library.chosen()


class LowRankKernels:
    """The passes over a list of groups, at one level.

    Memory is checked once, and must stay where it is, and so are factors in a tuple; those in a list are checked in
    each call. Of each group, they are one contiguous tensor k×r×n or k×r×m. Raises `CompressorError` for tensors that
    are not as they say, before anything is written.
    """

    def __init__(self, level: str, groups: Sequence[MatrixGroup]) -> None:
        self.level = level
        self._groups = groups  # whose memory stays alive
        self._checked: dict[tuple[int, int], tuple[Sequence[Tensor], ctypes.Array[ctypes.c_char]]] = {}
        self._shapes: list[tuple[int, int, int, int]] = []
        packed: list[bytes] = []
        self._elements = 0
        for number, (r, matrices) in enumerate(groups):
            n, m = matrices[0].gradient.shape[-2:]
            if not 1 <= r <= MOST_RANK:
                raise CompressorError(f"compiled passes need a rank from 1 to {MOST_RANK} (got {r}).")
            k = 0
            for memory in matrices:
                size, addresses = _addresses(memory, n, m)
                for at in range(size):
                    moved = (address and address + at * n * m * 4 for address in addresses)
                    packed.append(_MATRIX.pack(n, m, r, number, k + at, *moved))
                k += size
            self._shapes.append((k, r, n, m))
            self._elements += k * n * m
        self._number = len(packed)
        self._packed = ctypes.create_string_buffer(b"".join(packed), self._number * _MATRIX.size)
        self._matrices = ctypes.addressof(self._packed), self._number

    def left(
        self,
        Q: Sequence[Tensor],
        P: Sequence[Tensor],
        *,
        decay: float = 1.0,
        forms: bool = True,
        probes: Probes | None = None,
    ) -> None:
        """Form M = gradient + decay · residual in the gradient's memory, if it `forms`, and compute P = M·Qᵀ.

        With probes, also each M times its group's direction, in the same read.
        """
        addresses = [self._of_groups("Q", Q, 3), self._of_groups("P", P, 2), None, None]
        if probes is not None:
            for tensor, (*_, m) in zip(probes.directions, self._shapes, strict=True):
                _check("a direction", tensor, (m,))
            for tensor, (k, _, n, _) in zip(probes.shown, self._shapes, strict=True):
                _check("the product with a direction", tensor, (k, n))
            addresses[2:] = [_array([tensor.data_ptr() for tensor in of]) for of in probes]
        packed = _LEFT.pack(*self._matrices, *map(_address, addresses), forms, decay)
        self._run("low_rank_left", packed)

    def right(self, P: Sequence[Tensor], Q: Sequence[Tensor]) -> None:
        """Compute Q = P·M; M must be formed."""
        addresses = self._of_groups("P", P, 2), self._of_groups("Q", Q, 3)
        self._run("low_rank_right", _RIGHT.pack(*self._matrices, *map(_address, addresses)))

    def finish(
        self, P: Sequence[Tensor], sent: Sequence[Tensor], means: Sequence[Tensor], *, keeps: bool = True
    ) -> None:
        """Write the means P·Q of the mean Q and, if it `keeps` them, residuals M - P·Q of this rank's Q, `sent`.

        M must be formed if any residual is to be kept.
        """
        addresses = [
            self._of_groups("P", P, 2),
            self._of_groups("sent", sent, 3),
            self._of_groups("means", means, 3),
        ]
        self._run("low_rank_finish", _FINISH.pack(*self._matrices, *map(_address, addresses), keeps))

    def _of_groups(self, name: str, factors: Sequence[Tensor], width: int) -> ctypes.Array[ctypes.c_char]:
        """Return the addresses of the factors of all groups; a tuple that comes again is not checked again."""
        known, array = self._checked.get((id(factors), width), (None, None))
        if array is None or known is not factors:
            for factor, shape in zip(factors, self._shapes, strict=True):
                _check(name, factor, (shape[0], shape[1], shape[width]))
            array = _array([factor.data_ptr() for factor in factors])
            if isinstance(factors, tuple):
                self._checked[id(factors), width] = factors, array
        return array

    def _run(self, name: str, packed: bytes) -> None:
        worst, _ = over_threads(name, self.level, self._elements, 1, packed)
        assert worst == 0, f"{name} has no such rank: {self._shapes}"


def orthonormalize(level: str, P: Sequence[Tensor], to: Sequence[Tensor], epsilon: float = 0.0) -> None:
    """Make orthonormal rows, in `to`, of the matrices P of each group k×r×n, r ≤ n; `to` may be P. Any rank is taken.

    Householder reflections in double, in one fixed order (orthonormal.h), so that the result depends on P alone. Rows
    of zeros, or that depend on others, are replaced by arbitrary ones. A row with an inf or a NaN, and those after it,
    are NaN. With `epsilon`, a row is multiplied by d / (d + epsilon), where d is the norm of what is not in the span
    of the rows before it.
    """
    packed = []
    for matrices, results in zip(P, to, strict=True):
        k, r, n = matrices.shape
        if not 1 <= r <= n:
            raise unsuited("P", matrices, "[k, r, n] with r ≤ n")
        _check("P", matrices, (k, r, n))
        _check("to", results, (k, r, n))
        packed.append(_BATCH.pack(k, r, n, matrices.data_ptr(), results.data_ptr()))
    batches = _array_of(packed)
    elements = sum(matrices.numel() for matrices in P)
    arguments = _ORTHONORMAL.pack(ctypes.addressof(batches), len(packed), epsilon)
    worst, _ = over_threads("orthonormal", level, elements, 1, arguments)
    if worst:
        raise MemoryError(f"orthonormal rows of {max(matrices.shape[2] for matrices in P)} elements")


def keep_scaled(level: str, kept: Sequence[Sequence[Tensor]], means: Sequence[Tensor]) -> None:
    """Overwrite rows of bases by those of each group's means, K×r×m, scaled to a largest magnitude of 1.

    Rows of zeros, and rows with a NaN, leave the old row. Of each group, `kept` are K matrices in tensors k×r×m, whose
    matrices may be apart in memory.
    """
    packed = []
    for of_group, mean in zip(kept, means, strict=True):
        of_all, r, m = mean.shape
        _check("means", mean, (of_all, r, m))
        first = 0
        for bases in of_group:
            k = len(bases)
            is_suited = bases.dtype is torch.float32 and bases.is_cpu and bases.shape == (k, r, m) and k > 0
            if not is_suited or not bases[0].is_contiguous():
                raise unsuited("kept", bases, f"[k, {r}, {m}], each matrix contiguous, of torch.float32")
            packed.append(_BASES.pack(k, r, m, mean.data_ptr() + first * r * m * 4, bases.data_ptr(), bases.stride(0)))
            first += k
        if first != of_all:
            raise CompressorError(f"means of {of_all} matrices need as many bases to be kept in (got {first}).")
    array = _array_of(packed)
    elements = sum(mean.numel() for mean in means)
    over_threads("keep", level, elements, 1, _KEEP.pack(ctypes.addressof(array), len(packed)))


def _addresses(memory: MatrixMemory, n: int, m: int) -> tuple[int, tuple[int, ...]]:
    """Return the number of matrices, and where the first's gradient, residual and mean are; 0 for no residual."""
    shape = memory.gradient.shape
    if len(shape) not in (2, 3) or shape[-2:] != (n, m):
        raise unsuited("a gradient", memory.gradient, f"[{n}, {m}] or [k, {n}, {m}], as its group's first")
    for name, tensor in zip(("a gradient", "a residual", "a mean"), memory, strict=True):
        if tensor is not None:
            _check(name, tensor, tuple(shape))
    size = shape[0] if len(shape) == 3 else 1
    return size, tuple(0 if tensor is None else tensor.data_ptr() for tensor in memory)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype is not torch.float32 or not tensor.is_cpu or tensor.shape != shape or not tensor.is_contiguous():
        raise unsuited(name, tensor, f"{list(shape)}, contiguous, of torch.float32")


def _array(addresses: list[int]) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(struct.pack(f"{len(addresses)}P", *addresses), len(addresses) * 8)


def _array_of(packed: list[bytes]) -> ctypes.Array[ctypes.c_char]:
    joined = b"".join(packed)
    return ctypes.create_string_buffer(joined, len(joined))


def _address(array: ctypes.Array[ctypes.c_char] | None) -> int:
    return 0 if array is None else ctypes.addressof(array)
