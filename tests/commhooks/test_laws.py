"""What every compressor must obey, crossed with the table in tests/cases.py. N workers, one process.

The laws that need nothing but a compressor are in `commhooks.testing`; here are those that need the table besides.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks import make_compressor
from commhooks.compressors import COMPRESSORS
from commhooks.testing import LAWS, Law
from commhooks.testing.claims import every_one_in
from tests import bounds
from tests.cases import BY_NAME, CASES, NEEDED, Case, is_form, is_whole, rows_of
from tests.commhooks.workers import Workers, largest, low_rank, mean_of, normal, zeros
from tests.tiers import A_ROW, THOROUGH, in_turn

SHAPES = ((24, 40), (40,), (3, 5, 3, 3), (24, 40), (7,), (64, 33), (3, 20, 16), (1, 1), ())
EXCHANGING = [case for case in CASES if case.exchanges]
EXACT = [case for case in EXCHANGING if case.exact_rank != 0]
DTYPES = [torch.float16, torch.bfloat16, torch.float64]
SHARE = 5
"""One law in so many is tried on rows that are not tried whole, of each row others."""

pytestmark = pytest.mark.kernels

every_case = pytest.mark.parametrize("case", rows_of(CASES), ids=str)


def laws_of_rows() -> list[Any]:
    """Return each row with each law that applies to it.

    `make test` tries all laws on the rows of `WHOLE` and some on each other row, `make test-fast` some on each form.
    """
    found = []
    for (row, case), (number, law) in itertools.product(enumerate(CASES), enumerate(LAWS)):
        if not law.why_not(case.make(), case):
            is_its_turn = (row + number) % SHARE == 0
            mark = () if is_form(case) and is_its_turn else A_ROW if is_whole(case) or is_its_turn else THOROUGH
            found.append(pytest.param(case, law, marks=mark))
    return found


@pytest.mark.parametrize(("case", "law"), laws_of_rows(), ids=str)
def test_the_law_is_kept(case: Case, law: Law) -> None:
    law.try_on(case.make(), case)


def test_each_compressor_of_the_registry_has_a_row_on_which_every_law_is_tried() -> None:
    whole = {type(one) for case in CASES if is_whole(case) for one in every_one_in(case.make())}
    for name in COMPRESSORS:
        classes = {type(one) for one in every_one_in(make_compressor(name, **NEEDED.get(name, {})))}
        assert classes <= whole, f"{name} needs a row in WHOLE, in tests/cases.py"


@every_case
def test_payload_bytes_equal_the_formula_and_are_fewer_than_dense(case: Case) -> None:
    workers = Workers(case.make(), 2, zeros(*SHAPES))
    dense = sum(p.numel() * p.element_size() for p in workers.parameters)
    for step in range(4):
        before = workers.traffic.payload_bytes
        workers.step(normal(workers.parameters, 2, seed=step))
        expected = case.bytes_on_wire(workers.parameters, step, 2)
        assert_sent(case, workers.traffic.payload_bytes - before, expected)
        assert (expected < dense) is case.smaller_than_dense


@pytest.mark.parametrize(("case", "dtype"), in_turn(CASES, DTYPES, fast=is_form), ids=str)
def test_payload_bytes_follow_the_dtype(case: Case, dtype: torch.dtype) -> None:
    workers = Workers(case.make(), 2, zeros((60, 60), (5,), dtype=dtype))
    workers.step(normal(workers.parameters, 2, seed=0))
    assert_sent(case, workers.traffic.payload_bytes, case.bytes_on_wire(workers.parameters, 0, 2))


def assert_sent(case: Case, sent: int, expected: int) -> None:
    assert 0 < sent <= expected if case.at_most else sent == expected


@pytest.mark.parametrize(("case", "policy"), in_turn(CASES, ["fifo", "fused"], whole=is_form, fast=is_form), ids=str)
def test_collectives_are_made_for_each_bucket_in_fifo_and_for_all_if_they_are_fused(case: Case, policy: str) -> None:
    for buckets in (1, 5):
        workers = Workers(case.make(), 2, zeros(*[(24, 40), (12, 41)] * buckets), buckets=buckets, policy=policy)
        times = 1 if policy == "fused" and not case.travels_as_it_is else buckets
        for step in range(4):
            before = workers.traffic.collectives
            workers.step(normal(workers.parameters, 2, seed=step))
            assert workers.traffic.collectives - before == times * case.collectives[step % len(case.collectives)]


def settled(case: Case, parameters: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> Workers:
    """Return workers that have made as many steps with these gradients as come before a mean is exact."""
    workers = Workers(case.make(), len(gradients), parameters)
    for _ in range(case.exact_after):
        workers.step(gradients)
    return workers


@pytest.mark.parametrize(("case", "world_size"), in_turn(EXACT, [1, 2, 3]), ids=str)
def test_a_mean_that_can_be_represented_comes_back(case: Case, world_size: int) -> None:
    shapes = ((24, 40), (40,), (24, 40), (24, 40), (6, 4, 3, 3), (3, 40, 24), (64, 33))  # several of one shape
    parameters = zeros(*shapes, dtype=torch.float64)
    gradients = low_rank(parameters, world_size, rank=case.exact_rank or 5, seed=1, rule=case.rule)
    workers = settled(case, parameters, gradients)
    for _ in range(3):
        assert_mean(case, workers.step(gradients)[0], gradients)


@pytest.mark.parametrize("case", [case for case in CASES if case.lossless], ids=str)
def test_a_lossless_mean_is_the_mean(case: Case) -> None:
    workers = Workers(case.make(), 3, zeros(*SHAPES, dtype=torch.float64))
    gradients = normal(workers.parameters, 3, seed=2)
    assert_mean(case, workers.step(gradients)[2], gradients)


@pytest.mark.parametrize("case", [case for case in CASES if case.owes_as], ids=str)
def test_what_is_owed_does_not_depend_on_what_a_sum_is_divided_by(case: Case) -> None:
    """Each rank keeps what it has not sent, bit for bit as in the row whose mean is over all ranks, which conserves."""
    ours, theirs = (Workers(one.make(), 3, zeros(*SHAPES)) for one in (case, BY_NAME[case.owes_as]))
    differs = False
    for step in range(5):
        gradients = normal(ours.parameters, 3, seed=step)
        means, others = ours.step(gradients)[0], theirs.step(gradients)[0]
        differs = differs or not all(torch.equal(a, b) for a, b in zip(means, others, strict=True))
        for rank, index in itertools.product(range(3), range(len(SHAPES))):
            assert torch.equal(ours.residual(rank, index), theirs.residual(rank, index))
    assert differs


@pytest.mark.parametrize(("case", "dtype"), in_turn(EXACT, DTYPES), ids=str)
def test_other_dtypes_come_back_in_their_own(case: Case, dtype: torch.dtype) -> None:
    """Gradients of rank 1 whose every element, and every mean, any of these dtypes can hold: integers and halves."""
    parameters = zeros((24, 40), (5,), (24, 40), dtype=dtype)
    generator = torch.Generator().manual_seed(6)
    left = torch.randint(-3, 4, (24, 1), generator=generator)
    gradients = [
        [left * integers((1, 40), generator), integers((5,), generator), left * integers((1, 40), generator)]
        for _ in range(2)
    ]
    gradients = [[gradient.to(dtype) for gradient in own] for own in gradients]
    means = settled(case, parameters, gradients).step(gradients)[0]
    assert all(mean.dtype == dtype for mean in means)
    # It computes in fp32 at least, and rounds once more when it writes: that is what shows of a narrow dtype.
    assert_mean(case, means, gradients, narrowest=dtype if dtype.itemsize == 2 else None)


def integers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-3, 4, shape, generator=generator)


@pytest.mark.parametrize(("case", "form"), in_turn(EXACT, ["channels-last", "transposed", "middle"]), ids=str)
def test_the_order_of_dimensions_in_memory_does_not_matter(case: Case, form: str) -> None:
    parameter = _laid_out(form)
    gradients = low_rank([parameter], 2, rank=1, seed=7, rule=case.rule)
    assert_mean(case, settled(case, [parameter], gradients).step(gradients)[0], gradients)


def _laid_out(form: str) -> Tensor:
    if form == "channels-last":
        return torch.zeros(16, 8, 3, 3, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    if form == "transposed":
        return torch.zeros(40, 24, dtype=torch.float64).t()
    return torch.zeros(8, 16, 12, dtype=torch.float64).permute(1, 0, 2)


def assert_mean(
    case: Case, means: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], narrowest: torch.dtype | None = None
) -> None:
    """Assert that a mean that can be represented came back, but for what computing in float64 and the wire round.

    narrowest: the gradient's dtype, if it is narrow and so rounds too.
    """
    for index, mean in enumerate(means):
        terms = largest(*(own[index] for own in gradients))
        rounding = bounds.IN_FLOAT64
        for dtype in (case.wire, narrowest):
            rounding += bounds.of_mean(len(gradients), dtype) if dtype else 0.0
        assert largest(mean - mean_of(gradients, index)) <= terms * rounding, index
