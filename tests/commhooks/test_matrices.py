"""How gradients become matrices: properties of the rules, over drawn shapes and strides."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commhooks.compressors.powersgd.matrices import form_of, form_of_bucket
from commhooks.tensors import is_dense

RULES = ["first-dimension", "most-square"]


@st.composite
def tensors(draw: st.DrawFn, min_dimensions: int = 0) -> Tensor:
    """Draw a tensor of 0 to 5 dimensions, laid out in any order of them: channels-last and transposed among others."""
    shape = draw(st.lists(st.integers(1, 7), min_size=min_dimensions, max_size=5))
    order = draw(st.permutations(range(len(shape))))
    laid_out = torch.zeros([shape[dimension] for dimension in order])
    return laid_out.permute([order.index(dimension) for dimension in range(len(shape))])


def _places(parameter: Tensor) -> Tensor:
    """Return, in the parameter's shape, where in its gradient's memory each element lies."""
    return torch.arange(parameter.numel()).as_strided(parameter.shape, parameter.stride())


@pytest.mark.parametrize("rule", RULES)
@given(parameter=tensors(min_dimensions=2))
def test_a_matrix_holds_every_element_once_and_is_no_copy(rule: str, parameter: Tensor) -> None:
    form = form_of(parameter, rule)
    assert form is not None and is_dense(parameter)
    memory = torch.arange(parameter.numel())
    matrix = form.view(memory)
    assert matrix.shape == (form.n, form.m)
    assert matrix.untyped_storage().data_ptr() == memory.data_ptr()
    assert torch.equal(matrix.reshape(-1).sort().values, memory)


@given(parameter=tensors(min_dimensions=2))
def test_rows_are_the_first_dimension_where_it_is_outermost_or_innermost(parameter: Tensor) -> None:
    form = form_of(parameter, "first-dimension")
    assert form is not None
    order = sorted((d for d in range(parameter.dim()) if parameter.shape[d] > 1), key=lambda d: -parameter.stride()[d])
    if parameter.shape[0] > 1 and 0 not in (order[0], order[-1]):
        assert form.n == parameter.shape[order[0]]  # the outermost dimension stands in
        return
    assert (form.n, form.m) == (parameter.shape[0], parameter[0].numel())
    rows = form.view(torch.arange(parameter.numel()))
    for ours, theirs in zip(rows, _places(parameter), strict=True):
        assert torch.equal(ours.sort().values, theirs.reshape(-1).sort().values)


def test_a_channels_last_gradient_is_split_where_its_first_dimension_ends() -> None:
    weight = torch.zeros(16, 8, 3, 3)
    last = form_of(weight.contiguous(memory_format=torch.channels_last), "first-dimension")
    assert last == form_of(weight, "first-dimension") == (16, 72, False)
    assert form_of(torch.zeros(40, 24).t(), "first-dimension") == (24, 40, True)


@given(parameter=tensors(min_dimensions=2))
def test_the_most_square_matrix_has_the_smallest_sides_of_all_splits(parameter: Tensor) -> None:
    form = form_of(parameter, "most-square")
    assert form is not None
    sizes = [parameter.shape[d] for d in sorted(range(parameter.dim()), key=lambda d: -parameter.stride()[d])]
    splits = [math.prod(sizes[:split]) for split in range(len(sizes) + 1)]
    assert form.n in splits
    assert form.n + form.m == min(n + parameter.numel() // n for n in splits)


@pytest.mark.parametrize("rule", RULES)
@given(parameter=tensors(), gap=st.integers(2, 3))
def test_a_parameter_with_gaps_has_a_matrix_of_the_same_size(rule: str, parameter: Tensor, gap: int) -> None:
    """A gradient has none: it is laid out in the order of dimensions."""
    apart = torch.zeros(*parameter.shape, gap)[..., 0]
    form = form_of(apart, rule)
    assert form == form_of(torch.zeros(parameter.shape), rule)
    assert form is None or form.n * form.m == apart.numel()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(), (5,), (0,), (0, 3), (3, 0, 2)], ids=str)
def test_vectors_and_what_is_empty_are_no_matrices(rule: str, shape: tuple[int, ...]) -> None:
    assert form_of(torch.zeros(shape), rule) is None


@given(elements=st.integers(1, 3_000_000), rank=st.integers(1, 8))
def test_a_buckets_matrix_leaves_over_less_than_a_row(elements: int, rank: int) -> None:
    form = form_of_bucket(elements, rank)
    assert 0 <= elements - form.n * form.m < form.m
    assert not form.transposed


@given(elements=st.integers(1, 3_000_000), rank=st.integers(1, 8))
def test_a_buckets_matrix_is_nearly_square_and_sends_least(elements: int, rank: int) -> None:
    form, root = form_of_bucket(elements, rank), math.isqrt(elements)
    assert root - root // 8 <= form.m <= root <= form.n
    sent = (form.n + form.m) * rank + elements - form.n * form.m
    for width in range(max(1, root - root // 8), root + 1):
        assert sent <= (elements // width + width) * rank + elements % width
