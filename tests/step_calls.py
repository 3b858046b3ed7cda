"""The calls of our own functions in one steady-state training step: `python -m tests.step_calls` lists them.

Two ranks train a linear layer, which is one bucket, under PyTorch's DDP; rank 0 counts with `sys.setprofile`, on the
training thread and on the worker's. How often a rank looks around while it waits depends on the machine. Therefore
several steps are counted, each until both threads have come to rest, and the one of the fewest calls stands for all:
in it no wait was longer than a slice. Generators and comprehensions count as calls each time they are entered.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.language import lending
from tests.world import run_world

ROOT = Path(__file__).parent.parent
PACKAGES = ("commhooks", "ddp_core")
COMPRESSORS = ("all-reduce", "powersgd")
WARM_UP = 3
COUNTED = 8
AT_REST = 0.02
"""Seconds without a call after which a step is over."""

Calls = Counter[tuple[str, str]]
"""How often each function is called, by its file and its qualified name."""


def calls_of_a_step() -> dict[str, Calls]:
    """Return the calls of a steady-state step on rank 0, by compressor."""
    by_compressor: dict[str, Calls] = run_world(_calls_by_compressor, 2, check_exit=False)[0]
    return by_compressor


def files_of(calls: Calls) -> set[str]:
    """Return the files whose functions are called."""
    return {file for file, _ in calls}


def _calls_by_compressor(rank: int) -> dict[str, Calls]:
    lending.IS_CHECKED = False  # as in a training run
    return {compressor: _fewest_calls(compressor) for compressor in COMPRESSORS}


def _fewest_calls(compressor: str) -> Calls:
    seen: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen[frame.f_code] += 1

    model = DistributedDataParallel(torch.nn.Linear(32, 64))
    inputs = torch.ones(8, 32)
    steps = []
    threading.setprofile(count)  # for the worker's thread, which the first step starts
    attachment = commhooks.attach(model, compressor)
    for _ in range(WARM_UP + COUNTED):
        seen.clear()
        sys.setprofile(count)
        model(inputs).sum().backward()
        sys.setprofile(None)
        total = -1
        while total < seen.total():
            total = seen.total()
            time.sleep(AT_REST)
        steps.append(_ours(seen))
    threading.setprofile(None)
    attachment.detach()
    return min(steps[WARM_UP:], key=Counter.total)


def _ours(seen: Counter[CodeType]) -> Calls:
    calls: Calls = Counter()
    for code, times in seen.items():
        file = Path(code.co_filename)
        if file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in PACKAGES:
            calls[str(file.relative_to(ROOT)), code.co_qualname] += times
    return calls


if __name__ == "__main__":
    for compressor, calls in calls_of_a_step().items():
        print(f"{compressor}: {len(files_of(calls))} files, {calls.total()} calls")
        for (file, name), times in sorted(calls.items()):
            print(f"{times:6} {file} {name}")
