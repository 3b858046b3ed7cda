"""Which parameter goes into which bucket: laws, and agreement with PyTorch."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from ddp_core.buckets import ParameterSpec, assign_buckets

DTYPES = {"half": torch.float16, "single": torch.float32, "double": torch.float64}

Case = tuple[list[ParameterSpec], list[int], list[int] | None]  # parameters, limits, perhaps an order

specs = st.builds(
    lambda elements, kind, sparse: ParameterSpec(elements * DTYPES[kind].itemsize, kind, sparse),
    st.integers(0, 40),
    st.sampled_from(sorted(DTYPES)),
    st.integers(0, 5).map(lambda number: number == 0),
)
many = st.lists(specs, min_size=1, max_size=30)
some_limits = st.lists(st.integers(0, 600), min_size=1, max_size=3)


@st.composite
def ordered(draw: st.DrawFn) -> Case:
    """Draw parameters, limits, and perhaps an order in which to take the parameters."""
    drawn = draw(many)
    order = draw(st.none() | st.permutations(range(len(drawn))))
    return drawn, draw(some_limits), order


@given(ordered())
def test_plans_are_those_of_pytorch(case: Case) -> None:
    drawn, limits, order = case
    taken = list(order or range(len(drawn)))
    dtypes = [DTYPES[str(spec.kind)] for spec in drawn]
    tensors = [torch.empty(drawn[i].nbytes // dtypes[i].itemsize, dtype=dtypes[i]) for i in taken]
    sparse = [spec.alone for spec in drawn]
    theirs, _ = _compute_bucket_assignment_by_size(tensors, limits, sparse, [] if order is None else taken)
    ours = assign_buckets(drawn, limits, order)
    # buckets that never filled come from a hash map there: their order among themselves says nothing
    assert sorted(map(tuple, theirs)) == sorted(ours)
    assert order is not None or [tuple(bucket) for bucket in theirs] == ours
