"""Train with compressed gradients on PyTorch's DDP, and resume an earlier run.

torchrun --nproc-per-node 2 plain_ddp.py checkpoints
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commhooks

STEPS = 60
SAVE_EVERY = 20


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return this rank's share of the step's data, the same if the step is repeated."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    inputs = torch.randn(128, 64, generator=generator)
    return inputs, inputs[:, :10].argmax(1)


def main(folder: str) -> None:
    """Train from the newest checkpoint in the folder, if any, up to the last step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hooks = commhooks.attach(model, "powersgd:rank=2,start_after=10")

    whole = {"model": model, "optimizer": optimizer, "hooks": hooks}
    loaded = commhooks.load_checkpoint(folder, **whole)
    first = 0 if loaded is None else loaded.step
    for step in range(first, STEPS):
        inputs, labels = batch(step, dist.get_rank())
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            commhooks.save_checkpoint(folder, step=step + 1, **whole)

    if dist.get_rank() == 0 and first < STEPS:
        last = hooks.last_step()
        print(f"steps {first + 1} to {STEPS}: loss {loss.item():.3f}")
        print(f"{last.payload_bytes:,} bytes a step instead of {last.gradient_bytes:,}")
    hooks.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
