"""The largest and the smallest gradients: half of a dtype's largest number, and numbers that are not normal."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from commhooks import make_compressor
from commhooks.codecs import E3M0, FP8, MXFP4, MXFP8, QSGD, Codebook, Codec, Int4, Int8, Natural, Sign, TernGrad
from tests import bounds
from tests.cases import CASES, Case, is_form
from tests.commhooks.workers import Workers, largest, mean_of, normal, zeros
from tests.tiers import in_turn

pytestmark = pytest.mark.kernels

SHAPES = ((24, 40), (33, 65), (40,))
QUANTUM = 2.0**-149
"""fp32's smallest number."""
ABSOLUTE = {"threshold", "dgc"}
"""What they send depends on a size that is set."""
UNSCALED = [
    case
    for case in CASES
    # Products of factors have a range of their own, fp16 on the wire has its own, and an unbiased sample is n/k times
    # as large as the gradient.
    if case.exchanges and not case.rank and case.wire != torch.float16 and "zeros" not in case.exempt
    if case.name not in ABSOLUTE and case.name != "random-k-unbiased"
    # Coefficients that few ranks have sent add up to more than any gradient.
    if case.owes_as != "demo"
]
CODECS: list[Codec] = [
    Int4(), Int4(stochastic=False), Int8(), Int8(stochastic=False), QSGD(), TernGrad(), Natural(), Sign(), FP8(),
    MXFP4(), MXFP8(), E3M0(), Codebook(),
]  # fmt: skip
SMALLEST: dict[type[Codec], float] = {MXFP4: 2.0**-129, MXFP8: 2.0**-137}
"""What a code rounds to 0, where that is above fp32's smallest number."""


def just_below_one(dtype: torch.dtype, world_size: int, *, alike: bool) -> list[list[Tensor]]:
    """Return gradients in (-1, 1) that `dtype` holds exactly, some as large as possible; all ranks' may be the same."""
    generator = torch.Generator().manual_seed(world_size)
    most = 1 - torch.finfo(dtype).eps / 2
    of_ranks: list[list[Tensor]] = []
    for _ in range(world_size):
        own = [torch.rand(shape, generator=generator) * 2 - 1 for shape in SHAPES]
        own = [torch.where(one.abs() > 0.5, one.sign() * most, one).to(dtype).clamp_(-most, most) for one in own]
        of_ranks.append(of_ranks[0] if alike and of_ranks else own)
    return of_ranks


WAYS = [
    (dtype, world_size, alike)
    for dtype, world_size in ((torch.float32, 1), (torch.float32, 8), (torch.bfloat16, 3), (torch.float16, 3))
    for alike in (True, False)
]


@pytest.mark.parametrize(("case", "way"), in_turn(UNSCALED, WAYS, fast=is_form), ids=str)
def test_gradients_up_to_half_of_the_largest_number_have_the_mean_of_others(
    case: Case, way: tuple[torch.dtype, int, bool]
) -> None:
    """Bit for bit, as the scale is a power of two; but a mean of magnitudes may be added up in another order."""
    dtype, world_size, alike = way
    gradients = just_below_one(dtype, world_size, alike=alike)
    scale = 2.0 ** (math.frexp(torch.finfo(dtype).max)[1] - 1)
    usual, large = (
        Workers(case.make(), world_size, zeros(*SHAPES, dtype=dtype)).step([[g * s for g in own] for own in gradients])
        for s in (1.0, scale)
    )
    # A mean of 32 magnitudes of at most 1 is off by 32·u, on each hop, either way.
    allowed = 4 * 32 * bounds.unit_roundoff(torch.float32) if "Sign(" in repr(case.make()) else 0.0
    # At the usual scale, fp16 rounds numbers below 2**-14 more coarsely: every rank's share, and the mean.
    allowed += (world_size + 1) * 2.0**-25 if dtype == torch.float16 else 0.0
    for ours, theirs in zip(large[0], usual[0], strict=True):
        assert torch.isfinite(ours).all()
        assert largest(ours.double() / (scale if case.follows_scale else 1.0) - theirs.double()) <= allowed


def test_coefficients_of_the_largest_numbers_do_not_overflow_on_their_way_back() -> None:
    (demo,) = (case for case in UNSCALED if case.name == "demo")
    test_gradients_up_to_half_of_the_largest_number_have_the_mean_of_others(demo, WAYS[0])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_block_with_an_inf_among_the_largest_numbers_shows_it(codec: Codec, bad: float) -> None:
    blocks = torch.full((3, codec.block), torch.finfo(torch.float32).max / 2)
    blocks[1, 5] = bad
    evidence = codec.evidence(codec.encode(blocks, torch.rand(blocks.shape)))
    assert all([bool(row.isfinite().all()) for row in one] == [True, False, True] for one in evidence)


@pytest.mark.parametrize("quanta", [1, 100, 10_000])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_code_loses_no_more_of_numbers_that_are_not_normal_than_they_are(codec: Codec, quanta: int) -> None:
    """And it sends something of them, if they are within its range; what it does not send stays in the residual."""
    magnitude = quanta * QUANTUM
    blocks = torch.randn(50, codec.block, generator=torch.Generator().manual_seed(1)) * magnitude
    noise = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(2))
    got = codec.decode(codec.encode(blocks, noise)).double() / QUANTUM
    given = blocks.double() / QUANTUM
    lost = float((got - given).square().sum() / given.square().sum())
    in_range = 8 * magnitude > SMALLEST.get(type(codec), 0.0)
    assert bool(got.any()) is in_range
    assert lost <= max(codec.relative_error(), 1 / 9) + 1 / quanta if in_range else lost == 1


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "fp8", "int8", "sign", "affine"])
def test_what_a_code_cannot_hold_is_owed_until_it_can(name: str) -> None:
    """All of it is in the mean or in the residuals, to the last bit that fp32 has there, and the residuals stay small.

    Of each step W shares and their sum are rounded to fp32's smallest number, as by an all-reduce.
    """
    compressor = make_compressor(name, error_feedback=True)
    workers = Workers(compressor, 2, zeros((2048,)))
    gradients = normal(workers.parameters, 2, seed=0, scale=2.0**-133)
    total, steps = torch.zeros(2048, dtype=torch.float64), 40
    for _ in range(steps):
        total += workers.step(gradients)[0][0].double()
    missing = total + workers.unsent(0) - steps * mean_of(gradients, 0)
    assert largest(missing) <= steps * 3 * QUANTUM
    assert float(total.norm()) >= 0.5 * steps * float(mean_of(gradients, 0).norm())
