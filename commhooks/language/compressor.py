"""The interface of a compressor.

A compressor is tensor maths written as a generator: it *yields* the collectives it wants, and the answer comes back
from the `yield`. It never calls one itself, so it can be run over a process group or over many workers in one
process, be counted, and be reordered.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commhooks.errors import CompressorError, SettingsError
from commhooks.language.bucket import BucketView
from commhooks.language.entries import Declared, ParameterState
from commhooks.language.requests import Asked, Judge, Request
from commhooks.language.spelling import spelled

Exchange = Generator[Asked, Any, None]
"""What `Compressor.compress` returns: yields requests and is sent their answers. A request is answered by a list of
tensors, several at once by a list of such lists, `Judge` by a 0-dim bool."""

Carry = Callable[[Asked], Generator[Asked, Any, Any]]
"""Carry out what was asked by way of something else, and return its answer."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Where a compressor runs."""

    rank: int
    world_size: int
    step: int
    """Steps before this one, warm-up included."""
    wire: torch.dtype | None = None
    """The dtype in which sums travel, where a wrapper sets one: what it rounds away is not sent either.

    Here and not in the bucket, which is kept from step to step and shared by compressors that have other wires.
    """

    loss_scale: float | Tensor = 1.0
    """What gradients are scaled by, if `attach(scaler=)` or `set_grad_scale` told; on a GPU it may be a tensor.

    A setting in units of the gradient is multiplied by it.
    """

    def as_sent(self, tensor: Tensor) -> Tensor:
        """Return what an average gets of this rank's own tensor: itself, or what the wire's dtype leaves of it.

        The difference is unsent, too.
        """
        if self.wire is None or self.wire.itemsize >= tensor.element_size():
            return tensor
        return (tensor / self.world_size).to(self.wire).to(tensor.dtype).mul_(self.world_size)


class Compressor(ABC):
    """Average gradients over ranks by way of something smaller.

    Subclasses are frozen dataclasses: their fields are settings, checked when built. They keep no tensors; what is to
    be remembered is declared by `state`.
    """

    def __str__(self) -> str:
        """Return what `make_compressor` reads back: the class, and the settings that are not its defaults."""
        return spelled(self)

    @property
    def fixes_wire(self) -> bool:
        """Whether `compress` chooses the dtype in which its sums travel, so that no wrapper may change it."""
        return False

    @property
    def only_sums(self) -> bool:
        """Whether all that `compress` asks for is sums, which alone can be cast on the wire."""
        return True

    @property
    def needs_whole_buckets(self) -> bool:
        """Whether `compress` must be given a bucket's slots all together."""
        return False

    @property
    def takes_feedback(self) -> bool:
        """Whether `ErrorFeedback` may go around it.

        Not if its mean is right on average without, or if it remembers by itself what it has not sent.
        """
        return True

    def takes(self, gradient: Tensor) -> bool:
        """Return whether `compress` can handle this kind of gradient; the others are averaged by a plain all-reduce."""
        return not gradient.is_sparse and gradient.is_floating_point()

    def check_parameters(self, named: Mapping[str, Tensor]) -> None:  # noqa: B027 "empty method": most check nothing
        """Raise `SettingsError` if a setting cannot work for a model with these parameters."""

    def check_ranks(self, world_size: int) -> None:  # noqa: B027 "empty method": most check nothing
        """Raise `SettingsError` if a setting cannot work for so many ranks."""

    def state(self, name: str, parameter: Tensor, world_size: int) -> Declared:
        """Return what is remembered for a parameter, by name; the residual is `ErrorFeedback`'s to declare."""
        return {}

    def bucket_state(self, bucket: BucketView) -> Declared:
        """Return what is remembered for a bucket and no parameter, by name; it is kept with the first slot."""
        return {}

    def remembers(self, step: int) -> bool:
        """Return whether `compress` reads or writes any state in this step; if not, there is nothing to guard.

        The same on every rank: guards may add to what is sent.
        """
        return True

    def chooses(self, step: int) -> bool:
        """Return whether `choose` is to be called before this step's first bucket; the same on every rank."""
        return False

    def choose(self, states: Mapping[Tensor, ParameterState], step: int) -> Mapping[Tensor, int]:
        """Return an integer for each of some parameters, such as a rank, given what is remembered for all of them.

        It may decide what is sent, so it must follow from settings and replicated state alone. It is found again as
        `slot.choice`, and saved as the entry `CHOICE`, which `state` must declare. To read state on a GPU the host
        waits for the last step.
        """
        return {}

    def loses(self, name: str, parameter: Tensor) -> bool:
        """Return whether something of this parameter's gradient may be left unsent, which `slot.keep` is told."""
        return False

    def relative_error(self, elements: int) -> float:
        """Return the largest |unsent|² / |formed|², or its expectation if it is random, for so many elements.

        Below 1, error feedback gets everything through in the end; from 1 on its residual grows without bound.
        """
        return 0.0

    @property
    def is_unbiased(self) -> bool:
        """Whether the mean of the gradients is the expectation of the mean that is written, over what is drawn."""
        return False

    @property
    def is_damped(self) -> bool:
        """Whether a damping factor was written out, so that `ErrorFeedback` accepts a relative error of 1 or more."""
        return False

    @abstractmethod
    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Yield requests until the mean of every slot is written.

        A collective that fails is thrown into the generator at its `yield`; it may clean up, and must let the exception
        pass. State is written only after `Judge` was answered, and only where that says so.
        """


def check_compressor(caller: str, compressor: object) -> None:
    """Raise `SettingsError` for what is no compressor, or one that could keep tensors from step to step by itself."""
    if not isinstance(compressor, Compressor):
        raise SettingsError(f"{caller}: expected a Compressor or a name (got {compressor!r}).")
    kind: Any = type(compressor)
    if not getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        raise SettingsError(f"{caller}: {kind.__name__} must be a frozen dataclass, whose fields are its settings.")
    try:
        hash(compressor)
    except TypeError as error:
        raise SettingsError(
            f"{caller}: the settings of {compressor!r} must be hashable, such as tuples ({error})."
        ) from error
    for name, value in vars(compressor).items():
        if isinstance(value, Tensor):
            raise SettingsError(
                f"{caller}: {kind.__name__}.{name} holds a tensor, which no checkpoint would save; declare it by "
                "Compressor.state(), and make scratch memory by BucketView.plan()."
            )
        for inner in compressors_in(value):
            check_compressor(caller, inner)


def compressors_in(value: object) -> list[Compressor]:
    """Return the compressors that a setting holds: itself, or those in a tuple."""
    if isinstance(value, tuple):
        return [compressor for item in value for compressor in compressors_in(item)]
    return [value] if isinstance(value, Compressor) else []


def begin_exchange(compressor: Compressor, bucket: BucketView, context: Context) -> Exchange:
    """Return a compressor's exchange; raise `CompressorError` if `compress` is no generator."""
    exchange = compressor.compress(bucket, context)
    if not isinstance(exchange, Generator):
        raise CompressorError(
            f"{type(compressor).__name__}.compress must be a generator, which yields requests (it returned "
            f"{type(exchange).__name__})."
        )
    return exchange


def map_requests(carry: Carry, exchange: Exchange) -> Exchange:
    """Run an exchange, and let `carry` see to whatever it asks for; a failure is thrown into the exchange."""
    try:
        asked = next(exchange)
        while True:
            try:
                answer = yield from carry(asked)
            except Exception as error:
                asked = exchange.throw(error)
            else:
                asked = exchange.send(answer)
    except StopIteration:
        return


def judged(bucket: BucketView, exchange: Exchange) -> Exchange:
    """Run an exchange; if it asks for no verdict, let its means count in that of the step."""
    seen = _Seen()
    yield from map_requests(seen.carry, exchange)
    if not seen.judge:
        yield Judge(*([bucket.mean] if bucket.is_whole else [slot.gradient for slot in bucket.slots]))


class _Seen:
    """Whether an exchange has asked for a verdict."""

    judge = False

    def carry(self, asked: Asked) -> Generator[Asked, Any, Any]:
        self.judge = self.judge or isinstance(asked, Judge)
        return (yield asked)


def side_by_side(exchanges: Sequence[Exchange]) -> Exchange:
    """Run several exchanges as one: what they ask for at the same time is asked for at once, and judged together."""
    asked: dict[int, Asked] = {}
    for number, exchange in enumerate(exchanges):
        _advance(number, exchange, None, asked)
    while asked:
        judges = {number: one for number, one in asked.items() if isinstance(one, Judge)}
        try:
            if len(judges) == len(asked):
                finite = yield Judge(*(tensor for one in judges.values() for tensor in one.tensors))
                answers = dict.fromkeys(judges, finite)
            else:
                requests = {number: _as_tuple(one) for number, one in asked.items() if not isinstance(one, Judge)}
                found = iter((yield tuple(request for own in requests.values() for request in own)))
                of_all = {number: [next(found) for _ in own] for number, own in requests.items()}
                answers = {n: of if isinstance(asked[n], tuple) else of[0] for n, of in of_all.items()}
        except Exception as error:  # every one of them may clean up
            for number in asked:
                _close(exchanges[number], error)
            raise
        for number in sorted(answers):  # always in the order in which they were given
            del asked[number]
            try:
                _advance(number, exchanges[number], answers[number], asked)
            except Exception as error:
                for other in asked:
                    _close(exchanges[other], error)
                raise


def _advance(number: int, exchange: Exchange, answer: Any, asked: dict[int, Asked]) -> None:
    try:
        asked[number] = next(exchange) if answer is None else exchange.send(answer)
    except StopIteration:
        return


def _close(exchange: Exchange, error: Exception) -> None:
    """Throw an error into an exchange, which ends it whatever it makes of that."""
    try:
        exchange.throw(error)
    except BaseException:  # its own, or the one thrown in
        return
    exchange.close()


def _as_tuple(asked: Asked) -> tuple[Request, ...]:
    assert not isinstance(asked, Judge), "a verdict is asked for when nothing else is"
    return asked if isinstance(asked, tuple) else (asked,)
