"""A hook's averaging, state and checkpoints for named tensors, without a DistributedDataParallel."""

from __future__ import annotations

import contextlib
import math
import numbers
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NoReturn, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.communicators.parent_group import group_or_default
from commhooks.compressors import Signum
from commhooks.compressors.codecs import Vote
from commhooks.engine.engine import Engine
from commhooks.errors import CommHooksError, CompressorError, SettingsError
from commhooks.exchange.buckets import FlatBucket, InTurns, allocated, places_of
from commhooks.exchange.checks import checked_compressor
from commhooks.exchange.feed import Channel, Feed
from commhooks.exchange.handle import Handle
from commhooks.exchange.options import Options, check_belongs_to_connection, check_flags, settings_of
from commhooks.language.compressor import Compressor, inner_of
from commhooks.saving.saved import ONLY
from commhooks.scheduling.connection import Connection
from commhooks.scheduling.lockstep import LockstepConnection, run_in_turns
from commhooks.state.memory import MemoryReport, added
from commhooks.tensors import is_dense

_LIGHTEST, _HEAVIEST = 1e-30, 1e30
"""Weights that are not 0: fp32 holds the sum and the quotient of any number of them."""
WEIGHTS = f"0, or from {_LIGHTEST} to {_HEAVIEST}"
"""The numbers that are weights, in words."""


class Averaging:
    """A round of an `Exchanger`, under way since `begin`."""

    def __init__(
        self,
        like: Mapping[str, Tensor],
        buckets: Sequence[FlatBucket],
        futures: Sequence[torch.futures.Future[Tensor]],
        connection: Connection,
        in_turns: InTurns | None,
    ) -> None:
        self._in_turns = in_turns
        self._like = like
        self._buckets = buckets
        self._futures = futures
        self._connection = connection
        self._is_written = False

    @property
    def is_written(self) -> bool:
        """True once the means are written; another round may then use the memory."""
        return self._is_written

    @property
    def means(self) -> Mapping[str, Tensor]:
        """The means, by name, in the memory in which they arrived; waits for them, and raises as `wait`.

        Another round may use the memory once this object is gone or the means are written; after `write`, this raises
        `CompressorError`.
        """
        if self._is_written:
            raise CompressorError("Averaging.means: the means were written, and their memory may be in use again.")
        self.wait()
        return places_of(self._buckets)

    def done(self) -> bool:
        """Return whether the round is over: its means have arrived, or it has failed."""
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        """Wait until the means have arrived; raise the error if the round failed: see `Exchanger.average`.

        Raises `CompressorError` if it would wait forever, for workers of this process that take turns.
        """
        _check_turns("Averaging.wait", self._futures, self._connection)
        for future in self._futures:
            future.wait()

    @torch.no_grad()
    def write(self, into: Mapping[str, Tensor]) -> None:
        """Wait for the means, then write them into tensors with the exchanger's names and shapes; call it once.

        Raises `CompressorError`, and writes nothing, if a tensor is missing, of another shape, dtype or device, if its
        elements share memory (`expand`), or if the means were written before.
        """
        if self._is_written:
            raise CompressorError(
                "Averaging.write: the means were written before, and their memory may be in use again."
            )
        if wrong := _misfits(self._like, into, overwritten=True):
            raise CompressorError(f"Averaging.write: {wrong[0]}; nothing was written.")
        self.wait()
        for bucket in self._buckets:
            torch._foreach_copy_([into[name] for name in bucket.names()], bucket.places)
        if self._in_turns is not None:
            self._in_turns.read()
        self._is_written = True


class TensorChannel(Channel):
    """Named tensors of an `Exchanger` that are averaged together: one channel of it."""

    def __init__(self, label: str, engine: Engine, feed: TensorFeed) -> None:
        super().__init__(label, engine, feed)
        self._like = feed.like()[label]
        self._in_turns = feed.memory_of(label)
        self._is_weighted = feed.is_weighted(label)
        self._beginning = threading.Lock()
        self._last: list[torch.futures.Future[Tensor]] = []
        """The last round's futures; the next round waits for them."""
        self._memories: list[tuple[list[FlatBucket], weakref.ref[Averaging]]] = []
        """The buckets of each round; another may use them once the means are written or the `Averaging` is gone."""
        self._next: list[FlatBucket] = []
        """The buckets of the next round, if `buffers` was called for it."""

    @torch.no_grad()
    def average(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace each tensor with its mean over the ranks; every rank must call this equally often.

        Raises `CompressorError` if the tensors are not the ones named at construction, which closes this exchanger and
        so fails the other ranks' calls, `CollectiveError` if another rank fails, and `AttachError` after `close`. In
        all cases the tensors are unchanged.
        """
        if isinstance(self.engine.connection, LockstepConnection):
            if self.engine.connection.world_size > 1:
                raise CompressorError("Exchanger.average: workers of one process meet in average_in_lockstep.")
            _average_in_lockstep([self], [tensors])
            return
        self._check(tensors, overwritten=True)
        self.begin(tensors).write(tensors)

    @property
    @torch.inference_mode(False)  # as begin
    def buffers(self) -> Mapping[str, Tensor]:
        """The memory of the next round, by name: `begin()` averages the values written here, without a copy.

        Each tensor has the shape, dtype and device of the one named at construction, and undefined values until you
        write them.
        """
        with self._beginning:
            if not self._next:
                self._wait_for_the_last("Exchanger.buffers")
                self._next = self._free_buckets()
            return places_of(self._next)

    @torch.inference_mode(False)  # as Engine.run; rounds also share memory
    @torch.no_grad()
    def begin(self, tensors: Mapping[str, Tensor] | None = None, *, weight: float | None = None) -> Averaging:
        """Copy the tensors and start averaging; the tensors may change as soon as this returns.

        Without tensors, the values written into `buffers` are averaged. With `weighted`, `weight` is this rank's weight
        in the mean: 0, or from 1e-30 to 1e30, so that fp32 holds the sum; if all weights are 0, so are the means.
        Several rounds may be begun before the first one's means are written. Residuals of one round are part of the
        next, so this waits until the previous round is over. Raises as `average`.
        """
        self.check_open("begin")
        if not (is_weight(weight) if self._is_weighted else weight is None):
            wanted = WEIGHTS if self._is_weighted else "None unless the Exchanger is weighted"
            self.fail(f"begin(weight={weight!r}): weight must be {wanted}.")
        if tensors is not None:
            self._check(tensors)
        elif not self._next:
            self.fail("begin without tensors sends what was written into `buffers`, but nobody has asked for that.")
        with self._beginning:
            self._wait_for_the_last("Exchanger.begin")
            buckets, self._next = self._next or self._free_buckets(), []
            for bucket in buckets:
                bucket.weight = weight
                if tensors is not None:
                    torch._foreach_copy_(bucket.places, [tensors[name] for name in bucket.names()])
            self._last = [self.engine.run(bucket) for bucket in buckets]
            begun = Averaging(self._like, buckets, self._last, self.engine.connection, self._in_turns)
            self._memories.append((buckets, weakref.ref(begun)))
            return begun

    @property
    def is_in_use(self) -> bool:
        """True while a round's tensors are being written, averaged or read in this exchanger's memory."""
        rounds = (of_round() for _, of_round in self._memories)
        return bool(self._next) or any(last is not None and not last.is_written for last in rounds)

    def memories(self) -> list[Tensor]:
        """Return the memory of all rounds so far, one tensor for each dtype and device of a round."""
        buckets = [bucket for of_round, _ in self._memories for bucket in of_round]
        return [bucket.buffer() for bucket in (*buckets, *self._next)]

    def fail(self, what: str) -> NoReturn:
        """Raise `CompressorError`, and close the channel: the other ranks, which may have begun, learn of it."""
        why = f"rank {self.engine.connection.rank}: {what}"
        if isinstance(self.engine.connection, LockstepConnection):  # nobody has begun, so nothing is lost
            raise CompressorError(why)
        self.stop(why)
        raise CompressorError(f"{why} It is closed now: other ranks' calls fail.")

    def stop(self, why: str) -> None:
        """Close the channel because of a failure outside it, of which the other ranks learn."""
        self.engine.stop(why)

    @property
    def failure(self) -> CommHooksError | None:
        """The error that ended all rounds; None if there was none, and after `close`."""
        why = self.engine.why_stopped
        return self.engine.failure() or (CompressorError(why) if why else None)

    def _check(self, tensors: Mapping[str, Tensor], *, overwritten: bool = False) -> None:
        """Raise `CompressorError`, and close the channel, if tensors do not match those named at construction."""
        wrong = _misfits(self._like, tensors, overwritten=overwritten)
        if wrong:
            self.fail(f"Exchanger was made for other tensors: {wrong[0]}.")

    def _wait_for_the_last(self, caller: str) -> None:
        _check_turns(caller, self._last, self.engine.connection)
        for future in self._last:
            with contextlib.suppress(Exception):  # whoever waits for that round is told; this one fails by itself
                future.wait()

    def _free_buckets(self) -> list[FlatBucket]:
        """Return buckets that no round uses any more, or new ones."""
        if self._in_turns is not None:
            self._in_turns.take(self)
        for buckets, of_round in reversed(self._memories):  # the last round's: views and plans of it are kept
            last = of_round()
            if last is None or last.is_written:
                self._memories.remove((buckets, of_round))
                return buckets
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, tensor in self._like.items():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(name)
        take = allocated if self._in_turns is None else self._in_turns.part
        return [
            FlatBucket(number, names, self._like, number == len(kinds) - 1, take)
            for number, names in enumerate(kinds.values())
        ]


class TensorFeed(Feed):
    """Tensors that a user names, in one channel or several; rounds begin when the user says so."""

    channel_type: ClassVar[type[Channel]] = TensorChannel
    caller = "Exchanger"
    ended = "this Exchanger was closed"
    label = "Exchanger"

    def __init__(
        self,
        channels: Mapping[str, Mapping[str, Tensor]],
        *,
        name: str = "",
        weighted: bool = False,
        in_turns: InTurns | bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        # Objects of our own, since state is kept by object and one tensor may be given under two names. Without memory,
        # unless the tensor has gaps: elements travel without.
        self._like = {
            channel: {key: one.detach() if is_dense(one) else torch.empty_like(one) for key, one in tensors.items()}
            for channel, tensors in channels.items()
        }
        self._name = name
        self._weighted = weighted
        self._in_turns = in_turns if isinstance(in_turns, InTurns) else InTurns() if in_turns else None
        for channel, named in self._like.items():
            if (memory := self.memory_of(channel)) is not None:
                memory.reserve(named.values())
        self._group = group

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group that was given, or the default one."""
        return group_or_default(self._group)

    def like(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the tensors, by name."""
        return self._like

    def is_weighted(self, channel: str) -> bool:
        """Return whether each rank has a weight in a channel's mean."""
        return self._weighted

    def memory_of(self, channel: str) -> InTurns | None:
        """Return the memory that a channel shares with others; None if it has its own."""
        return self._in_turns

    def title(self, channel: str) -> str:
        """Return a channel's name in errors."""
        return self._name if channel == ONLY else f"{self._name} {channel}".strip()

    def facts(self, channel: str) -> str:
        """Return the tensors' shapes, dtypes and strides."""
        facts = [f"tensor {key}: {_described(tensor)}" for key, tensor in self._like[channel].items()]
        return "\n".join(facts + ["weighted: True"] * self.is_weighted(channel))

    def refusal_of(self, compressor: Compressor) -> SettingsError | None:
        """Return why ranks cannot be weighted, if they are to be."""
        try:
            if self._weighted:
                check_takes_weights(compressor)
        except SettingsError as error:
            return error
        return None

    def memory(self, channels: Iterable[Channel]) -> MemoryReport:
        """Return the bytes that channels use, by purpose; memory that several share counts once."""
        these = [*channels]
        memories = {
            memory.data_ptr(): memory for one in these if isinstance(one, TensorChannel) for memory in one.memories()
        }
        used = sum(memory.untyped_storage().nbytes() for memory in memories.values())
        return added((one.memory() for one in these), used)


class Exchanger(Handle[TensorChannel]):
    """Averaging of named tensors, such as pseudo-gradients, with the state, statistics and checkpoints of a hook.

    `tensors` names them: on every rank the same names, shapes, strides and dtypes, dense and of floating point. Only
    names, shapes, strides, dtypes and devices are read from it; for tensors in pinned memory, `buffers` are pinned too.
    Or it names groups of them, by label: these are channels, averaged separately, as `exchanger["label"].average(...)`,
    each with its own count of rounds, so that seeds and warm-up do not depend on the others; no name may be in two of
    them, and `compressor` may be one for each, by label. `Options` describes the options, of which all but `guard`
    apply; `policy` is "fused", or the connection's.

    - `weighted`: `begin` takes this rank's weight in the mean; compressors that count votes raise `SettingsError`.
    - `in_turns`: no round begins before the last one's means are written or dropped, so the channels share their
      memory, which is that of the largest. Exchangers that are given one `InTurns` share it too.

    Making an exchanger has no effect on other ranks. Like PyTorch's collectives, exchangers are paired in the order of
    their first use, which must be the same on every rank: the first round, `open`, `replace` or `load_state_dict`.
    Ranks then compare `name`, tensors, compressor and options, and raise `AttachError` if these differ. Exchangers
    that are equal in all of them are paired by order alone. A wrong pair of those is noticed only if ranks made them in
    one order: the first use that is out of that order on some ranks raises `AttachError`, and earlier means may be
    wrong. So give each a `name`. If first rounds may begin in any order, as in several threads, call `open` on each in
    one order before.

    `connection` replaces the process group: exchangers that share one `ProcessGroupConnection` share its thread and
    private group, as the channels of one do, and must begin all their rounds in the same order on every rank. Those of
    one connection that have no name, or the same, are told apart by the order of making: there, one that a single rank
    makes, even if it closes it, needs a name of its own, or the others' first use raises `AttachError`. Errors name the
    round and the exchanger, "round 3, <name>". `lockstep_connections` are for workers in one process, see
    `average_in_lockstep`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | Mapping[str, Mapping[str, Tensor]],
        compressor: Compressor | str | Mapping[str, Compressor | str],
        *,
        name: str = "",
        weighted: bool = False,
        in_turns: bool | InTurns = False,
        connection: Connection | None = None,
        **options: Unpack[Options],
    ) -> None:
        check_flags("Exchanger", weighted=weighted, in_turns=isinstance(in_turns, InTurns) or in_turns)
        channels = _channels_in(tensors)
        given = dict(compressor) if isinstance(compressor, Mapping) else dict.fromkeys(channels, compressor)
        if given.keys() != channels.keys():
            raise SettingsError(
                f"Exchanger: there must be a compressor for each group, by its label (got those of {', '.join(given)} "
                f"for {', '.join(channels)})."
            )
        if connection is not None:
            check_belongs_to_connection("Exchanger", options)
        settings = settings_of("Exchanger", options if connection is None else {"policy": connection.policy, **options})
        compressors = {label: checked_compressor("Exchanger", one) for label, one in given.items()}
        feed = TensorFeed(channels, name=name, weighted=weighted, in_turns=in_turns, group=settings.process_group)
        super().__init__(feed, compressors, settings, connection)
        for channel in self.values():
            if (refusal := channel.refusal_of(channel.compressor)) is not None:
                self.close()
                raise refusal

    @property
    def name(self) -> str:
        """Its name in errors."""
        return next(iter(self.values())).name

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The memory of the next round, by name, if there is one channel; see `TensorChannel.buffers`."""
        return self._only().buffers

    def average(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace each tensor with its mean over the ranks, if there is one channel; see `TensorChannel.average`."""
        self._only().average(tensors)

    def begin(self, tensors: Mapping[str, Tensor] | None = None, *, weight: float | None = None) -> Averaging:
        """Start averaging, if there is one channel; see `TensorChannel.begin`."""
        return self._only().begin(tensors, weight=weight)

    def fail(self, what: str) -> NoReturn:
        """Raise `CompressorError` here, and fail the other ranks' rounds with it."""
        next(iter(self.values())).fail(what)


def _channels_in(tensors: object) -> dict[str, dict[str, Tensor]]:
    """Return the channels that an exchanger's tensors are given for; raise `SettingsError` if they cannot be."""
    if not isinstance(tensors, Mapping) or not tensors:
        raise SettingsError(f"Exchanger(tensors={tensors!r:.80}): tensors must name at least one tensor.")
    several = all(isinstance(one, Mapping) and one for one in tensors.values())
    channels = {label: dict(one) for label, one in tensors.items()} if several else {ONLY: dict(tensors)}
    for group in channels.values():
        for key, tensor in group.items():
            if not isinstance(tensor, Tensor):
                raise SettingsError(f"Exchanger: {key!r} must be a tensor (got {type(tensor).__name__}).")
            if tensor.layout != torch.strided or not tensor.is_floating_point():
                raise SettingsError(f"Exchanger: {key!r} must be dense and of floating point (got {tensor.dtype}).")
    return channels


@torch.no_grad()
def average_in_lockstep(exchangers: Sequence[Exchanger], tensors: Sequence[Mapping[str, Tensor]]) -> None:
    """Average over workers in this process, each with its own tensors; see `Exchanger.average`."""
    for exchanger in exchangers:
        if not isinstance(exchanger.connection, LockstepConnection):
            raise CompressorError(
                "average_in_lockstep: every Exchanger must have a connection of lockstep_connections."
            )
        exchanger._check_open("average_in_lockstep")
    _average_in_lockstep([exchanger._only() for exchanger in exchangers], tensors)


def _average_in_lockstep(channels: Sequence[TensorChannel], tensors: Sequence[Mapping[str, Tensor]]) -> None:
    for channel, own in zip(channels, tensors, strict=True):
        channel._check(own, overwritten=True)
    rounds = [channel.begin(own) for channel, own in zip(channels, tensors, strict=True)]
    connections = [channel.engine.connection for channel in channels]
    run_in_turns(
        [connection for connection in dict.fromkeys(connections) if isinstance(connection, LockstepConnection)]
    )  # a shared one's turn once
    for one, own in zip(rounds, tensors, strict=True):
        one.write(own)


def is_weight(value: object) -> bool:
    """Return whether a rank can have this weight: a number of `WEIGHTS`, or a tensor of one."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    number = float(value) if isinstance(value, numbers.Real) else math.nan
    return number == 0 or _LIGHTEST <= number <= _HEAVIEST


def check_takes_weights(compressor: Compressor) -> None:
    """Raise `SettingsError` if a compressor's mean is a vote, in which ranks cannot be weighted."""
    if isinstance(compressor, Signum) or isinstance(getattr(compressor, "codec", None), Vote):
        raise SettingsError(f"weighted=True: {compressor} counts votes, which have no weights.")
    for inner in inner_of(compressor):
        check_takes_weights(inner)


def _check_turns(caller: str, futures: Sequence[torch.futures.Future[Tensor]], connection: Connection) -> None:
    """Raise `CompressorError` if a round of workers that take turns is under way: none of them can while one waits."""
    if isinstance(connection, LockstepConnection) and not all(future.done() for future in futures):
        raise CompressorError(f"{caller}: the last round is under way; let the workers take their turns.")


def _misfits(like: Mapping[str, Tensor], tensors: Mapping[str, Tensor], *, overwritten: bool) -> list[str]:
    """List mismatches with the named tensors, in words; if none and `overwritten`, tensors that cannot be written."""
    found, wanted = (
        {name: (tuple(t.shape), t.dtype, t.layout, t.device) for name, t in named.items()} for named in (tensors, like)
    )
    wrong = [
        f"{name!r} is {found.get(name, 'missing')}, and was {wanted.get(name, 'not named')}"
        for name in sorted({*found, *wanted})
        if found.get(name) != wanted.get(name)
    ]
    if wrong or not overwritten:
        return wrong
    return [
        f"elements of {name!r} share memory, so no mean can be written into it"
        for name, t in tensors.items()
        if any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True))
    ]


def _described(tensor: Tensor) -> str:
    """Return the properties that all ranks must agree on, strides included: elements travel in the order of memory."""
    strides = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, strides {tuple(strides)}"
