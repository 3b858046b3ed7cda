"""What goes around an exchange runs only if there is something to protect."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from commhooks import ErrorFeedback, StartAfter, WireDtype, make_compressor
from commhooks.compressors import Cast, NoOp, PowerSGD
from commhooks.engine.guards import are_zeros
from commhooks.wrappers.phases import phases_of


def sparse_with(value: float, place: int) -> Tensor:
    memory = torch.zeros(1_000_003)
    memory[place] = value
    return memory


@pytest.mark.parametrize("value", [1.0, -1e-45, torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("place", [0, 1, 300_000, -1])
def test_one_element_that_is_not_zero_is_found_wherever_it_lies(value: float, place: int) -> None:
    assert not are_zeros(sparse_with(value, place))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("size", [0, 1, 5000, 600_000])
def test_only_zeros_are_taken_for_those_of_a_rank_that_are_zeros(dtype: torch.dtype, size: int) -> None:
    assert are_zeros(torch.zeros(size, dtype=dtype))
    assert not size or not are_zeros(torch.ones(size, dtype=dtype))


def test_what_a_compressor_remembers_is_a_function_of_the_step() -> None:
    started = StartAfter(steps=2, inner=WireDtype(inner=PowerSGD(), dtype=torch.float16))
    feeding = StartAfter(steps=2, before=ErrorFeedback(inner=Cast(dtype=torch.float16)), inner=NoOp())
    assert phases_of(started) == ((0, False), (2, True))
    assert phases_of(feeding) == ((0, True), (2, False))
    for name in ("all-reduce", "fp16", "bf16", "noop", "powersgd-unbiased"):
        assert phases_of(make_compressor(name)) == ((0, False),)
    assert phases_of(make_compressor("top-k", error_feedback=False)) == ((0, True),)
