"""Parameters of unusual shape, layout, dtype and use. What each rank runs is in odd_parameters_in_worlds.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.cases import BY_NAME, EVERY_FORM_OR_ALL
from tests.commhooks import odd_parameters_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks

ORDINARY = [
    ("core", "fifo", torch.bfloat16),
    ("core", "fused", torch.float16),
    ("torch", "fused", torch.float32),
]
"""Each DDP, policy and dtype occurs; the long runs have all three with each other."""
EVERY = itertools.product(("core", "torch"), ("fifo", "fused"), (torch.float32, torch.float16, torch.bfloat16))
REST = [pytest.param(*one, marks=pytest.mark.soak) for one in EVERY if one not in ORDINARY]


@pytest.mark.kernels
@pytest.mark.parametrize(("kind", "policy", "dtype"), [*ORDINARY, *REST], ids=str)
@EVERY_FORM_OR_ALL
def test_a_model_of_odd_parameters_trains_with_every_case(
    kind: str, policy: str, dtype: torch.dtype, names: list[str]
) -> None:
    (one, wrong_on_one), (other, wrong_on_other) = run_ranks(on_every_rank.every_case, 2, kind, policy, dtype, names)
    assert wrong_on_one == wrong_on_other == []
    for name in one:
        by_step = [sum(of_ranks) for of_ranks in zip(one[name], other[name], strict=True)]
        trains = sum(by_step[3:]) < sum(by_step[:3])  # other parameters are used in every third step
        assert trains or not BY_NAME[name].sends_small, name


@pytest.mark.parametrize("policy", ["fifo", "fused"])
@pytest.mark.parametrize("kind", ["core", "torch"])
def test_nothing_is_written_into_a_sparse_gradient_that_shares_its_values(kind: str, policy: str) -> None:
    """PyTorch's own DDP divides it in place, with a hook and without: there, and here, 16 came out on its DDP."""
    assert run_ranks(on_every_rank.shared_values, 2, kind, policy) == [[32.0] * 3] * 2
