"""The two famous errors name the parameters, and no optimiser steps on gradients that were not reduced."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from tests.ddp_core.models import Branches, ones, scale, wrap

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


def test_a_parameter_ready_twice_is_named() -> None:
    ddp = wrap(Branches())
    outputs = ddp.module.a(ones()), ddp.module.a(ones())
    ddp(ones(), "ab")
    outputs[0].sum().backward()
    with pytest.raises(RuntimeError, match=r"ready only once.*index 0 with name a\.weight.*static_graph=True"):
        outputs[1].sum().backward()


def test_the_error_is_kept_for_the_logging_data() -> None:
    ddp = wrap(Branches())
    ddp(ones(), "a").backward()
    with pytest.raises(RuntimeError, match=r"b\.weight"):
        ddp(ones())
    assert "b.weight" in ddp._get_ddp_logging_data()["error"]


def test_a_scaled_step_is_no_mistake() -> None:
    ddp = wrap(Branches())
    optimizer, scaler = sgd(ddp), torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(ddp(ones()) * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def test_a_scaled_step_after_a_parameter_was_left_out_is_one() -> None:
    ddp = wrap(Branches())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(ddp(ones(), "a")).backward()
    with pytest.raises(RuntimeError, match=r"b\.weight"):
        scaler.step(sgd(ddp))


def test_two_optimisers_over_one_model_are_no_mistake() -> None:
    ddp = wrap(Branches())
    optimizers = [torch.optim.Adam(ddp.module.a.parameters()), sgd(ddp.module.b)]
    for _ in range(3):
        ddp(ones()).backward()
        for optimizer in optimizers:
            optimizer.step()


def test_two_backward_passes_that_share_the_parameters_out_are_no_mistake() -> None:
    class Pair(Branches):
        def forward(self, x: Tensor, use: str = "ab") -> tuple[Tensor, Tensor]:  # type: ignore[override]  # 'Return type ... incompatible': another module, the same weights
            return self.a(x), self.b(x)

    ddp = wrap(Pair())
    optimizer = sgd(ddp)
    for _ in range(3):
        a, b = ddp(ones())
        a.sum().backward()
        b.sum().backward()
        optimizer.step()


def test_several_backward_passes_that_each_step_are_no_mistake() -> None:
    ddp = wrap(Branches())
    optimizer = sgd(ddp)
    for use, _ in itertools.product(("ab",), range(3)):
        ddp(ones(), use).backward()
        optimizer.step()
        loss = ddp(ones(), use)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


def test_accumulation_that_uses_a_part_of_the_model_is_no_mistake() -> None:
    ddp = wrap(Branches())
    optimizer = sgd(ddp)
    with ddp.no_sync():
        ddp(ones(), "a").backward()
        optimizer.step()
    ddp(ones(), "ab").backward()
    optimizer.step()


def test_a_step_of_somebody_else_is_no_mistake() -> None:
    ddp, other = wrap(Branches()), scale()
    ddp(ones(), "a").backward()
    other(ones()).sum().backward()
    sgd(other).step()


def test_adversaries_that_train_in_turn_are_no_mistake() -> None:
    generator, critic = wrap(scale()), wrap(Branches())
    for_generator, for_critic = sgd(generator), sgd(critic)
    for freeze, _ in itertools.product((False, True), range(2)):
        for_critic.zero_grad()
        (critic(ones()) - critic(generator(ones()).detach())).backward()
        for_critic.step()
        for_generator.zero_grad()
        critic.requires_grad_(not freeze)
        critic(generator(ones())).backward()
        for_generator.step()
        critic.requires_grad_(True)


def test_an_optimiser_with_a_closure_is_no_mistake() -> None:
    ddp = wrap(Branches())
    optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (ddp(ones()) - 1).square()
        loss.backward()
        return float(loss.item())

    for _ in range(2):
        optimizer.step(closure)
    assert ddp(ones()).item() == pytest.approx(1, abs=1e-3)


def test_a_forward_pass_without_a_backward_pass_is_no_mistake() -> None:
    ddp = wrap(Branches())
    optimizer = sgd(ddp)
    ddp(ones())
    with torch.no_grad():
        ddp(ones(), "a")
    ddp(ones()).backward()
    ddp.eval()(ones(), "b")
    optimizer.step()
    ddp.train()(ones()).backward()
    optimizer.step()


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
