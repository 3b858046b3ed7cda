"""How gradients become matrices: properties of the rules, over drawn shapes and strides."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commhooks.compressors.powersgd.matrices import MatrixForm, form_of, form_of_bucket, stack_of
from commhooks.tensors import is_dense

RULES = ["stacked", "first-dimension", "most-square"]


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
    assert matrix.shape[-2:] == (form.n, form.m) and matrix.shape[:-2].numel() == form.matrices
    assert matrix.untyped_storage().data_ptr() == memory.data_ptr()
    assert torch.equal(matrix.reshape(-1).sort().values, memory)


@given(parameter=tensors(min_dimensions=3))
def test_a_stack_has_a_matrix_for_each_index_of_the_leading_dimensions(parameter: Tensor) -> None:
    form, places = stack_of(parameter), _places(parameter).flatten(0, -3)
    sizes = [d for d in range(parameter.dim()) if parameter.shape[d] > 1]
    in_memory = sorted(sizes, key=lambda d: -parameter.stride()[d])
    leading = [d for d in sizes if d < parameter.dim() - 2]
    assert (form is None) is (in_memory[: len(leading)] != leading)
    if form is not None:
        assert torch.equal(form.view(torch.arange(parameter.numel())).view_as(places), places)


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ((8, 256, 128), MatrixForm(256, 128, stack=8)),
        ((256, 1024, 768), MatrixForm(1024, 768, stack=256)),
        ((2, 8, 64, 32), MatrixForm(64, 32, stack=16)),
        ((1, 197, 96), MatrixForm(197, 96)),  # position embeddings
        ((128, 64, 64), MatrixForm(128, 4096)),
        ((512, 512, 3), MatrixForm(512, 1536)),
        ((64, 32, 3, 3), MatrixForm(64, 288)),
        ((24, 40), MatrixForm(24, 40)),
    ],
    ids=str,
)
def test_experts_are_stacked_and_convolutions_are_not(shape: tuple[int, ...], form: MatrixForm) -> None:
    assert form_of(torch.zeros(shape, device="meta"), "stacked") == form


def test_experts_may_be_stored_column_by_column_but_not_between_each_other() -> None:
    assert form_of(torch.zeros(8, 128, 256).mT, "stacked") == MatrixForm(256, 128, transposed=True, stack=8)
    assert form_of(torch.zeros(256, 8, 128).transpose(0, 1), "stacked") == MatrixForm(256, 1024)


@given(parameter=tensors(min_dimensions=2))
def test_the_most_square_matrix_has_the_smallest_sides_of_all_splits(parameter: Tensor) -> None:
    form = form_of(parameter, "most-square")
    assert form is not None
    sizes = [parameter.shape[d] for d in sorted(range(parameter.dim()), key=lambda d: -parameter.stride()[d])]
    splits = [math.prod(sizes[:split]) for split in range(len(sizes) + 1)]
    assert form.n in splits
    assert form.n + form.m == min(n + parameter.numel() // n for n in splits)


@given(elements=st.integers(1, 3_000_000), rank=st.integers(1, 8))
def test_a_buckets_matrix_is_nearly_square_and_sends_least(elements: int, rank: int) -> None:
    form, root = form_of_bucket(elements, rank), math.isqrt(elements)
    assert root - root // 8 <= form.m <= root <= form.n
    sent = (form.n + form.m) * rank + elements - form.n * form.m
    for width in range(max(1, root - root // 8), root + 1):
        assert sent <= (elements // width + width) * rank + elements % width
