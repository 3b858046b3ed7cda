"""Train one model in two houses with DiLoCo: `two_houses.py FOLDER STEPS`; see the guide."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import commhooks

STEPS, EVERY, SAVE_EVERY = int(sys.argv[2]), 30, 60  # a checkpoint after every second round


def save(folder: Path, step: int, parts: dict) -> None:
    """Write a checkpoint, complete or not at all; keep two, as the other house may lack the last."""
    with (folder / "writing").open("wb") as file:
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.flush()
        os.fsync(file.fileno())  # the power may fail
    (folder / "writing").rename(folder / f"{step}.pt")
    (folder / f"{step - 2 * SAVE_EVERY}.pt").unlink(missing_ok=True)


def load(folder: Path, parts: dict) -> None:
    """Resume from the newest step of which both houses have a checkpoint, if there is one."""
    saved: list = [None] * dist.get_world_size()
    dist.all_gather_object(saved, {int(path.stem) for path in folder.glob("*.pt")})
    if common := set.intersection(*saved):
        for later in (step for step in saved[dist.get_rank()] if step > max(common)):
            (folder / f"{later}.pt").unlink()  # this house comes there again
        for name, state in torch.load(folder / f"{max(common)}.pt").items():
            parts[name].load_state_dict(state)


dist.init_process_group("gloo")
house, folder = dist.get_rank(), Path(sys.argv[1])
folder.mkdir(exist_ok=True)
layers = nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16)
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
streaming = {"every": EVERY, "compressor": "int4", "fragments": 3, "delay": 5}
# 60 seconds are longer than a round takes in either house.
diloco = commhooks.DiLoCo(model, optimizer, **streaming, hook_timeout=60)
load(folder, parts := {"diloco": diloco, "model": model, "optimizer": optimizer})
first = diloco.steps
for step in range(first, STEPS):
    generator = torch.Generator().manual_seed(1000 * step + house)  # each house has data of its own
    inputs = torch.randn(256, 256, generator=generator)
    loss = nn.functional.cross_entropy(model(inputs), inputs[:, :16].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    diloco.step()
    if diloco.steps % SAVE_EVERY == 0:
        save(folder, diloco.steps, parts)
counts = diloco.statistics()
sent = f"{counts.bytes_per_step:,.0f} bytes a step"
print(f"house {house}: steps {first + 1} to {STEPS}, {sent}, loss {loss:.3f}")
