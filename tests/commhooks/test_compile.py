"""Compiled models train as others do; what runs in C++, or in threads, is not traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

import commhooks
from tests.commhooks.models import wrap
from tests.tiers import thorough
from tests.world import on_ranks, run_world

PARTS = ["ddp", "module", "step"]
SEVERAL_BUCKETS = {"bucket_cap_mb": 0.0004}  # only ddp_core's: dynamo cuts graphs by PyTorch's, of at least 1 MiB
STEPS = 4


def frames_of(
    rank: int, kind: str, settings: dict[str, Any], ways: Sequence[str], optimize: bool = True
) -> dict[str, int]:
    """Train a model of which one part is under `torch.compile`; return how many frames that traced, by part.

    `optimize` lets dynamo cut the graph where PyTorch's DDP has the end of a bucket. Each way must end with the
    parameters of the run that compiles nothing, with one step of the hook for each of ours.
    """
    compile, found = functools.partial(torch.compile, backend="eager"), {}
    expected = _train(kind, settings, {})
    for what in ways:
        torch._dynamo.reset()
        counters.clear()
        with torch._dynamo.config.patch(optimize_ddp=optimize):
            got = _train(kind, settings, {what: compile})
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True)), what
        found[what] = counters["frames"]["total"]
    return found


def _train(kind: str, settings: dict[str, Any], compiled: dict[str, Callable[[Any], Any]]) -> list[Tensor]:
    """Return the parameters after some steps, every other one of two backward passes."""
    torch.manual_seed(0)
    module: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    ddp = wrap(kind, compiled.get("module", _as_it_is)(module), **settings)
    hooks = commhooks.attach(ddp, commhooks.make_compressor("powersgd", rank=2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    called = compiled.get("ddp", _as_it_is)(ddp)

    def backward(inputs: Tensor) -> None:
        called(inputs).square().mean().backward()

    backward = compiled.get("step", _as_it_is)(backward)
    for number in range(STEPS):
        optimizer.zero_grad()
        if number % 2:
            with ddp.no_sync():  # type: ignore[operator]  # 'Tensor not callable'
                backward(torch.randn(4, 8))
        backward(torch.randn(4, 8))
        optimizer.step()
    assert hooks.steps == STEPS
    assert hooks.statistics().ratio > 1
    hooks.close()
    return list(module.parameters())


def _as_it_is(whatever: Any) -> Any:
    return whatever


@on_ranks(1, check_exit=False)
def test_a_ddp_that_calls_no_hook_as_hooks_are_called_is_refused(rank: int) -> None:
    stepping = nn.Linear(8, 8)
    _apply_optimizer_in_backward(torch.optim.SGD, stepping.parameters(), {"lr": 0.1})
    with pytest.raises(commhooks.AttachError, match="_apply_optimizer_in_backward"):
        commhooks.attach(wrap("torch", stepping), "powersgd")
    said = 'optimize_ddp was "python_reducer" when this model was wrapped'
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        with pytest.raises(commhooks.AttachError, match=said):
            commhooks.attach(wrap("torch", nn.Linear(8, 8)), "powersgd")
        for hook, state in (
            (commhooks.powerSGD_hook, commhooks.PowerSGDState(None)),
            (commhooks.fp16_compress_hook, None),
        ):
            ddp = wrap("torch", nn.Linear(8, 8))
            ddp.register_comm_hook(state, hook)  # type: ignore[operator]  # 'Tensor not callable'
            loss = ddp(torch.ones(1, 8)).sum()
            if ddp._accum_grad_hooks:
                with pytest.raises(commhooks.AttachError, match=said):
                    loss.backward()
            else:  # PyTorch 2.6 goes back to C++ unless autograd is compiled, and calls hooks as ever
                loss.backward()
                assert all(torch.equal(p.grad, torch.ones_like(p)) for p in ddp.parameters() if p.grad is not None)
    dist.barrier()


def test_a_compiled_model_trains_to_the_same_bits_and_traces_neither_reducer_nor_hook() -> None:
    (frames,) = run_world(frames_of, 1, "core", SEVERAL_BUCKETS, PARTS)
    most = 12 if torch.__version__.startswith("2.8.") else 10
    assert frames["ddp"] <= 6 and frames["module"] == 1 and frames["step"] <= most, frames


@pytest.mark.parametrize("optimize", thorough([True, False], unless=bool))
def test_pytorchs_compiled_ddp_trains_to_the_same_bits(optimize: bool) -> None:
    run_world(frames_of, 1, "torch", {}, ["ddp"], optimize)
