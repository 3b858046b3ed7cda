"""Training with DiLoCo in place of a DistributedDataParallel with a hook."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import commhooks

from ..hooks import make_hook
from ..seldom import Recipe, Seldom
from ..specs import Spec


def settings_of(hook: Spec, seed: int = 0) -> dict[str, Any]:
    """Return the arguments of `commhooks.DiLoCo` after model and optimizer; random numbers follow the seed.

    Raises:
        ValueError: A setting does not exist or cannot work, or there is no such compressor.

    """
    asked = Seldom.of(hook)
    return {
        "every": asked.every,
        "compressor": make_hook(asked.compressor, seed),
        "outer": functools.partial(outer_optimizer, asked.recipe),
        "fragments": asked.fragments,
        "arrangement": asked.arrangement,
        "delay": asked.delay,
        "mixing": float(asked.mixing),
    }


def outer_optimizer(recipe: Recipe, tensors: list[Tensor]) -> torch.optim.Optimizer:
    """Return the outer optimizer of a recipe."""
    return torch.optim.SGD(tensors, lr=recipe.rate, momentum=recipe.momentum, nesterov=recipe.momentum > 0)


def check_diloco(hook: Spec, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Raise ValueError if DiLoCo does not accept the model, the optimizer or a setting, or no round ends in the run."""
    commhooks.DiLoCo(model, optimizer, line=commhooks.lockstep_lines(1)[0], **settings_of(hook)).close()
    every = Seldom.of(hook).every
    if every > steps:
        raise ValueError(
            f"hook {hook.label!r}: a run of {steps} steps ends before the first round; let it take at least {every}"
        )
