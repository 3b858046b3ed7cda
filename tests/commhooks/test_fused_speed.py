"""What packing costs: steps of one process under the policies "fused" and "fifo", in turns, in one run.

A process group of one rank moves nothing, so what remains is compressing, packing, and the hand-over of buckets. To
compare two checkouts, run this file from both in turns: `python -m tests.commhooks.test_fused_speed` prints JSON last.
It uses what `commhooks` exports and `tests.world`, and PyTorch's DDP, which is the same for both.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.world import run_world

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]

BUCKETS = 40
SHAPE = (1088, 1024)
"""Of the matrix in each bucket; a vector of 1,088 comes with it. 40 buckets take 178 MB."""
BUCKET_CAP_MB = 4.25
STEPS = {"all-reduce": 40, "powersgd": 25}
WARM_UP = 4
POLICIES = ("fifo", "fused")

Quartiles = list[float]


def test_a_fused_step_of_one_rank_takes_less_than_three_times_as_long() -> None:
    measured = measure()
    print(f"\n{as_text(measured)}")
    for name, result in measured["results"].items():
        assert result["buckets"] == BUCKETS, name
        assert result["fused/fifo"]["processor"][1] < 3.0, name


def measure() -> dict[str, Any]:
    """Return quartiles of seconds per step, by compressor and policy, and of the ratio of the policies."""
    # It leaves by os._exit: a process that used PyTorch's DDP over Gloo aborts at its exit in about 6 % of runs.
    (results,) = run_world(_measure_all, 1, timeout=280.0, check_exit=False)
    return {
        "commhooks": str(Path(commhooks.__file__).parent),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "results": results,
    }


def as_text(measured: dict[str, Any]) -> str:
    """Return the table."""
    lines = [f"{measured['commhooks']}, PyTorch {measured['torch']}, load {measured['load']:.1f}"]
    for name, result in measured["results"].items():
        lines.append(f"{name}, {result['buckets']} buckets, {result['gradient_bytes'] / 1e6:.0f} MB:")
        for policy in POLICIES:
            for clock, quartiles in result[policy].items():
                lines.append(f"  {policy:11}{clock:12}{_shown(quartiles, 1e3)} ms a step")
        for clock, quartiles in result["fused/fifo"].items():
            lines.append(f"  fused/fifo {clock:12}{_shown(quartiles)}")
    return "\n".join(lines)


def _shown(quartiles: Quartiles, factor: float = 1.0) -> str:
    low, middle, high = (factor * number for number in quartiles)
    return f"{middle:9.3f} [{low:.3f} {high:.3f}]"


def _measure_all(_: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    given = [torch.randn(shape) for _ in range(BUCKETS) for shape in (SHAPE, SHAPE[:1])]
    compressors: dict[str, Any] = {
        "all-reduce": "all-reduce",
        "powersgd": commhooks.make_compressor("powersgd", rank=4),
    }
    return {name: _measure(compressor, given, STEPS[name]) for name, compressor in compressors.items()}


def _measure(compressor: Any, given: list[Tensor], steps: int) -> dict[str, Any]:
    """Let both policies take steps in turns."""
    models = [DistributedDataParallel(_HandsIn(given), bucket_cap_mb=BUCKET_CAP_MB) for _ in POLICIES]
    pairs = [
        (model, commhooks.attach(model, compressor, policy=policy))
        for model, policy in zip(models, POLICIES, strict=True)
    ]
    turns: list[list[dict[str, float]]] = [[] for _ in POLICIES]
    for number in range(WARM_UP + steps):
        for which in (0, 1) if number % 2 else (1, 0):
            turns[which].append(_step(*pairs[which]))
    fifo, fused = (taken[WARM_UP:] for taken in turns)
    last = pairs[0][1].last_step()
    for _, attachment in pairs:
        attachment.detach()
    ratios = [{clock: b[clock] / a[clock] for clock in a} for a, b in zip(fifo, fused, strict=True)]
    return {
        "buckets": last.buckets,
        "gradient_bytes": last.gradient_bytes,
        "fifo": _quartiles(fifo),
        "fused": _quartiles(fused),
        "fused/fifo": _quartiles(ratios),
    }


def _step(model: nn.Module, attachment: commhooks.Attachment) -> dict[str, float]:
    """Take a step, and return the seconds of its backward pass, and of what the hook computed and packed in it."""
    model.zero_grad()
    loss = model()
    compressing = attachment.statistics().seconds_compressing
    processor, begun = time.process_time(), time.perf_counter()
    loss.backward()
    return {
        "wall": time.perf_counter() - begun,
        "processor": time.process_time() - processor,
        "compressing": attachment.statistics().seconds_compressing - compressing,
    }


def _quartiles(turns: list[dict[str, float]]) -> dict[str, Quartiles]:
    return {clock: statistics.quantiles((turn[clock] for turn in turns), n=4) for clock in turns[0]}


class _HandsIn(nn.Module):
    """Have parameters whose gradients are given, at the price of one copy of each."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.given = given
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros_like(gradient)) for gradient in given])

    def forward(self) -> Tensor:
        zeros = [_hand_in(weight, gradient) for weight, gradient in zip(self.weights, self.given, strict=True)]
        return torch.stack(zeros).sum()


class _HandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


_hand_in: Any = functools.partial(_HandIn.apply)


if __name__ == "__main__":
    found = measure()
    print(as_text(found))
    print(json.dumps(found))
