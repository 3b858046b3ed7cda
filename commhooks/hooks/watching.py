"""Proof that the hook runs: an optimizer that steps without it raises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from commhooks.errors import AttachError, HookDidNotRunError


class Watch:
    """A check of one optimizer's steps against the number of buckets that the hook has received."""

    def __init__(self, optimizer: Optimizer, buckets_handed_in: Callable[[], int]) -> None:
        self._buckets_handed_in = buckets_handed_in
        self._at_last_step = buckets_handed_in()
        before = optimizer.register_step_pre_hook(self._before_step)
        after = optimizer.register_step_post_hook(self._after_step)
        self._handles = before, after

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check before the step changes anything, unless it runs the backward pass itself, in a closure."""
        if not any(callable(given) for given in (*args, *kwargs.values())):
            self._check(optimizer, "is about to take")

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check(optimizer, "took")
        self._at_last_step = self._buckets_handed_in()

    def _check(self, optimizer: Optimizer, makes: str) -> None:
        """Raise `HookDidNotRunError` if the hook has received no bucket since the last step."""
        if self._buckets_handed_in() == self._at_last_step:
            raise HookDidNotRunError(
                f"{type(optimizer).__name__} {makes} a step, but no gradient has passed through the attached "
                "compressor since its last one: this rank trains alone. Call the model that DistributedDataParallel "
                "returned, not the module inside it; run the last backward pass before each step outside no_sync(); "
                "and attach to the model that is trained."
            )


def optimizer_of(parameters: Iterable[Tensor], wrapped: object) -> Optimizer:
    """Return the torch optimizer that this is or wraps; raise `AttachError` if it trains none of these parameters."""
    optimizer = wrapped
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):  # where frameworks keep what they wrap
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
