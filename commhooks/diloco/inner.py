"""The inner optimizer: the caller's, which trains this rank's parameters between exchanges."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Adagrad, Optimizer

from commhooks.errors import SettingsError
from commhooks.tensors import all_finite, local
from ddp_core.guard import is_standing, steps_locally

OptimizerState = Literal["local", "mean"]
"""Whose moments the inner optimizer has after a round: each rank's own, or the mean over the ranks."""


class Inner:
    """The optimizer that trains this rank's parameters, and a check that its steps are counted.

    `fail` is called, and must raise, before a step if the last one was not counted. `keeps_counts`: a state that is not
    finite is set to zero, and the parameter's count of steps goes on, as on the other ranks.
    """

    def __init__(self, optimizer: Optimizer, fail: Callable[[str], Any], *, keeps_counts: bool = False) -> None:
        self.optimizer = optimizer
        self._keeps_counts = keeps_counts
        self.cleared: int = 0
        """The number of times that a parameter's state was not finite and was cleared."""
        self._uncounted = 0
        self._fail = fail
        own = weakref.ref(self)  # the optimizer must not keep this, and through it all exchanges, alive
        self._handle = optimizer.register_step_pre_hook(functools.partial(_before_step, own))
        _of_optimizers[optimizer] = own
        steps_locally(optimizer)  # also if it trains a wrapped model

    @property
    def is_ahead(self) -> bool:
        """True if the optimizer has taken a step that was not counted yet."""
        return self._uncounted > 0

    def parameters(self) -> list[int]:
        """Return the ids of the tensors that it trains now, in order."""
        return [id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]]

    def count(self) -> None:
        """Count a step, even if a gradient scaler skipped it."""
        self._uncounted = 0

    def clear(self, parameters: Iterable[Tensor]) -> None:
        """Clear the state of parameters if it is not finite: after an inf, moments would remain NaN."""
        for parameter in parameters:
            kept: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
            tensors = [local(value) for value in kept.values() if isinstance(value, Tensor)]
            if not tensors or all_finite(tensors):
                continue
            self.cleared += 1
            if self._keeps_counts:
                for spoilt in tensors:
                    if not all_finite([spoilt]):
                        spoilt.zero_()
            else:
                del self.optimizer.state[parameter]  # the next step makes it anew
                if isinstance(self.optimizer, Adagrad):  # or, as this one does not, expects it
                    first = self.optimizer.defaults["initial_accumulator_value"]
                    fresh = {"step": torch.zeros_like(kept["step"]), "sum": torch.full_like(kept["sum"], first)}
                    self.optimizer.state[parameter] = fresh

    def expect_step(self) -> None:
        """Note that the optimizer is about to take a step; fail if the last one was not counted."""
        if self._uncounted:
            self._fail(
                f"{type(self.optimizer).__name__} is about to take a second step since the last diloco.step(); call "
                "diloco.step() after each step of the optimizer, so that all ranks count the same."
            )
        self._uncounted += 1

    def close(self) -> None:
        """Stop checking."""
        self._handle.remove()
        own = _of_optimizers.get(self.optimizer)
        if own is not None and own() is self:  # not if this was closed before, and another one counts by now
            del _of_optimizers[self.optimizer]
            steps_locally(self.optimizer, is_local=False)


_of_optimizers: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Inner]] = weakref.WeakKeyDictionary()


def check_is_free(optimizer: Optimizer) -> None:
    """Raise `SettingsError` if an optimizer's steps are counted already."""
    if optimizer in _of_optimizers and _of_optimizers[optimizer]() is not None:
        raise SettingsError(
            f"DiLoCo: this {type(optimizer).__name__} is used by another DiLoCo; call its close() first."
        )


@_disable_dynamo  # a compiled step would be compiled again for every new count
def _before_step(
    inner: weakref.ref[Inner], optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if (own := inner()) is not None and not is_standing(optimizer):
        own.expect_step()
