"""PyTorch's companions of comm hooks: those that step the optimizer or cast around a hook, on both DDPs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.optim.utils import as_functional_optim

import commhooks
from tests.commhooks.models import MODELS, Given, wrap
from tests.ddp_core.facts import BOTH_DDPS
from tests.world import on_ranks

SHAPES, SEVERAL_BUCKETS = MODELS[7]
STEPS = 5
SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


pytestmark = pytest.mark.filterwarnings("ignore:.TorchScript. support for functional optimizers:DeprecationWarning")


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
    for kind in BOTH_DDPS:
        for wrong_at in (None, 3):  # an inf in a bucket is in the parameters of that bucket alone, in both
            after, inside = (train(kind, rank, overlapped, wrong_at) for overlapped in (False, True))
            for one, other in zip(after, inside, strict=True):
                assert torch.equal(one.nan_to_num(), other.nan_to_num())
            finite = [bool(parameter.isfinite().all()) for parameter in inside]
            assert all(finite) if wrong_at is None else 0 < sum(finite) < len(finite)
