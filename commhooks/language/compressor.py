"""The interface of a compressor, and what it is handed.

A compressor is tensor maths written as a generator: it *yields* the collectives it wants, and the answer comes back
from the `yield`. It never calls one itself, so it can be run over a process group or over many workers in one
process, be counted, and be reordered.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from commhooks.errors import SettingsError
from commhooks.language.requests import Layout, Request
from commhooks.state.table import LocalEntry, ParameterState
from commhooks.streams import queue_copy
from commhooks.tensors import is_finite

Plan = TypeVar("Plan")

Exchange = Generator[Request, Tensor, "Result"]
"""What `Compressor.compress` returns: yields requests, is sent their answers, returns a `Result`."""


Carry = Callable[[Request], Generator[Request, Tensor, Tensor]]
"""Carry out one request by way of others, and return its answer."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What `Compressor.compress` returns: the mean, and what was not sent."""

    mean: Tensor
    """The mean of the gradient over the ranks, as the compressor could tell it: the bucket's own memory, or another
    tensor for a sparse bucket."""
    unsent: Tensor | None = None
    """Where the bucket `wants_unsent`: what this rank's own contribution left out, shaped like the bucket's memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """One parameter's place in a bucket."""

    parameter: Tensor
    gradient: Tensor
    """1-D view of the bucket's memory: the gradient's elements in the order in which the parameter's lie in memory."""
    state: ParameterState


@dataclasses.dataclass(eq=False)
class BucketView:
    """What a compressor sees of a bucket: flat memory, and which parameter owns which part of it."""

    index: int
    memory: Tensor
    """1-D and dense, or one parameter's sparse gradient. It holds this rank's gradient, and in the end the mean."""
    slots: Sequence[Slot] = ()
    """One for each parameter, in memory order."""
    wants_unsent: bool = False
    """The result must say what this rank left out; asked only of compressors that can."""
    plans: dict[Compressor, Any] = dataclasses.field(default_factory=dict, repr=False)
    """What `plan` made, by compressor."""

    @functools.cached_property
    def layout(self) -> Layout:
        """Whose elements `memory` holds; the bucket's own where parameters are not known."""
        if not self.slots:
            return Layout((f"bucket {self.index}",), (self.memory.numel(),))
        return Layout(tuple(slot.state.key for slot in self.slots), tuple(slot.gradient.numel() for slot in self.slots))

    def plan(self, compressor: Compressor, make: Callable[[], Plan]) -> Plan:
        """Return what `make` returned for this bucket the first time: views and scratch memory, never state."""
        if compressor not in self.plans:
            self.plans[compressor] = make()
        return cast(Plan, self.plans[compressor])


class StepVerdict:
    """The finite/non-finite verdict shared by all buckets of a step.

    Only answers that every rank receives alike are noted (`Request.answers_alike`), so all ranks reach the same one.
    """

    def __init__(self) -> None:
        self._checks: list[Tensor] = []

    def note(self, received: Tensor) -> None:
        """Take an answer into account."""
        self._checks.append(is_finite(received))

    def checks(self) -> list[Tensor]:
        """Return a 0-dim bool for each answer so far."""
        return self._checks


@dataclasses.dataclass(frozen=True)
class Context:
    """Where a compressor runs: its rank and step, and what the policy and wrappers around it set."""

    rank: int
    world_size: int
    step: int
    """Steps before this one, warm-up included."""
    verdict: StepVerdict | None = None
    """What is known of the step's other buckets; None where each is judged alone."""
    wire: torch.dtype | None = None
    """The dtype in which sums travel, where a wrapper sets one: what it rounds away is not sent either.

    Here and not in the bucket, which is kept from step to step and shared by compressors that have other wires.
    """

    def all_finite(self, *received: Tensor) -> Tensor:
        """Return a 0-dim bool: no inf and no NaN in what came back.

        Hand in only what every rank receives alike, never an all-to-all's answer: ranks would commit differently. The
        result stays a tensor, so that on a GPU nobody waits for it.
        """
        checks = [is_finite(tensor) for tensor in received]
        if self.verdict is not None:
            checks += self.verdict.checks()
        return torch.stack(checks).all()

    def commit(self, memory: Tensor, value: Tensor, allowed: Tensor) -> None:
        """Write `value` into `memory` where `allowed` (a broadcastable bool) holds; dtype and device may differ."""
        if allowed.numel() == 1 and not allowed.is_cuda:
            if allowed:
                memory.copy_(value)
        elif memory.device == value.device:
            torch.where(allowed, value.to(memory.dtype), memory, out=memory)  # out takes no other dtype
        else:
            queue_copy(memory, torch.where(allowed, value, memory.to(value.device, non_blocking=True)))


class Compressor(ABC):
    """Average gradients over ranks by way of something smaller.

    Subclasses are frozen dataclasses: their fields are settings, checked when built. They keep no tensors; what is to
    be remembered lives in `Slot.state`, all of it made before the first request.
    """

    @property
    def fixes_wire(self) -> bool:
        """Whether `compress` chooses the dtype in which its sums travel, so that no wrapper may change it."""
        return False

    @property
    def tells_unsent(self) -> bool:
        """Whether `compress` can return what it left out, which `ErrorFeedback` needs."""
        return False

    def takes(self, gradient: Tensor) -> bool:
        """Return whether `compress` can handle this kind of gradient; the others are averaged by a plain all-reduce."""
        return not gradient.is_sparse and gradient.is_floating_point()

    def check_parameters(self, names: Iterable[str]) -> None:  # noqa: B027 "empty method": most have nothing to check
        """Raise `SettingsError` if a setting does not fit a model with parameters of these names."""

    def first_steps(self) -> tuple[int, ...]:
        """Return the steps that create all lasting state, before their first requests; none if buckets decide what."""
        return (0,)

    def remembers(self, step: int) -> bool:
        """Return whether `compress` reads or writes any state in this step; if not, there is nothing to guard.

        The same on every rank: guards may add to what is sent.
        """
        return True

    def local_entries(self) -> Mapping[str, LocalEntry]:
        """Return, by name, how this compressor's `ParameterState.local` entries behave, except for the residual."""
        return {}

    @abstractmethod
    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Yield requests until `bucket.memory` holds the mean.

        A collective that fails is thrown into the generator at its `yield`; it may clean up, and must let the exception
        pass. State is written only after the last answer came, and only if all answers were finite.
        """


def carried_by(carry: Carry, exchange: Exchange) -> Exchange:
    """Run an exchange, and let `carry` see to each of its requests; a failure is thrown into the exchange."""
    try:
        request = next(exchange)
        while True:
            try:
                answer = yield from carry(request)
            except Exception as error:
                request = exchange.throw(error)
            else:
                request = exchange.send(answer)
    except StopIteration as stop:
        result: Result = stop.value
    return result


def check_inner(owner: str, inner: object) -> None:
    """Raise `SettingsError` for what a wrapper cannot wrap."""
    if not isinstance(inner, Compressor):
        raise SettingsError(
            f"{owner}(inner={inner!r}): inner must be a Compressor; make one of a name with make_compressor."
        )


def residual_of(slot: Slot) -> Tensor:
    """Return what this rank still owes for a parameter: 1-D, in the order of its memory.

    Every compressor with error feedback keeps it here, so that one can take over from another. It may be narrower than
    the computing dtype, or lie in the host's memory: read it by `add_owed`, and write it by `Context.commit`.
    """
    return slot.state.residual(slot.gradient)


def add_owed(memories: Sequence[Tensor], residuals: Sequence[Tensor]) -> None:
    """Add residuals, wherever and however they are kept, to memory of the computing dtype."""
    if residuals and residuals[0].device != memories[0].device:
        residuals = [
            kept.to(memory.device, non_blocking=True) for kept, memory in zip(residuals, memories, strict=True)
        ]
    torch._foreach_add_(list(memories), list(residuals))
