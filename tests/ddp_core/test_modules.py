"""Every kind of module: what it holds, how it is copied and saved, where it is wrapped, and that it is let go."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from ddp_core import replicas
from tests.commhooks.models import gloo_sums_complex_numbers
from tests.ddp_core.facts import Facts
from tests.ddp_core.models import MEAN, Branches, grads, ones, scale, wrap
from tests.quantised import OnCodes
from tests.waiting import until
from tests.world import run_world_outcomes

facts = Facts()
facts_of_three = Facts(world_size=3)
facts_in_detail = Facts(environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})

MODES: list[dict[str, bool]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


class Odd(nn.Module):
    """Parameters of every dtype and layout; the gradient of each element is the factor."""

    def __init__(self) -> None:
        super().__init__()
        self.fp16 = nn.Parameter(torch.ones(3, dtype=torch.float16))
        self.bf16 = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.fp64 = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.complex64 = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.lonely = nn.Parameter(torch.zeros(0, dtype=torch.complex128))
        self.transposed = nn.Parameter(torch.ones(2, 5).t())
        self.channels_last = nn.Parameter(torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))

    def forward(self, factor: float) -> Tensor:
        sums = [p.real.double().sum() if p.is_complex() else p.double().sum() for p in self.parameters()]
        return torch.stack(sums).sum() * factor


@facts
def parameters_of_every_dtype_and_layout_are_averaged(rank: int) -> None:
    for mode in MODES:
        model = Odd()
        if not gloo_sums_complex_numbers():
            del model.complex64, model.lonely
        ddp = wrap(model, bucket_cap_mb=1e-4, **mode)
        for _ in range(3):
            ddp.zero_grad()
            ddp(rank + 1.0).backward()
            for parameter in ddp.parameters():
                assert torch.equal(parameter.grad, torch.full_like(parameter, MEAN)), mode
                assert parameter.grad.stride() == parameter.stride()


@facts
def everything_is_copied_from_rank_zero(rank: int) -> None:
    model = Odd()
    for parameter in model.parameters():
        parameter.data.fill_(rank + 1)
    model.scalar.requires_grad_(False)
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex128):
        model.register_buffer(str(dtype).split(".")[1], torch.full((3,), rank, dtype=dtype))
    model.register_buffer("strided", torch.full((4, 6), rank)[:, ::2].t())
    model.register_buffer("own", torch.full((2,), rank), persistent=False)
    model.register_buffer("conjugate", torch.full((2,), complex(rank, -rank)).conj())
    model.register_buffer("negative", torch.full((2,), complex(0, rank)).conj().imag)
    wrap(model)
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())
    assert all(bool((buffer == 0).all()) for buffer in model.buffers())


class Counting(nn.Module):
    """Adds this rank's number to a buffer, in place or with a new tensor."""

    seen: Tensor

    def __init__(self, replace: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))
        self.replace = replace

    def forward(self, number: float) -> Tensor:
        before = self.seen.item()
        if self.replace:
            self.seen = self.seen + number
        else:
            self.seen += number
        return self.weight * before


@facts
def buffers_are_rank_zeros_before_every_forward_pass(rank: int) -> None:
    for replace in (False, True):
        ddp = wrap(Counting(replace))
        for step in range(3):
            assert ddp(rank + 1.0).item() == step
        ddp.eval()
        assert ddp(rank + 1.0).item() == 3
        with torch.no_grad():
            assert ddp(rank + 1.0).item() == 4
        ddp.train()
        with ddp.no_sync():  # the forward pass before it did not synchronise, so it did not promise to
            assert ddp(rank + 1.0).item() == 5 * (rank + 1) - 4 * rank


@facts
def frozen_codes_are_left_as_each_rank_has_them(rank: int) -> None:
    """PyTorch's class copies them with operations that such a tensor may not answer."""
    for mode in MODES:
        model = OnCodes(rank)
        ddp = wrap(model, **mode)
        for step in range(3):
            ddp.zero_grad()
            ddp(torch.full((2, 4), rank + step + 1.0)).sum().backward()
        of_ranks = [torch.zeros(4) for _ in range(2)]
        dist.all_gather(of_ranks, ddp.module.head.bias.grad)
        assert torch.equal(*of_ranks) and model.marks() == [rank, 0], mode


@facts
def a_deep_copy_trains_apart(rank: int) -> None:
    for mode in MODES:
        ddp = wrap(Branches(), **mode)
        ddp(ones(rank)).backward()
        twin = copy.deepcopy(ddp)
        assert twin.module.a.weight is not ddp.module.a.weight
        twin.zero_grad()
        for _ in range(2):
            twin(10 * ones(rank)).backward()
        assert grads(twin) == [[20 * MEAN]] * 2
        assert grads(ddp) == [[MEAN]] * 2
        ddp(ones(rank)).backward()
        assert grads(ddp) == [[2 * MEAN]] * 2


@facts
def a_dropped_wrapper_is_freed_at_once_with_its_buckets(rank: int) -> None:
    gc.collect()
    gc.disable()
    for mode in MODES:
        model = nn.Sequential(scale(), nn.BatchNorm1d(1))
        ddp = wrap(model, **mode)
        handle = ddp.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True))
        for step in range(3):
            loss = ddp(torch.arange(4.0).view(4, 1)).sum()
            loss.backward()
            if step == 1:
                handle.remove()
        with ddp.join():
            ddp(torch.arange(4.0).view(4, 1)).sum().backward()
        with ddp.no_sync():
            kept = ddp(torch.arange(4.0).view(4, 1))  # a graph that outlives the wrapper
        model.zero_grad()
        watched = [weakref.ref(ddp), weakref.ref(ddp.reducer)]
        buckets = [weakref.ref(bucket.flat) for bucket in ddp.reducer.layout.buckets]
        del ddp
        assert [alive() for alive in watched] == [None, None], mode
        # Gloo's thread may still hold a collective that was waited for.
        assert until(lambda buckets=buckets: all(bucket() is None for bucket in buckets)), mode  # type: ignore[misc]
        kept.sum().backward()
    gc.enable()


@facts_of_three
def groups_of_some_ranks_average_apart(rank: int) -> None:
    groups = {members: dist.new_group(list(members)) for members in ((0, 2), (1, 2))}
    for members, group in groups.items():
        if rank in members:
            model = scale()
            model.weight.data.fill_(rank)
            ddp = wrap(model, process_group=group)
            assert model.weight.item() == members[0]
            for _ in range(3):
                ddp.zero_grad()
                ddp(ones(rank)).sum().backward()
                assert grads(ddp) == [[sum(r + 1 for r in members) / 2]]
            del ddp


@facts_in_detail
def training_survives_the_most_detailed_debugging(rank: int) -> None:
    assert get_debug_level() == DebugLevel.DETAIL
    for mode in MODES:
        ddp = wrap(Branches(), **mode)
        for _ in range(3):
            ddp.zero_grad()
            ddp(ones(rank)).backward()
            assert grads(ddp) == [[MEAN]] * 2


def dies(rank: int, when: str) -> None:
    ddp = wrap(nn.Sequential(scale(), nn.BatchNorm1d(1)), bucket_cap_mb=1e-6)
    batch = torch.arange(4.0).view(4, 1)
    for step in range(20):
        if rank == 1 and step == 3:
            if when == "backward":
                ddp.module[0].weight.register_hook(lambda grad: os._exit(7))
            else:
                os._exit(7)
        ddp(batch).sum().backward()


@pytest.mark.parametrize("when", ["backward", "between steps"])
def test_a_rank_that_dies_ends_the_others_with_an_error(when: str) -> None:
    left, dead = run_world_outcomes(dies, 2, when, check_exit=False)
    assert dead.exit_code == 7
    assert left.stack is None, "it hung"
    assert left.traceback is not None
    assert "Connection" in left.traceback or "reset" in left.traceback


DTYPES = [torch.int64, torch.float32, torch.float64, torch.float16, torch.uint8]
JOINED, MOST = 64, 200

some_tensors = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 60)), min_size=1, max_size=12)


@given(some_tensors)
def test_every_tensor_gets_the_sources_elements_in_messages_that_are_not_too_large(
    kinds: list[tuple[torch.dtype, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "JOINED_BYTES", JOINED)
        patch.setattr(replicas, "MESSAGE_BYTES", MOST)
        patch.setattr(replicas, "finish", lambda work: None)
        sources = [torch.arange(size).to(dtype) for dtype, size in kinds]
        others = [torch.full_like(source, 77) for source in sources]
        sent: list[Tensor] = []
        patch.setattr(replicas, "broadcast", _recorder(sent.append))
        replicas.broadcast_coalesced(sources, cast(dist.ProcessGroup, None), 0)
        on_their_way = iter(sent)
        patch.setattr(replicas, "broadcast", _recorder(lambda message: message.copy_(next(on_their_way))))
        replicas.broadcast_coalesced(others, cast(dist.ProcessGroup, None), 0)
        chunks = replicas._chunks(sources)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(others, sources, strict=True))
    for chunk in chunks:
        nbytes, is_mixed = sum(tensor.nbytes for tensor in chunk), len({tensor.dtype for tensor in chunk}) > 1
        assert nbytes <= (JOINED if is_mixed else MOST) or len(chunk) == 1


def _recorder(take: Callable[[Tensor], object]) -> Any:
    def broadcast(group: object, message: Tensor, source: int) -> None:
        take(message)

    return broadcast


def test_a_models_parameters_are_copied_once_though_it_has_integers_beside_them() -> None:
    """As a model with batch normalization has; a message of several dtypes is copied twice."""
    parameters = [torch.zeros(300_000), torch.zeros(300_000)]
    chunks = replicas._chunks([*parameters, torch.zeros((), dtype=torch.int64)])
    assert [[tensor.numel() for tensor in chunk] for chunk in chunks] == [[1], [300_000, 300_000]]


test_on_two_ranks = facts.tests()
test_on_three_ranks = facts_of_three.tests()
test_in_detail = facts_in_detail.tests()
