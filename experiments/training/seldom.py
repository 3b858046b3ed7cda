"""Training with DiLoCo in place of a DistributedDataParallel with a hook."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import commhooks
from commhooks.communicators.connection import WrapCommunicator
from commhooks.language.compressor import Compressor
from commhooks.scheduling.line import Line, ProcessGroupLine
from commhooks.state.table import ResidualStorage

from ..hooks import make_hook
from ..seldom import Recipe, Seldom
from ..specs import Spec


class LinkedDiLoCo(commhooks.DiLoCo):
    """DiLoCo on a process group, all of whose exchanges pass a wrapped communicator, such as an emulated link."""

    def __init__(self, *args: Any, wrap_communicator: WrapCommunicator, **settings: Any) -> None:
        self._wrap_communicator = wrap_communicator
        super().__init__(*args, **settings)

    def _make_exchangers(self, compressor: Compressor, line: Line | None, residuals: ResidualStorage) -> None:
        assert self.process_group is not None, "it is made on one"
        linked = ProcessGroupLine(
            self.process_group, label="DiLoCo", policy="fused", wrap_communicator=self._wrap_communicator
        )
        super()._make_exchangers(compressor, linked, residuals)


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
