"""What goes around an exchange runs only if there is something to protect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from commhooks import ErrorFeedback, StartAfter, WireDtype, make_compressor
from commhooks.compressors import Cast, NoOp, PowerSGD
from commhooks.engine.guards import are_zeros
from commhooks.wrappers.phases import phases_of


class Looks(TorchDispatchMode):
    """Count the elements that are looked at."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "count_nonzero" in str(func):
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


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


def test_a_gradient_is_known_by_a_few_of_its_elements_even_if_it_begins_with_zeros() -> None:
    gradient = torch.ones(1_000_003)
    gradient[:900_000] = 0.0
    for memory in (torch.ones(1_000_003), gradient):
        with Looks() as looks:
            assert not are_zeros(memory)
        assert 0 < looks.elements <= 2048


def test_what_a_compressor_remembers_is_a_function_of_the_step() -> None:
    started = StartAfter(steps=2, inner=WireDtype(inner=PowerSGD(), dtype=torch.float16))
    feeding = StartAfter(steps=2, before=ErrorFeedback(inner=Cast(dtype=torch.float16)), inner=NoOp())
    assert phases_of(started) == ((0, False), (2, True))
    assert phases_of(feeding) == ((0, True), (2, False))
    for name in ("all-reduce", "fp16", "bf16", "noop", "powersgd-unbiased"):
        assert phases_of(make_compressor(name)) == ((0, False),)
    assert phases_of(make_compressor("top-k", error_feedback=False)) == ((0, True),)
