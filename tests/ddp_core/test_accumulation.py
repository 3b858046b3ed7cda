"""Gradients accumulate with no_sync() around either pass, and are reduced afterwards; uneven inputs are joined."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core import GradBucket
from tests.ddp_core.facts import Facts
from tests.ddp_core.models import MEAN, Branches, Words, grads, ones, scale, wrap

facts = Facts(backend="gloo in turn")  # some hooks sum sparse gradients as Gloo does

MODES: list[dict[str, bool]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
]


def gradient(ddp: nn.Module) -> float:
    (values,) = grads(ddp)
    assert values is not None
    return values[0]


@facts
def no_sync_round_the_backward_pass_accumulates(rank: int) -> None:
    for mode in MODES:
        ddp = wrap(scale(), **mode)
        for _ in range(3):
            ddp.zero_grad()
            loss = ddp(ones(rank)).sum()
            with ddp.no_sync():
                loss.backward()
            assert gradient(ddp) == rank + 1, mode
            loss = ddp(10 * ones(rank)).sum()
            with ddp.no_sync():
                loss.backward(retain_graph=True)
            loss.backward()
            assert gradient(ddp) == 21 * MEAN, mode


@facts
def what_was_used_only_while_accumulating_is_reduced_too(rank: int) -> None:
    ddp = wrap(Branches(), find_unused_parameters=True)
    for _ in range(2):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(ones(rank), "a").backward()
        ddp(ones(rank), "b").backward()
        assert grads(ddp) == [[MEAN], [MEAN]]


@facts
def a_gradient_that_comes_after_the_reduction_stays_local_with_a_warning(rank: int) -> None:
    ddp = wrap(scale())
    for first, second in ((ones(rank), 10 * ones(rank)), (ones(rank), ones(rank))):
        ddp.zero_grad()
        losses = ddp(first).sum(), ddp(second).sum()
        losses[0].backward()
        assert gradient(ddp) == MEAN * first.item() / (rank + 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses[1].backward()
        assert gradient(ddp) == MEAN + second.item()  # what PyTorch's class does, in silence
        messages = [str(warning.message) for warning in caught]
        assert len(messages) == (1 if second is not first and second.item() > rank + 1 else 0), "once for a model"
        assert all("'weight' got a gradient after this iteration's gradients were reduced" in m for m in messages)


@facts
def every_input_weighs_the_same_in_join(rank: int) -> None:
    ddp = wrap(scale())
    seen = []
    with ddp.join():
        for _ in range(2 + 2 * rank):
            ddp.zero_grad()
            ddp(ones(rank)).sum().backward()
            seen.append(gradient(ddp))
    assert seen == [MEAN, MEAN, 1.0, 1.0][: 2 + 2 * rank]


@facts
def the_last_model_is_everyones_after_join(rank: int) -> None:
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        model = nn.Sequential(scale(), nn.BatchNorm1d(1))
        ddp = wrap(model, **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for epoch in range(2):
            with ddp.join():
                for _ in range(1 + 2 * (rank if epoch == 0 else 1 - rank)):
                    optimizer.zero_grad()
                    ddp(torch.arange(4.0).view(4, 1) * (rank + 1)).square().sum().backward()
                    optimizer.step()
                own = [value.tolist() for value in model.state_dict().values()]
            states: list[Any] = [None, None]
            torch.distributed.all_gather_object(states, (own, [v.tolist() for v in model.state_dict().values()]))
            of_the_last, _ = states[1 - epoch]
            assert [now for _, now in states] == [of_the_last] * 2, options


@facts
def no_sync_round_the_backward_pass_alone_is_refused_in_join(rank: int) -> None:
    ddp = wrap(scale())
    words = r"no_sync\(\) around the backward pass alone.*Put the forward pass"
    with pytest.raises(RuntimeError, match=words), ddp.join():  # noqa: PT012 (join must see the exception pass)
        loss = ddp(ones(rank)).sum()
        with ddp.no_sync():
            loss.backward()
    assert ddp.require_backward_grad_sync is True


@facts
def join_mirrors_a_hook_and_sparse_gradients(rank: int) -> None:
    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]  # 'Returning Any from function': Work.get_future is untyped

    for options in ({}, {"find_unused_parameters": True}):
        for registered in (None, hook):
            ddp = wrap(Words(), **options)
            if registered is not None:
                ddp.register_comm_hook(None, registered)
            seen = []
            with ddp.join():
                for _ in range(1 + 2 * rank):
                    ddp.zero_grad()
                    ddp(rank).backward()
                    seen.append(ddp.module.words.weight.grad.to_dense()[:, 0].tolist())
            assert seen == [[0.5, 0.5, 0, 0], [0, 0.5, 0, 0], [0, 0.5, 0, 0]][: 1 + 2 * rank], options


@facts
def join_refuses_what_a_joined_rank_cannot_mirror(rank: int) -> None:
    skipping = wrap(scale(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    hooked = wrap(scale())
    hooked._register_buffer_comm_hook(None, lambda state, buffers: [])
    for ddp in (skipping, hooked):
        with pytest.raises(NotImplementedError, match="skip_all_reduce_unused_params.*buffer hook"), ddp.join():
            ddp(ones(rank))
        with ddp.join(enable=False):
            ddp(ones(rank)).sum().backward()
        assert gradient(ddp) == MEAN


test_on_two_ranks = facts.tests()
