"""The phases of a training step, seen from outside: when a backward pass runs and ends.

Nothing is asked of the step. Hooks on the parameters note moments, and
`torch.autograd.backward`, which `Tensor.backward` calls too, is wrapped while steps are watched.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from commhooks.errors import SettingsError
from commhooks.experiments.devices import Moment, Stopwatch


@dataclasses.dataclass
class Phases:
    """The moments of one step on one rank, by the wall clock."""

    begin: float
    end: float
    backward: list[tuple[float, float, float]]
    """The beginning, the last gradient and the end of each backward pass."""
    gradients: list[tuple[float, int]]
    """The time at which a gradient was ready, and its parameter's index, for each gradient."""
    own_seconds: float
    """The time spent on recording all this."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.end - self.begin

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """Seconds of forward, backward, exposed and optimizer, as in `StepParts`; their sum is the step."""
        backward = sum(gradient - begin for begin, gradient, _ in self.backward)
        exposed = sum(end - gradient for _, gradient, end in self.backward)
        optimizer = self.end - self.backward[-1][2]
        return self.seconds - backward - exposed - optimizer, backward, exposed, optimizer


class PhaseWatch:
    """Notes the phases of steps while it is installed: use it as a context manager."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        seen: Callable[[Optimizer], None] = lambda optimizer: None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """Watch steps that train these parameters.

        `seen` is called with an optimizer before it steps; its time does not count as our own.
        """
        self._parameters = parameters
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._seen = seen
        self._optimizers: Any = None
        self._stopwatch = stopwatch or Stopwatch()
        self._listening: list[Any] = []
        self._backward: Any = None
        self._forget()

    def __enter__(self) -> PhaseWatch:
        """Install the hooks."""
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._run_backward
        self._optimizers = register_optimizer_step_pre_hook(self._optimizer_begins)
        self.listen(self._parameters)
        return self

    def __exit__(self, *raised: object) -> None:
        """Remove them."""
        torch.autograd.backward = self._backward
        for handle in (self._optimizers, *self._listening):
            handle.remove()

    def listen(self, parameters: Sequence[Tensor]) -> None:
        """Note the gradients of these parameters only. The last one of a step must be among them."""
        for handle in self._listening:
            handle.remove()
        hook = self._gradient_ready
        self._listening = [p.register_post_accumulate_grad_hook(hook) for p in parameters if p.requires_grad]

    def watch(self, step: Callable[[], object]) -> Phases:
        """Run a step, and return its phases; raise `SettingsError` if it ran no backward pass."""
        self._forget()
        begin = self._stopwatch.start()
        step()
        end = self._stopwatch.now()
        if not self._backwards:
            raise SettingsError("the step ran no backward pass; it must be a whole training step of this model.")
        at = self._stopwatch.seconds_at
        gradients = [(at(moment), self._numbers[parameter]) for moment, parameter in self._gradients]
        backwards = [(at(first), at(last), at(done)) for first, last, done in self._backwards]
        return Phases(at(begin), at(end), backwards, gradients, self._own)

    def _forget(self) -> None:
        self._backwards: list[tuple[Moment, Moment, Moment]] = []
        self._gradients: list[tuple[Moment, Tensor]] = []
        self._own = 0.0
        self._depth = 0

    def _gradient_ready(self, parameter: Tensor) -> None:
        now = time.perf_counter()
        self._gradients.append((self._stopwatch.now(), parameter))
        self._own += time.perf_counter() - now

    def _run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass; those inside another one, of checkpointed parts of a model, belong to that one."""
        if self._depth:
            return self._backward(*args, **kwargs)
        self._depth, begin, before = 1, self._stopwatch.now(), len(self._gradients)
        try:
            return self._backward(*args, **kwargs)
        finally:
            now, self._depth = time.perf_counter(), 0
            last = self._gradients[-1][0] if len(self._gradients) > before else begin
            self._backwards.append((begin, last, self._stopwatch.now()))
            self._own += time.perf_counter() - now

    def _optimizer_begins(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._seen(optimizer)
