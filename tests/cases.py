"""THE table of compressors. One row buys every law in tests/commhooks/test_laws.py."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from commhooks import Compressor, make_compressor

Formula = Callable[[Sequence[Tensor]], int]


def dense_bytes(parameters: Sequence[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def cast_bytes(parameters: Sequence[Tensor]) -> int:
    return sum(p.numel() * 2 for p in parameters)


def powersgd_bytes(rank: int, rate: float = 2.0, itemsize: int | None = None) -> Formula:
    """(n + m)·r for a matrix that this makes `rate` times smaller; everything else as it is; at least fp32."""

    def formula(parameters: Sequence[Tensor]) -> int:
        total = 0
        matrices = False
        for p in parameters:
            elements = p.numel()
            if p.dim() >= 2 and elements:
                n, m = p.shape[0], elements // p.shape[0]
                factors = (n + m) * min(n, m, rank)
                if factors * rate < elements:
                    elements, matrices = factors, True
            total += elements
        own = parameters[0].element_size()
        width = itemsize or (max(own, 4) if matrices else own)
        return total * min(width, own if not matrices else width)

    return formula


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a compressor, and which laws it claims."""

    name: str
    make: Callable[[], Compressor]
    bytes_on_wire: Formula
    """Payload bytes of a step, over the parameters of one bucket."""
    smaller_than_dense: bool = True
    exchanges: bool = True
    """Ranks end with the same mean."""
    exact_rank: int | None = None
    """Comes back exactly: matrices of at most this rank; None: whatever the wire can hold."""
    tolerance: float = 1e-5
    """Of a mean that can be represented, relative to the largest element."""
    warm: bool = True
    """Finds a better answer in a second step on the same data."""
    error_feedback: bool = False
    """Keeps what it did not send, in the state "residual"."""
    lossless: bool = False
    """The mean of any gradient comes back to `tolerance`."""

    def __str__(self) -> str:
        return self.name


CASES = [
    Case(
        name="all-reduce",
        make=lambda: make_compressor("all-reduce"),
        bytes_on_wire=dense_bytes,
        smaller_than_dense=False,
        lossless=True,
    ),
    Case(name="fp16", make=lambda: make_compressor("fp16"), bytes_on_wire=cast_bytes, tolerance=2e-3, lossless=True),
    Case(name="bf16", make=lambda: make_compressor("bf16"), bytes_on_wire=cast_bytes, tolerance=2e-2, lossless=True),
    Case(
        name="noop",
        make=lambda: make_compressor("noop"),
        bytes_on_wire=lambda parameters: 0,
        exchanges=False,
    ),
    *(
        Case(
            name=f"powersgd-{rank}",
            make=functools.partial(make_compressor, "powersgd", rank=rank),
            bytes_on_wire=powersgd_bytes(rank),
            exact_rank=rank,
            error_feedback=True,
        )
        for rank in (1, 2, 4)
    ),
    Case(
        name="powersgd-2-fp16-wire",
        make=lambda: make_compressor("powersgd", rank=2, wire=torch.float16),
        bytes_on_wire=powersgd_bytes(2, itemsize=2),
        exact_rank=2,
        error_feedback=True,
        tolerance=1e-2,
    ),
    Case(
        name="powersgd-2-cold-no-feedback",
        make=lambda: make_compressor("powersgd", rank=2, warm_start=False, error_feedback=False),
        bytes_on_wire=powersgd_bytes(2),
        exact_rank=2,
        warm=False,
    ),
]

BY_NAME = {case.name: case for case in CASES}
