"""Train with compressed gradients under Ray Train; a worker that dies costs the steps since the last checkpoint.

python ray_ddp.py /tmp/ray-results
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn

from commhooks.integrations.ray import compress, save

STEPS, SAVE_EVERY = 40, 10


def train_loop(config: dict[str, Any]) -> None:
    """Train on one worker, from the latest checkpoint if there is one."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = ray.train.torch.prepare_model(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    attachment = compress(model, "powersgd", optimizers=[optimizer])  # and resume from ray.train.get_checkpoint()
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "model.pt"))
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]

    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(1_000 * step + rank)
        inputs = torch.randn(128, 64, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                save(attachment, folder)  # on every worker; the one of rank 0 writes
                saved = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(saved, Path(folder, "model.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
                ray.train.report({"loss": loss.item()} | attachment.metrics(), checkpoint=checkpoint)
    attachment.close()


if __name__ == "__main__":
    storage = ray.train.RunConfig(storage_path=sys.argv[1], failure_config=ray.train.FailureConfig(max_failures=3))
    workers = ray.train.ScalingConfig(num_workers=2)
    print(ray.train.torch.TorchTrainer(train_loop, scaling_config=workers, run_config=storage).fit().metrics)
