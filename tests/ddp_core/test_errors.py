"""The two famous errors name the parameters, and no optimiser steps on gradients that were not reduced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.ddp_core.models import Branches, ones, wrap

pytestmark = pytest.mark.usefixtures("alone")


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def test_a_parameter_left_out_is_named_by_the_next_forward_pass() -> None:
    ddp = wrap(Branches())
    ddp(ones(), "a").backward()
    words = (
        r"(?s)finished reduction in the prior.*find_unused_parameters=True.*rank 0: 1\n.*rank 0: b\.weight\n"
        r"The reduction is in phase REDUCING of iteration 1: 0 of 1 buckets launched, bucket 0 waits for b\.weight\.$"
    )
    with pytest.raises(RuntimeError, match=words):
        ddp(ones(), "a")


def test_a_parameter_left_out_is_named_in_the_same_step_before_anything_changes() -> None:
    ddp = wrap(Branches())
    before = [p.detach().clone() for p in ddp.parameters()]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, weight_decay=0.1)
    ddp(ones(), "b").backward()
    with pytest.raises(RuntimeError, match=r"(?s)finished reduction.*a\.weight"):
        optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, ddp.parameters(), strict=True))


def test_an_output_out_of_sight_is_named_though_unused_parameters_are_searched_for() -> None:
    class Hidden(Branches):
        def forward(self, x: Tensor, use: str = "ab") -> Tensor:
            self.kept = self.b(x)  # reachable for nobody but the module
            return super().forward(x, "a") if use == "a" else (self.a(x) + self.kept).sum()

    ddp = wrap(Hidden(), find_unused_parameters=True)
    loss = ddp(ones(), "a")
    with pytest.raises(RuntimeError, match=r"ready only once.*index 1 with name b\.weight"):
        (loss + ddp.module.kept.sum()).backward()


def test_an_unfinished_reduction_can_be_given_up() -> None:
    model = Branches()
    ddp = wrap(model)
    ddp(ones(), "a").backward()
    del ddp
    sgd(model).step()
    ddp = wrap(model)
    ddp(ones()).backward()
    ddp(ones(), "a").backward()
    ddp._update_process_group(ddp.process_group)
    ddp(ones()).backward()
    sgd(ddp).step()


def test_an_exception_in_a_backward_pass_reaches_the_user_and_a_new_wrapper_goes_on() -> None:
    model = Branches()
    ddp = wrap(model)
    handle = model.a.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ddp(ones()).backward()
    handle.remove()
    del ddp
    ddp = wrap(model)
    ddp.zero_grad()
    ddp(ones()).backward()
    assert [p.grad.item() for p in ddp.parameters() if p.grad is not None] == [1, 1]
