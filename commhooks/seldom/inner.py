"""The inner optimizer: the caller's, which trains this rank's parameters between exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Adagrad, Optimizer

from commhooks.tensors import all_finite


class Inner:
    """The optimizer that trains this rank's parameters, and a check that its steps are counted.

    `fail` is called, and must raise, before a step that comes without the last one having been counted.
    """

    def __init__(self, optimizer: Optimizer, fail: Callable[[str], Any]) -> None:
        self.optimizer = optimizer
        self.cleared = 0
        """Parameters whose state was not finite and has been cleared, each time."""
        self._uncounted = 0
        self._fail = fail
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    @property
    def is_ahead(self) -> bool:
        """Whether it has taken a step that was not counted yet."""
        return self._uncounted > 0

    def count(self) -> None:
        """Count a step; the optimizer may have left it out, as a gradient scaler makes it do."""
        self._uncounted = 0

    def clear(self, parameters: Iterable[Tensor]) -> None:
        """Clear the state of parameters for which it is not finite: from an inf on, moments would stay NaN."""
        for parameter in parameters:
            kept: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
            tensors = [value for value in kept.values() if isinstance(value, Tensor)]
            if tensors and not all_finite(tensors):
                del self.optimizer.state[parameter]  # the next step makes it anew
                if isinstance(self.optimizer, Adagrad):  # or, as this one does not, expects it
                    first = self.optimizer.defaults["initial_accumulator_value"]
                    fresh = {"step": torch.zeros_like(kept["step"]), "sum": torch.full_like(kept["sum"], first)}
                    self.optimizer.state[parameter] = fresh
                self.cleared += 1

    def close(self) -> None:
        """Stop checking."""
        self._handle.remove()

    @_disable_dynamo  # a compiled step would be compiled again for every new count
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._uncounted:
            self._fail(
                f"{type(optimizer).__name__} is about to take a second step since the last diloco.step(); call "
                "diloco.step() after each step of the optimizer, so that all ranks count the same."
            )
        self._uncounted += 1
