"""An attachment's private process group: its address in the parent group's store, its opening and closing.

Collectives pair up across ranks by the order in which they are issued, so nothing else may issue any on this group: no
second model, and not the user's own backward pass. Nothing else may hold a reference to it either: dropping the last
one wakes the peers if this rank fails (on Gloo, `abort` and `shutdown` wake nobody).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from commhooks.communicators import Collective, Communicator, Pending, ProcessGroupCommunicator
from commhooks.communicators.disagreement import describe
from commhooks.communicators.failure_store import ANSWER_SECONDS, FailureStore, StoreThread
from commhooks.communicators.kernels import KERNELS_BYTES, Kernels, warn_of_kernels
from commhooks.communicators.parent_group import members_of, name_and_store
from commhooks.communicators.sections import Section, Sections, sections_under
from commhooks.communicators.unhurried import unhurried
from commhooks.errors import AttachError, CollectiveError
from commhooks.language.requests import Group

WrapCommunicator = Callable[[Communicator], Communicator]

PRIVATE_NAMES = (
    "torch._C._distributed_c10d:PrefixStore",
    "torch._C._distributed_c10d:ProcessGroup._allgather_base",
    "torch._C._distributed_c10d:ProcessGroup._get_backend",
    "torch._C._distributed_c10d:ProcessGroup._reduce_scatter_base",
    "torch._C._distributed_c10d:ProcessGroup.get_group_store | torch.distributed.distributed_c10d:_world.pg_map",
    "torch._C._distributed_c10d:ProcessGroupGloo.options | torch._C._distributed_c10d:Backend.options",
    "torch._C._distributed_c10d:ProcessGroupGloo._Options._devices",
    "torch._C._distributed_c10d:ProcessGroupGloo._Options._threads",
    "torch._C._distributed_c10d:ProcessGroupGloo._Options._timeout",
    "torch._C._distributed_c10d:ProcessGroupGloo.create_default_device",
    "torch._C._distributed_c10d:ProcessGroupGloo.create_device",
    "torch._C._distributed_c10d:Store",
    "torch.distributed.distributed_c10d:_world.pg_group_ranks",
    "torch.distributed.distributed_c10d:_world.pg_map",
    "torch.distributed.distributed_c10d:_world.pg_names",
)
"""PyTorch's process groups and stores, for all of this folder and for `commhooks.scheduling`."""

_DEFAULT_TIMEOUT = timedelta(minutes=30)
OPENING_SECONDS = 2.0
"""Seconds that opening may take beyond the group's timeout, at which Gloo itself raises with a better message."""
SWAP_SECONDS = 10.0
"""Seconds that ranks which disagree wait for each other's fingerprints."""
_DIGEST_BYTES = 32 - KERNELS_BYTES
"""The size of a fingerprint's digest; with that of kernels it is as large as a channel's header, `HEADER_BYTES`."""
_POLL_SECONDS = 0.002
"""Seconds between the first looks for other ranks in the store."""
_LONGEST_POLL_SECONDS = 0.2
"""Seconds between later looks: one store serves all ranks, and polling at the first rate would keep it busy."""


@dataclasses.dataclass(frozen=True)
class Address:
    """Everything needed to create a private group, without a reference to the parent group itself."""

    section: Section
    rank: int
    world_size: int
    timeout: timedelta
    store_thread: StoreThread

    @classmethod
    def under(cls, parent: dist.ProcessGroup, label: str) -> Address:
        """Return the address of the next private group under `label`; every rank must ask in the same order.

        Raises `AttachError` if the parent has no name, or no store.
        """
        parents_name, parents_store = name_and_store(parent)
        own = PrefixStore(f"commhooks/{parents_name}", parents_store)
        is_elastic = type(parent) is not dist.ProcessGroup  # a subclass may change its ranks in its own ways
        sections = sections_under.setdefault(parent, Sections())
        section = sections.begin(own, label, members_of(parent), is_elastic=is_elastic)
        return cls(section, parent.rank(), parent.size(), timeout_of(parent), StoreThread(section.base))

    @property
    def store(self) -> Store:
        """The section of the store that belongs to this group alone, once its ranks have met."""
        assert self.section.store is not None, "the ranks have not met"
        return self.section.store

    def failure_store(self) -> FailureStore:
        """Return the failure store of this group's ranks, in which nothing is written before they have met."""
        return FailureStore(lambda: self.section.store, self.store_thread, self.rank, self.world_size)

    def meet(self) -> concurrent.futures.Future[Store]:
        """Let all ranks meet, without a group; the future is done when they have, within the parent's timeout."""
        return self.store_thread.submit(self._meet)

    def _meet(self) -> Store:
        try:
            return _meet(self, "", range(self.world_size), self.timeout.total_seconds())
        finally:
            self.section.is_over = True  # a group may never follow: an attachment may be refused after this


class PrivateGroup:
    """A private Gloo group that carries requests, and groups of some of its ranks.

    Construction blocks until every rank has come to `address`, or its timeout has passed. The first sparse sum opens
    its own group, within `hook_timeout`. So do the first collective among some of the ranks and the first exchange over
    two groups, after `wait` has made sure that all ranks have reached it. Raises `CollectiveError`, naming the ranks
    that have not come, or the store if it does not answer.
    """

    def __init__(
        self,
        address: Address,
        wrap: WrapCommunicator | None = None,
        hook_timeout: float | None = None,
        wait: Callable[[Pending], None] | None = None,
    ) -> None:
        self.timeout: float = address.timeout.total_seconds()
        everyone = range(address.world_size)
        try:
            group = _open_group(address, "", everyone, self.timeout)
        finally:
            address.section.is_over = True
        settings: Any = group.options
        limit, devices = hook_timeout or self.timeout, settings._devices
        open_for_sparse = functools.partial(_open_group, address, "sparse", everyone, limit, devices, threads=1)
        open_some = functools.partial(_open_some, address, limit, devices)
        open_back = functools.partial(_open_back, address, limit, devices)
        carrier = ProcessGroupCommunicator(group, open_for_sparse, open_some, wait, open_back=open_back)
        self._carrier: ProcessGroupCommunicator | None = carrier
        self._agreements: Agreements | None = Agreements(carrier, address)
        wrapped = carrier if wrap is None else wrap(carrier)
        self.communicator: Communicator | None = wrapped

    def agree(self, fingerprint: str, kernels: Kernels, wait: Callable[[Pending], None]) -> None:
        """Compare fingerprints with all ranks; see `Agreements.agree`."""
        assert self._agreements is not None, "the private group was closed"
        self._agreements.agree(fingerprint, kernels, wait)

    @property
    def groups(self) -> Sequence[object]:
        """The private groups; empty once they have been dropped."""
        return self._carrier.groups() if self._carrier is not None else []

    def close(self, patience_seconds: float) -> bool:
        """Drop the groups, which wakes every peer that waits for this rank; return False if pending work does not end.

        The destructor of a Gloo group waits for pending work, so a group that still has some is kept.
        """
        if self._carrier is None:
            return True
        deadline = time.monotonic() + patience_seconds
        while self._carrier.is_busy():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        self._carrier.release()
        self._carrier = self._agreements = self.communicator = None
        return True


def _open_some(
    address: Address, patience: float, devices: list[Any], group: Group, inside: str = ""
) -> ProcessGroupGloo:
    """Return a group of some of the ranks once all of them have come to its part of the section, within `inside`."""
    ranks = group.ranks(address.rank, address.world_size)
    name = f"{inside}{group.kind} group of rank {ranks[0]}, machines of {group.size}"
    return _open_group(address, name, ranks, patience, devices)


def _open_back(address: Address, patience: float, devices: list[Any], group: Group | None) -> ProcessGroupGloo:
    """Return a second group of all ranks, or of the ranks in `group`."""
    if group is None:
        return _open_group(address, "back", range(address.world_size), patience, devices)
    return _open_some(address, patience, devices, group, "back/")


def _open_group(
    address: Address,
    part: str,
    ranks: Sequence[int],
    patience: float,
    devices: list[Any] | None = None,
    threads: int | None = None,
) -> ProcessGroupGloo:
    """Return a group of these ranks, which meet in a part of the section, once all have come.

    `devices` are an open group's.
    """
    limit = patience + OPENING_SECONDS
    store = address.store_thread.call(functools.partial(_meet, address, part, ranks, patience), limit)
    make = functools.partial(_make_group, address, store, ranks, devices, threads)
    return address.store_thread.call(make, limit)


def _meet(address: Address, part: str, ranks: Sequence[int], patience: float) -> Store:
    """Wait for all of these ranks, and return that part of the section, "" for all of it; runs on the store's thread.

    Gloo would wait for one rank after another, each time as long as the timeout, and would not show whether a rank or
    the store itself kept it waiting. The last to come says so under one key, for which the others look: to look for
    every rank, a thousand ranks would ask for a million keys, several times a second.
    """
    failures = address.failure_store()
    store: Store | None = None
    deadline = time.monotonic() + patience
    pause = _POLL_SECONDS
    while True:  # not wait(): while that blocks, this process can make no other call
        section = address.section.look()
        if store is None and section is not None:
            store, pause = PrefixStore(part, section) if part else section, _POLL_SECONDS
            store.set(f"came/{address.rank}", "")
            if store.add("number that came", 1) == len(ranks):
                store.set("all came", "")
        if store is not None and store.check(["all came"]):
            address.section.has_met = True
            return store
        cause = failures.look()
        if cause is not None:
            raise CollectiveError(f"another rank failed: {cause}")
        late = time.monotonic() > deadline
        absent = [rank for rank in ranks if store and not store.check([f"came/{rank}"])] if late else []
        if late and store is None:
            absent = [0]  # who would have told the number
        if absent:
            raise CollectiveError(
                f"could not connect to every rank within {patience:g} s. Missing: rank {', '.join(map(str, absent))}."
            )
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_POLL_SECONDS)


def _make_group(
    address: Address, store: Store, ranks: Sequence[int], devices: list[Any] | None, threads: int | None
) -> ProcessGroupGloo:
    """Make the group, once all of its ranks have come; runs on the store's thread.

    The group for sparse sums has one thread, so it runs one collective at a time: Gloo's sum of sparse tensors corrupts
    the heap if another collective of its group ends at the same moment. The threads of a group write the name of the
    finished collective into one string, without a lock, and this name is the only one too long for the string's inline
    buffer (PyTorch 2.13; tests/commhooks/test_sparse.py).
    """
    place = ranks.index(address.rank)
    try:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub calls it Options
        options._devices, options._timeout = devices or _make_devices(), address.timeout
        options._threads = threads or 2 * len(options._devices)  # as many as PyTorch gives a group
        # Over another connection to the store, from PyTorch 2.8: while Gloo waits in the store for the other ranks'
        # addresses, no other call reaches it over that one, and two ranks that each open two groups, in different
        # orders, would wait for each other.
        own = store.clone() if hasattr(store, "clone") else store
        return ProcessGroupGloo(own, place, len(ranks), options)
    except RuntimeError as error:
        raise CollectiveError(f"could not connect to every rank: {error}.") from error


def _make_devices() -> list[Any]:
    """Make the devices that PyTorch would make for a group, each of which has an event loop: a thread.

    It makes one for each network interface named in the variable GLOO_SOCKET_IFNAME, or the default one.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    with unhurried():
        if len(names) > 1:
            return [ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
        return [ProcessGroupGloo.create_default_device()]


class Agreements:
    """Comparisons of fingerprints, texts that must be the same on every rank.

    Digests are gathered over `carrier`, on `device`, with those of kernels. If they differ, the texts themselves are
    exchanged through the store, so that the error can name the ranks and their differences.
    """

    def __init__(self, carrier: ProcessGroupCommunicator, address: Address, device: torch.device | None = None) -> None:
        self._carrier = carrier
        self._address = address
        self._device = device
        self._asked = 0

    def agree(
        self, fingerprint: str, kernels: Kernels, wait: Callable[[Pending], None] = lambda pending: pending.wait()
    ) -> None:
        """Return if all ranks pass the same fingerprint; otherwise raise `AttachError`, naming the differences.

        Kernels may differ: that is worth a warning, see `warn_of_kernels`.
        """
        store = PrefixStore(f"fingerprint {self._asked}", self._address.store)
        self._asked += 1
        wait(self._carrier.start_to_meet())
        digest = hashlib.blake2b(fingerprint.encode(), digest_size=_DIGEST_BYTES).digest()
        row = torch.tensor(list(digest + kernels.digest), dtype=torch.uint8, device="cpu")
        pending = self._carrier.start(Collective("all-gather", row.to(self._device)))
        wait(pending)
        rows = [bytes(of_rank) for of_rank in pending.result.cpu().tolist()]
        if all(of_rank[:_DIGEST_BYTES] == digest for of_rank in rows):
            warn_of_kernels([of_rank[_DIGEST_BYTES:] for of_rank in rows], kernels.what)
            return
        swap = functools.partial(_swap, store, fingerprint, self._carrier.rank, self._carrier.world_size)
        every = self._address.store_thread.call(swap, SWAP_SECONDS + ANSWER_SECONDS)
        raise AttachError("ranks disagree. " + describe(every))


def _swap(store: Store, own: str, rank: int, world_size: int) -> list[str]:
    """Return every rank's fingerprint; runs on the store's thread."""
    keys = [str(other) for other in range(world_size)]
    store.set(keys[rank], own)
    deadline = time.monotonic() + SWAP_SECONDS
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise AttachError(f"ranks disagree, but not all of them reported how within {SWAP_SECONDS:g} s.")
        time.sleep(_POLL_SECONDS)
    return [store.get(key).decode() for key in keys]


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the group's timeout."""
    try:
        options: Any = group._get_backend(torch.device("cpu")).options
        timeout: timedelta = options._timeout
        return timeout
    except (RuntimeError, AttributeError):  # a backend without a CPU side, or one that does not expose its timeout
        return _DEFAULT_TIMEOUT
