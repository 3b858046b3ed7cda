"""``delay_all_reduce_named_params``: PyTorch's numbers, in every way in which a step can be taken."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from tests.ddp_core.facts import Facts
from tests.ddp_core.models import MEAN, Branches, grads, ones, scale, wrap
from tests.parity.training import ddp_class, first_difference, snapshot

facts = Facts(check_exit=False)  # PyTorch's DDP aborts in about 6 % of exits


def delaying(module: nn.Module, trigger: str, *names: str) -> dict[str, Any]:
    """Return the two arguments that delay parameters ``names`` until the gradient of ``trigger`` is ready."""
    named = dict(module.named_parameters())
    return {
        "delay_all_reduce_named_params": [(name, named[name]) for name in names],
        "param_to_hook_all_reduce": named[trigger],
    }


def delayed(module: nn.Module, trigger: str, *names: str, **options: Any) -> Any:
    """Wrap the module."""
    return wrap(module, **delaying(module, trigger, *names), **options)


@contextmanager
def kept_works(works: list[dist.Work]) -> Iterator[None]:
    """Keep the works of ``dist.all_reduce``: PyTorch's class drops that of its delayed all-reduce."""
    original = dist.all_reduce

    def keeping(*args: Any, **kwargs: Any) -> Any:
        works.append(original(*args, **kwargs))
        return works[-1]

    dist.all_reduce = keeping
    try:
        yield
    finally:
        dist.all_reduce = original


def history(rank: int, which: str, compressor: str | None = None, **options: Any) -> list[dict[str, Tensor]]:
    """Return parameters and gradients after each of five steps; weights differ by rank before they are wrapped."""
    torch.manual_seed(7 + rank)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
    some = delaying(module, "0.weight", "4.bias", "2.weight", "4.weight")
    ddp: Any = ddp_class(which)(module, **some, **options)
    attachment = commhooks.attach(ddp, compressor) if compressor is not None else None
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    steps, works = [], []  # type: ignore[var-annotated]  # 'Need type annotation': both are filled below
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with kept_works(works):
            ddp(torch.randn(4, 5)).square().sum().backward()
        for work in works:
            work.wait()
        optimizer.step()
        steps.append(snapshot(module))
    if attachment is not None:
        attachment.close()
    return steps


@facts
def every_step_has_the_bits_of_pytorchs_class(rank: int) -> None:
    every: list[dict[str, Any]] = [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ]
    for options in every:
        assert first_difference(history(rank, "torch", **options), history(rank, "ours", **options)) is None, options


@facts
def gradients_are_means_in_memory_that_stays(rank: int) -> None:
    model = Branches()
    ddp = delayed(model, "a.weight", "b.weight")
    ddp(ones(rank)).backward()
    assert grads(model) == [[MEAN], [MEAN]]
    memory: Any = model.b.weight.grad
    for set_to_none in (True, False):
        ddp.zero_grad(set_to_none=set_to_none)
        output = ddp(ones(rank))
        ddp.zero_grad(set_to_none=set_to_none)  # also in between
        output.backward()
        assert grads(model) == [[MEAN], [MEAN]]
        now: Any = model.b.weight.grad
        assert now.data_ptr() == memory.data_ptr()
    ddp(ones(rank)).backward()  # accumulates onto means
    assert grads(model) == [[2 * MEAN], [2 * MEAN]]


@facts
def what_is_not_used_has_a_gradient_of_zeros(rank: int) -> None:
    """As in PyTorch's class, with or without find_unused_parameters; a trigger that is not used holds nothing up."""
    for options in ({}, {"find_unused_parameters": True}):
        model = Branches()
        ddp = delayed(model, "a.weight", "b.weight", **options)
        ddp(ones(rank), "a").backward()
        assert grads(model) == [[MEAN], [0.0]]
        ddp.zero_grad()
        ddp(ones(rank), "ab" if rank else "a").backward()
        assert grads(model) == [[MEAN], [1.0]]
    ddp.zero_grad()
    ddp(ones(rank), "b").backward()
    assert grads(model) == [None, [MEAN]]


@facts
def ranks_may_get_to_the_trigger_in_different_orders(rank: int) -> None:
    """One rank's last bucket is full before the trigger fires, the other's after it: the order is the same."""
    model = nn.ModuleDict({name: scale() for name in "abc"})
    model.forward = lambda x, order: sum(model[name](x) for name in order)
    ddp = delayed(model, "a.weight", "c.weight", bucket_cap_mb=1e-6)
    for _ in range(3):
        ddp.zero_grad()
        ddp(ones(rank), "abc" if rank else "cba").backward()
        assert grads(model) == [[MEAN]] * 3


@facts
def a_hook_may_issue_collectives_until_its_future_is_done(rank: int) -> None:
    """As PyTorch's PowerSGD does, in callbacks. The delayed sum must not pair up with one of these."""
    model = Branches()
    ddp = delayed(model, "a.weight", "b.weight")

    def sum_of_sevens() -> Tensor:
        sevens = torch.full((1,), 7.0)
        dist.all_reduce(sevens)
        return sevens

    def hook(_: object, _bucket: Any) -> Any:
        if rank == 0:
            return sum_of_sevens()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        threading.Timer(0.1, lambda: future.set_result(sum_of_sevens())).start()
        return future

    ddp.register_comm_hook(None, hook)
    with ddp.join():
        for step in range(2 + rank):
            ddp.zero_grad()
            ddp(ones(rank)).backward()
            assert grads(model) == [[14.0], [MEAN if step < 2 else 1.0]]


@facts
def all_may_be_delayed_and_wait_for_one_of_themselves(rank: int) -> None:
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        model = Branches()
        ddp = delayed(model, "b.weight", "a.weight", "b.weight", **options)
        for _ in range(3):
            ddp.zero_grad()
            ddp(ones(rank)).backward()
            assert grads(model) == [[MEAN], [MEAN]]


test = facts.tests()
