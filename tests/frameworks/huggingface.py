"""What the tests of Accelerate and of the Trainer share: ranks, comparison, and what one rank hands back."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import commhooks
from tests.frameworks.launch import QUIET, ROOT, torchrun


def settle_in(rank: int, world_size: int = 2) -> None:
    """Set what torchrun would have set; the world's own process group is then used."""
    os.environ |= QUIET | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }


def what_it_became(model: nn.Module, attachment: commhooks.Handle[Any]) -> dict[str, Any]:
    """Return parameters and hook state, for comparison."""
    state = attachment.state_dict()
    hook = {name: state[name] for name in ("step", "replicated", "local")}
    return {"model": {name: p.detach().clone() for name, p in model.named_parameters()}, "hook": hook}


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Name every place at which two nested dictionaries are not equal, bit for bit."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        lacking = [f"{where}.{key} is in one only" for key in one.keys() ^ other.keys()]
        both = one.keys() & other.keys()
        return lacking + [found for key in both for found in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list) and isinstance(other, list):
        return differences(dict(enumerate(one)), dict(enumerate(other)), where)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return [] if torch.equal(one, other) else [where]
    return [] if one == other else [f"{where}: {one} and {other}"]


def train_and_resume(example: str, folder: Path, pattern: str) -> str:
    """Run an example, then again from the checkpoint in its middle; return what it printed at first."""
    script = ROOT / "docs" / "examples" / example
    printed = torchrun(script, str(folder), timeout=100)
    *_, end = sorted(folder.glob(pattern), key=lambda path: int(path.name.rsplit("-", 1)[1]))
    shutil.rmtree(end)
    torchrun(script, str(folder), timeout=100)
    assert (end / "commhooks-rank1.pt").exists()
    return printed


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
