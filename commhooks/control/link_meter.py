"""The clock of a controller, and the exchange by which what one rank measured becomes what all ranks know."""

from __future__ import annotations

import time
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.communicators.collective import KINDS
from commhooks.communicators.connection import Address
from commhooks.communicators.links import Link
from commhooks.communicators.noticeboard import Noticeboard, SilentStoreError
from commhooks.communicators.parent_group import backend_of
from commhooks.communicators.process_group import WorkPending
from commhooks.control.deciding import Decider, Seen, link_of, sends_of
from commhooks.devices import device_in_use, runs_on_streams
from commhooks.errors import AttachError, CollectiveError, SettingsError
from commhooks.scheduling.ledger import Statistics

_SLICE_SECONDS = 0.2
"""Seconds between two checks of a waiting rank: whether another rank has given up, and whether a roll call is to be
answered."""


class Counting(Protocol):
    """The part of an `Attachment` that the meter uses."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group whose ranks average together; None once it has been destroyed."""
        ...

    @property
    def hook_timeout(self) -> float | None:
        """The limit of a collective, in seconds; None: the group's."""
        ...

    def statistics(self) -> Statistics:
        """Return this rank's totals so far."""
        ...


class LinkMeter:
    """The clock and the exchange: what this rank measured becomes what all ranks know."""

    def __init__(self, attachment: Counting) -> None:
        group = attachment.process_group
        if group is None:
            raise AttachError("Adaptive: the attachment's process group was destroyed.")
        self._group: dist.ProcessGroup = group
        self.ranks = group.size()
        if self.ranks < 2:
            raise SettingsError("Adaptive: one rank has no link to adapt to; at least 2 are needed.")
        # On NCCL the host does not see how long a collective takes: the whole step stands for it.
        device = device_in_use()
        self._sees_waiting = device is None or not runs_on_streams(backend_of(group, device))
        self._device = torch.device("cpu") if self._sees_waiting or device is None else device
        # On NCCL a wait with a limit would end the process: the group's own timeout holds there.
        self._limit = attachment.hook_timeout if self._sees_waiting else None
        self._board: Noticeboard | None = None
        if self._limit is not None:
            address = Address.under(group, "Adaptive")
            address.meet()  # in the background: until then, no failure is known
            address.section.release()  # a meter has no end
            self._board = address.noticeboard()
        self._attachment = attachment
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self._counted, self._began = self._attachment.statistics(), time.perf_counter()

    def seen(self) -> Seen | None:
        """Return the mean of the steps since the last call, as all ranks see it, and begin the next; None if none.

        Raises `CollectiveError`, as `probe` does, if the attachment has a `hook_timeout` and another rank takes longer.
        """
        now, counts = time.perf_counter(), self._attachment.statistics()
        seconds, added = now - self._began, counts.since(self._counted)
        if added.steps == 0:
            return None
        waiting, exposed = added.seconds_waiting, added.seconds_exposed
        if not self._sees_waiting:
            waiting = exposed = seconds
        own = [seconds, -waiting, exposed]
        for kind in KINDS:
            traffic = added.by_kind.get(kind)
            own += [traffic.payload_bytes, traffic.collectives] if traffic else [0, 0]
        longest, shortest, most, *sent = (value / added.steps for value in self._largest(own))
        kinds = zip(KINDS, sent[::2], sent[1::2], strict=True)
        self._counted, self._began = counts, time.perf_counter()
        return Seen(longest, -shortest, most, sends_of(list(kinds)))

    def probe(self, decider: Decider) -> Link:
        """Time all-reduces between the ranks; the first time twice, since the rate tells how many bytes suffice."""
        link = self._probe(decider.probe_bytes())
        return link if decider.link is not None else self._probe(decider.probe_bytes(link))

    def gathered(self, text: str) -> list[str]:
        """Return every rank's text, by rank."""
        texts = [""] * self.ranks
        dist.all_gather_object(texts, text, group=self._group)
        return texts

    def _probe(self, payload: int) -> Link:
        small = torch.zeros(1, dtype=torch.float32, device=self._device)
        large = torch.zeros(payload // small.element_size(), dtype=small.dtype, device=self._device)
        self._timed(small)  # the ranks meet here, so that what follows is the link's alone
        of_small, of_large = self._largest([self._timed(small), self._timed(large)])
        return link_of(of_small, of_large, payload, self.ranks)

    def _timed(self, tensor: Tensor) -> float:
        began = time.perf_counter()
        self._all_reduce(tensor, dist.ReduceOp.SUM)
        tensor[0].item()  # a GPU's host waits here
        return time.perf_counter() - began

    def _largest(self, own: list[float]) -> list[float]:
        """Return each number of the rank where it is largest: bit for bit the same everywhere."""
        told = torch.tensor(own, dtype=torch.float64, device=self._device)
        self._all_reduce(told, dist.ReduceOp.MAX)
        numbers: list[float] = told.tolist()
        return numbers

    def _all_reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        if self._board is None or self._limit is None:
            dist.all_reduce(tensor, operation, group=self._group)
            return
        work = dist.all_reduce(tensor, operation, group=self._group, async_op=True)
        assert work is not None, "this rank is in the group"
        _wait(WorkPending([work], "all-reduce of a measurement", tensor), self._limit, self._board)


def _wait(pending: WorkPending, limit: float, board: Noticeboard) -> None:
    """Wait for a collective; raise `CollectiveError` after `limit` seconds, or if another rank has given up."""
    deadline = time.monotonic() + limit
    while True:
        try:
            pending.wait(max(0.001, min(_SLICE_SECONDS, deadline - time.monotonic())))  # of 0 s would mean for ever
            return
        except TimeoutError:
            cause = board.failure()
        if cause is not None:
            raise CollectiveError(f"Adaptive.step: another rank failed: {cause}")
        if time.monotonic() >= deadline:
            text = f"the other ranks' step() was not called within hook_timeout={limit:g} s.{_silent(board)}"
            board.post(text)
            raise CollectiveError(f"Adaptive.step: {text}")


def _silent(board: Noticeboard) -> str:
    """Return a sentence that names the ranks that do not wait in the same exchange, if that can be found out."""
    try:
        silent = board.silent_ranks()
    except SilentStoreError as error:
        return f" {error}"
    return f" No answer from rank {', '.join(map(str, silent))}." if silent else ""
