"""What each code for two hops makes of blocks, beside references in NumPy and bounds from the papers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import commhooks
from commhooks import ErrorFeedback
from commhooks.codecs import (
    E3M0,
    FP8,
    MXFP4,
    MXFP8,
    QSGD,
    Codebook,
    Codec,
    Half,
    Int4,
    Int8,
    Natural,
    Sign,
    TernGrad,
    Vote,
)
from commhooks.compressors import TwoHop
from commhooks.language.loss import error_of
from tests import bounds
from tests.commhooks.native_oracle import Oracle
from tests.commhooks.workers import Workers, largest, normal, zeros

pytestmark = pytest.mark.kernels

Array = NDArray[np.float64]

FP16, BF16 = Half(dtype=torch.float16), Half(dtype=torch.bfloat16)
STOCHASTIC = Half(dtype=torch.bfloat16, stochastic=True, block=32)
CODECS: list[Codec] = [
    Int8(block=32), Int4(block=32), QSGD(block=32), QSGD(block=32, levels=7), QSGD(block=32, levels=1),
    TernGrad(block=32), Natural(block=32), STOCHASTIC, Int8(stochastic=False), Int4(stochastic=False), Sign(), FP8(),
    MXFP8(), MXFP4(), E3M0(), Codebook(), FP16, BF16, Vote(),
]  # fmt: skip


def drawn(codec: Codec, blocks: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return normal blocks of many sizes, and noise for them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (4 * torch.rand(blocks, 1, generator=generator) - 2)
    noise = torch.rand(blocks, codec.block, generator=generator)
    return (torch.randn(blocks, codec.block, generator=generator) * sizes).to(dtype), noise


def coded(codec: Codec, blocks: Tensor, noise: Tensor) -> Tensor:
    return codec.decode(codec.encode(blocks, noise if codec.draws else blocks.new_empty(0)))


def assert_as_in(got: Tensor, wanted: Array) -> None:
    """Assert that all elements in float64 are right, but for one in a thousand: noise that falls on a boundary."""
    scale = np.abs(wanted).max(axis=1, keepdims=True)
    assert (np.abs(got.double().numpy() - wanted) <= bounds.IN_FLOAT64 * scale).mean() > 0.999


# --- against the papers -----------------------------------------------------------------------------------------------


FORMATS = [
    (Int8(block=64), Oracle("uniform", 127)), (Int8(block=64, stochastic=False), Oracle("uniform", 127)),
    (Int4(block=64), Oracle("uniform", 7)), (Int4(block=64, stochastic=False), Oracle("uniform", 7)),
    *((QSGD(block=64, levels=levels), Oracle("qsgd", levels)) for levels in (1, 7, 127)),
    (TernGrad(block=64), Oracle("uniform", 1)), (Natural(block=64), Oracle("natural")), (FP8(block=64), Oracle("fp8")),
    (Sign(block=64), Oracle("sign")), (Vote(block=64), Oracle("vote")), (MXFP4(block=64), Oracle("mxfp4")),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "oracle"), FORMATS, ids=[repr(codec) for codec, _ in FORMATS])
def test_codes_are_those_of_the_formats(codec: Codec, oracle: Oracle) -> None:
    """Bit for bit, as compiled passes' are (test_native.py); scales that are sums are within n·ε."""
    for seed in range(20):
        blocks, _ = drawn(codec, 100, seed)
        draws = torch.randint(0, 2**16, blocks.shape, generator=torch.Generator().manual_seed(seed))
        got = coded(codec, blocks, ((draws + 0.5) * 2.0**-16).float()).numpy()
        code = oracle.encode(blocks.numpy(), draws.numpy().astype(np.uint16) if codec.draws else None)
        wanted = oracle.decode(code, 64, 1.0)
        if oracle.kind in ("sign", "qsgd"):
            allowed = 64 * bounds.unit_roundoff(torch.float32) * np.abs(wanted).max(axis=1, keepdims=True)
            assert (np.abs(got - wanted) <= allowed).mean() > 0.999  # the others were rounded to another level
        else:
            assert np.array_equal(got, wanted)


def test_a_scale_of_natural_is_the_first_power_of_two_that_is_not_below_its_block() -> None:
    codec = Natural(block=2)
    blocks = torch.tensor([[1.0, -4.0], [4.0, 4.5], [0.5, 0.25]])
    scales, _ = codec.encode(blocks, torch.full_like(blocks, 0.5))
    assert scales.flatten().tolist() == [4.0, 8.0, 0.5]


def test_one_bit_in_two_hops_is_the_papers() -> None:
    """Each rank sends its compensated gradient's signs, the server its compensated mean's (1-bit Adam, algorithm 1)."""
    block, blocks, steps, ranks = 32, 6, 20, 3
    workers = Workers(
        commhooks.make_compressor("sign", block=block), ranks, zeros((blocks, block), dtype=torch.float64)
    )

    def one_bit(x: Array) -> Array:
        return np.asarray(np.where(x >= 0, 1, -1) * np.abs(x).mean(axis=1, keepdims=True))

    worker_error = np.zeros((ranks, blocks, block))
    server_error = np.zeros((blocks, block))
    for step in range(steps):
        gradients = normal(workers.parameters, ranks, seed=step)
        sent = []
        for rank in range(ranks):
            p = gradients[rank][0].numpy() + worker_error[rank]
            sent.append(one_bit(p))
            worker_error[rank] = p - sent[rank]
        p = sum(sent) / ranks + server_error
        server_error = p - one_bit(p)
        wanted = one_bit(p)
        assert np.abs(workers.step(gradients)[0][0].numpy() - wanted).max() <= bounds.IN_FLOAT64 * np.abs(wanted).max()


def test_four_bits_without_a_fraction_are_the_nearest_powers_of_two_or_zero() -> None:
    """Of 0, 1/64, 1/32, ... 1, times the largest magnitude; between two, the larger one of a tie."""
    codec = E3M0(block=64)
    numbers = np.array([0, *2.0 ** np.arange(-6, 1)])
    for seed in range(20):
        blocks, noise = drawn(codec, 4, seed)
        blocks[0, :18] = torch.tensor([256.0, 0, *(2.0 ** torch.arange(1, 9)), *(1.5 * 2.0 ** torch.arange(8))])
        x = blocks.double().numpy()
        largest = np.abs(x).max(axis=1, keepdims=True)
        above = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, (np.abs(x) / largest).astype(np.float32), "right")
        assert_as_in(coded(codec, blocks, noise), np.sign(x) * numbers[above] * largest)


def test_a_codebook_has_the_means_by_sign_and_by_the_root_mean_square() -> None:
    codec = Codebook(block=64)
    for seed in range(20):
        blocks, noise = drawn(codec, 6, seed, torch.float64)
        blocks[1] = blocks[1].abs()  # two of the classes are empty
        blocks[2] = blocks[2].sign()  # and none is below
        blocks[3, ::3] = torch.tensor(-0.0)
        x = blocks.numpy()
        is_small, wanted = np.abs(x) < np.sqrt((x * x).mean(axis=1, keepdims=True)), np.zeros_like(x)
        is_small[2] = False
        for large in (False, True):
            for negative in (False, True):
                own = (is_small != large) & (np.signbit(x) == negative)
                wanted += own * (x * own).sum(axis=1, keepdims=True) / np.maximum(own.sum(axis=1, keepdims=True), 1)
        assert_as_in(coded(codec, blocks, noise), wanted)


@pytest.mark.parametrize(
    "number", [1.0, 1 + 2.0**-23, -1.2345, 1.7 * 2.0**-126, 12345 * 2.0**-149, -(2.0**-149), 2.0**128 - 2.0**104]
)
def test_sixteen_bits_are_rounded_up_with_exactly_the_probability_of_what_is_cut_off(number: float) -> None:
    """Of all noise there is: the expectation, too, is exact. Above bf16's largest number the upper neighbour is inf."""
    codec = Half(dtype=torch.bfloat16, stochastic=True, block=2**16)
    noise = (torch.arange(2**16) + 0.5).mul_(2.0**-16).unsqueeze(0)
    number = float(np.float32(number))
    got = coded(codec, torch.full((1, 2**16), number), noise).double().numpy()[0]
    step = 2.0 ** (max(math.floor(math.log2(abs(number))), -126) - 7)
    below = math.floor(abs(number) / step) * step
    above = below + step if below + step < 2.0**128 else math.inf
    ups = round((abs(number) - below) / step * 2**16)
    assert sorted(np.abs(got)) == [below] * (2**16 - ups) + [above] * ups
    assert np.array_equal(np.signbit(got), [number < 0] * 2**16)
    if above < math.inf:
        assert got.mean() == number


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001, 0x7F800000, -0x800000])
def test_rounding_at_random_leaves_every_inf_and_nan(bits: int) -> None:
    """A carry out of a NaN's fraction would end at 0."""
    bad = torch.full((1, 32), bits, dtype=torch.int32).view(torch.float32)
    for noise in (2.0**-17, 1 - 2.0**-17):
        got = coded(STOCHASTIC, bad, torch.full((1, 32), noise))
        assert torch.equal(got.isnan(), bad.isnan()) and torch.equal(got.isinf(), bad.isinf())


@pytest.mark.parametrize(
    ("codec", "fraction", "exponents"), [(MXFP8(block=64), 3, (-6, 8)), (MXFP4(block=64), 1, (0, 2))], ids=str
)
def test_microscaled_elements_are_the_standards(codec: Codec, fraction: int, exponents: tuple[int, int]) -> None:
    """The nearest multiple of 2^(exponent - fraction bits), the even one of two; at most the largest element."""
    lowest, highest = exponents
    most = 448.0 if fraction == 3 else 6.0
    for seed in range(20):
        blocks, noise = drawn(codec, 4, seed)
        blocks[0, :32] = torch.arange(32) / 4  # with all ties
        groups = blocks.double().numpy().reshape(-1, 32)
        scale = 2.0 ** (np.floor(np.log2(np.abs(groups).max(axis=1, keepdims=True))) - highest)
        x = np.abs(groups) / scale
        step = 2.0 ** (np.clip(np.floor(np.log2(np.maximum(x, 1e-30))), lowest, highest) - fraction)
        wanted = np.sign(groups) * np.minimum(np.round(x / step) * step, most) * scale
        assert np.array_equal(coded(codec, blocks, noise).double().numpy().reshape(-1, 32), wanted)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "loss"),
    [
        (Sign(), 0.36), (Int8(), 8e-5), (Int4(), 0.027), (Int4(block=1024), 0.04), (FP8(), 7e-4), (MXFP8(), 9e-4),
        (MXFP4(), 0.013), (QSGD(), 0.0053), (QSGD(levels=7), 1.6), (TernGrad(), 1.3), (Natural(), 0.08), (FP16, 4e-8),
        (BF16, 2.8e-6), (STOCHASTIC, 5.5e-6), (E3M0(), 0.038),
        (Codebook(), 0.117),
    ],
    ids=repr,
)  # fmt: skip
def test_a_normal_block_loses_what_the_guide_says(codec: Codec, loss: float) -> None:
    """Rounded to one or two digits there."""
    generator = torch.Generator().manual_seed(3)
    blocks, noise = (draw(2**18 // codec.block, codec.block, generator=generator) for draw in (torch.randn, torch.rand))
    lost = float((coded(codec, blocks, noise) - blocks).norm() ** 2 / blocks.norm() ** 2)
    assert lost == pytest.approx(loss, rel=0.08)


def worst_of_codebook(n: int) -> list[float]:
    """Return a block of root mean square 1 with one largest element, and about √n each of just above and just below 1.

    The others are 0. What the bound takes to be at its worst separately, is so together up to terms in 1/√n.
    """
    above = below = math.isqrt(n) - 1
    return [math.sqrt(n - above - below), *[1.001] * above, *[0.999] * below, *[0.0] * (n - above - below - 1)]


@pytest.mark.parametrize(
    ("codec", "block", "part"),
    [
        (Int4(block=32), [7.0, *[7 / (1 + math.sqrt(1 + 31 / 49)) / 7] * 31], 1.0),
        (Int4(block=32, stochastic=False), [7.0, *[0.49999] * 31], 1.0),
        (TernGrad(block=32), [1.0, *[1 / (1 + math.sqrt(32))] * 31], 1.0),
        (Natural(block=32), [4 / 3] * 32, 1.0),
        (Sign(block=32), [1.0, *[0.0] * 31], 1.0),
        (MXFP4(block=32), [5.0, *[0.25] * 31], 1.0),
        (MXFP8(block=32), [511.999, *[0.0] * 31], 1.0),
        (FP8(block=32), [448.0, *[272.0] * 31], 0.8145),
        (E3M0(block=1024), [1.0, *[0.7499] * 1023], 1.0),
        (E3M0(block=4096), [1.0, *[2.0**-7 - 2.0**-20] * 4095], 1.0),
        (Codebook(block=1024), worst_of_codebook(1024), 0.9953),
        (STOCHASTIC, [1 + 2.0**-8] * 32, (1 + 2.0**-8) ** -2),
    ],
    ids=str,
)
def test_the_worst_block_loses_as_much_as_is_declared(codec: Codec, block: list[float], part: float) -> None:
    """For FP8 nearly: the largest element is exact, and half a step is at most 1/17. 20,000 draws, if it is random."""
    blocks = torch.tensor([block]).expand(20_000 if codec.draws else 1, -1)
    noise = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(3))
    lost = float((coded(codec, blocks, noise).double() - blocks).square().sum(1).mean() / blocks[0].norm() ** 2)
    assert lost == pytest.approx(part * codec.relative_error(), rel=0.03 if codec.draws else 1e-3)
    assert lost <= codec.relative_error() * (1.03 if codec.draws else 1 + 1e-6)


def test_error_feedback_makes_such_a_code_blow_up_unless_it_is_damped() -> None:
    """What it loses is in the next step's block, and is lost again; times 1/(1 + ω), it shrinks."""
    codec = QSGD(block=128, levels=1)
    assert residual_after(20, codec, damping=1.0) > 100 * residual_after(1, codec, damping=1.0)
    damped = 1 / (1 + codec.relative_error())
    # An error that is at most the part r of what is to be sent, in norms, leaves at most r/(1 - r) of a gradient.
    r = math.sqrt(error_of(TwoHop(codec=codec, damping=damped).loss("w", torch.zeros(128))))
    assert residual_after(60, codec, damping=damped) < r / (1 - r)


def residual_after(steps: int, codec: Codec, damping: float) -> float:
    """Return the residual's norm over a gradient's, after steps on normal gradients."""
    compressor = ErrorFeedback(inner=TwoHop(codec=codec, server_feedback=False, damping=damping))
    workers = Workers(compressor, 2, zeros((1024,)))
    for step in range(steps):
        gradients = normal(workers.parameters, 2, seed=step)
        workers.step(gradients)
    return float(workers.residual(0, 0).norm() / gradients[0][0].norm())


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_zeros_and_zero_bytes_decode_to_something_finite(codec: Codec) -> None:
    blocks = torch.zeros(3, codec.block)
    code = codec.encode(blocks, torch.rand(blocks.shape))
    size = 1 if isinstance(codec, Vote) else 0  # a vote has no size: zeros are decided by a coin
    assert (codec.decode(code).abs() == size).all()
    assert codec.decode([torch.zeros_like(payload) for payload in code]).isfinite().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.shows_non_finite], ids=repr)
def test_a_code_shows_an_inf_in_its_evidence_and_when_it_is_decoded(codec: Codec, bad: float) -> None:
    blocks, noise = drawn(codec, 3, 5)
    blocks[1, 7] = bad
    code = codec.encode(blocks, noise)
    for shown in [*codec.evidence(code), codec.decode(code)]:
        assert [bool(row.isfinite().all()) for row in shown] == [True, False, True]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flat(Codec):
    """int8 numbers, and a scale for each block without a dimension of its own."""

    block: int = 16

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        scales = blocks.abs().amax(1) / 127
        return scales, (blocks / scales.unsqueeze(1)).round().to(torch.int8)

    def decode(self, code: Sequence[Tensor]) -> Tensor:
        return code[1] * code[0].unsqueeze(1)

    def relative_error(self) -> float:
        return 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_code_may_have_one_number_for_each_block(dtype: torch.dtype) -> None:
    """Whatever its bytes: 4 are no whole number of the widest, 8 are one."""
    parameters = zeros((1000,), (37,), dtype=dtype)
    gradients = normal(parameters, 3, seed=0)
    workers = Workers(ErrorFeedback(inner=TwoHop(codec=Flat())), 3, parameters)
    for index, mean in enumerate(workers.step(gradients)[0]):
        wanted = torch.stack([own[index] for own in gradients]).mean(0)
        missing = (wanted - mean - workers.unsent(index)).abs().max()
        assert missing <= bounds.of_mean(3, torch.float32) * largest(wanted) * 4


class Doubled(Int8):
    """Decodes to twice the numbers of its base."""

    def decode(self, code: Sequence[Tensor]) -> Tensor:
        return 2 * super().decode(code)


def test_a_subclass_that_decodes_otherwise_is_decoded_so_everywhere() -> None:
    """Not by what its base has to decode into memory."""
    gradients = normal(zeros((1024,)), 2, seed=0)
    of_base, of_heir = (
        Workers(TwoHop(codec=codec, server_feedback=False), 2, zeros((1024,))).step(gradients)[0][0]
        for codec in (Int8(stochastic=False), Doubled(stochastic=False))
    )
    assert (of_heir - 4 * of_base).abs().max() <= 0.1 * largest(of_base)  # in two hops


def test_ties_of_two_ranks_are_decided_by_a_coin() -> None:
    workers = Workers(commhooks.make_compressor("signum", beta=0.0, block=128), 2, zeros((8192,)))
    opposite = [[torch.ones(8192)], [-torch.ones(8192)]]
    votes = workers.step(opposite)[0][0]
    ups = int((votes == 1).sum())
    assert ups + int((votes == -1).sum()) == 8192
    # Hoeffding: 8192 fair coins are off by t with a probability of at most 2·exp(-2t²/8192), 1e-6 for 244.
    assert abs(ups - 4096) <= 244


def test_signum_takes_the_majoritys_sign_of_momenta() -> None:
    ranks, steps, beta = 3, 20, 0.9
    workers = Workers(commhooks.make_compressor("signum", beta=beta, block=8), ranks, zeros((5, 17), (5,)))
    momenta = [[np.zeros((5, 17)), np.zeros(5)] for _ in range(ranks)]
    for step in range(steps):
        gradients = normal(workers.parameters, ranks, seed=step)
        means = workers.step(gradients)[0]
        for index, mean in enumerate(means):
            for rank in range(ranks):
                momenta[rank][index] *= beta
                momenta[rank][index] += (1 - beta) * gradients[rank][index].double().numpy()
            whole = mean.numel() // 8 * 8
            of_ranks = np.stack([own[index].reshape(-1) for own in momenta])
            voted, averaged = np.sign(np.sign(of_ranks).sum(0)), np.sign(of_ranks.sum(0))
            assert np.array_equal(mean.flatten()[:whole].numpy(), voted[:whole])
            assert np.array_equal(mean.flatten()[whole:].numpy(), averaged[whole:])


# --- a ring -----------------------------------------------------------------------------------------------------------
