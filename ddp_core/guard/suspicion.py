"""Suspicion, which is cheap and local: no reduction is known to have averaged the gradients of a step."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_core.errors import NotAveragedError
from ddp_core.guard.intent import is_standing, local
from ddp_core.guard.proof import is_plain

Named = Sequence[tuple[str, Tensor]]
"""Parameters, with their names."""

ROUNDS_IN_LOG = 4
"""A log holds so many gradients of each parameter. Once it is full, every parameter is suspect."""

current_pass = torch._C._current_graph_task_id  # the number of the backward pass that is under way; -1: none is


class Step(NamedTuple):
    """A step of an optimizer."""

    optimizer: Optimizer
    verb: str  # "is about to take", or "took" if the backward pass runs inside the step
    backward_pass: int  # in which the step is taken; -1: in none

    def holds(self) -> set[int]:
        """Return the ids of the optimizer's parameters."""
        return {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}


class Log(deque[Tensor]):
    """The parameters whose gradient came outside a reduction, or after one; ``append``, a C function, adds one."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(maxlen=max(1, ROUNDS_IN_LOG * len(parameters)))
        self._all = parameters

    def parameters(self) -> list[Tensor]:
        """Return the parameters in the log, each once; all of them, if it is full and may have lost some."""
        if len(self) == self.maxlen:
            return self._all
        return list({id(parameter): parameter for parameter in self}.values())

    def drop(self, ids: Set[int]) -> None:
        """Remove the parameters with these ids."""
        if not ids.isdisjoint(map(id, self)):
            kept = [parameter for parameter in self.parameters() if id(parameter) not in ids]
            self.clear()
            self.extend(kept)


@dataclasses.dataclass
class Record:
    """What a guard remembers of an optimizer."""

    reductions: int = 0  # that had ended by its last step
    suspicions: int = 0
    next_proof: int = 1  # the suspicion at which gradients are compared next
    used: dict[int, tuple[Any, int]] | None = None
    """If it is watched, the gradients of its last step, and their versions."""


class Guard:
    """What is known of some parameters' gradients, and of the optimizers that step on them.

    This class counts reductions, and judges the optimizers that `watch` is called with: strictly, on suspicion alone.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], title: str) -> None:
        self.title = title  # of the model, in errors
        self.named = {id(p): (name, p) for name, p in named}  # kept alive, so that their ids stay theirs
        self.log = Log(self.parameters())
        self._ended_reductions = 0
        self._records: weakref.WeakKeyDictionary[Optimizer, Record] = weakref.WeakKeyDictionary()
        _guards[self] = None
        see_steps()

    @property
    def reductions(self) -> int:
        """The number of reductions that have ended."""
        return self._ended_reductions

    def who(self) -> str:
        """Return this process's rank in words."""
        raise NotImplementedError

    def cause(self, known: bool, within: bool) -> str:
        """Return the likely cause of a step on local gradients, and a remedy."""
        raise NotImplementedError

    def parameters(self) -> list[Tensor]:
        """Return all parameters."""
        return [parameter for _, parameter in self.named.values()]

    def record(self, optimizer: Optimizer) -> Record:
        """Return what is remembered of an optimizer."""
        record = self._records.get(optimizer)
        if record is None:
            record = self._records[optimizer] = Record()
        return record

    def watch(self, optimizer: Optimizer) -> None:
        """Raise before a step of ``optimizer`` on suspicion alone, in any mode, even if all ranks would agree."""
        record = self.record(optimizer)
        record.used, record.reductions = {}, self.reductions

    def unwatch(self, optimizer: Optimizer) -> None:
        """End `watch`."""
        self.record(optimizer).used = None

    def remove(self) -> None:
        """Judge no step any more."""
        self.log.clear()
        _guards.pop(self, None)

    def watches(self, optimizer: Optimizer) -> bool:
        """Return True between `watch` and `unwatch`."""
        return self.record(optimizer).used is not None

    def note_use(self, optimizer: Optimizer) -> None:
        """Remember the gradients that a watched optimizer has used."""
        if self.watches(optimizer):
            self.record(optimizer).used = {
                id(p): (weakref.ref(p.grad), p.grad._version)
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None and id(p) in self.named
            }

    def judge(self, step: Step) -> None:
        """Raise or warn if a step is on local gradients."""
        if self.watches(step.optimizer):
            self.suspect(step)

    def suspect(self, step: Step, within: bool = False) -> None:
        """Accuse a step if gradients may be local; all may be ``within`` a backward pass whose means are missing."""
        record = self.record(step.optimizer)
        stale = record.reductions == self.reductions  # gradients by hand, or the last step's
        if within or stale or self.log:
            self.accuse(step, self._suspects(step, record, within, stale), within)
        record.reductions = self.reductions

    def _suspects(self, step: Step, record: Record, within: bool, stale: bool) -> Named:
        held = step.holds()
        candidates = self.parameters() if within or stale else self.log.parameters()
        suspects = [p for p in candidates if id(p) in held and p.grad is not None]
        if record.used is not None and stale and not within:  # a second step on the same means is no bypass
            logged = {id(p) for p in self.log.parameters()}
            suspects = [p for p in suspects if id(p) in logged or not _is_same(p, record.used)]
        return [self.named[id(p)] for p in suspects]

    def accuse(self, step: Step, suspects: Named, within: bool = False) -> None:
        """Ask for proof, unless the step changes none of the suspect parameters."""
        if suspects and not is_standing(step.optimizer):
            first = next((place for place, (_, p) in enumerate(suspects) if is_used(p)), None)
            if first is not None:  # the others are looked at only if there is something to tell
                self.prove(step, suspects[first:], within)

    def prove(self, step: Step, suspects: Named, within: bool) -> None:
        """Raise NotAveragedError: a guard that only watches needs no more than suspicion."""
        cause = self.cause(id(suspects[0][1]) in self.named, within)
        raise NotAveragedError(self.text(step, cause, [name for name, p in suspects if is_used(p)]))

    def text(self, step: Step, cause: str, names: Sequence[str]) -> str:
        """Return what is wrong with a step, and its likely cause."""
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"{type(step.optimizer).__name__} {step.verb} a step on gradients of {self.title} that were not averaged: "
            f"{names[0]!r}{more} on {self.who()}, so replicas drift apart. Likely cause: {cause}."
        )


# -------------------------------------------------------------------- the steps of all optimizers


_guards: weakref.WeakKeyDictionary[Guard, None] = weakref.WeakKeyDictionary()
"""In the order in which they were made, which for those of wrappers is the same on all ranks."""
preludes: list[Callable[[Step], None]] = []
"""Called before the guards judge a step: ``following.py``, which needs this file, sees to it that all are there."""


@functools.cache
def see_steps() -> None:
    """Judge the steps of all optimizers from now on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@_disable_dynamo
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _has_closure(args, kwargs):
        _judge(optimizer, "is about to take")


@_disable_dynamo
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _has_closure(args, kwargs):
        _judge(optimizer, "took")
    for guard in _all_guards():
        guard.note_use(optimizer)


def _all_guards() -> list[Guard]:
    # Not list(_guards): a guard whose wrapper is collected meanwhile removes itself, which breaks off an iteration.
    return [guard for reference in _guards.keyrefs() if (guard := reference()) is not None]


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Return True if the backward pass runs inside the step."""
    return bool(args or kwargs) and any(map(callable, (*args, *kwargs.values())))


def _judge(optimizer: Optimizer, verb: str) -> None:
    if optimizer not in local:
        step = Step(optimizer, verb, current_pass())
        for prelude in preludes:
            prelude(step)
        for guard in _all_guards():
            guard.judge(step)


def _is_same(parameter: Tensor, used: dict[int, tuple[Any, int]]) -> bool:
    """Return True if the last step used this gradient, and nothing has changed it since."""
    reference, version = used.get(id(parameter), (None, -1))
    grad = parameter.grad
    return reference is not None and grad is not None and grad is reference() and grad._version == version


def is_used(parameter: Tensor) -> bool:
    """Return True if a step changes the parameter, as far as its gradient says."""
    gradient = parameter.grad
    if gradient is None:
        return False
    if hasattr(gradient, "to_local"):  # a DTensor's: this rank steps on its shard
        gradient = gradient.to_local()
    if not is_plain(gradient):
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False  # the host must not ask while a graph is captured
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.count_nonzero())
