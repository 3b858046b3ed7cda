"""The compiled passes of a code in two hops: send, serve and write, over blocks of fp32 elements on a CPU.

A code of k blocks is one or two payloads: scales in fp32 (of MXFP4: exponents, one byte per 32 elements; a vote has
none), and bytes. A message of them is a tensor [W, b, ...] per payload, for W ranks and b rows.
"""

from __future__ import annotations

import array
import ctypes
import dataclasses
import functools
import itertools
import os
import struct
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.errors import CompressorError, SettingsError
from commhooks.native import library

_AT_LEAST = 1 << 16
"""The least number of elements for a thread; fewer are done before another thread has started."""
_FLOATS, _BYTES, _SHORTS = {torch.float32}, {torch.int8, torch.uint8}, {torch.int16, torch.uint16}
_SHIFTS = {torch.int64, torch.int32, *_SHORTS}
_FORM, _PAYLOADS, _ROWS, _NOISE = "qqqd", "PqqPqq", "Pqqq", "PqPPq"
_SEND = struct.Struct(f"{_FORM}{_PAYLOADS}{_ROWS}P{_NOISE}qP")
_WRITE = struct.Struct(f"{_FORM}{_PAYLOADS}{_ROWS}P")
_SERVE = struct.Struct(f"{_FORM}{_PAYLOADS}q{_PAYLOADS}PP{_NOISE}P")
"""The structs in passes.h. Packed, they take a third of the time that `ctypes` needs for as many arguments."""
_ARGUMENTS = (ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p)
"""The first block, the end of the blocks, and one of these structs, packed."""


@dataclasses.dataclass(frozen=True)
class CodeFormat:
    """A kind of code, for blocks of `block` elements.

    Raises `SettingsError` if there is no such kind, or none for this block and these levels.
    """

    kind: str
    """`"uniform"` (int8, int4, TernGrad), `"qsgd"`, `"sign"`, `"vote"`, `"fp8"`, `"natural"` or `"mxfp4"`."""
    block: int
    levels: int = 0
    """The largest integer of uniform and QSGD, from 1 to 127; 0 for others."""
    packed: tuple[int, int, int] = dataclasses.field(init=False, repr=False)
    """Kind, levels and block as numbers."""
    payloads: tuple[tuple[Set[torch.dtype], int, int], ...] = dataclasses.field(init=False, repr=False)
    """For each payload, scales first: the possible dtypes, the number of elements per block, and the bytes of one."""

    def __post_init__(self) -> None:
        if self.kind not in library.PASSES:
            raise SettingsError(f"{self!r}: kind must be one of {', '.join(library.PASSES)}.")
        has_levels = self.kind in ("uniform", "qsgd")
        if not (1 <= self.levels <= 127 if has_levels else self.levels == 0):
            raise SettingsError(f"{self!r}: levels must be {'from 1 to 127' if has_levels else '0'}.")
        bits = {"sign": 1, "vote": 1, "mxfp4": 4}.get(self.kind, 8)
        if has_levels:
            bits = next(bits for bits in (2, 4, 8) if 2 * self.levels < 2**bits)
        multiple = 32 if self.kind == "mxfp4" else 8 // bits
        if self.block % multiple or not 0 < self.block < 2**31:
            raise SettingsError(f"{self!r}: block must be a multiple of {multiple}, at least 1 and below 2**31.")
        scales = {"vote": [], "mxfp4": [(_BYTES, self.block // 32, 1)]}.get(self.kind, [(_FLOATS, 1, 4)])
        object.__setattr__(self, "packed", (library.PASSES.index(self.kind), self.levels, self.block))
        object.__setattr__(self, "payloads", (*scales, (_BYTES, self.block * bits // 8, 1)))


class NoiseTable(NamedTuple):
    """Random numbers of k blocks: number j of block i is ((table[rows[i], j] + shifts[i]) mod 2^16 + 1/2) / 2^16."""

    table: Tensor
    """[R, block], int16 or uint16."""
    rows: Tensor
    """[k], int32, from 0 to R - 1."""
    shifts: Tensor
    """[k], int16, uint16, int32 or int64, of which the low 16 bits count."""


class CodeKernels:
    """The three passes of a form of code at one level; decoded values are multiplied by `damping`.

    They raise `CompressorError` for tensors that are not as they say, before anything is written, and for rows that do
    not exist, when some of the blocks may have been changed. Larger runs are divided among `torch.get_num_threads()`
    threads.
    """

    def __init__(self, level: str, form: CodeFormat, damping: float = 1.0) -> None:
        self.level = level
        self.form = form
        self._settings = *form.packed, damping
        self._message: tuple[Sequence[Tensor], tuple[int, ...], Sequence[int]] | None = None

    def send(
        self,
        blocks: Tensor,
        sent: Sequence[Tensor],
        rows: Tensor | None = None,
        noise: NoiseTable | None = None,
        *,
        keeps: bool = True,
        residuals: Sequence[Tensor] = (),
    ) -> int:
        """Encode blocks [k, block] into rows of a message, `sent`, [W, b, ...] for each payload.

        Block i takes row q % b of rank q // b, where q is `rows[i]` (int64 [k]), or i. If `keeps`, what the code leaves
        out takes the place of the blocks: x - decoded · damping. `residuals`, if there are any, hold k blocks together,
        one after another; they are added to the blocks first, get what the code leaves out, and their old values take
        the place of the blocks. Returns the fp32 bits of a vote's largest magnitude,
        which are at least 0x7f800000 if it is inf or NaN; 0 for other codes.
        """
        k = _blocks(self.form, blocks, "blocks")
        (ranks, b), message = self._looked_at(sent)
        segments = _segments(self.form, residuals, k, "residuals")  # C reads it: it must outlive the call
        packed = _SEND.pack(
            *(*self._settings, *message, _rows(rows, k), 0, b, ranks * b),
            *(blocks.data_ptr(), *_noise(self.form, noise, k), keeps, segments.buffer_info()[0] if residuals else 0),
        )
        return self._run("send", noise is not None, k, packed)

    def serve(
        self,
        received: Sequence[Tensor],
        coded: Sequence[Tensor],
        noise: NoiseTable | None = None,
        *,
        error: Tensor | None = None,
        left: Tensor | None = None,
        errors: Sequence[Tensor] = (),
    ) -> None:
        """Encode the means of blocks that all ranks have sent: `received`, [W, k, ...], into `coded`, [k, ...].

        Means are sums in rank order of decoded · damping · s, divided by W · s unless that is 1, where s is the largest
        power of two that is at most 1/W. `error` [k, block] is added to them, and `left` [k, block], which may be
        `error`, becomes what the code leaves out: y - decoded · damping. `errors`, if there are any, are k blocks
        as the residuals of `send`, in place of `error`; `left` then becomes their old values.
        """
        (ranks, k), of_all = _message(self.form, received, 3)
        (rows,), own = _message(self.form, coded, 2)
        if rows != k:
            raise CompressorError(f"coded must have {k} rows (got {rows}).")
        for tensor, name in ((error, "error"), (left, "left")):
            if tensor is not None and _blocks(self.form, tensor, name) != k:
                raise CompressorError(f"{name} must have {k} blocks (got {len(tensor)}).")
        if errors and (left is None or error is not None):
            raise CompressorError("errors take the place of error, and need left for their old values.")
        segments = _segments(self.form, errors, k, "errors")
        addresses = [0 if one is None else one.data_ptr() for one in (error, left)]
        packed = _SERVE.pack(
            *(*self._settings, *of_all, ranks, *own, *addresses, *_noise(self.form, noise, k)),
            segments.buffer_info()[0] if errors else 0,
        )
        self._run("serve", noise is not None, k, packed)

    def write(self, gathered: Sequence[Tensor], blocks: Tensor, rows: Tensor | None = None) -> None:
        """Decode rows of a message, `gathered`, [W, b, ...], into blocks [k, block]: decoded · damping.

        Rows are those of `send`.
        """
        k = _blocks(self.form, blocks, "blocks")
        (ranks, b), message = self._looked_at(gathered)
        packed = _WRITE.pack(*self._settings, *message, _rows(rows, k), 0, b, ranks * b, blocks.data_ptr())
        self._run("write", False, k, packed)

    def _looked_at(self, payloads: Sequence[Tensor]) -> tuple[tuple[int, ...], Sequence[int]]:
        """Return the shape and the arguments of a message [W, b, ...], which is checked once for many passes."""
        if self._message is None or self._message[0] is not payloads:
            self._message = payloads, *_message(self.form, payloads, 3)
        return self._message[1:]

    def _run(self, name: str, draws: bool, k: int, packed: bytes) -> int:
        """Call a function for k blocks, and return the largest result; passes.h has the numbers of errors."""
        worst, result = over_threads(name, self.level, k, self.form.block, packed)
        if worst >= 0:
            return result
        if worst == -1:
            raise MemoryError(f"a mean of {self.form.block} elements")
        if worst == -2:
            raise CompressorError(f"compiled passes of {self.form!r}: a row is beyond the message's, or the noise's.")
        raise CompressorError(f"compiled passes of {self.form!r} {'take no' if draws else 'need'} noise.")


def _blocks(form: CodeFormat, blocks: Tensor, name: str) -> int:
    """Return the number of blocks. Raises `CompressorError` if they are not [k, block], fp32 and contiguous."""
    if (
        blocks.dtype is not torch.float32
        or not blocks.is_cpu
        or blocks.dim() != 2
        or blocks.shape[1] != form.block
        or not blocks.is_contiguous()
    ):
        raise unsuited(name, blocks, f"[k, {form.block}], contiguous, of torch.float32")
    return blocks.shape[0]


def _segments(form: CodeFormat, state: Sequence[Tensor], k: int, name: str) -> array.array[int]:
    """Return the segments (passes.h) of tensors that hold k blocks together, if there are any tensors."""
    found, end = array.array("q"), 0
    for tensor in state:
        first, (blocks, beyond) = end, divmod(tensor.numel(), form.block)
        end += blocks
        if beyond or tensor.dtype is not torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
            raise unsuited(name, tensor, f"whole blocks of {form.block}, contiguous, of torch.float32")
        found.extend((end, tensor.data_ptr() - first * form.block * tensor.element_size()))
    if state and end != k:
        raise CompressorError(f"{name} must have {k} blocks (got {end}).")
    return found


def _rows(rows: Tensor | None, k: int) -> int:
    if rows is None:
        return 0
    if rows.dtype is not torch.int64 or not rows.is_cpu or rows.shape != (k,) or not rows.is_contiguous():
        raise unsuited("rows", rows, f"[{k}], contiguous, of torch.int64")
    return rows.data_ptr()


def _message(form: CodeFormat, payloads: Sequence[Tensor], dim: int) -> tuple[tuple[int, ...], list[int]]:
    """Return the dimensions before the last, and the addresses of scales and bytes, each with two strides in bytes.

    The dimensions are ranks, if there are three, and rows; the strides too. Without scales their numbers are 0.
    """
    if len(payloads) != len(form.payloads):
        raise CompressorError(f"a code of {form!r} has {len(form.payloads)} payloads (got {len(payloads)}).")
    before = tuple(payloads[0].shape[:-1])
    arguments = [] if len(payloads) == 2 else [0, 0, 0]
    for payload, (dtypes, width, size) in zip(payloads, form.payloads, strict=True):
        if (
            payload.dtype not in dtypes
            or not payload.is_cpu
            or payload.dim() != dim
            or payload.shape != (*before, width)
            or (width > 1 and payload.stride(-1) != 1)
        ):
            shape = [*before, width] if len(before) == dim - 1 else ["W", "b", width][-dim:]
            raise unsuited("a payload", payload, f"[{', '.join(map(str, shape))}], of {_in_words(dtypes)}")
        strides = payload.stride()
        arguments += (payload.data_ptr(), strides[0] * size if dim == 3 else 0, strides[-2] * size)
    return before, arguments


def _noise(form: CodeFormat, noise: NoiseTable | None, k: int) -> tuple[int, ...]:
    """Return the addresses, the number of rows of the table, and the bytes from shift to shift; zeros for no noise."""
    if noise is None:
        return 0, 0, 0, 0, 0
    table, rows, shifts = noise
    if (
        table.dtype not in _SHORTS
        or not table.is_cpu
        or table.dim() != 2
        or table.shape[1] != form.block
        or not table.is_contiguous()
    ):
        raise unsuited("the noise's table", table, f"[R, {form.block}], contiguous, of {_in_words(_SHORTS)}")
    if rows.dtype is not torch.int32 or not rows.is_cpu or not rows.is_contiguous() or rows.shape != (k,):
        raise unsuited("the noise's rows", rows, f"[{k}], contiguous, of torch.int32")
    if shifts.dtype not in _SHIFTS or not shifts.is_cpu or shifts.shape != (k,):
        raise unsuited("the noise's shifts", shifts, f"[{k}], of {_in_words(_SHIFTS)}")
    (step,), size = shifts.stride(), shifts.element_size()
    return table.data_ptr(), table.shape[0], rows.data_ptr(), shifts.data_ptr(), step * size


def unsuited(name: str, tensor: Tensor, expected: str) -> CompressorError:
    """Return the error for a tensor that a function does not take."""
    return CompressorError(
        f"compiled passes need {name} on a CPU, {expected} (got {list(tensor.shape)} with strides "
        f"{list(tensor.stride())}, of {tensor.dtype}, on {tensor.device})."
    )


def _in_words(dtypes: Set[torch.dtype]) -> str:
    return " or ".join(sorted(map(str, dtypes)))


def over_threads(name: str, level: str, k: int, elements: int, packed: bytes) -> tuple[int, int]:
    """Call a function for k blocks of `elements`, on as many threads as pay; return the extreme results."""
    call = library.function(name, level, _ARGUMENTS)
    threads = torch.get_num_threads()
    pieces = min(threads, k * elements // _AT_LEAST)
    if pieces < 2:
        result = call(0, k, packed)
        return result, result
    pool = _pool(threads)
    ends = [k * piece // pieces for piece in range(pieces + 1)]
    running = [pool.submit(call, start, end, packed) for start, end in itertools.pairwise(ends)]
    results = [one.result() for one in running]
    return min(results), max(results)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="commhooks passes")


if hasattr(os, "register_at_fork"):  # a child has the pool, but not its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
