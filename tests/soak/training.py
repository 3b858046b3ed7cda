"""A training script like any other: `python -m tests.soak.training RANK WORLD_SIZE STORE_FILE CLASS keep|destroy`."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

kept: list[Any] = []  # a script's names at module level live until the interpreter ends


def train(rank: int, which: str, destroy: bool, steps: int = 4) -> float:
    """Train a few steps over the default group, and return the loss; the model outlives the function."""
    if which == "ours":
        from ddp_core import DistributedDataParallel
    else:
        from torch.nn.parallel import DistributedDataParallel  # type: ignore[assignment]  # 'Incompatible import'
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ddp(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
    kept.extend([ddp, optimizer, loss])
    if destroy:
        dist.destroy_process_group()
    return float(loss.item())


if __name__ == "__main__":
    rank, world_size, store, which, ending = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world_size))
    train(int(rank), which, ending == "destroy")
