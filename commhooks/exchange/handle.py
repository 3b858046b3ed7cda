"""The user's handle on an exchange, and `open_exchange`, which makes one of a feed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import torch.distributed as dist
from torch import Tensor

from commhooks.communicators.disagreement import refusal_as_fingerprint
from commhooks.communicators.parent_group import group_or_default
from commhooks.communicators.ranks import Ranks
from commhooks.engine.engine import Engine
from commhooks.errors import AttachError, CheckpointError, SettingsError
from commhooks.exchange.checks import checked_compressor, warn_of_whole
from commhooks.exchange.feed import Channel, Feed
from commhooks.exchange.metrics import Writer, metrics_of, write_to
from commhooks.exchange.options import Options, Settings, settings_of
from commhooks.exchange.pieces import WITH_DTENSORS, PiecesWatch
from commhooks.exchange.watching import Watch, optimizer_of
from commhooks.language.compressor import Compressor
from commhooks.language.place import Place
from commhooks.saving.parts import merge_state_dicts
from commhooks.saving.resumption import agreed
from commhooks.saving.rules import LoadOptions, LoadRules
from commhooks.saving.saved import ONLY, Differences, Saved, read
from commhooks.scheduling.connection import Connection, ProcessGroupConnection
from commhooks.scheduling.ledger import ParameterTraffic, Statistics, total
from commhooks.state.memory import MemoryReport
from commhooks.state.table import StateTable
from commhooks.tensors import cloned

One = TypeVar("One", bound=Channel)


class Handle(Mapping[str, One]):
    """An exchange under way: its statistics, checkpoints and compressor; a mapping of its channels, by name.

    `attach`, `attach_sharded` and `attach_replicas` return one, and `Exchanger`, `PowerSGDState` and `DiLoCo` are one
    or have one. Most have a single channel, "gradients". All counts start at zero. It is a context manager that ends
    with `close`, and `print` shows a summary.
    """

    keeps_own_model = False
    """Every rank has the same model, or a shard of it, and the same optimizer's state."""

    def __init__(
        self,
        feed: Feed,
        compressor: Compressor | Mapping[str, Compressor],
        settings: Settings,
        connection: Connection | None = None,
    ) -> None:
        """Make the engines, unless settings cannot work; the other ranks learn of nothing before `open`."""
        self._feed, self._settings = feed, settings
        self._watches: list[Watch | PiecesWatch] = []
        self._is_open = False
        connections: dict[dist.ProcessGroup, Connection] = {}
        if connection is None and settings.process_group is not None:
            connection = self._connected(group_or_default(settings.process_group), connections)
        self._connection = connection or self._connected(feed.process_group, connections)
        self._made: dict[str, One] = {}
        like = feed.like()
        _check_names(feed.caller, like)
        try:
            for name, named in like.items():
                one = compressor[name] if isinstance(compressor, Mapping) else compressor
                of_group = connection or self._connected(feed.group_of(name), connections)
                self._made[name] = self._channel(name, named, one, of_group)
        except Exception:
            self.close()
            raise

    def _connected(self, group: dist.ProcessGroup, known: dict[dist.ProcessGroup, Connection]) -> Connection:
        """Return the connection beside a process group: the known one, or a new one."""
        settings = self._settings
        if group not in known:
            known[group] = ProcessGroupConnection(
                group,
                label=self._feed.label,
                policy=settings.policy,
                wrap_communicator=settings.wrap_communicator,
                hook_timeout=settings.hook_timeout,
                may_bypass=settings.process_group is not None or settings.wrap_communicator is not None,
                may_be_alone=self._feed.may_be_alone,
            )
        return known[group]

    def _channel(self, name: str, named: Mapping[str, Tensor], compressor: Compressor, connection: Connection) -> Any:
        feed, settings = self._feed, self._settings
        engine = Engine(
            compressor,
            connection,
            fingerprint=feed.facts(name),
            residuals=settings.residuals,
            atomic=settings.atomic,
            may_join=feed.may_join,
            policy=settings.policy,
            name=feed.title(name),
            is_sharded=feed.is_sharded,
            joins_buckets=feed.joins_buckets,
        )
        if named:  # a bare hook learns of its parameters from buckets
            engine.bind(list(named.items()), may_be_unused=feed.may_be_unused)
        if settings.scaler is not None:
            engine.loss_scale.follow(settings.scaler)
        return feed.channel_type(name, engine, feed)

    def open(self) -> Self:
        """Connect to the other ranks, and have buckets run through the channels; on any failure close, and raise.

        A second call does nothing; one after `close` raises `AttachError`.
        """
        for channel in self._channels().values():
            channel.check_open("open")
        if self._is_open:
            return self
        try:
            for channel in self._channels().values():
                channel.open()
            self._plug_in()
        except BaseException:
            self.close()
            raise
        self._is_open = True
        return self

    def _plug_in(self) -> None:
        """Plug the feed in; if that fails on one rank, raise on all of them."""
        (first, *_) = self._channels().values()
        try:
            if self._connection.rank == 0:
                self._warn_of_whole()  # here, because a warning may be an error
            self._feed.plug(self._made)
        except BaseException as error:  # without a comparison: the others may wait for this rank within their `plug`
            rank = self._connection.rank
            first.engine.stop(f"rank {rank}: {self._feed.caller} could not plug in: {type(error).__name__}: {error}")
            raise
        if type(self._feed).plug is not Feed.plug:  # which does nothing, and cannot fail
            first.engine.agree("plugged in", "open", first.device)

    def _warn_of_whole(self) -> None:
        feed = self._feed
        ranks = {name: one.engine.connection.world_size for name, one in self._made.items()}
        warn_of_whole(
            feed.caller,
            (
                (self._made[channel].compressor, Place(name, parameter, ranks[channel], is_sharded=feed.is_sharded))
                for channel, named in feed.like().items()
                if feed.is_replaceable(channel)  # others, such as buffers, are no gradients
                for name, parameter in named.items()
            ),
        )

    def _channels(self) -> Mapping[str, One]:
        return self._made

    def _existing(self) -> Mapping[str, One]:
        """Return the channels that have been made: a hook's state has none before there is a process group."""
        return self._channels()

    def _only(self) -> One:
        """Return the channel of a handle that has one."""
        channels = self._channels()
        if len(channels) != 1:
            raise SettingsError(f"{self._feed.caller}: there are several channels; name one of {', '.join(channels)}.")
        return next(iter(channels.values()))

    @property
    def engine(self) -> Engine:
        """The engine of a handle that has one channel."""
        return self._only().engine

    @property
    def state(self) -> StateTable:
        """The compressor's state, by parameter, of a handle that has one channel."""
        return self.engine.state

    @property
    def _is_plain(self) -> bool:
        return [*self._channels()] == [ONLY]

    # --- a mapping ----------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> One:
        """Return a channel."""
        channels = self._channels()
        if name not in channels:
            raise KeyError(f"{self._feed.caller}: there is no channel {name!r}, only {', '.join(channels)}.")
        return channels[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the channels' names."""
        return iter(self._channels())

    def __len__(self) -> int:
        return len(self._channels())

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        """Return a summary of each channel."""
        title = type(self).__name__ if type(self) is not Handle else self._feed.caller
        if not self._existing():
            return f"{title}: there is no process group yet"
        if self._is_plain:
            return f"{title}: {self._only()}"
        summaries = [f"{name}: {one}" for name, one in self.items()]
        summaries += [f"{name}: not compressed, {one}" for name, one in self.not_compressed.items()]
        return "\n".join(summaries + [str(self.gathers)] * bool(self.gathers))

    # --- what users ask -----------------------------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """True while buckets go through this handle: until `close`, or until the model is gone."""
        return self._feed.is_plugged

    @property
    def connection(self) -> Connection:
        """The connection to the other ranks."""
        return self._connection

    @property
    def gathers(self) -> Any:
        """The gathers of weights, with `attach_sharded(gather=)`, by module name; frozen modules have one too."""
        return getattr(self._feed, "gathers", {})

    @property
    def not_compressed(self) -> Mapping[str, Any]:
        """The modules whose gradients FSDP2 reduces itself, with `attach_sharded`, by name: their bytes, and why."""
        return getattr(self._feed, "not_compressed", {})

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group whose ranks average together; None once it has been destroyed, or without one."""
        return self._connection.process_group if isinstance(self._connection, ProcessGroupConnection) else None

    @property
    def hook_timeout(self) -> float | None:
        """The limit of a collective, in seconds; None: the process group's."""
        return self._connection.hook_timeout if isinstance(self._connection, ProcessGroupConnection) else None

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        """The rank of this process and the number of ranks, among those that average together."""
        (first, *_) = self._channels().values()
        return first.engine.connection.rank, first.engine.connection.world_size

    @property
    def compressor(self) -> Compressor:
        """The compressor in use, of the first channel if they differ."""
        return next(iter(self._channels().values())).compressor

    @property
    def steps(self) -> int:
        """The number of steps, or rounds, begun so far: the most of any channel."""
        return max((one.steps for one in self._existing().values()), default=0)

    def statistics(self) -> Statistics:
        """Return this rank's totals so far; steps are the most of any channel."""
        every = (one.statistics() for one in self._existing().values())
        return _together(every, self.gathers.values(), self.not_compressed.values())

    def last_step(self) -> Statistics:
        """Return this rank's counts for the last complete step of each channel."""
        return _together((one.last_step() for one in self._existing().values()), (), self.not_compressed.values())

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return each parameter's share of this rank's totals so far, by name."""
        return {name: share for one in self._existing().values() for name, share in one.by_parameter().items()}

    def memory(self) -> MemoryReport:
        """Return the bytes in use on this rank, by purpose."""
        return self._feed.memory(self.values())

    def metrics(self, *, by_parameter: bool = False) -> dict[str, float]:
        """Return this rank's metrics by tag; call it after the optimizer's step and before `zero_grad`.

        - commhooks/bytes_sent_total and bytes_sent_per_step: bytes that this rank sent, since attaching and in the last
          step
        - commhooks/compression_ratio and collectives_per_step: values of the last step
        - commhooks/seconds_compressing, seconds_waiting, seconds_exposed: values of the last step, as in `Statistics`
        - commhooks/residual_norm_over_gradient_norm: this rank's residuals over the mean gradients in `.grad`, if there
          are both and the gradients are not zero; clipped gradients are smaller
        - with `by_parameter`, also bytes_sent_total and residual_norm_over_gradient_norm of every parameter, whose name
          follows after a slash

        Reading the norms makes the host wait for a GPU, so do not log in every step.
        """
        engines = [one.engine for one in self._existing().values()]
        if not engines:
            return {}
        shares = self.by_parameter() if by_parameter else {}
        return metrics_of(engines, self.statistics(), self.last_step(), shares)

    def log_to(self, writer: Writer, step: int, *, by_parameter: bool = False) -> None:
        """Write `metrics` to a TensorBoard `SummaryWriter`, a Lightning logger, or a function of (metrics, step)."""
        write_to(writer, self.metrics(by_parameter=by_parameter), step)

    def set_grad_scale(self, scale: float) -> None:
        """Set the loss scale from the next step on, and rescale residuals to it. Not needed with a `scaler`."""
        for one in self.values():
            one.engine.loss_scale.announce(scale)

    # --- another compressor -------------------------------------------------------------------------------------------

    def checked(self, compressor: Compressor | str) -> Compressor:
        """Return the compressor that `replace` would switch to, made if a name is given; nothing changes.

        Raises `AttachError` if this handle was closed, or does not know the parameters' names yet, and `SettingsError`
        for a compressor that does not exist or does not suit the parameters or the ranks.
        """
        self._check_open("replace")
        for one in self._replaceable().values():
            candidate, refusal = one.candidate(compressor)
            if refusal is not None:
                raise refusal
        return candidate

    def expect(self, *compressors: Compressor) -> None:
        """Announce the compressors that may take over later: a `state_dict` may then also hold their state."""
        for one in self._replaceable().values():
            one.engine.expect(compressors)

    def replace(self, compressor: Compressor | str | Mapping[str, Compressor | str]) -> None:
        """Switch to another compressor from the next step on, in all channels or in those named, keeping their state.

        Every rank must replace between the same two steps. Residuals are kept for whichever compressor next uses them;
        a server error that it does not use is added to its residual, or named in a warning if it has none; a basis of
        another size starts from scratch. DiLoCo's buffers stay uncompressed. Raises `AttachError` if ranks disagree or
        a step is under way, and `SettingsError` for settings that do not suit the parameters or channels that cannot
        switch; in either case the old compressor stays, in all channels.
        """
        self._check_open("replace")
        channels = self._replaceable()
        given = dict(compressor) if isinstance(compressor, Mapping) else dict.fromkeys(channels, compressor)
        if len(self) > 1 or isinstance(compressor, Mapping):  # a channel alone compares what it switches to by itself
            self._agree_on(given, channels)
        for name, one in given.items():
            channels[name].replace(one)

    def _replaceable(self) -> dict[str, One]:
        return {name: one for name, one in self.items() if self._feed.is_replaceable(name)}

    def _agree_on(self, given: Mapping[str, Compressor | str], channels: Mapping[str, One]) -> None:
        """Raise on every rank, before any channel switches, if one cannot on some rank, or if ranks differ."""
        refusal: SettingsError | None = None
        if unknown := given.keys() - channels.keys():
            names = ", ".join(sorted(unknown))
            refusal = SettingsError(
                f"replace: there is no channel {names} that could switch; {', '.join(channels)} can."
            )
        found = [channels[name].candidate(one) for name, one in given.items() if name in channels]
        refusal = refusal or next((error for _, error in found if error is not None), None)
        facts = [f"compressor of {name}: {one!r}" for name, (one, _) in zip(given, found, strict=False)]
        for one in self.values():
            one.engine.stand_between_steps("replace")
        (first, *_) = self.values()
        try:
            first.engine.agree(
                refusal_as_fingerprint(refusal) if refusal else "\n".join(facts), "replace", first.device
            )
        finally:
            if refusal is not None:
                raise refusal

    # --- the model ----------------------------------------------------------------------------------------------------

    def watch(self, *optimizers: object) -> None:
        """Raise `NotAveragedError` whenever one of these takes a step on gradients that bypassed the compressor.

        Pass the optimizers of the attached model, or a framework's wrappers around them. This is the guard of `attach`
        in its strict form: the error is raised without comparing gradients with those of other ranks, so it does not
        wait for a rank that is late, and gradients that were averaged by hand are an error too. It is raised before the
        step changes anything, or after it if the step runs the backward pass itself, in a closure. At the first step,
        rank 0 warns if the compressor is known to do badly with such an optimizer, or if an optimizer of whole matrices
        computes with pieces of sharded ones. Watching ends with `close`. Raises
        `AttachError` for an optimizer of other parameters.
        """
        self._check_open("watch")
        averaged = {one: self._feed.averaged_by(one) for one in self.values()}
        known = [*itertools.chain.from_iterable(averaged.values())]
        found = [optimizer_of("watch", known, optimizer) for optimizer in optimizers]
        for optimizer, (one, named) in itertools.product(found, averaged.items()):
            if not {tensor for group in optimizer.param_groups for tensor in group["params"]}.isdisjoint(named):
                self._watches.append(Watch(optimizer, self._feed.guard_of(one), named.keys(), one.engine))
        if self._connection.rank == 0:
            every = {name: one for of_channel in averaged.values() for one, name in of_channel.items()}
            self._watches += [PiecesWatch(optimizer, every, WITH_DTENSORS) for optimizer in found]

    def close(self) -> None:
        """End the exchange: restore what the feed replaced, and stop the scheduler. A second call does nothing.

        Every rank must close between the same two steps. PyTorch's DistributedDataParallel only ever accepts one hook,
        so afterwards `attach` works again on the same model but `register_comm_hook` does not.
        """
        while self._watches:  # they hold parameters
            self._watches.pop().remove()
        with contextlib.ExitStack() as stopping:
            for one in self._made.values():
                stopping.callback(one.engine.stop)
            self._feed.unplug()

    def _check_open(self, caller: str) -> None:
        """Raise `AttachError` if buckets no longer go through this handle."""
        if not self._feed.is_plugged:
            raise AttachError(f"{caller}: {self._feed.ended}.")
        for one in self.values():
            one.check_open(caller)

    # --- saving and loading -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, for a checkpoint; `commhooks.saving.saved` describes its layout.

        It holds only this rank's residuals, so call it on every rank, between two steps. Tensors are copies. Raises
        `CheckpointError` after a step that failed, or if the parameters' names are not known (see
        `PowerSGDState.bind`).
        """
        state: dict[str, Any] = cloned(self.snapshot().as_dict())
        return state

    def snapshot(self) -> Saved:
        """Return the same as `state_dict`, with the tensors themselves instead of copies."""
        return Saved(channels={self._feed.saved_as(name): one.snapshot() for name, one in self.items()})

    def gathered(self, *, to: int | None = None) -> dict[str, Any]:
        """Return the `state_dict` with the per-rank state of all ranks, for a checkpoint that one rank writes.

        Call it on every rank, between the same two steps; the hook's own process group carries the states. With `to`,
        only that rank gets all of it, and every other rank gets its own `state_dict`. Every rank can load the complete
        state with `load_state_dict`. It takes as much memory as the residuals of all ranks together.

        Raises `CheckpointError` on every rank if any rank cannot return its state, or if the states differ where they
        must agree.
        """
        _, ranks = self.rank_and_world_size
        if not isinstance(self._connection, ProcessGroupConnection):
            raise CheckpointError("gathered: workers of one process gather with merge_state_dicts.")
        if to is not None and not 0 <= to < ranks:
            raise CheckpointError(f"gathered(to={to}): to must be a rank from 0 to {ranks - 1}, or None.")
        group = self._connection.process_group  # a PowerSGDState's own attribute is what it was made with
        if group is None and ranks > 1:
            raise CheckpointError(
                "gathered: the process group was destroyed, so the other ranks cannot be reached; gather before that."
            )
        others = Ranks(group)
        if to is None:
            return merge_state_dicts(others.gather("gather the hook's state", self.state_dict))
        own = others.each("take the hook's state", self.state_dict)
        states = others.gather_to(to, own)
        return merge_state_dicts(states) if states is not None else own

    def differences(self, saved: Saved, rules: LoadRules) -> list[str]:
        """List every difference between a saved state and this run that would cause an error on loading."""
        own = self._own_of(saved).channels
        channels = {self._feed.saved_as(name): one for name, one in self.items()}
        if own.keys() != channels.keys():
            return [f"it was saved with the channels {', '.join(own)}, and this run has {', '.join(channels)}"]
        return [
            fault if name == ONLY else f"{name}: {fault}"
            for name, one in channels.items()
            for fault in one.differences(own[name], rules)
        ]

    def _own_of(self, saved: Saved) -> Saved:
        """Return a state without the channels of ranks with other experts or shards, unless there are no others."""
        own = {name: one for name, one in saved.channels.items() if self._feed.is_own(name)}
        return dataclasses.replace(saved, channels=own) if own else saved

    def load_state_dict(self, state: Mapping[str, Any] | CheckpointError, **rules: Unpack[LoadOptions]) -> None:
        """Restore the state that `state_dict` returned; call it on every rank, between the same two steps.

        `LoadRules` describes which differences may be allowed. Raises `CheckpointError` on every rank, and changes
        nothing in any channel, if the state is damaged or does not match the run on any rank, or if ranks pass
        different states. A rank that could not even read its state passes the `CheckpointError` that explains why, so
        that the other ranks learn of it.

        A `PowerSGDState` that does not know its parameters' names yet checks the state once it learns them; if that is
        before its first step, ranks that passed different states raise at their first bucket.
        """
        self.restore(read(state), LoadRules(**rules))

    def restore(self, saved: Saved | CheckpointError, rules: LoadRules, differences: Differences | None = None) -> None:
        """Restore a state; if it does not match, or is an error, raise on every rank and change nothing.

        `differences` replaces this handle's own, for a state that holds more than its channels'.
        """
        for one in self.values():
            one.engine.stand_between_steps("load_state_dict")
        own: Any = saved if isinstance(saved, CheckpointError) else self._own_of(saved)
        found = functools.partial(differences or self.differences, own, rules)
        labels: dict[Connection, dict[str, One]] = {}
        for name, one in self.items():
            labels.setdefault(one.engine.connection, {})[self._feed.saved_as(name)] = one
        fingerprints, error = dict[Connection, str](), None
        # The first channel's ranks, which are all of them if any channel has all, agree last: they learn what parts of
        # them have found.
        for connection, channels in reversed(labels.items()):
            part = error or (own if len(labels) == 1 else _only(own, channels))
            (first, *_) = channels.values()
            try:
                fingerprints[connection] = agreed(first.engine, part, found)
            except CheckpointError as refused:
                error = refused
        if error is not None:
            raise error
        for connection, channels in labels.items():
            for label, one in channels.items():
                one.restore(own.channels[label], rules, fingerprints[connection])

    def is_own(self, saved: str) -> bool:
        """Return whether this rank loads a channel of a checkpoint; it skips those of ranks with another shard."""
        return self._feed.is_own(saved)

    def ranks_of(self, saved: str) -> tuple[int, int]:
        """Return this process's number among the ranks that average a saved channel, and how many these are."""
        of = {self._feed.saved_as(name): one.engine.connection for name, one in self.items()}
        return (of[saved].rank, of[saved].world_size) if saved in of else self.rank_and_world_size


def open_exchange(feed: Feed, compressor: Compressor | str, **options: Unpack[Options]) -> Handle[Any]:
    """Average what a feed hands in, with a compressor: make engines, connect, and plug in, on every rank or on none.

    Raises `AttachError` if ranks disagree about compressor, options or tensors, and `SettingsError` for settings that
    cannot work, on this rank or another. If `Feed.plug` raises on one rank, the others raise `CollectiveError`, which
    names it and its error; on NCCL they notice it only at the group's timeout.
    """
    settings = settings_of(feed.way, options, feed.caller)
    return Handle(feed, checked_compressor(feed.caller, compressor), settings).open()


def _only(saved: Saved | CheckpointError, labels: Collection[str]) -> Saved | CheckpointError:
    """Return a state with these channels alone; an error stays one."""
    if isinstance(saved, CheckpointError):
        return saved
    return dataclasses.replace(saved, channels={name: one for name, one in saved.channels.items() if name in labels})


def _check_names(caller: str, like: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise `SettingsError` if there is no channel, or a name is in two: counts of all channels go by name."""
    if not like:
        raise SettingsError(f"{caller}: there is nothing to average: the feed's like() names no channel.")
    seen: dict[str, str] = {}
    for channel, name in ((channel, name) for channel, named in like.items() for name in named):
        if (other := seen.setdefault(name, channel)) != channel:
            raise SettingsError(
                f"{caller}: {name!r} is in two channels, {other} and {channel}; call them '{other}.{name}' and "
                f"'{channel}.{name}', for example."
            )


def _together(counts: Iterable[Statistics], gathers: Iterable[Any], not_compressed: Iterable[Any]) -> Statistics:
    every, others, left = [*counts], [one.statistics() for one in gathers], [*not_compressed]
    if len(every) == 1 and not others and not left:
        return every[0]
    steps = max((one.steps for one in every), default=0)
    size = steps * sum(one.gradient_bytes for one in left)
    return dataclasses.replace(total([*every, *others]), steps=steps, not_compressed_bytes=size)
