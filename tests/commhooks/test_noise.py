"""The random numbers of codecs: few are drawn, and any two are independent."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from commhooks.codecs import Int4, Natural
from commhooks.language.noise import Keys, Noise
from tests.tiers import A_ROW

BLOCKS, WIDTH = 16, 32


def noise_of(step: int, name: str = "weight", width: int = WIDTH, hop: int = 0) -> Tensor:
    keys = Keys.of(name, BLOCKS, width)
    return Noise.of(keys, width, step, 1000 * step + hop).uniform()


def test_a_blocks_numbers_depend_on_its_name_number_step_and_hop_alone() -> None:
    numbers = noise_of(3)
    assert torch.equal(numbers, noise_of(3))
    keys = Keys.together([Keys.of("bias", 5, WIDTH), Keys.of("weight", BLOCKS, WIDTH)])
    among_others = Noise.of(keys, WIDTH, 3, 3000)
    assert torch.equal(among_others.at(slice(5, 5 + BLOCKS)).uniform(), numbers)
    some = torch.tensor([7, 2])
    assert torch.equal(Noise.of(Keys.of("weight", BLOCKS, WIDTH).at(some), WIDTH, 3, 3000).uniform(), numbers[some])
    others = [noise_of(4), noise_of(3, name="bias"), noise_of(3, hop=1)]
    for one, other in itertools.combinations([numbers, *others], 2):
        assert (one == other).float().mean() < 0.01


@A_ROW
@pytest.mark.parametrize("codec", [Int4(block=WIDTH), Natural(block=WIDTH)], ids=str)
def test_a_sum_of_errors_varies_as_with_a_number_for_each_element(codec: Int4 | Natural) -> None:
    """50 random linear functionals of all blocks' rounding errors, each within 10 % of the exact variance.

    Also the plain sums over a row, a column and everything, which a pattern in the numbers would show first. The
    variance of 6,000 sums is off by 1.8 % (one standard deviation): 10 % are over five of them.
    """
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randn(BLOCKS, WIDTH, generator=generator)
    functionals = torch.randn(50, BLOCKS, WIDTH, generator=generator)
    whole = torch.ones(1, BLOCKS, WIDTH)
    row, column = torch.zeros_like(whole), torch.zeros_like(whole)
    row[0, 5], column[0, :, 3] = 1, 1
    functionals = torch.cat([functionals, whole, row, column]).flatten(1).double()
    low, high = (codec.decode(codec.encode(blocks, torch.full_like(blocks, end))) for end in (2**-17, 1 - 2**-17))
    variances = ((blocks - low) * (high - blocks)).abs().flatten().double()
    noise = torch.stack([noise_of(step) for step in range(6000)])
    rounded = codec.decode(codec.encode(blocks.repeat(len(noise), 1), noise.flatten(0, 1))).view_as(noise)
    measured = (rounded - blocks).flatten(1).double() @ functionals.T
    expected = functionals.square() @ variances
    assert (measured.var(0) / expected - 1).abs().max() <= 0.1
    # Means: a normal number is beyond 6 standard deviations with a probability of 2e-9.
    assert (measured.mean(0) / (expected / len(measured)).sqrt()).abs().max() <= 6
