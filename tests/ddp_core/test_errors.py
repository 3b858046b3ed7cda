"""The famous errors name the parameters, no optimiser steps on gradients not reduced, and what few programs do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ddp_core import GradBucket
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
    assert "b.weight" in ddp._get_ddp_logging_data()["error"]


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


# What few programs do: each of these changed once, unnoticed by all other tests.


def test_a_failure_in_a_backward_pass_within_the_next_forward_pass_is_not_forgotten() -> None:
    class Trains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = scale()
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.last is not None:
                with pytest.raises(ValueError, match="of the hook"):
                    self.last.backward()
            return torch.as_tensor(self.a(x))

    def failing(state: object, bucket: object) -> Tensor:
        raise ValueError("of the hook")

    ddp = wrap(Trains())
    handle = ddp.register_comm_hook(None, failing)
    ddp.module.last = ddp(ones()).sum()
    ddp(ones())
    handle.remove()
    with pytest.raises(RuntimeError, match="interrupted by ValueError: of the hook"):
        ddp(ones())


def test_a_static_graph_leaves_out_buckets_that_no_rank_uses_and_refuses_to_join() -> None:
    def note(state: list[int], bucket: GradBucket) -> Tensor:
        state.append(bucket.index())
        return bucket.buffer()

    seen: list[int] = []
    ddp = wrap(Branches(), static_graph=True, skip_all_reduce_unused_params=True, bucket_cap_mb=1e-6)
    ddp.register_comm_hook(seen, note)
    for _ in range(3):
        ddp(ones(), "a").backward()
    assert seen == [0, 0, 0]  # the first iteration, in one bucket, is when it is learned what is used
    with pytest.raises(NotImplementedError, match="skip_all_reduce_unused_params"):
        ddp.join()


def test_names_of_pytorchs_class_can_be_set_and_a_copy_made_while_a_buffer_hook_is_under_way() -> None:
    def future(state: object, buffers: object) -> list[torch.futures.Future[Tensor]]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(torch.zeros(1))
        return [done]

    ddp = wrap(nn.BatchNorm1d(1), bucket_cap_mb_list=[1, 2])
    ddp._register_buffer_comm_hook(None, future)
    loss = ddp(torch.zeros(2, 1)).sum()
    copy.deepcopy(ddp)
    loss.backward()
    ddp.buffer_hook = None
    ddp.forward_sync_buffers = False
    ddp.bucket_bytes_cap = 5
    ddp.device_ids = None
    assert not ddp.will_sync_module_buffers()
    assert ddp.bucket_bytes_cap_list == [2**20, 2**21]
    assert wrap(scale())._get_ddp_logging_data()["num_buckets_reduced"] == 0
