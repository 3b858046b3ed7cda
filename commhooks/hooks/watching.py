"""Proof that the hook runs: an optimizer that steps without it raises."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from commhooks.devices import runs_later
from commhooks.engine.engine import Engine
from commhooks.errors import AttachError, HookDidNotRunError
from commhooks.hooks.optimizers import unsuited

_ADVICE = (
    "Call the model that DistributedDataParallel returned, not the module inside it; run the last backward pass before "
    "each step outside no_sync(); and attach to the model that is trained."
)


class Watch:
    """A check of one optimizer's steps against the number of buckets that the hook has received.

    `in_buckets` are the parameters whose gradients reach the hook; `left_out` maps parameters whose gradients never
    reach it to their names. `engine` runs the compressor. `advice` ends the error.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        in_buckets: Set[Tensor],
        left_out: Mapping[Tensor, str],
        buckets_handed_in: Callable[[], int],
        engine: Engine,
        advice: str = _ADVICE,
    ) -> None:
        self._advice = advice
        self._in_buckets = in_buckets
        self._left_out = left_out
        self._buckets_handed_in = buckets_handed_in
        self._at_last_step = buckets_handed_in()
        self._engine: Engine | None = engine if engine.line.rank == 0 else None
        self._used: dict[Tensor, tuple[Callable[[], Tensor | None], int]] = {}
        before = optimizer.register_step_pre_hook(self._before_step)
        after = optimizer.register_step_post_hook(self._after_step)
        self._handles = before, after

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    # Dynamo would compile these into a compiled step, and compile it again for every new count.
    @_disable_dynamo
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check before the step changes anything, unless it runs the backward pass itself, in a closure.

        Before the first step, warn on rank 0 if the optimizer does not suit the compressor.
        """
        if self._engine is not None:
            engine, self._engine = self._engine, None  # to be told once
            if reason := unsuited(engine.compressor, optimizer, self._in_buckets):
                warnings.warn(f"commhooks: {reason}", stacklevel=2)
        if not any(callable(given) for given in (*args, *kwargs.values())):
            self._check(optimizer, "is about to take")

    @_disable_dynamo
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._check(optimizer, "took")
        self._at_last_step = self._buckets_handed_in()
        self._used = {p: (weakref.ref(p.grad), p.grad._version) for p in _stepped(optimizer) if p.grad is not None}

    def _is_new(self, parameter: Tensor) -> bool:
        """Return whether a parameter is in a bucket and its gradient was made or changed after the last step."""
        gradient, version = self._used.get(parameter, (lambda: None, 0))
        grad = parameter.grad
        is_same = grad is not None and grad is gradient() and grad._version == version
        return parameter in self._in_buckets and not is_same

    def _check(self, optimizer: Optimizer, makes: str) -> None:
        """Raise `HookDidNotRunError` if the step uses gradients of the model that did not reach the hook.

        A step without gradients of the model, or with the last step's, is allowed, being the same on every rank: one
        optimizer may train two models in turns, and Lightning's SWA makes a step after a pass that only updates batch
        norms.
        """
        is_bypassed = self._buckets_handed_in() == self._at_last_step and any(map(self._is_new, _stepped(optimizer)))
        if is_bypassed and not is_standing(optimizer):
            raise HookDidNotRunError(
                f"{type(optimizer).__name__} {makes} a step, but no gradient has passed through the attached "
                f"compressor since its last one: this rank trains alone. {self._advice}"
            )
        alone = [self._left_out[p] for p in _stepped(optimizer) if p in self._left_out] if self._left_out else []
        if alone and not is_standing(optimizer):
            more = f" and of {len(alone) - 1} more parameters" if len(alone) > 1 else ""
            raise HookDidNotRunError(
                f"{type(optimizer).__name__} {makes} a step with the gradient of {alone[0]!r}{more}, which "
                "DistributedDataParallel does not average: they required no gradient when it wrapped the model, and "
                "each rank would train them alone. Wrap the model while they require gradients, and freeze them "
                "afterwards if you want (with find_unused_parameters=True); or wrap it again once they do."
            )


def is_standing(optimizer: Optimizer) -> bool:
    """Return whether all learning rates are 0, so that a step changes no parameter.

    `torch.distributed.checkpoint` takes such a step to make an optimizer create its state. An optimizer whose rate is
    None chooses its own. A rate on a GPU counts as not 0, without being read: the host would wait for it, and reading
    fails during graph capture.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    return not any(rate is None or (isinstance(rate, Tensor) and runs_later(rate)) or float(rate) for rate in rates)


def _stepped(optimizer: Optimizer) -> Iterable[Tensor]:
    """Return the parameters that have a gradient, and that a step therefore changes."""
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


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
