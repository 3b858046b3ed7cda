"""One rank's connection to the others: its number, and the scheduler, chosen once the gradients' device is known."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from commhooks.communicators import ProcessGroupCommunicator
from commhooks.communicators.parent_group import backend_of, members_of, name_and_store, warn_of_bypass
from commhooks.communicators.private_group import Address, Agreements, WrapCommunicator, timeout_of
from commhooks.devices import SideStream, runs_on_streams
from commhooks.errors import AttachError, CollectiveError
from commhooks.scheduling.channels import ConnectionChannel
from commhooks.scheduling.inline import InlineScheduler
from commhooks.scheduling.policy import PolicyName
from commhooks.scheduling.scheduler import Scheduler
from commhooks.scheduling.worker import Worker
from ddp_core.guard import warn_of_one_rank


class Connection(Protocol):
    """One rank's connection to the others: its number, and the channels through which engines reach them.

    Engines that share a connection share its thread and its group. Each opens its own channel with its first bucket, in
    the same order on every rank.
    """

    rank: int
    """The number of this rank."""
    world_size: int
    """The number of ranks."""
    policy: PolicyName
    """The order of collectives in channels that choose none."""

    def carries_groups(self, device: torch.device) -> bool:
        """Return whether requests may name a group of some of the ranks, for gradients on this device."""
        ...

    def join(self, name: str = "") -> int:
        """Reserve a channel, and return how many of its name were reserved before."""
        ...

    def open(self, channel: ConnectionChannel, device: torch.device, fingerprint: str) -> Scheduler:
        """Open a reserved channel, with one fingerprint on all ranks. The first channel opens the connection."""
        ...

    def leave(self) -> None:
        """Leave a channel, open or not; when all have left, the connection stops."""
        ...

    def check_ranks(self) -> None:
        """Raise `AttachError` if the ranks are no longer those that the connection was made for."""
        ...


class ProcessGroupConnection:
    """A connection beside a process group: a thread and a private group of the same ranks, for one engine or several.

    It does not keep the process group alive, so that a destroyed one is freed. `label` names it in the store, `policy`
    is the policy of engines that choose none, and `hook_timeout` is in seconds (None: the process group's timeout).
    `wrap_communicator` takes the private group's communicator, and returns the one to use in its place. It warns of a
    process group of one rank, once, unless that `may_be_alone`; None: if it is a dimension of a mesh.

    Connections of one label are paired in the order in which ranks open their first channels, so a connection that one
    rank alone makes has no effect on others; those of several labels may be opened in any order. A wrong pair raises
    `AttachError` if what ranks compare differs. Connections that compare equal must be opened in one order on all
    ranks: the first that is opened in another raises it, too.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        *,
        label: str = "attached",
        policy: PolicyName = "fifo",
        wrap_communicator: WrapCommunicator | None = None,
        hook_timeout: float | None = None,
        may_bypass: bool = False,
        may_be_alone: bool | None = None,
    ) -> None:
        self.policy = policy
        self.label = label
        """Its name in the store; it may change until the connection has its place there."""
        self._made = next(_made)
        self._overtaken = Counter[int]()
        """The connections made later that were opened while this one was not, by a hash of label and fingerprint."""
        self._channels = 0
        self._joined = Counter[str]()
        self._worker: Worker | None = None
        self._inline: InlineScheduler | None = None
        self._process_group = weakref.ref(process_group)
        name_and_store(process_group)  # raises if it has none
        self._timeout = timeout_of(process_group).total_seconds()
        self._address: Address | None = None
        """Where the ranks meet; None before the connection has its place."""
        self._used_before = 0
        """How many equal connections had been made later and opened when it took its place."""
        self.rank: int
        self.rank, size = process_group.rank(), process_group.size()
        """The number of this rank in the process group."""
        self.world_size = size
        """The number of ranks in the process group."""
        self._members = members_of(process_group)
        if wrap_communicator is None:
            warn_of_one_rank(process_group, f"commhooks, {label}", is_meant=may_be_alone)
        self._wrap = wrap_communicator
        self.hook_timeout = hook_timeout
        self._may_bypass = may_bypass  # the user knows that a group without Gloo only provides its ranks
        with _counting:
            _unopened.add(self)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group, or None if it was destroyed."""
        return self._process_group()

    @property
    def timeout(self) -> float:
        """The process group's timeout, in seconds."""
        return self._timeout

    def carries_groups(self, device: torch.device) -> bool:
        """Return True except on NCCL, where groups would need their own communicators."""
        return not runs_on_streams(self._backend(device))

    def join(self, name: str = "") -> int:
        """Reserve a channel, and return how many of its name were reserved before."""
        self._channels += 1
        self._joined[name] += 1
        return self._joined[name] - 1

    def leave(self) -> None:
        """Leave a channel; when all have left, the thread stops and the private group is dropped."""
        self._channels -= 1
        for running in (self._worker, self._inline):
            if self._channels == 0 and running is not None:
                running.stop()
        if self._channels == 0 and self._address is not None:
            self._address.section.release()

    def check_ranks(self) -> None:
        """Raise `AttachError` if the process group has changed its size, its ranks, or this rank's number.

        The private group is still that of the former ranks, which would average among themselves. If the group is one
        that `torch.distributed` does not know, an exchange of other ranks goes unnoticed.
        """
        group, before = self._process_group(), self._members
        if group is None:
            return
        # As members_of does, but for a call in each step.
        now = group.rank(), group.size(), *distributed_c10d._world.pg_group_ranks.get(group, ())
        if now == before:
            return
        exchanged = _exchanged(before[2:], now[2:])  # a destroyed group's are no longer known
        if exchanged or now[:2] != before[:2]:
            raise AttachError(
                f"the process group has changed: this was rank {before[0]} of {before[1]}, and is rank {now[0]} of "
                f"{now[1]} now{exchanged}. Close on every former rank, and then make or attach it again on "
                "every rank; state_dict() and load_state_dict(world_size=...) take its state along."
            )

    def open(self, channel: ConnectionChannel, device: torch.device, fingerprint: str) -> Scheduler:
        """Open a reserved channel; on NCCL this waits for all ranks, otherwise the thread does."""
        if self._worker is None and self._inline is None:
            if channel.is_closed:
                raise CollectiveError(
                    f"rank {self.rank}: not started: the attachment was stopped before its first bucket."
                )
            # The connection takes its place here, in the same order on every rank, and not on the thread.
            self.take_place(fingerprint)
            fingerprint += f"\n{_USED_BEFORE}: {self._used_before}"
        assert self._address is not None, "the connection has its place"
        backend = self._backend(device)
        running: InlineScheduler | Worker
        if runs_on_streams(backend) or self._inline is not None:
            running = self._inline = self._inline or self._on_a_stream(self._address, device)
        else:
            running = self._worker = self._worker or self._on_a_thread(self._address, backend)
        running.open(channel, fingerprint)
        return running

    def take_place(self, fingerprint: str) -> None:
        """Take the connection's place, with what its first channel compares, without waiting; once."""
        if self._address is None:
            self._address = self._place()
            self._used_before = self._overtake(fingerprint)

    def _place(self) -> Address:
        process_group = self._process_group()
        if process_group is None:
            raise AttachError("the process group was destroyed.")
        self.check_ranks()
        return Address.under(process_group, self.label)

    def _overtake(self, fingerprint: str) -> int:
        """Return how many equal connections were made later than this one and opened before it.

        If ranks make equal connections in one order, these numbers differ as soon as their order of opening does: they
        are the inversions of that order. Connections that are never opened do not count.
        """
        what = hash((self.label, fingerprint))  # the texts are long, and some connections are kept and never opened
        with _counting:
            _unopened.discard(self)
            for other in _unopened:
                if other._made < self._made and other._process_group is self._process_group:
                    other._overtaken[what] += 1
            return self._overtaken[what]

    def _backend(self, device: torch.device) -> str:
        process_group = self._process_group()
        return backend_of(process_group, device) if process_group is not None else "gloo"

    def _on_a_stream(self, address: Address, device: torch.device) -> InlineScheduler:
        process_group = self._process_group()
        assert process_group is not None, "its backend was just asked for"
        # A proxy: an engine is found by its group, and must not keep it alive.
        address.meet().result()
        carrier: Any = ProcessGroupCommunicator(weakref.proxy(process_group), has_tensor_forms=True)
        agreements = Agreements(carrier, address, device)
        communicator = self._wrap(carrier) if self._wrap else carrier
        failures = address.failure_store()
        return InlineScheduler(
            communicator, agreements.agree, (SideStream(device), SideStream(device)), self.hook_timeout, failures
        )

    def _on_a_thread(self, address: Address, backend: str) -> Worker:
        process_group = self._process_group()
        if process_group is not None and backend != "gloo" and not self._may_bypass:
            warn_of_bypass(process_group, backend)
        return Worker(address, self._wrap, self.hook_timeout)


_made = itertools.count()
"""The number of connections that this process has made."""
_unopened: weakref.WeakSet[ProcessGroupConnection] = weakref.WeakSet()
"""The connections that are not open yet."""
_counting = threading.Lock()
"""Held while these connections change or are counted: threads may make and open some at once."""
_USED_BEFORE = "equal ones made later and used earlier (make and use all in one order, or name each Exchanger)"


def _exchanged(before: tuple[int, ...], now: tuple[int, ...]) -> str:
    """Return a remark about the ranks that were exchanged for others; "" if there are none, or it is not known."""
    if not (before and now) or before == now:
        return ""
    if {*before} == {*now}:
        return " (the others have other numbers)"
    went, came = ([str(rank) for rank in one if rank not in other] for one, other in ((before, now), (now, before)))
    return f" (of the world's ranks {', '.join(went[:8]) or 'none'} went, and {', '.join(came[:8]) or 'none'} came)"
