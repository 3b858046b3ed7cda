"""Speed against PyTorch's own hooks, in turns in one run. Needs a quiet machine: `pytest -m bench`."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock

import commhooks
from tests.commhooks.models import Shape, resnet18_shapes, wrap
from tests.commhooks.ranks import run_ranks

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

GPT_SHAPES: list[Shape] = [
    (2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,)
] * 4  # fmt: skip


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("shapes", [resnet18_shapes(), GPT_SHAPES], ids=["resnet18", "gpt"])
def test_powersgd_takes_less_than_half_of_the_stock_hook(shapes: list[Shape], rank: int) -> None:
    ((ours, theirs, ratio),) = run_ranks(_powersgd_against_stock, 1, shapes, rank, timeout=300.0)
    print(f"microseconds per 1,000 elements: ours {ours:.2f}, stock {theirs:.2f}; median of ratios {ratio:.3f}")
    assert ratio < (0.45 if rank == 1 else 0.65)


class _Bucket:
    """Hand the same parameters to either hook."""

    def __init__(self, parameters: list[nn.Parameter], memory: Tensor) -> None:
        self._parameters = parameters
        self._memory = memory

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> Tensor:
        return self._memory

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        parts = self._memory.split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]


def _powersgd_against_stock(_: int, shapes: list[Shape], rank: int) -> tuple[float, float, float]:
    elements = sum(math.prod(shape) for shape in shapes)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    gradient = torch.randn(elements)
    contenders: list[tuple[Callable[..., Any], Any]] = [
        (commhooks.powerSGD_hook, commhooks.PowerSGDState(None, rank, start_powerSGD_iter=2)),
        (stock.powerSGD_hook, stock.PowerSGDState(None, rank, start_powerSGD_iter=2)),
    ]
    buckets = [_Bucket(parameters, gradient.clone()) for _ in contenders]
    seconds: list[list[float]] = [[], []]
    for _ in range(16):
        for (hook, state), bucket, times in zip(contenders, buckets, seconds, strict=True):
            bucket.buffer().copy_(gradient)
            begun = time.process_time()  # of all threads: one thread computes at a time, and others may share the core
            hook(state, bucket).wait()
            times.append(time.process_time() - begun)
    ours, theirs = (times[6:] for times in seconds)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ours) / elements * 1e9, statistics.median(theirs) / elements * 1e9, ratio


@pytest.mark.parametrize("kind", ["core", "torch"])
def test_the_allreduce_hook_costs_what_pytorchs_costs(kind: str) -> None:
    for name, ratio, spread in run_ranks(_allreduce_against_stock, 2, kind, timeout=300.0)[0]:
        print(f"{name}: step time over that with PyTorch's hook {ratio:.3f}; that hook against itself {spread:.3f}")
        assert ratio < max(1.0, spread) + 0.1


def _allreduce_against_stock(rank: int, kind: str) -> list[tuple[str, float, float]]:
    jobs: list[tuple[str, nn.Module, Shape, float]] = [
        ("1,000 small parameters", nn.Sequential(*[nn.Linear(32, 32) for _ in range(500)]), (8, 32), 25),
        ("8 large layers, 8 buckets", nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]), (32, 1024), 4),
        ("40 buckets", nn.Sequential(*[nn.Linear(128, 128) for _ in range(40)]), (64, 128), 0.06),
    ]
    return [(name, *_in_turns(kind, module, shape, cap)) for name, module, shape, cap in jobs]


def _in_turns(kind: str, module: nn.Module, shape: Shape, cap: float) -> tuple[float, float]:
    hooks = [commhooks.allreduce_hook, default_hooks.allreduce_hook, default_hooks.allreduce_hook]
    models = [wrap(kind, copy.deepcopy(module), bucket_cap_mb=cap) for _ in hooks]
    for model, hook in zip(models, hooks, strict=True):
        model.register_comm_hook(None, hook)  # type: ignore[operator]
    inputs = torch.randn(shape)
    seconds: list[list[float]] = [[] for _ in hooks]
    for _ in range(70):
        for model, times in zip(models, seconds, strict=True):
            model.zero_grad()
            begun = time.perf_counter()
            model(inputs).sum().backward()
            times.append(time.perf_counter() - begun)
    ours, theirs, again = (times[10:] for times in seconds)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return ratio, statistics.median(a / b for a, b in zip(again, theirs, strict=True))
