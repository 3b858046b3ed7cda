"""One attachment's own line to the other ranks: a private process group, and the store in which a failure is told.

Collectives pair up across ranks by the order in which they are issued, so nobody else may issue any on this group:
not a second model, not the user's own backward pass. Nobody else holds a reference to it either, for dropping the
last one is what wakes the peers when this rank fails (`abort` and `shutdown` wake nobody on Gloo).
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from commhooks.communicators import Communicator, Pending, ProcessGroupCommunicator, RecordingCommunicator
from commhooks.errors import AttachError, CollectiveError
from commhooks.requests import AllGather

WrapCommunicator = Callable[[Communicator], Communicator]

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_FAILURE_KEY = "failure"
_ROLL_CALL_KEY = "roll-call"
_HERE_KEY = "came"
ANSWER_SECONDS = 1.0
"""How long a rank whose collective failed waits for the others to say that they are still there."""

_private_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""How many private groups each parent has, by label; every rank makes those of one label in the same order."""


@dataclasses.dataclass(frozen=True)
class Address:
    """Hold what a private group is made from, without holding the parent group itself."""

    store: Store
    rank: int
    world_size: int
    timeout: timedelta

    @classmethod
    def under(cls, parent: dist.ProcessGroup, label: str) -> Address:
        """Take the parent's next number under `label`; every rank of the parent must do so in the same order."""
        numbers = _private_groups.setdefault(parent, Counter())
        name = f"commhooks/{parent.group_name}/{label}/{numbers[label]}"
        numbers[label] += 1
        store = PrefixStore(name, parent.get_group_store())
        return cls(store, parent.rank(), parent.size(), _timeout_of(parent))


def _wait_without_limit(pending: Pending) -> None:
    pending.wait()


class Connection:
    """Open a private Gloo group at `address`, and carry requests over it.

    Blocks until every rank has come, or the address's timeout has passed.
    """

    def __init__(self, address: Address, wrap: WrapCommunicator | None = None) -> None:
        self._address = address
        self.timeout = address.timeout.total_seconds()
        address.store.set(f"{_HERE_KEY}/{address.rank}", "")
        try:
            group = ProcessGroupGloo(address.store, address.rank, address.world_size, address.timeout)
        except RuntimeError as error:
            raise CollectiveError(f"no line to every rank could be opened: {error}.{self._absent()}") from error
        self._carrier: ProcessGroupCommunicator | None = ProcessGroupCommunicator(group)
        self._agreements: Agreements | None = Agreements(self._carrier, address.store)
        wrapped = self._carrier if wrap is None else wrap(self._carrier)
        self.communicator: RecordingCommunicator | None = RecordingCommunicator(wrapped)

    def _absent(self) -> str:
        absent = [r for r in range(self._address.world_size) if not self._address.store.check([f"{_HERE_KEY}/{r}"])]
        return f" Not there: rank {', '.join(map(str, absent))}." if absent else ""

    def agree(self, terms: str, wait: Callable[[Pending], None] = _wait_without_limit) -> None:
        """Return if every rank comes with the same terms; see `Agreements.agree`."""
        assert self._agreements is not None, "the connection was closed"
        self._agreements.agree(terms, wait)

    def failure(self) -> str | None:
        """Return what some rank reported as the cause of its failure, if one did."""
        store = self._address.store
        try:
            return store.get(_FAILURE_KEY).decode() if store.check([_FAILURE_KEY]) else None
        except RuntimeError as error:  # the store lives in rank 0's process, or beside it
            return f"the store that ranks report failures to does not answer ({error})"

    def silent_ranks(self) -> list[int]:
        """Say that this rank is there, and return those that do not say so within a second.

        A Gloo collective that fails does not tell whose process is gone; the ranks that failed with it, or still wait,
        do by answering.
        """
        store, ranks = self._address.store, range(self._address.world_size)
        deadline = time.monotonic() + ANSWER_SECONDS
        try:
            store.set(_ROLL_CALL_KEY, "")
            store.set(f"here/{self._address.rank}", "")
            while time.monotonic() < deadline and not store.check([f"here/{rank}" for rank in ranks]):
                time.sleep(0.02)
            return [rank for rank in ranks if not store.check([f"here/{rank}"])]
        except RuntimeError:  # the store is gone, and with it the process that held it; `report` says so
            return []

    def answer_roll_call(self) -> None:
        """Say that this rank is there, if another one that failed has asked."""
        if self._address.store.check([_ROLL_CALL_KEY]):
            self._address.store.set(f"here/{self._address.rank}", "")

    def report(self, cause: str) -> str:
        """Tell the others why this rank fails, and return the first cause that any rank told."""
        try:
            return str(self._address.store.compare_set(_FAILURE_KEY, "", cause).decode())
        except RuntimeError as error:
            return f"{cause} (not told to the other ranks, for the store does not answer: {error})"

    def close(self, patience_seconds: float) -> bool:
        """Drop the group, which wakes every peer that waits for this rank; return False if its work does not end.

        A Gloo group's destructor waits for its pending work, so a group with some left is kept.
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


class Agreements:
    """Compare texts that must be the same on every rank: digests over `carrier`, on `device`.

    Only where digests differ do the texts themselves travel, through `store`.
    """

    def __init__(self, carrier: ProcessGroupCommunicator, store: Store, device: torch.device | None = None) -> None:
        self._carrier = carrier
        self._store = store
        self._device = device
        self._asked = 0

    def agree(self, terms: str, wait: Callable[[Pending], None] = _wait_without_limit) -> None:
        """Return if every rank comes with the same `terms`; raise `AttachError`, saying who differs in what."""
        store = PrefixStore(f"terms {self._asked}", self._store)
        self._asked += 1
        digest = torch.tensor(list(hashlib.blake2b(terms.encode(), digest_size=32).digest()), dtype=torch.uint8)
        pending = self._carrier.start(AllGather(digest.to(self._device)))
        wait(pending)
        if bool((pending.result.cpu() == digest).all()):
            return
        store.set(str(self._carrier.rank), terms)
        theirs = [store.get(str(rank)).decode() for rank in range(self._carrier.world_size)]
        raise AttachError("ranks disagree. " + _first_difference(theirs))


def _first_difference(terms: list[str]) -> str:
    for rank, text in enumerate(terms):
        if text != terms[0]:
            ours, theirs = terms[0].splitlines(), text.splitlines()
            line = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            first, other = (lines[line] if line < len(lines) else "nothing more" for lines in (ours, theirs))
            return f"Rank 0 has: {first}. Rank {rank} has: {other}."
    raise AssertionError("digests differ but texts do not")


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    try:
        options: Any = group._get_backend(torch.device("cpu")).options
        timeout: timedelta = options._timeout
        return timeout
    except (RuntimeError, AttributeError):  # a backend that has no CPU side, or keeps its timeout to itself
        return _DEFAULT_TIMEOUT
