"""The interface of a compressor.

A compressor is tensor maths written as a generator: it *yields* the collectives it wants, and receives each answer from
the `yield`. It never runs a collective itself, so the same code can run over a process group or over many workers in
one process, and its collectives can be counted and reordered.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from commhooks.errors import CompressorError, HookTypeError, SettingsError
from commhooks.language.bucket import BucketView
from commhooks.language.entries import Declared, ParameterState
from commhooks.language.loss import Loss, Sends
from commhooks.language.place import Place
from commhooks.language.requests import AllToAll, Asked, Flags, Judge, Request
from commhooks.language.settings import check_settings
from commhooks.language.text import Spelling, name_of, spelled

Exchange = Generator[Asked, Any, None]
"""The generator that `Compressor.compress` returns: it yields requests and receives their answers. The answer to one
request is a list of tensors, to several at once a list of such lists, and to `Judge` a 0-dim bool."""

Carry = Callable[[Asked], Generator[Asked, Any, Any]]
"""A function that carries out a request, possibly by yielding others, and returns its answer."""

FEEDBACK_LAWS = ("conservation", "narrow", "tiny", "convergence")
"""The keys of the laws by which mean + residual is what was to be sent, for `Compressor.exempt`."""


@dataclasses.dataclass(frozen=True)
class Context:
    """The setting in which a compressor runs."""

    rank: int
    world_size: int
    step: int
    """The number of steps before this one, warm-up included."""
    wire: torch.dtype | None = None
    """The dtype in which sums are sent, if a wrapper sets one; its rounding errors also count as unsent.

    It is set here, not in the bucket, which persists between steps and may be shared by compressors with other wire
    dtypes.
    """

    loss_scale: float | Tensor = 1.0
    """The loss scale, if `attach(scaler=)` or `set_grad_scale` provided one; on a GPU it may be a tensor.

    A setting in units of the gradient is multiplied by it.
    """

    def as_sent(self, tensor: Tensor) -> Tensor:
        """Return this rank's tensor as an average sees it: unchanged, or rounded to the wire dtype.

        The difference is also unsent.
        """
        if self.wire is None or self.wire.itemsize >= tensor.element_size():
            return tensor
        return (tensor / self.world_size).to(self.wire).to(tensor.dtype).mul_(self.world_size)


class _NoSignature:
    """A stand-in for the signature, which both DDPs inspect when a hook is registered: it raises a helpful error."""

    def __get__(self, compressor: Compressor | None, kind: type) -> NoReturn:
        if compressor is None:
            raise AttributeError  # a class has the signature of its settings
        raise no_hook(compressor)


def no_hook(given: object) -> HookTypeError:
    """Return the error for a compressor, or a compressor's class, that was given as a hook."""
    made = (
        f'"{given}"'
        if isinstance(given, Compressor)
        else f"commhooks.compressors.{getattr(given, '__name__', given)}(...)"
    )
    return HookTypeError(
        f"expected a hook, a function hook(state, bucket) (got {given}, a compressor); write "
        f"commhooks.attach(model, {made}) in place of model.register_comm_hook(...)."
    )


class Compressor(ABC):
    """The interface of compressors, which average gradients over ranks by sending something smaller.

    Subclasses are frozen dataclasses: their fields are settings, which are checked on construction. They hold no
    tensors; `state` declares the tensors to remember.
    """

    __signature__: ClassVar[_NoSignature] = _NoSignature()

    def __post_init__(self) -> None:
        """Raise `SettingsError` for a setting that its field does not allow; subclasses check combinations."""
        check_settings(self)

    def __init_subclass__(cls, **settings: Any) -> None:
        """Raise `CompressorError` if `state` cannot be given a place: it would fail at the first bucket only."""
        super().__init_subclass__(**settings)
        given = [one for one in inspect.signature(cls.state).parameters.values() if one.default is one.empty]
        if len(given) != 2:
            raise CompressorError(
                f"{cls.__name__}.state({', '.join(map(str, given))}): state is given one Place; define "
                "state(self, place), and ask place.name, place.parameter and place.world_size."
            )
        own = vars(cls)
        if "compress" in own and "may_join_buckets" not in own:  # what was inherited speaks of another `compress`
            cls.may_join_buckets = Compressor.may_join_buckets  # type: ignore[method-assign]

    def __call__(self, state: object, bucket: object) -> NoReturn:
        """Raise `HookTypeError`: a compressor is attached, not called. It is callable because DDPs check that first."""
        raise no_hook(self)

    def __str__(self) -> str:
        """Return text that `make_compressor` can parse, such as "powersgd:rank=4"."""
        return str(spelled(self))

    def by_name(self) -> Spelling | None:
        """Return its spelling by a name that `make_compressor` knows; None if there is none.

        Wrappers that are settings of such a name have their own `by_name`.
        """
        return name_of(self)

    @property
    def sends(self) -> Sends:
        """The kind of `compress`'s requests, which decides whether a wrapper may cast them."""
        return Sends.SUMS

    @property
    def exempt(self) -> Mapping[str, str]:
        """Return the laws of `commhooks.testing` that do not hold here by design: their keys, and the reason."""
        return {}

    @property
    def needs_equal_kernels(self) -> bool:
        """True if each rank computes on a GPU, by products of matrices or factorizations, what must be equal on all.

        Ranks with GPUs of different models then warn when they meet. On a CPU, compute such things in a fixed order:
        products and sums of single elements, rounded one by one.
        """
        return False

    def may_join_buckets(self, step: int) -> bool:
        """Return whether a step may average several buckets as one, whose `memory` is then only the first one's.

        It may if a parameter's mean does not depend on the others in its bucket, and `compress` uses slots alone. A
        subclass that overrides `compress` must override this, too.
        """
        return False

    def takes(self, gradient: Tensor) -> bool:
        """Return whether `compress` can handle this kind of gradient; others are averaged by a plain all-reduce."""
        return not gradient.is_sparse and gradient.is_floating_point()

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return a bound on the part of a parameter's gradient that may be left unsent; None: nothing is.

        Unless `Loss.is_kept` is false, `compress` passes the unsent part to `slot.keep`. The loss may depend on the
        name, and on the parameter's shape, strides and dtype, but not on its values: wrappers ask about a large matrix
        without a name or memory when they are built.
        """
        return None

    def why_whole(self, place: Place) -> str | None:
        """Return why a parameter is sent uncompressed though larger or other ones are not; None if it is compressed.

        None also if settings ask for it. If much of a model is sent whole, a warning quotes the reason, which follows
        "since".
        """
        return None

    def check(self, named: Mapping[str, Tensor], world_size: int | None) -> None:  # noqa: B027 most check nothing
        """Raise `SettingsError` if a setting cannot work for these parameters, or this number of ranks (None: any)."""

    def state(self, place: Place) -> Declared:
        """Return the entries remembered for a parameter, by name, except the residual (see `ErrorFeedback`).

        If the parameter leads `place.bucket`, they include the entries of the bucket as a whole. If `place.step` is
        given, return only the entries that this step uses: when the next compressor of a schedule takes over, unsent
        values in other entries are added to the residual in use. Entries must depend only on the settings and the
        place.
        """
        return {}

    def choose(self, states: Mapping[Tensor, ParameterState], step: int) -> Mapping[Tensor, int]:
        """Return an integer, such as a rank, for some of the parameters, given the state of all; {} in most steps.

        It is called before every step's first bucket. Choices may affect messages, so they must depend only on
        settings, the step and replicated state. A choice is available as `slot.choice`, and saved as the entry
        `CHOICE`, which `state` must declare. Reading state on a GPU makes the host wait for the last step.
        """
        return {}

    @property
    def scatters(self) -> bool:
        """True if it and all compressors in its settings implement `scatter`."""
        return type(self).scatter is not Compressor.scatter and all(inner.scatters for inner in inner_of(self))

    def scatter(self, bucket: BucketView, context: Context) -> Exchange:
        """Yield requests until the mean of this rank's shard of every slot is written; see `BucketView.is_sharded`.

        Each rank gets a different answer, so if anything is kept, send `Flags` with the first request, and pass their
        answer to `Judge`. The default raises `CompressorError`: most compressors' means need the messages of all ranks.
        """
        raise CompressorError(f"{self!r} can average whole gradients only, not shards, of which each rank keeps one.")

    @abstractmethod
    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Yield requests until the mean of every slot is written.

        If a collective fails, its error is thrown into the generator at the `yield`; the generator may clean up, but
        must let the exception propagate. State may be written only after `Judge` was answered, and only if the answer
        is true.
        """


def never_chooses(compressor: Compressor) -> bool:
    """Return whether a compressor is known to choose nothing, so that no state needs to be collected for it."""
    return type(compressor).choose is Compressor.choose


def check_compressor(caller: str, compressor: object) -> None:
    """Raise `SettingsError` unless this is a compressor that cannot keep tensors between steps by itself."""
    if not isinstance(compressor, Compressor):
        remedy = 'write for example commhooks.make_compressor("powersgd", rank=4)'
        if isinstance(compressor, type) and issubclass(compressor, Compressor):
            remedy = f"write {compressor.__name__}(...), with its settings"
        raise SettingsError(f"{caller}: expected a Compressor or a name (got {compressor!r}); {remedy}.")
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


def inner_of(compressor: Compressor) -> list[Compressor]:
    """Return the compressors in a compressor's settings."""
    return compressors_in(tuple(vars(compressor).values()))


def compares_kernels(compressor: Compressor) -> bool:
    """Return whether a compressor or one in its settings needs equal kernels on all ranks."""
    return compressor.needs_equal_kernels or any(map(compares_kernels, inner_of(compressor)))


def loss_of_a_matrix(compressor: Compressor) -> Loss:
    """Return a compressor's loss for a large matrix, if no parameter is known yet; an error of 0 if nothing is lost."""
    return compressor.loss("", torch.empty(4096, 4096, dtype=torch.float32, device="meta")) or Loss(0.0)


def compressors_in(value: object) -> list[Compressor]:
    """Return the compressors in a setting: the setting itself, or those in a tuple."""
    if isinstance(value, tuple):
        return [compressor for item in value for compressor in compressors_in(item)]
    return [value] if isinstance(value, Compressor) else []


def takes_feedback(compressor: Compressor) -> bool:
    """Return whether `ErrorFeedback` may wrap a compressor: all compressors in it pass their loss to `slot.keep`.

    They are asked about a large matrix, since no parameter is known when a compressor is made.
    """
    inner = inner_of(compressor)
    return all(map(takes_feedback, inner)) if inner else loss_of_a_matrix(compressor).is_kept


def begin_exchange(compressor: Compressor, bucket: BucketView, context: Context) -> Exchange:
    """Return a compressor's exchange for a bucket; raise `CompressorError` if it is not a generator."""
    exchange = (compressor.scatter if bucket.is_sharded else compressor.compress)(bucket, context)
    if not isinstance(exchange, Generator):
        raise CompressorError(
            f"{type(compressor).__name__}.{'scatter' if bucket.is_sharded else 'compress'} must be a generator, which "
            f"yields requests (it returned {type(exchange).__name__})."
        )
    return exchange


def map_requests(carry: Carry, exchange: Exchange) -> Exchange:
    """Run an exchange, letting `carry` handle its requests; a failure is thrown into the exchange."""
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
    """Run an exchange; if it does not ask for a verdict, include its means in the step's verdict.

    If it ends without one, state that was overwritten before it is put back: see `Tile.took`.

    Means of shards differ between ranks: for them, unless the exchange sends `Flags`, each rank tells the others
    whether its own gradients are finite.
    """
    if bucket.is_sharded:
        of_shards = _SeenOfShards()
        yield from side_by_side([map_requests(of_shards.carry, exchange), _flagged(bucket, of_shards)])
        return
    seen = _Seen()
    try:
        yield from map_requests(seen.carry, exchange)
        if not seen.judge:
            yield Judge(*([bucket.mean] if bucket.is_whole else [slot.mean for slot in bucket.slots]))
    except BaseException:  # a failure anywhere, or the exchange is closed
        bucket.scratch.settle(finite=False)
        raise


class _Seen:
    """A record of whether an exchange has asked for a verdict."""

    judge = False

    def carry(self, asked: Asked) -> Generator[Asked, Any, Any]:
        self.judge = self.judge or isinstance(asked, Judge)
        return (yield asked)


class _SeenOfShards:
    """A record of whether an exchange has sent flags."""

    flags = False

    def carry(self, asked: Asked) -> Generator[Asked, Any, Any]:
        if not isinstance(asked, Judge):
            self.flags |= any(isinstance(part, Flags) for request in _as_tuple(asked) for part in request.parts)
        return (yield asked)


def _flagged(bucket: BucketView, seen: _SeenOfShards) -> Exchange:
    """Tell all ranks whether this rank's gradients are finite, if the exchange has not told them already."""
    if not seen.flags:
        rows = [memory for memory, _ in bucket.rows]
        (flags,) = yield AllToAll(Flags.of(rows, len(bucket.memory)), last=True)
        yield Judge(flags)


def side_by_side(exchanges: Sequence[Exchange]) -> Exchange:
    """Run several exchanges as one: their requests of one round are yielded together, and judged together."""
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
        except Exception as error:  # each of them may clean up
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
    """End an exchange by throwing an error into it, whether or not it lets the error propagate."""
    try:
        exchange.throw(error)
    except BaseException:  # its own, or the one thrown in
        return
    exchange.close()


def _as_tuple(asked: Asked) -> tuple[Request, ...]:
    assert not isinstance(asked, Judge), "a verdict is asked for when nothing else is"
    return asked if isinstance(asked, tuple) else (asked,)
