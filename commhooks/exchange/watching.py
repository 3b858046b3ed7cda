"""Watched optimizers: a step on gradients that bypassed the compressor raises, on suspicion alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Set
from typing import Any

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from commhooks.engine.engine import Engine
from commhooks.errors import AttachError
from commhooks.exchange.optimizers import unsuited
from ddp_core.guard import Guard, NotAveragedError, NotAveragedWarning, set_guard, steps_locally

__all__ = [
    "NotAveragedError",
    "NotAveragedWarning",
    "ReductionsGuard",
    "Watch",
    "optimizer_of",
    "set_guard",
    "steps_locally",
]


class ReductionsGuard(Guard):
    """The guard of parameters whose gradients an engine averages, and no DistributedDataParallel.

    `reductions` returns the number of rounds so far; `advice` is the likely cause of steps between two of them.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        title: str,
        engine: Engine,
        advice: str,
        reductions: Callable[[], int],
    ) -> None:
        self._count = reductions
        super().__init__(named, title)
        self._connection = engine.connection
        self._advice = advice

    @property
    def reductions(self) -> int:
        """The number of rounds so far."""
        return self._count()

    def who(self) -> str:
        """Return this process's rank in words."""
        return f"rank {self._connection.rank}"

    def cause(self, known: bool, within: bool) -> str:
        """Return the likely cause of a step on local gradients, and a remedy."""
        return self._advice


class Watch:
    """A check of one optimizer's steps: a guard judges them strictly, without asking the other ranks.

    Before the first step, rank 0 warns if the optimizer does not suit the compressor, which `engine` runs for
    `averaged` parameters.
    """

    def __init__(self, optimizer: Optimizer, guard: Guard | None, averaged: Set[Tensor], engine: Engine) -> None:
        self._optimizer = optimizer
        self._guard = guard
        self._averaged = averaged
        self._engine: Engine | None = engine if engine.connection.rank == 0 else None
        self._handle = optimizer.register_step_pre_hook(self._before_step)
        if guard is not None:
            guard.watch(optimizer)

    def remove(self) -> None:
        """Stop watching."""
        self._handle.remove()
        if self._guard is not None:
            self._guard.unwatch(self._optimizer)

    @_disable_dynamo  # it would be compiled into a compiled step
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None  # to be told once
            if reason := unsuited(engine.compressor, optimizer, self._averaged):
                warnings.warn(f"commhooks: {reason}", stacklevel=2)


def optimizer_of(caller: str, parameters: Iterable[Tensor], wrapped: object) -> Optimizer:
    """Return the torch optimizer that this is or wraps; raise `AttachError` if it trains none of these parameters."""
    optimizer = wrapped
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):  # where frameworks keep what they wrap
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise AttachError(f"{caller}: expected a torch.optim.Optimizer (got {type(wrapped).__name__}).")
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if trained.isdisjoint(parameters):
        raise AttachError(
            f"{caller}: none of the parameters of {type(optimizer).__name__} belongs to the model that is attached to; "
            "pass the optimizer that trains this model."
        )
    return optimizer
