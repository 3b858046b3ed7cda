"""A training script that survives being killed: `torchrun -m tests.soak.train_and_resume --directory D --out O`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
import ddp_core
from commhooks.unwrapping import bare
from tests.soak import places


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10)
    )


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 20, generator=generator), torch.randint(0, 10, (16,), generator=generator)


def train(args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)  # each rank drops other units; all of them begin with rank 0's parameters
    model: Any = network()
    hooks: Any
    if args.ddp == "diloco":  # what is due is under way in two steps of three
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        settings: dict[str, Any] = {"every": 6, "fragments": 2, "delay": 2, "mixing": 0.5}
        hooks = commhooks.DiLoCo(model, optimizer, compressor=args.hook, **settings)
    else:
        wrapper = ddp_core.DistributedDataParallel if args.ddp == "core" else nn.parallel.DistributedDataParallel
        model = wrapper(model, bucket_cap_mb=0.005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        hooks = commhooks.attach(model, args.hook, policy=args.policy)

    loaded = commhooks.load_checkpoint(args.directory, model=model, optimizer=optimizer, hooks=hooks)
    first = 0 if loaded is None else loaded.step
    print(f"process {os.getpid()} trains from step {first}", flush=True)
    for step in range(first, args.steps):
        inputs, targets = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if args.ddp == "diloco":
            hooks.step()
        time.sleep(args.pause)
        if (step + 1) % args.save_every == 0:
            commhooks.save_checkpoint(args.directory, step=step + 1, model=model, optimizer=optimizer, hooks=hooks)

    states = {"model": bare(model), "optimizer": optimizer, "hooks": hooks}
    torch.save({name: part.state_dict() for name, part in states.items()}, args.out / f"rank{rank}.pt")


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ddp", choices=["core", "torch", "diloco"], default="core")
    parser.add_argument("--hook", default="powersgd")
    parser.add_argument("--policy", default="fifo")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--directory", type=Path, required=True, help="of checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="folder for what came of it")
    return parser.parse_args(words)


if __name__ == "__main__":
    torch.set_num_threads(1)
    places.arm()
    dist.init_process_group("gloo")
    train(read_arguments())
    dist.destroy_process_group()
