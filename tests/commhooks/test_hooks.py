"""The hooks on Gloo, over several buckets, on both DDPs."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as stock

import commhooks
from tests import bounds
from tests.cases import BY_NAME, EACH_FORM_ONCE
from tests.commhooks.mirrored import SHAPES, Mirrored, backward, given, largest_error
from tests.commhooks.models import gradients_of
from tests.commhooks.workers import largest, normal, zeros
from tests.ddp_core.facts import BOTH_DDPS, Facts
from tests.world import on_ranks

facts = Facts(kinds=BOTH_DDPS)


@on_ranks(2, check_exit=False)
@pytest.mark.kernels
@pytest.mark.parametrize("kind", BOTH_DDPS)
def test_the_default_hooks_give_pytorchs_mean(rank: int, kind: str) -> None:
    """But for the rounding of what they send: relative to the largest element of any rank's gradients."""
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
    for step in range(5):
        of_ranks = normal(zeros(*SHAPES), 2, seed=step)
        gradients, terms = of_ranks[rank], largest(*of_ranks[0], *of_ranks[1])
        expected = backward(reference, gradients)
        for name, model in models.items():
            assert all(g.dtype == torch.float32 for g in gradients_of(model))
            wire = torch.float16 if "fp16" in name else torch.bfloat16 if "bf16" in name else None
            error = largest_error(backward(model, gradients), expected) / terms
            assert error <= (bounds.of_mean(2, wire) if wire else 0.0), name


@on_ranks(2)
@pytest.mark.kernels
@EACH_FORM_ONCE
def test_every_case_is_over_gloo_bit_for_bit_what_it_is_in_lockstep(
    rank: int, kind: str, policy: str, names: list[str]
) -> None:
    """Over several buckets, on ranks that are delayed at random."""
    dawdling = random.Random(rank)
    for case in map(BY_NAME.__getitem__, names):
        both = Mirrored(kind, case.make(), policy)
        for step in range(4):
            time.sleep(dawdling.random() * 0.02)
            ours, expected = both.step(normal(zeros(*SHAPES), 2, seed=step))
            same = all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
            assert same, (case.name, step, largest_error(ours, expected))
        counted, simulated = both.attachment.statistics(), both.workers.traffic
        assert counted.steps == 4 and counted.buckets > 8, counted
        assert counted.payload_elements == simulated.payload_elements, (case.name, counted, simulated)
        assert counted.collectives == simulated.collectives, (case.name, counted, simulated)
        assert counted.gradient_bytes == 4 * 4 * sum(math.prod(shape) for shape in SHAPES)
        assert sum(kind.payload_bytes for kind in counted.by_kind.values()) == counted.payload_bytes
        assert both.attachment.last_step().buckets * 4 >= counted.buckets - 3
        both.attachment.close()


@facts
def a_copy_that_shares_the_reducer_keeps_the_attachment_and_any_other_copy_has_none(rank: int, kind: str) -> None:
    """`Module._replicate_for_data_parallel` makes the first kind; `copy.copy` and `copy.deepcopy` the second."""
    model = given(kind)
    gradients = normal(zeros(*SHAPES), 2, seed=0)[rank]
    attachment = commhooks.attach(model, "fp16")
    compressed = backward(model, gradients)
    other = copy.deepcopy(model) if kind == "core" else copy.copy(model)
    same = model._replicate_for_data_parallel()
    _expect("attached to this model already; close its handle first", commhooks.attach, same, "bf16")
    del model
    gc.collect()
    assert largest_error(compressed, backward(same, gradients)) == 0
    assert attachment.is_attached and attachment.steps == 2
    attachment.replace("bf16")
    _expect("a copy with its reducer trains on", attachment.watch, None)
    attachment.close()
    plain = backward(same, gradients)
    assert attachment.steps == 2 and largest_error(compressed, plain) > 0
    second = commhooks.attach(same, "fp16")
    assert largest_error(compressed, backward(same, gradients)) == 0 and second.steps == 1
    assert largest_error(plain, backward(other, gradients)) == 0 and second.steps == 1
    del same
    gc.collect()
    assert not second.is_attached
    _expect("its model is gone", second.replace, "bf16")
    second.close()


def _expect(text: str, function: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(commhooks.AttachError, match=text):
        function(*arguments)


@on_ranks(2, check_exit=False)
def test_process_groups_come_and_go(rank: int) -> None:
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


@pytest.mark.parametrize(
    "name", ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "noop_hook", "powerSGD_hook"]
)
def test_hooks_have_the_shape_that_pytorch_wants(name: str) -> None:
    hook: Any = getattr(commhooks, name)
    signature = inspect.signature(hook)
    assert signature.parameters["bucket"].annotation is dist.GradBucket  # type: ignore[attr-defined]
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
    assert hook.__name__ not in ("bf16_compress_hook", "bf16_compress_wrapper_hook")  # PyTorch refuses these off NCCL


def test_the_state_of_powersgd_takes_pytorchs_arguments_in_pytorchs_order() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    every = inspect.signature(commhooks.PowerSGDState).parameters.values()
    ours = [p for p in every if p.kind is not p.KEYWORD_ONLY]
    theirs = inspect.signature(PowerSGDState).parameters.values()
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


test = facts.tests()
