"""Proof that the hook runs: an optimizer that steps without it raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from commhooks.errors import AttachError, HookDidNotRunError


class Watch:
    """What one optimizer's steps are compared with: how many buckets the hook has been handed."""

    def __init__(self, optimizer: Optimizer, buckets_handed_in: Callable[[], int]) -> None:
        self._buckets_handed_in = buckets_handed_in
        self._at_last_step = buckets_handed_in()
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Watch no longer."""
        self._handle.remove()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Raise `HookDidNotRunError` if nothing was handed in since the last step.

        After the step, because an optimizer that is passed a closure runs the backward pass within its step.
        """
        handed_in = self._buckets_handed_in()
        if handed_in == self._at_last_step:
            raise HookDidNotRunError(
                f"{type(optimizer).__name__} made a step, and no gradient has passed through the attached compressor "
                "since its last one: this rank trains alone. Call the model that DistributedDataParallel returned, not "
                "the module inside it; let the last backward pass before each step run outside no_sync(); and attach "
                "to the model that is trained."
            )
        self._at_last_step = handed_in


def optimizer_of(parameters: Iterable[Tensor], wrapped: object) -> Optimizer:
    """Return the torch optimizer that this is or wraps; raise `AttachError` if it trains none of these parameters."""
    optimizer = wrapped
    while not isinstance(optimizer, Optimizer) or type(optimizer).step is Optimizer.step:
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            break
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise AttachError(f"watch: expected a torch.optim.Optimizer (got {type(wrapped).__name__}).")
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if trained.isdisjoint(parameters):
        raise AttachError(
            f"watch: none of the parameters of {type(optimizer).__name__} belongs to the model that is attached to; "
            "pass the optimizer that trains this model."
        )
    return optimizer
