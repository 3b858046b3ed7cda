"""Any communication hook runs: whatever it is, whatever of the allowed it returns, and PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

import ddp_core
from ddp_core import GradBucket
from ddp_core.features.sparse import group_for_sparse_sums
from tests.ddp_core.facts import Facts
from tests.ddp_core.models import MEAN, Words, grads, ones, scale, wrap

facts = Facts()


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3, 2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]  # 'No overload variant of "to"': the stubs leave memory_format alone out


def step(ddp: nn.Module, rank: int) -> list[list[float] | None]:
    """Return the gradients of one backward pass on this rank's data."""
    ddp.zero_grad()
    generator = torch.Generator().manual_seed(rank)
    ddp(torch.randn(2, 2, 3, 3, generator=generator)).square().sum().backward()
    return grads(ddp)


def means(rank: int) -> list[list[float] | None]:
    """Return the gradients without any hook."""
    return step(wrap(model_of_seed(), bucket_cap_mb=1e-4), rank)


def model_of_seed() -> nn.Module:
    torch.manual_seed(1)
    return model()


def hooked(state: object, hook: Callable[..., Any], **options: Any) -> Any:
    """Return the model, in several buckets after the first step, with a hook."""
    ddp = wrap(model_of_seed(), bucket_cap_mb=1e-4, **options)
    ddp.register_comm_hook(state, hook)
    return ddp


def reduced(bucket: Any) -> Any:
    """Start the bucket's average."""
    bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(bucket.buffer(), async_op=True)


def plain(state: Any, bucket: Any) -> Future[Tensor]:
    return reduced(bucket).get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]  # 'Returning Any from function': Work.get_future is untyped


def postponed(state: object, bucket: ddp_core.GradBucket) -> Future[Tensor]:
    return plain(state, bucket)


def for_a_type_checker(state: object, bucket: NowhereToBeFound) -> Future[Tensor]:  # type: ignore[name-defined]  # noqa: F821 (a name that is imported under TYPE_CHECKING alone)
    return plain(state, bucket)


def for_pytorch(state: object, bucket: torch._C._distributed_c10d.GradBucket) -> Future[Tensor]:
    return plain(state, bucket)


class Callable_:  # noqa: N801 (the name would hide typing's)
    """Hooks of every other shape."""

    def __call__(self, state: object, window: Any) -> Any:
        return plain(state, window)


SHAPES: dict[str, Callable[..., Any]] = {
    "function": plain,
    "lambda": lambda s, b: plain(s, b),  # noqa: PLW0108 (a lambda is what is tested)
    "callable object": Callable_(),
    "any arguments": lambda *arguments: plain(*arguments),  # noqa: PLW0108 (see above)
    "defaults": lambda s, b, more=3: plain(s, b),
    "postponed annotations": postponed,
    "annotations for a type checker alone": for_a_type_checker,
    "PyTorch's annotations": for_pytorch,
}

RETURNS: dict[str, Callable[..., Any]] = {
    "Future[Tensor]": plain,
    "Future[list[Tensor]]": lambda s, b: reduced(b).get_future(),
    "Work": lambda s, b: reduced(b),
    "Tensor": lambda s, b: (reduced(b).wait(), b.buffer())[1],
    "another Tensor": lambda s, b: (reduced(b).wait(), b.buffer().clone())[1],
    "another shape": lambda s, b: (reduced(b).wait(), b.buffer().clone().view(1, -1))[1],
    "another dtype": lambda s, b: (reduced(b).wait(), b.buffer().double())[1],
    "every second element": lambda s, b: (reduced(b).wait(), b.buffer().repeat_interleave(2)[::2])[1],
    "half of its memory": lambda s, b: (reduced(b).wait(), b.buffer().repeat(2)[b.buffer().numel() :])[1],
}


@facts
def a_hook_may_have_any_shape(rank: int) -> None:
    expected = means(rank)
    for name, hook in SHAPES.items():
        ddp = hooked(None, hook)
        for _ in range(2):
            assert step(ddp, rank) == expected, name


@facts
def a_hook_may_return_a_future_a_list_a_work_or_a_tensor(rank: int) -> None:
    expected = means(rank)
    for view in (False, True):
        for name, hook in RETURNS.items():
            ddp = hooked(None, hook, gradient_as_bucket_view=view)
            for _ in range(2):
                assert step(ddp, rank) == expected, (name, view)


@facts
def hooks_are_replaced_and_removed_between_steps(rank: int) -> None:
    ddp = wrap(scale())

    def gradient() -> float:
        ddp.zero_grad()
        ddp(ones(rank)).sum().backward()
        return float(ddp.module.weight.grad.item())

    first = ddp.register_comm_hook(None, lambda state, bucket: torch.full_like(bucket.buffer(), 5.0))
    assert gradient() == 5
    second = ddp.register_comm_hook(6.0, lambda state, bucket: torch.full_like(bucket.buffer(), state))
    assert gradient() == 6
    first.remove()  # it is not the registered one
    assert gradient() == 6
    second.remove()
    second.remove()
    assert gradient() == MEAN
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    assert gradient() == MEAN
    ddp.remove_comm_hook()
    assert gradient() == MEAN


@facts
def a_hook_sees_a_sparse_gradient_alone(rank: int) -> None:
    seen: list[tuple[str, bool]] = []

    def look(state: object, bucket: GradBucket) -> Any:
        assert bucket.gradients()[0] is bucket.buffer() or not bucket.buffer().is_sparse
        seen.append((" ".join(bucket.names()), bucket.buffer().is_sparse))
        if bucket.buffer().is_sparse:  # a sum of these is not safe beside another collective of the group
            alone = group_for_sparse_sums(dist.distributed_c10d._get_default_group(), bucket.buffer().device)
            return alone.allreduce([bucket.buffer().div_(dist.get_world_size())], dist.AllreduceOptions())
        return plain(state, bucket)

    ddp = wrap(Words())
    ddp.register_comm_hook(None, look)
    ddp(rank).backward()
    assert sorted(seen) == [("out.weight", False), ("words.weight", True)]
    assert ddp.module.words.weight.grad.to_dense().tolist() == [[0.5, 0.5], [0.5, 0.5], [0, 0], [0, 0]]
    assert grads(ddp)[1] == [1.0]


test_on_two_ranks = facts.tests()
