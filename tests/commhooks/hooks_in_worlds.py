"""What the tests of hooks run on every rank. Module-level functions: they are pickled by name."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as stock

import commhooks
from tests import bounds
from tests.cases import BY_NAME
from tests.commhooks.mirrored import SHAPES, Mirrored, backward, given, largest_error
from tests.commhooks.models import Given, gradients_of, wrap
from tests.commhooks.workers import largest, normal, zeros


def default_hooks_against_pytorchs(rank: int, kind: str) -> dict[str, float]:
    """Return the largest distance of each hook's mean from that of PyTorch's all-reduce hook, over 5 steps.

    Relative to the largest element of any rank's gradients.
    """
    reference = given("torch")
    reference.register_comm_hook(None, stock.allreduce_hook)  # type: ignore[operator]
    hooks: dict[str, tuple[Any, Callable[..., Any]]] = {
        "allreduce": (None, commhooks.allreduce_hook),
        "fp16": (dist.group.WORLD, commhooks.fp16_compress_hook),
        "bf16": (None, commhooks.bf16_compress_hook),
        "fp16 of allreduce": (None, commhooks.fp16_compress_wrapper(commhooks.allreduce_hook)),
        "bf16 of allreduce": (None, commhooks.bf16_compress_wrapper(commhooks.allreduce_hook)),
        "fp16 of PyTorch's allreduce": (None, commhooks.fp16_compress_wrapper(stock.allreduce_hook)),
        "bf16 of PyTorch's allreduce": (None, commhooks.bf16_compress_wrapper(stock.allreduce_hook)),
        "dense PowerSGD": (commhooks.PowerSGDState(None), commhooks.powerSGD_hook),
        "fp16 of dense PowerSGD": (
            commhooks.PowerSGDState(None),
            commhooks.fp16_compress_wrapper(commhooks.powerSGD_hook),
        ),
    }
    models = {name: given(kind) for name in hooks}
    for name, (state, hook) in hooks.items():
        models[name].register_comm_hook(state, hook)  # type: ignore[operator]
    worst = dict.fromkeys(hooks, 0.0)
    for step in range(5):
        of_ranks = normal(zeros(*SHAPES), 2, seed=step)
        gradients, terms = of_ranks[rank], largest(*of_ranks[0], *of_ranks[1])
        expected = backward(reference, gradients)
        for name, model in models.items():
            assert all(g.dtype == torch.float32 for g in gradients_of(model))
            worst[name] = max(worst[name], largest_error(backward(model, gradients), expected) / terms)
    return worst


def powersgd_hook_with_fp16_on_the_wire(rank: int, kind: str) -> tuple[int, set[torch.dtype]]:
    """Return the payload bytes of 3 steps of the wrapped hook, and the dtypes of what it remembers."""
    state = commhooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=0)
    model = wrap(kind, Given((40, 60), (9,)))
    hook = commhooks.fp16_compress_wrapper(commhooks.powerSGD_hook)
    model.register_comm_hook(state, hook)  # type: ignore[operator]
    for step in range(3):
        model(*normal(zeros((40, 60), (9,)), 2, seed=step)[rank]).backward()
    assert state.parameters is not None
    kept = [state.parameters.of(parameter) for parameter in model.parameters()]
    dtypes = {tensor.dtype for one in kept for tensor in one.tensors.values()}
    return state.statistics().payload_bytes, dtypes


def every_case_like_lockstep(rank: int, kind: str, policy: str, names: Sequence[str]) -> list[str]:
    """Run these cases over Gloo with several buckets and randomly delayed ranks; list what differs from lockstep."""
    differ = []
    dawdling = random.Random(rank)
    for case in map(BY_NAME.__getitem__, names):
        both = Mirrored(kind, case.make(), policy)
        for step in range(4):
            time.sleep(dawdling.random() * 0.02)
            ours, expected = both.step(normal(zeros(*SHAPES), 2, seed=step))
            if not all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)):
                differ.append(f"{case.name}, step {step}: {largest_error(ours, expected)}")
        counted, simulated = both.attachment.statistics(), both.workers.traffic
        assert counted.steps == 4 and counted.buckets > 8, counted
        assert counted.payload_elements == simulated.payload_elements, (case.name, counted, simulated)
        assert counted.collectives == simulated.collectives, (case.name, counted, simulated)
        assert counted.gradient_bytes == 4 * 4 * sum(math.prod(shape) for shape in SHAPES)
        assert sum(kind.payload_bytes for kind in counted.by_kind.values()) == counted.payload_bytes
        assert both.attachment.last_step().buckets * 4 >= counted.buckets - 3
        both.attachment.detach()
    return differ


def attach_detach_attach(rank: int, kind: str) -> None:
    model = given(kind)
    of_ranks = normal(zeros(*SHAPES), 2, seed=0)
    gradients = of_ranks[rank]
    dense = backward(model, gradients) if kind == "core" else None
    first = commhooks.attach(model, "fp16")
    with_fp16 = backward(model, gradients)
    _expect(commhooks.AttachError, "attached to this model already; detach it first", commhooks.attach, model, "bf16")
    first.detach()
    first.detach()
    plain = backward(model, gradients)
    second = commhooks.attach(model, "bf16")
    with_bf16 = backward(model, gradients)
    assert first.statistics().steps == 1 and second.statistics().steps == 1
    assert dense is None or largest_error(dense, plain) == 0
    terms = largest(*of_ranks[0], *of_ranks[1])
    fp16, bf16 = (largest_error(compressed, plain) for compressed in (with_fp16, with_bf16))
    assert 0 < fp16 <= terms * bounds.of_mean(2, torch.float16) < bf16 <= terms * bounds.of_mean(2, torch.bfloat16)
    second.detach()


def _expect(kind: type[Exception], text: str, function: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(kind, match=text):
        function(*arguments)


def groups_come_and_go(rank: int) -> None:
    """Destroy the process group and make another, three times, with the stateless hooks."""
    store = dist.distributed_c10d._get_default_store()
    gradients = normal(zeros(*SHAPES), 2, seed=0)
    expected = [(a + b) / 2 for a, b in zip(gradients[0], gradients[1], strict=True)]
    for generation in range(3):
        model = given("torch")
        model.register_comm_hook(None, commhooks.allreduce_hook)  # type: ignore[operator]
        for _ in range(2):
            assert largest_error(backward(model, gradients[rank]), expected) == 0  # halves lose no bit, at any time
        del model
        gc.collect()
        if generation < 2:
            dist.destroy_process_group()
            again = PrefixStore(f"generation {generation}", store)
            dist.init_process_group("gloo", store=again, rank=rank, world_size=2)
