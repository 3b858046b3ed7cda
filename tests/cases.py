"""THE table of compressors. One row buys every law in tests/commhooks/test_laws.py."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks import Compressor, Hierarchical, PerParameter, make_compressor
from commhooks.language.entries import blocks_served
from commhooks.testing import Claims
from tests.formulas_low_rank import AccordionBytes, AdaptiveRankBytes, GatheredFactorsBytes, SketchBytes, matrices_of
from tests.formulas_sparse import DeMoBytes, GatheredBytes, SparseLoCoBytes, SummedBytes
from tests.tiers import THOROUGH, rows

Formula = Callable[[Sequence[Tensor], int, int], int]
"""From the parameters of one bucket (called layer0, layer1, ...), the step, and the number of ranks, to the payload
bytes of that step."""


def dense_bytes(parameters: Sequence[Tensor], step: int, world_size: int) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def cast_bytes(parameters: Sequence[Tensor], step: int, world_size: int) -> int:
    return sum(p.numel() * 2 for p in parameters)


def affine_bytes(parameters: Sequence[Tensor], step: int, world_size: int) -> int:
    """Count a byte an element, and two numbers of at least 4 bytes for each 32 of the bucket."""
    elements, width = sum(p.numel() for p in parameters), max(parameters[0].element_size(), 4)
    return _round_up(elements + 2 * width * -(-elements // 32), width)


def no_bytes(parameters: Sequence[Tensor], step: int, world_size: int) -> int:
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankBytes:
    """(n + m)·r a pair of factors for each matrix that this makes `rate` times smaller; the rest whole; at least fp32.

    A parameter is a stack of matrices if that sends less than its first dimension against the rest.
    """

    rank: int
    rate: float = 2.0
    itemsize: int | None = None
    alternating: bool = False
    pairs: int = 1
    square: bool = False

    def __call__(self, parameters: Sequence[Tensor], step: int, world_size: int) -> int:
        compressed = [self._factors(p) for p in parameters]
        own = parameters[0].element_size()
        width = max(own, 4) if any(compressed) else own
        elements = 0
        for parameter, factors in zip(parameters, compressed, strict=True):
            if not factors:
                elements += parameter.numel()
            else:
                elements += factors[step % 2] if self.alternating else sum(factors) * self.pairs
        return elements * min(width, self.itemsize or width)

    def _factors(self, parameter: Tensor) -> tuple[int, int] | None:
        """Return the elements of both factors, or None for what is not compressed."""
        elements, shape, k = parameter.numel(), parameter.shape, 1
        if len(shape) < 2 or elements == 0:
            return None
        if self.square:
            splits = (math.prod(shape[:split]) for split in range(1, len(shape)))
            n = min(splits, key=lambda n: n + elements // n)
            m = elements // n
        else:
            k, n, m = matrices_of(parameter)
        r = min(n, m, self.rank)
        factors = k * n * r, k * m * r
        return factors if sum(factors) * self.pairs * self.rate < elements else None


def whole_bucket_bytes(parameters: Sequence[Tensor], step: int, world_size: int) -> int:
    """One matrix of any width from 7/8 of the square root up to it: the one with the fewest factors and left-overs."""
    elements, own = sum(p.numel() for p in parameters), parameters[0].element_size()
    root = math.isqrt(elements)
    sent = {w: (elements // w + w) * min(2, w, elements // w) for w in range(max(1, root - root // 8), root + 1)}
    width = min(sent, key=lambda w: (elements // w + w) * 2 + elements % w, default=0)
    if not elements or sent[width] * 2 >= elements // width * width:
        return elements * own
    return (sent[width] + elements % width) * max(own, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoHopBytes:
    """Codes of the blocks that every rank serves, to every rank and from one; the rest in 4 bytes an element.

    The blocks of a parameter that alone would send more that way than in fp32 belong to the rest.
    """

    block: int
    bits: int
    scales: int | None = None
    """Bytes of a block's scales; None: `numbers` scales as wide as the elements are computed in."""
    numbers: int = 1
    unit: int = 1
    """Of what the code is made of, in bytes, if that is more than one and its scales are not wider: messages are filled
    up to that."""
    flaw: int = 0
    """Bytes that tell of an inf which the code cannot show, of a bucket with blocks."""
    names: Sequence[str] = ()
    """The parameters' names, if they are not called layer0, layer1, ...: a name decides which rank serves first."""

    def __call__(self, parameters: Sequence[Tensor], step: int, world_size: int) -> int:
        width = max(parameters[0].element_size(), 4)
        names = self.names or [f"layer{number}" for number in range(len(parameters))]
        blocks = {name: self._coded(p, world_size) for name, p in zip(names, parameters, strict=True)}
        rest = sum(p.numel() for p in parameters) - sum(blocks.values()) * self.block
        served = [
            sum(len(blocks_served(*one, rank, world_size)) for one in blocks.items()) for rank in range(world_size)
        ]
        scales, unit = (self.numbers * width, width) if self.scales is None else (self.scales, self.unit)
        row = _round_up(max(served) * (self.block * self.bits // 8 + scales), unit)
        return (world_size + 1) * row + rest * width + self.flaw * any(served)

    def _coded(self, parameter: Tensor, world_size: int) -> int:
        blocks = parameter.numel() // self.block
        code = self.block * self.bits // 8 + (4 * self.numbers if self.scales is None else self.scales)
        coded = (world_size + 1) * math.ceil(blocks / world_size) * code
        return blocks if coded <= 4 * blocks * self.block else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideBySideBytes:
    """The bytes of two compressors, one for the parameters with even numbers, the other for those with odd numbers."""

    even: Formula
    odd: Formula

    def __call__(self, parameters: Sequence[Tensor], step: int, world_size: int) -> int:
        total = 0
        for remainder, formula in enumerate((self.even, self.odd)):
            own = [p if number % 2 == remainder else p.new_empty(0) for number, p in enumerate(parameters)]
            total += formula(own, step, world_size)
        return total


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(Claims):
    """One row: a compressor, and what it claims, some of it by the paper alone."""

    name: str
    make: Callable[[], Compressor]
    bytes_on_wire: Formula
    """Payload bytes of a step, over the parameters of one bucket."""
    at_most: bool = False
    """What is sent depends on the gradients, and `bytes_on_wire` is the most that it may be."""
    smaller_than_dense: bool = True
    collectives: Sequence[int] = (1,)
    """Collectives a bucket, by step, over and over; under "fused", for all of them."""
    travels_as_it_is: bool = False
    """Also under "fused" every bucket has a collective of its own, which copies nothing."""
    exact_rank: int | None = None
    """Comes back exactly: matrices of at most this rank; None: whatever the wire can hold; 0: nothing, in one step, or
    nothing that has a bound: a narrow wire rounds factors, and what that does to their product depends on them."""
    exact_after: int = 0
    """So many steps on the same data come first."""
    rule: str = "stacked"
    """How it makes matrices of gradients."""
    warm: bool = True
    """Finds a better answer in a second step on the same data."""
    owes_as: str = ""
    """The row with the same messages and residuals whose mean is that over all ranks, if this row's is another: then
    mean + residual is not what was to be sent."""
    follows_scale: bool = True
    """Gradients that are twice as large have a mean that is; signs do not."""
    sends_small: bool = True
    """Sends something of every gradient, however small."""
    lossless: bool = False
    """The mean of any gradient comes back, as far as the wire can hold it."""

    def __str__(self) -> str:
        return self.name


def beside(even: Compressor, odd: Compressor) -> Compressor:
    """Return a compressor for the parameters with an even digit, or "conv", in their name beside one for the others."""
    return PerParameter(rules=(("*[02468v]*", even),), otherwise=odd)


def row(name: str, text: str, bytes_on_wire: Formula, **claims: Any) -> Case:
    """Return a row of a compressor as it is written in text."""
    return Case(name=name, make=functools.partial(make_compressor, text), bytes_on_wire=bytes_on_wire, **claims)


def powersgd(name: str, settings: dict[str, Any], bytes_on_wire: Formula, **claims: Any) -> Case:
    """Return a row of PowerSGD: of rank 2, by default, which it finds exactly in two rounds, with error feedback."""
    usual: dict[str, Any] = {"rank": 2, "exact_rank": 2, "collectives": (2,), "error_feedback": True}
    make = functools.partial(make_compressor, "powersgd", **{"rank": 2} | settings)
    return Case(name=f"powersgd-{name}", make=make, bytes_on_wire=bytes_on_wire, **(usual | claims))


def two_hop(name: str, text: str, bytes_on_wire: Formula, **claims: Any) -> Case:
    """Return a row of codes in two hops, by default with error feedback.

    An element is scaled, decoded, added up and subtracted on each hop.
    """
    usual: dict[str, Any] = {"exact_rank": 0, "collectives": (3,), "error_feedback": True}
    usual |= {"roundings": 16} if claims.get("error_feedback", True) else {}
    return row(name, text, bytes_on_wire, **(usual | claims))


def tiled(name: str, text: str, bytes_on_wire: Formula, **claims: Any) -> list[Case]:
    """Return two rows of a compressor of tiles: its mean is over all ranks, or over those that sent an element."""
    usual: dict[str, Any] = {"exact_rank": 0} | claims
    senders = f"{text},mean_over=senders{',clip_to_median=true' if name == 'sparse-loco' else ''}"
    drops = "the mean is over those ranks that sent an element"
    return [
        row(name, text, bytes_on_wire, **usual),
        row(f"{name}-senders", senders, bytes_on_wire, owes_as=name, drops=drops, **usual),
    ]


FED: dict[str, Any] = {"error_feedback": True, "exact_rank": 0}

CASES = [
    row("all-reduce", "all-reduce", dense_bytes, smaller_than_dense=False, travels_as_it_is=True, lossless=True),
    *(
        row(
            f"{name}{'-feedback' * feedback}",
            f"{name}:error_feedback={feedback}",
            cast_bytes,
            wire=wire,
            range=wire if wire is torch.float16 else None,
            lossless=True,
            error_feedback=feedback,
            overshoots=False,
        )
        for feedback in (False, True)
        for name, wire in (("fp16", torch.float16), ("bf16", torch.bfloat16))
    ),
    row("noop", "noop", no_bytes, collectives=(0,), exchanges=False),
    *(powersgd(f"{rank}", {"rank": rank}, LowRankBytes(rank=rank), rank=rank, exact_rank=rank) for rank in (1, 2, 4)),
    powersgd(
        "2-fp16-wire",
        {"wire": torch.float16},
        LowRankBytes(rank=2, itemsize=2),
        wire=torch.float16,
        range=torch.float16,
        exact_rank=0,
    ),
    powersgd(
        "2-cold-no-feedback",
        {"warm_start": False, "error_feedback": False},
        LowRankBytes(rank=2),
        error_feedback=False,
        warm=False,
    ),
    # A step that sends P leaves something, and error feedback turns the next step's rows away from where they were: two
    # steps in a row are exact together, no single one is.
    powersgd(
        "2-alternating",
        {"alternating": True},
        LowRankBytes(rank=2, alternating=True),
        collectives=(1,),
        exact_rank=0,
    ),
    powersgd(
        "2-alternating-no-feedback",
        {"alternating": True, "error_feedback": False},
        LowRankBytes(rank=2, alternating=True),
        collectives=(1,),
        error_feedback=False,
        exact_after=1,
    ),
    powersgd("2-twice", {"iterations": 2}, LowRankBytes(rank=2, pairs=2), collectives=(4,)),
    powersgd("2-square", {"matrices": "most-square"}, LowRankBytes(rank=2, square=True), rule="most-square"),
    powersgd("2-bucket", {"matrices": "whole-bucket"}, whole_bucket_bytes, exact_rank=0, depends_on_buckets=True),
    row(
        "adaptive-rank",
        "adaptive-rank:rank=3,max_rank=5,every=8",
        AdaptiveRankBytes(rank=3, max_rank=5, every=8),
        at_most=True,
        collectives=(2,),
        rank=5,
        exact_rank=2,
        error_feedback=True,
    ),
    row(
        "adaptive-rank-accordion",
        "adaptive-rank:rank=2,max_rank=4,every=3,rule=accordion,eta=1e6",
        AccordionBytes(rank=2, max_rank=4, every=3),
        collectives=(2,),
        rank=4,
        exact_rank=2,
        error_feedback=True,
    ),
    row("powersgd-2-unbiased", "powersgd-unbiased:rank=2", SketchBytes(rank=2), rank=2, exact_rank=0, warm=False),
    row(
        "svd-2",
        "svd:rank=2",
        GatheredFactorsBytes(rank=2),
        rank=2,
        exact_rank=2,
        warm=False,
        error_feedback=True,
    ),
    row("top-k", "top-k:ratio=0.05", GatheredBytes(ratio=0.05), **FED),
    *tiled(
        "sparse-loco",
        "sparse-loco:chunk=16,k=8",
        SparseLoCoBytes(k=8, chunk=16),
        error_feedback=True,
        decay=0.95,
    ),
    # An element of a tile a×b is the product of a row, the coefficients and a column: off by (a + b)·u of the tile's
    # norm for each of the transforms there and back, or for the mean's and what is kept.
    *tiled(
        "demo",
        "demo:chunk=16,k=8",
        DeMoBytes(k=8, chunk=16),
        error_feedback=True,
        decay=0.999,
        roundings=2 * (16 + 16),
    ),
    # What it keeps is not what it did not send: of that it has sent signs, whatever their size.
    *tiled(
        "distro",
        "distro:chunk=16",
        DeMoBytes(k=4, chunk=16, one_bit=True),
        follows_scale=False,
        exempt={"mean": "its mean consists of signs"},
    ),
    row("top-k-bitmap", "top-k:ratio=0.2,indices=bitmap", GatheredBytes(ratio=0.2, indices="bitmap"), **FED),
    row(
        "top-k-all",
        "top-k:ratio=1.0,indices=block-16",
        GatheredBytes(ratio=1.0, indices="block-16"),
        smaller_than_dense=False,
        lossless=True,
    ),
    *(row(name, f"{name}:ratio=0.1", SummedBytes(ratio=0.1), **FED) for name in ("random-k", "random-block")),
    row(
        "threshold",
        "threshold:threshold=2.0,capacity=0.1",
        GatheredBytes(ratio=0.1),
        exempt={"loss": "what is below the threshold is left, and does not grow"},
        sends_small=False,
        **FED,
    ),
    row(
        "dgc",
        "dgc:ratio=0.05,clip=2.0,warm_up=2",
        GatheredBytes(ratio=0.05, ratios=(0.25, math.sqrt(0.25 * 0.05))),
        exact_rank=0,
    ),
    row("random-k-unbiased", "random-k:ratio=0.1,unbiased=true", SummedBytes(ratio=0.1), exact_rank=0),
    row(
        "affine",
        "affine:channel=32,error_feedback=true",
        affine_bytes,
        depends_on_buckets=True,
        roundings=8,
        overshoots=False,
        **FED,
    ),
    # Of the laws' numbers of ranks all are whole machines of one; tests/commhooks/test_hierarchical.py has larger ones.
    Case(
        name="hierarchical-1",
        make=lambda: Hierarchical(inner=make_compressor("top-k", ratio=0.1), size=1),
        bytes_on_wire=GatheredBytes(ratio=0.1),
        **FED,
    ),
    *(
        two_hop(f"two-hop-{name}", f"{name}:block=32", TwoHopBytes(block=32, bits=bits), overshoots=name == "int4")
        for name, bits in (("sign", 1), ("int8", 8), ("int4", 4), ("fp8", 8), ("e3m0", 4))
    ),
    two_hop("two-hop-codebook", "codebook:block=32", TwoHopBytes(block=32, bits=2, numbers=4), overshoots=False),
    # It may lose more than it is given, in the Euclidean norm.
    two_hop("two-hop-int4-wide", "int4:block=480", TwoHopBytes(block=480, bits=4)),
    *(
        two_hop(f"two-hop-{name}", f"{name}:block=32", TwoHopBytes(block=32, bits=bits, scales=1))
        for name, bits in (("mxfp8", 8), ("mxfp4", 4))
    ),
    *(
        two_hop(f"two-hop-{name}", f"{name}:block=32", TwoHopBytes(block=32, bits=bits), error_feedback=False)
        for name, bits in (("qsgd", 8), ("terngrad", 2), ("natural", 8))
    ),
    # Of two compressors side by side each parameter keeps its own kinds of state: blocks of two sizes, and a basis.
    Case(
        name="int8-beside-sign",
        make=lambda: beside(make_compressor("int8", block=32), make_compressor("sign", block=16)),
        bytes_on_wire=SideBySideBytes(even=TwoHopBytes(block=32, bits=8), odd=TwoHopBytes(block=16, bits=1)),
        collectives=(3,),
        roundings=16,
        overshoots=False,
        **FED,
    ),
    Case(
        name="top-k-beside-powersgd",
        make=lambda: beside(make_compressor("top-k", ratio=0.05), make_compressor("powersgd", rank=2)),
        bytes_on_wire=SideBySideBytes(even=GatheredBytes(ratio=0.05), odd=LowRankBytes(rank=2)),
        collectives=(3,),
        rank=2,
        **FED,
    ),
    two_hop(
        "two-hop-fp16",
        "fp16-two-hop:block=32",
        TwoHopBytes(block=32, bits=16, scales=0, unit=2),
        wire=torch.float16,
        range=torch.float16,
        lossless=True,
        exact_rank=None,
        error_feedback=False,
    ),
    two_hop(
        "two-hop-bf16-stochastic",
        "bf16-two-hop:block=32,stochastic=true",
        TwoHopBytes(block=32, bits=16, scales=0, unit=2),
        wire=torch.bfloat16,
        exact_rank=None,
        error_feedback=False,
    ),
    two_hop(
        "signum",
        "signum:block=32",
        TwoHopBytes(block=32, bits=1, scales=0, flaw=4),
        exempt={"zeros": "one bit has no third value"},
        error_feedback=False,
    ),
]

BY_NAME = {case.name: case for case in CASES}
NEEDED: dict[str, dict[str, Any]] = {"threshold": {"threshold": 1e-2}}
"""Settings that a name of the registry must be given."""
FORMS = [
    "all-reduce", "fp16", "fp16-feedback", "powersgd-2", "powersgd-2-fp16-wire", "powersgd-2-alternating",
    "powersgd-2-twice", "powersgd-2-bucket", "adaptive-rank", "top-k", "dgc", "two-hop-sign", "signum",
]  # fmt: skip
"""One row for each form of exchange: what ordinary tests run over processes, where the long ones run every row."""


WHOLE = {
    *FORMS, "affine", "demo", "noop", "powersgd-2-unbiased", "random-block", "random-k", "sparse-loco", "svd-2",
    "threshold",
}  # fmt: skip
"""One row for each form, and for each class of compressor: `make test` tries every law on each of these."""


def is_form(case: Case) -> bool:
    """Return whether it is a row of `FORMS`."""
    return case.name in FORMS


def is_whole(case: Case) -> bool:
    """Return whether it is a row of `WHOLE`."""
    return case.name in WHOLE


def rows_of(cases: Sequence[Case]) -> list[Any]:
    """Return parameters for a test: all rows, of which `make test-fast` has those of `FORMS`."""
    return rows(cases, unless=is_form)


def forms_first(cases: Sequence[Case]) -> list[Any]:
    """Return parameters for a test: the rows of `FORMS` for every run, the others for the long ones."""
    return [case if case.name in FORMS else pytest.param(case, marks=pytest.mark.soak) for case in cases]


EACH_FORM_ONCE = pytest.mark.parametrize(
    ("kind", "policy", "names"),
    [
        pytest.param("core", "fifo", FORMS[::2], id="core-fifo"),
        pytest.param("torch", "fused", FORMS[1::2], id="torch-fused"),
        *(
            pytest.param(kind, policy, names, id=f"{kind}-{policy}-{what}", marks=mark)
            for kind in ("core", "torch")
            for policy in ("fifo", "fused")
            for names, what, mark in ((FORMS, "every form", THOROUGH), (list(BY_NAME), "every row", pytest.mark.soak))
        ),
    ],
)
"""Each form, each DDP and each policy occurs; `make test-all` has every form with each pair of these, the long runs
every row."""
