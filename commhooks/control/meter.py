"""The clock of a controller, and the exchange by which what one rank measured becomes what all ranks know."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.communicators.failure_store import FailureStore, SilentStoreError
from commhooks.communicators.parent_group import backend_of
from commhooks.communicators.private_group import Address
from commhooks.communicators.process_group import WorkPending
from commhooks.control.decider import StepTimes
from commhooks.control.link import SMALL, Link, hops_of, link_of, probe_bytes
from commhooks.devices import device_in_use, runs_on_streams
from commhooks.errors import AttachError, CollectiveError, SettingsError
from commhooks.exchange.feed import Channel
from commhooks.exchange.handle import Handle

_SLICE_SECONDS = 0.2
"""Seconds between two checks of a waiting rank: whether another rank has given up, and whether a roll call is to be
answered."""


class Meter:
    """The clock and the exchange: what this rank measured becomes what all ranks know."""

    def __init__(self, attachment: Handle[Channel]) -> None:
        group = attachment.process_group
        if group is None:
            raise AttachError("Adaptive: the attachment's process group was destroyed.")
        self.group: dist.ProcessGroup = group
        self.ranks: int = group.size()
        if self.ranks < 2:
            raise SettingsError("Adaptive: one rank has no link to adapt to; at least 2 are needed.")
        # On NCCL the host does not see how long a collective takes: the whole step stands for it.
        device = device_in_use()
        self._sees_waiting = device is None or not runs_on_streams(backend_of(group, device))
        self._device = torch.device("cpu") if self._sees_waiting or device is None else device
        self._limit = math.inf if attachment.hook_timeout is None else attachment.hook_timeout
        self._failures: FailureStore | None = None
        if self._sees_waiting:  # on NCCL a wait with a limit would end the process: the group's own timeout holds there
            address = Address.under(group, "Adaptive")
            address.meet()  # in the background: until then, no failure is known
            address.section.release()  # a meter has no end
            self._failures = address.failure_store()
        self._attachment = attachment
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self._counted, self._began = self._attachment.statistics(), time.perf_counter()

    def step_times(self) -> StepTimes | None:
        """Return the mean of the steps since the last call, as all ranks see it, and begin the next; None if none.

        Raises `CollectiveError`, as `probe` does, if a rank is gone, or takes longer than the `hook_timeout`.
        """
        now, counts = time.perf_counter(), self._attachment.statistics()
        seconds, added = now - self._began, counts.since(self._counted)
        if added.steps == 0:
            return None
        waiting, exposed = added.seconds_waiting, added.seconds_exposed
        if not self._sees_waiting:
            waiting = exposed = seconds
        hops = sum(traffic.collectives * hops_of(kind, self.ranks) for kind, traffic in added.by_kind.items())
        own = [seconds, -waiting, exposed, added.moved_bytes, hops]
        longest, shortest, most, data, messages = (value / added.steps for value in self._largest(own))
        self._counted, self._began = counts, time.perf_counter()
        return StepTimes(longest, -shortest, most, data, messages)

    def probe(self, link: Link | None, seconds: float) -> Link:
        """Time all-reduces that suit a step of these seconds on the link as it was; without one, twice."""
        payload = probe_bytes(link, seconds, self.ranks)
        self._timed(SMALL)  # the ranks meet here, so that what follows is the link's alone
        of_small, of_large = self._largest([self._timed(SMALL), self._timed(payload)])
        found = link_of(of_small, of_large, payload, self.ranks)
        return found if link is not None else self.probe(found, seconds)

    def _timed(self, payload: int) -> float:
        tensor = torch.zeros(payload // 4, dtype=torch.float32, device=self._device)
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
        work = dist.all_reduce(tensor, operation, group=self.group, async_op=self._failures is not None)
        if self._failures is None:
            return
        assert work is not None, "this rank is in the group"
        failure = self._wait(WorkPending([work], "all-reduce of a measurement", tensor), self._failures)
        if not failure:
            return
        try:
            silent = ", ".join(map(str, self._failures.silent_ranks()))  # those that do not wait in the same exchange
            failure += f" No answer from rank {silent}." if silent else ""
        except SilentStoreError as error:
            failure += f" {error}"
        self._failures.post(failure)
        raise CollectiveError(f"Adaptive.step: {failure}")

    def _wait(self, pending: WorkPending, failures: FailureStore) -> str:
        """Wait for a collective, and return why it failed, if so; raise `CollectiveError` if another rank gave up."""
        deadline = time.monotonic() + self._limit
        while True:
            try:
                pending.wait(max(0.001, min(_SLICE_SECONDS, deadline - time.monotonic())))  # 0 s would mean for ever
                return ""
            except TimeoutError:
                cause = failures.failure()
            except CollectiveError as error:  # which does not say whose process is gone
                return f"{error}."
            if cause is not None:
                raise CollectiveError(f"Adaptive.step: another rank failed: {cause}")
            if time.monotonic() >= deadline:
                return f"the other ranks' step() was not called within hook_timeout={self._limit:g} s."
