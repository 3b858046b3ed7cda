"""The time that saving takes, beside torch.save of the same bytes. Needs a quiet machine: `pytest -m bench`."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
from tests.commhooks.models import wrap
from tests.commhooks.ranks import run_ranks

ROUNDS = 42


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_saving_takes_less_than_a_fifth_more_than_torch_save_of_the_same_bytes(tmp_path: Path) -> None:
    megabytes, times = run_ranks(_in_turns, 2, str(tmp_path), timeout=500.0)[0]
    ours, removing, flushed, plain, unflushed = times
    _, ratio, _ = quartiles = _ratios(ours, flushed)
    _, unflushed_ratio, _ = unflushed_quartiles = _ratios(unflushed, plain)
    print(f"\n{megabytes:.0f} MB on 2 ranks in {statistics.median(ours):.3f} s (quartiles {_spread(ours)})")
    print(f"torch.save and fsync: {_spread(flushed)} s; ours over it {_words(quartiles)}")
    print(f"torch.save alone: {_spread(plain)} s; ours over it {_words(_ratios(ours, plain))}")
    print(f"ours with flush=False: {_spread(unflushed)} s; over torch.save alone {_words(unflushed_quartiles)}")
    print(f"ours, with the removal of an older checkpoint: {_spread(removing)} s")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    assert ratio < 1.2
    assert unflushed_ratio < 1.2


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return statistics.quantiles((a / b for a, b in zip(ours, theirs, strict=True)), n=4)


def _spread(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{low:.3f} to {middle:.3f} to {high:.3f}"


def _words(quartiles: list[float]) -> str:
    low, middle, high = quartiles
    return f"{middle:.2f} (quartiles {low:.2f} to {high:.2f})"


def _in_turns(rank: int, place: str) -> tuple[float, list[list[float]]]:
    """Save by ours, twice, by torch.save with fsync and alone, and by ours without flush; return MB and seconds.

    Into a new folder each time, which is removed outside the time taken; but the second time one checkpoint makes room
    for the next.
    """
    root = Path(place)
    ddp = wrap("core", nn.Sequential(*[nn.Linear(1250, 1250) for _ in range(8)]))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    hooks = commhooks.attach(ddp, "powersgd")
    for _ in range(2):
        ddp(torch.randn(2, 1250)).square().mean().backward()
        optimizer.step()
    times = [[0.0] * ROUNDS for _ in range(5)]
    for number in range(ROUNDS):
        for way in random.Random(number).sample(range(5), 5):
            folder = root / ("removing" if way == 1 else f"{number}-{way}")
            folder.mkdir(exist_ok=True)
            dist.barrier()
            begun = time.perf_counter()
            if way in (0, 1, 4):
                parts: dict[str, Any] = {"model": ddp, "optimizer": optimizer, "hooks": hooks}
                commhooks.save_checkpoint(folder, step=number, keep=1, flush=way != 4, **parts)
            else:
                _save(folder, rank, ddp, optimizer, hooks, flush=way == 2)
            dist.barrier()
            times[way][number] = time.perf_counter() - begun
            if rank == 0 and way != 1:
                shutil.rmtree(folder)
            dist.barrier()
    megabytes = sum(file.stat().st_size for file in (root / "removing").rglob("*.pt")) / 1e6
    return megabytes, [seconds[2:] for seconds in times]


def _save(folder: Path, rank: int, ddp: nn.Module, optimizer: Any, hooks: Any, flush: bool) -> None:
    snapshot = hooks.snapshot().as_dict()
    contents = {f"rank{rank}.pt": snapshot["local"]}
    if rank == 0:
        model = ddp.module.state_dict()  # type: ignore[union-attr]  # 'Item "Tensor"'
        contents["shared.pt"] = [model, optimizer.state_dict(), snapshot["replicated"]]
    for name, content in contents.items():
        torch.save(content, folder / name)
        if flush:
            with open(folder / name, "rb") as file:
                os.fsync(file.fileno())
