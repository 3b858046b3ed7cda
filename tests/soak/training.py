"""A training script like any other: `python -m tests.soak.training RANK WORLD_SIZE STORE_FILE keep|destroy`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from ddp_core import DistributedDataParallel

if __name__ == "__main__":  # a script's names at module level live until the interpreter ends
    rank, world_size, store, ending = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world_size))
    torch.manual_seed(int(rank))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss = ddp(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
    if ending == "destroy":
        dist.destroy_process_group()
