"""What the tests of Ray Train run on each worker."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn

from commhooks.integrations.ray import compress, save
from tests.frameworks.launch import refused

STEPS, SAVE_AT, KILL_AT = 12, 6, 9


def train(config: dict[str, Any]) -> None:
    """Train 12 steps; if asked to, one worker kills itself in the ninth, once."""
    rank, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attachment = compress(model, "powersgd", optimizers=[optimizer])
    begin, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as loaded:
            parts = torch.load(Path(loaded, "model.pt"))
        model.module.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optimizer"])
        begin = parts["step"]
    killed = folder / "killed"
    for step in range(begin, STEPS):
        if config["dies"] and step == KILL_AT and rank == 1 and not killed.exists():
            assert ray.train.get_all_reported_checkpoints()  # Ray registers checkpoints on the side: wait until it has
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if step + 1 == SAVE_AT:
            with tempfile.TemporaryDirectory() as written:
                save(attachment, written)
                parts = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(parts, Path(written, "model.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(written) if rank == 0 else None
                ray.train.report(attachment.metrics(), checkpoint=checkpoint)
    hooks = attachment.state_dict()
    end = {
        "began": begin,
        "model": model.module.state_dict(),
        **{part: hooks[part] for part in ("replicated", "local")},
    }
    torch.save(end, folder / f"rank{rank}.pt")
    ray.train.report(attachment.metrics())
    attachment.close()
    check_refusals()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def check_refusals() -> None:
    """Assert what is said to those who wrap nothing, load what is not there, or step without the hook."""
    refused(".*got Sequential", compress, network(), "powersgd", optimizers=[], checkpoint=None)
    model = ray.train.torch.prepare_model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tempfile.TemporaryDirectory() as empty:
        given: dict[str, Any] = {"optimizers": [optimizer], "checkpoint": ray.train.Checkpoint.from_directory(empty)}
        refused(".*holds no commhooks.pt.*checkpoint=None", compress, model, "powersgd", **given)
    refused(".*got True", compress, model, "powersgd", optimizers=[optimizer], checkpoint=True)
    attachment = compress(model, "powersgd", optimizers=[optimizer], checkpoint=None)
    model.module(torch.randn(8, 64)).square().mean().backward()
    refused("NotAveragedError", optimizer.step)
    attachment.close()
