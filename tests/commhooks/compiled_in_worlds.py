"""What the tests of compiled models, and of DDPs that call no hook, run on a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

import commhooks
from tests.commhooks.models import wrap

STEPS = 4


def frames_of(
    rank: int, kind: str, settings: dict[str, Any], backend: str, ways: Sequence[str], optimize: bool = True
) -> dict[str, int]:
    """Train a model of which one part is under `torch.compile`; return how many frames that traced, by part.

    `optimize` lets dynamo cut the graph where PyTorch's DDP has the end of a bucket. Each way must end with the
    parameters of the run that compiles nothing, with one step of the hook for each of ours. Inductor's kernels round
    otherwise than eager ones: its parameters must be those of PyTorch's DDP around the compiled module.
    """
    compile, found = functools.partial(torch.compile, backend=backend), {}
    inductor = backend == "inductor"
    expected = _train("torch" if inductor else kind, settings, {"module": compile} if inductor else {})
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
    hooks.detach()
    return list(module.parameters())


def _as_it_is(whatever: Any) -> Any:
    return whatever


def refusals(rank: int) -> dict[str, str]:
    """Return the errors for hooks on a DDP that would not call them as hooks."""
    stepping = nn.Linear(8, 8)
    _apply_optimizer_in_backward(torch.optim.SGD, stepping.parameters(), {"lr": 0.1})
    found = {"in backward": _text_of(lambda: commhooks.attach(wrap("torch", stepping), "powersgd"))}
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        found["python_reducer"] = _text_of(lambda: commhooks.attach(wrap("torch", nn.Linear(8, 8)), "powersgd"))
        for hook, state in (
            (commhooks.powerSGD_hook, commhooks.PowerSGDState(None)),
            (commhooks.fp16_compress_hook, None),
        ):
            ddp = wrap("torch", nn.Linear(8, 8))
            ddp.register_comm_hook(state, hook)  # type: ignore[operator]  # 'Tensor not callable'
            found[hook.__name__] = _text_of(ddp(torch.ones(1, 8)).sum().backward)
    dist.barrier()
    return found


def _text_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except commhooks.AttachError as error:
        return str(error)
    return ""
