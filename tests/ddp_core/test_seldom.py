"""What few programs do: each of these changed once, unnoticed by all other tests."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ddp_core import GradBucket
from tests.ddp_core.models import Branches, ones, scale, wrap

pytestmark = pytest.mark.usefixtures("alone")


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
