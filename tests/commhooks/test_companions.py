"""PyTorch's companions of comm hooks: those that step the optimizer or cast around a hook, on both DDPs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.utils import as_functional_optim
from torch.nn.parallel.distributed import _MixedPrecision

import commhooks
from tests.commhooks.models import MODELS, Given, wrap
from tests.world import on_ranks

SHAPES, SEVERAL_BUCKETS = MODELS[7]
STEPS = 5
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}

REFUSED = {"core": "casting communication hook", "torch": "cpu backend doesn't support events"}
"""What is said of DDP's mixed precision on the CPU."""

pytestmark = pytest.mark.filterwarnings("ignore:.TorchScript. support for functional optimizers:DeprecationWarning")


class Spoiling(NamedTuple):
    """An optimizer that fails at one of its steps of a parameter."""

    at: int
    taken: list[Tensor]

    def step_param(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take no step."""
        self.taken.append(gradient)
        if len(self.taken) == self.at:
            raise ValueError("the step that is spoiled")


def given(rank: int, step: int) -> list[Tensor]:
    """Return gradients that depend on rank and step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def powersgd() -> commhooks.PowerSGDState:
    """Return a state that compresses from the second step on."""
    return commhooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=1)


def train(kind: str, rank: int, overlapped: bool, wrong_at: int | None = None) -> list[Tensor]:
    """Return the parameters after some steps with PowerSGD, the optimizer stepping in the hook or after the pass."""
    torch.manual_seed(0)
    model: Any = wrap(kind, Given(*SHAPES), bucket_cap_mb=SEVERAL_BUCKETS, gradient_as_bucket_view=True)
    hook: Any = commhooks.powerSGD_hook
    if overlapped:
        hook = _hook_then_optimizer(hook, _OptimizerHookState(as_functional_optim(torch.optim.SGD, **SGD)))
    model.register_comm_hook(powersgd(), hook)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    for step in range(STEPS):
        model.zero_grad(set_to_none=False)
        gradients = given(rank, step)
        if step == wrong_at and rank == 1:
            gradients[-1].flatten()[0] = math.inf
        model(*gradients).backward()
        if not overlapped:
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@on_ranks(2)
def test_an_optimizer_that_steps_in_the_hook_ends_where_one_after_the_pass_does(rank: int) -> None:
    for kind in REFUSED:
        for wrong_at in (None, 3):  # an inf in a bucket is in the parameters of that bucket alone, in both
            after, inside = (train(kind, rank, overlapped, wrong_at) for overlapped in (False, True))
            for one, other in zip(after, inside, strict=True):
                assert torch.equal(one.nan_to_num(), other.nan_to_num())
            finite = [bool(parameter.isfinite().all()) for parameter in inside]
            assert all(finite) if wrong_at is None else 0 < sum(finite) < len(finite)


@on_ranks(2, check_exit=False)
def test_an_error_in_the_hook_is_raised_by_the_backward_pass_and_what_cannot_run_is_refused(rank: int) -> None:
    for kind, words in REFUSED.items():
        model: Any = wrap(kind, Given(*SHAPES))
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        for with_zero in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
            with pytest.raises(RuntimeError, match="Gloo backend"):
                with_zero(commhooks.powerSGD_hook, model, zero)
        half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        with pytest.raises((NotImplementedError, RuntimeError), match=words):
            wrap(kind, Given(*SHAPES), mixed_precision=half)(*given(rank, 0)).backward()
        model = wrap(kind, Given(*SHAPES), bucket_cap_mb=SEVERAL_BUCKETS)
        spoiled = _OptimizerHookState(Spoiling(at=9, taken=[]))
        model.register_comm_hook(powersgd(), _hook_then_optimizer(commhooks.powerSGD_hook, spoiled))
        with pytest.raises((ValueError, RuntimeError), match="the step that is spoiled"):
            model(*given(rank, 0)).backward()
