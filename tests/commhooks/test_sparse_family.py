"""Compressors that send some of the elements: choosing, coding places, and what their papers say of each."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commhooks import ErrorFeedback, make_compressor
from commhooks.compressors import DGC, Threshold, TopK
from commhooks.compressors.kernels.selection import largest
from commhooks.compressors.sparse.indices import Indices, coding_of, codings_of
from commhooks.language import Compressor, Context
from commhooks.state.table import StateTable
from tests.bounds import assert_equal_in_float64
from tests.commhooks.alone import bucket_of, run_alone
from tests.commhooks.test_native_largest import HARD, assert_largest
from tests.commhooks.workers import Workers
from tests.formulas_sparse import SHAPES_OF_INDICES, sent_of
from tests.tiers import A_ROW

every_coding = pytest.mark.parametrize("indices", get_args(Indices))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@every_coding
@given(elements=st.integers(1, 140_000), ratio=st.sampled_from([1e-9, 0.001, 0.01, 0.3, 1.0]))
def test_places_come_back_from_their_code_in_the_same_order(indices: Indices, elements: int, ratio: float) -> None:
    coding = coding_of(indices, elements, ratio)
    numbers = coding.choose(0, drawn(elements))
    places = numbers + torch.from_numpy(coding.starts([0]))
    code = coding.encode(numbers)
    assert len(set(places.tolist())) == coding.k == len(places) and max(places.tolist()) < elements
    assert code.numel() * code.element_size() == coding.code_bytes
    assert torch.equal(coding.decode(torch.stack([code, code])).long(), torch.stack([numbers, numbers]))


@pytest.mark.parametrize("indices", ["int32", "block-12", "block-16", "bitmap"])
def test_parameters_share_a_code_which_says_where_the_elements_of_each_are(indices: Indices) -> None:
    sizes, offsets = (70_001, 5, 9000), (10, 0, 80_000)
    memory = drawn(100_000)
    ((coding, positions),) = codings_of(indices, sizes, 0.01, 4)
    assert positions == [0, 1, 2]
    parts = [memory[first : first + size] for first, size in zip(offsets, sizes, strict=True)]
    numbers = torch.cat([coding.choose(number, part) for number, part in enumerate(parts)])
    decoded = coding.decode(coding.encode(numbers).unsqueeze(0))[0] + torch.from_numpy(coding.starts(offsets))
    alone = [coding_of(indices, size, 0.01) for size in sizes]
    expected = [
        own.choose(0, part) + torch.from_numpy(own.starts([first]))
        for own, part, first in zip(alone, parts, offsets, strict=True)
    ]
    assert torch.equal(decoded, torch.cat(expected))


@pytest.mark.parametrize(("indices", "block"), [(name, block) for name, (block, _) in SHAPES_OF_INDICES.items()])
@pytest.mark.parametrize("elements", [1, 700, 4096, 4097, 70_000])
def test_every_block_sends_its_largest_elements(indices: Indices, block: int | None, elements: int) -> None:
    memory = drawn(elements)
    coding = coding_of(indices, elements, 0.01)
    expected = set()
    for number, part in enumerate(memory.split(block or elements)):
        found = torch.topk(part.abs(), math.ceil(0.01 * len(part))).indices
        expected |= {place + number * (block or elements) for place in found.tolist()}
    places = coding.choose(0, memory) + torch.from_numpy(coding.starts([0]))
    assert set(places.tolist()) == expected
    assert coding.k == sent_of(elements, 0.01, block)


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize(("rows", "n", "k"), [(9, 4096, 41), (9, 4099, 410), (1, 70_000, 701), (2, 65_536, 1)])
def test_the_values_of_the_largest_are_those_of_top_k(kind: str, rows: int, n: int, k: int) -> None:
    memory = HARD[kind](drawn(rows, n, seed=1))
    assert_largest(memory, largest(memory, k), k)


@A_ROW
@pytest.mark.parametrize("name", ["random-k", "random-block"])
def test_an_unbiased_mean_is_right_on_average(name: str) -> None:
    """Of 4,000 draws of n/k·x or 0, the mean is off by more than this for any of n elements once in 10⁶ (Hoeffding)."""
    n, k, steps, parameters = 24, 6, 500, 8
    gradient, memory = drawn(n), torch.empty(n * parameters)
    total = torch.zeros(n * parameters, dtype=torch.float64)
    compressor = make_compressor(name, ratio=k / n, unbiased=True)
    bucket = bucket_of([torch.empty(n) for _ in range(parameters)], memory, StateTable(0, 1), compressor)
    for step in range(steps):
        memory.copy_(gradient.repeat(parameters))  # a parameter's places are drawn by its name
        total += run_alone(bucket, compressor.compress(bucket, Context(0, 1, step)))
    draws = steps * parameters
    allowed = n / k * math.sqrt(math.log(2 * n / 1e-6) / (2 * draws))
    assert ((total.view(parameters, n).sum(0) / draws - gradient).abs() <= allowed * gradient.abs()).all()


STEPS, RANKS, ELEMENTS = 20, 2, 300
GRADIENTS = drawn(STEPS, RANKS, ELEMENTS, seed=1).double()


def means_of(compressor: Compressor, scale: float = 1.0) -> Tensor:
    """Return the means of all steps, of workers that know of a loss scale."""
    workers = Workers(compressor, RANKS, [torch.zeros(ELEMENTS, dtype=torch.float64)])
    for engine in workers.engines:
        engine.loss_scale.announce(scale)
    steps = [workers.step([[own * scale] for own in gradients]) for gradients in GRADIENTS]
    return torch.stack([of_ranks[0][0] / scale for of_ranks in steps])


def test_dgc_is_the_papers_algorithm() -> None:
    """In float64, on 20 random inputs: clip by clip/√N, u = m·u + g, v = v + u, send, and mask both."""
    momentum, clip = 0.9, 9.0
    # Of 300: a quarter, and each fourth of 8 steps 0.04 ** 0.25 of it.
    counts = [75, 75, 34, 34, 15, 15, 7, 7, *[3] * 12]
    means = means_of(DGC(ratio=0.01, clip=clip, warm_up=8))
    u, v = np.zeros((2, RANKS, ELEMENTS))
    for mean, of_ranks, k in zip(means, GRADIENTS.numpy(), counts, strict=True):
        norms = np.linalg.norm(of_ranks, axis=1, keepdims=True)
        u = momentum * u + of_ranks * np.minimum(1, clip / np.sqrt(RANKS) / norms)
        v = v + u
        mask = np.zeros_like(v)
        np.put_along_axis(mask, np.argsort(-np.abs(v), axis=1)[:, :k], 1.0, axis=1)
        assert_equal_in_float64(mean, torch.from_numpy((mask * v).mean(0)))
        u, v = u * (1 - mask), v * (1 - mask)


@pytest.mark.parametrize("indices", ["block-12", "bitmap"])
def test_a_mean_is_added_up_in_rank_order(indices: Indices) -> None:
    """Of more entries than are added at a time; another order would have other last bits."""
    elements, ranks = 100_000, 4
    gradients = [drawn(elements, seed=rank) for rank in range(ranks)]
    mean = Workers(TopK(ratio=0.3, indices=indices), ranks, [torch.zeros(elements)]).step([[g] for g in gradients])[0][
        0
    ]
    expected = torch.zeros(elements)
    coding = coding_of(indices, elements, 0.3)
    for gradient in gradients:
        at = coding.choose(0, gradient) + torch.from_numpy(coding.starts([0]))
        expected[at] += gradient[at] / ranks
    assert torch.equal(mean, expected)


def test_a_threshold_sends_what_has_grown_to_it_as_far_as_there_is_room() -> None:
    left, counts = np.zeros((RANKS, ELEMENTS)), set()
    compressor = ErrorFeedback(inner=Threshold(threshold=2.5, capacity=0.1))
    for mean, of_ranks in zip(means_of(compressor), GRADIENTS.numpy(), strict=True):
        M = of_ranks + left
        floor = np.maximum(2.5, np.sort(np.abs(M), axis=1)[:, [-30]])
        sent = np.where(np.abs(M) >= floor, M, 0.0)
        assert_equal_in_float64(mean, torch.from_numpy(sent.mean(0)))
        left = M - sent
        counts |= set(np.count_nonzero(sent, axis=1))
    assert min(counts) < 20 and max(counts) == 30


@pytest.mark.parametrize(
    "compressor", [DGC(clip=9.0), ErrorFeedback(inner=Threshold(threshold=2.5, capacity=0.1))], ids=str
)
def test_settings_in_units_of_the_gradient_follow_the_loss_scale(compressor: Compressor) -> None:
    assert torch.equal(means_of(compressor, scale=2.0**10), means_of(compressor))
