"""A script for torchrun's elastic restarts: `elastic_diloco.py FOLDER`.

Ranks train until the folder holds a file "stop". Each life of a rank writes what it began with, beside what the
checkpoint holds, into FOLDER/told.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import commhooks
from tests.diloco.workers import Worker

SAVE_EVERY = 5


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    worker = Worker(rank, every=4, compressor="top-k")
    parts: dict[str, Any] = {"model": worker.model, "optimizer": worker.optimizer, "hooks": worker.diloco}
    checkpoints = folder / "checkpoints"
    loaded = commhooks.load_checkpoint(checkpoints, **parts, world_size="keep")
    told = {"ranks": dist.get_world_size(), "step": 0}
    if loaded is not None:
        told |= {"step": loaded.step, **compared(worker, loaded.path, rank)}
    line = folder / "told" / f"{time.time_ns()}-rank{rank}-of-{dist.get_world_size()}"
    line.with_suffix(".part").write_text(json.dumps(told))
    line.with_suffix(".part").rename(line.with_suffix(".json"))
    while True:
        stop: list[object] = [(folder / "stop").exists()]
        dist.broadcast_object_list(stop, 0)
        if stop[0]:
            break
        worker.inner_step(worker.diloco.steps)
        worker.diloco.step()
        time.sleep(0.02)
        if worker.diloco.steps % SAVE_EVERY == 0:
            commhooks.save_checkpoint(checkpoints, step=worker.diloco.steps, **parts, flush=False)
    worker.diloco.close()
    dist.destroy_process_group()


def compared(worker: Worker, checkpoint: Path, rank: int) -> dict[str, Any]:
    """Return how what was loaded relates to the checkpoint's files."""
    shared, own = torch.load(checkpoint / "shared.pt"), checkpoint / f"rank{rank}.pt"
    was_there = own.exists()
    before = residuals(torch.load(own)["hooks"], rank) if was_there else []
    now = worker.diloco.state_dict()
    outer = now["shared"]["outer"]
    return {
        "was there": was_there,
        "saved by": shared["world_size"],
        "at the outer copies": all(torch.equal(held, outer[name]) for name, held in worker.model.named_parameters()),
        "outer copies": all(torch.equal(outer[name], held) for name, held in shared["model"].items()),
        "own residual": same(residuals(now, rank), before),
        "no residual": not any(bool(residual.any()) for residual in residuals(now, rank)),
        "was empty": not any(bool(residual.any()) for residual in before),
    }


def residuals(state: dict[str, Any], rank: int) -> list[Tensor]:
    local = [group["local"][f"rank{rank}"] for group in state["groups"].values()]
    return [entries["residual"] for own in local for entries in own.values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
