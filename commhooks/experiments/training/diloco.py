"""Training with DiLoCo in place of a DistributedDataParallel with a hook."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import commhooks
from commhooks.experiments.diloco import DiLoCoSpec
from commhooks.experiments.hooks import make_hook
from commhooks.experiments.specs import Spec
from commhooks.lockstep import lockstep_connections


def settings_of(hook: Spec, seed: int = 0) -> dict[str, Any]:
    """Return the arguments of `commhooks.DiLoCo` after model and optimizer; random numbers follow the seed.

    Raises:
        ValueError: A setting does not exist or cannot work, or there is no such compressor.

    """
    asked = DiLoCoSpec.of(hook)
    return {
        "every": asked.every,
        "compressor": make_hook(asked.compressor, seed),
        "outer": asked.outer,
        "fragments": asked.fragments,
        "arrangement": asked.arrangement,
        "delay": asked.delay,
        "mixing": float(asked.mixing),
    }


def check_diloco(hook: Spec, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Raise ValueError if DiLoCo does not accept the model, the optimizer or a setting, or no round ends in the run."""
    commhooks.DiLoCo(model, optimizer, connection=lockstep_connections(1)[0], **settings_of(hook)).close()
    every = DiLoCoSpec.of(hook).every
    if every > steps:
        raise ValueError(
            f"hook {hook.label!r}: a run of {steps} steps ends before the first round; let it take at least {every}"
        )
