"""A process group whose collectives pass an emulated link, for code that does not use one of our communicators.

PyTorch's own communication hooks, the all-reduce of a DistributedDataParallel without a hook, and the broadcasts of
parameters and buffers call the process group of their DDP.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.futures import Future

from commhooks.communicators.collective import KindTraffic
from commhooks.devices import future_on
from commhooks.experiments.links.gloo import course_of, moved_bytes
from commhooks.experiments.links.link import Wire
from commhooks.experiments.links.waits import WaitClock
from commhooks.tensors import tensor_bytes
from ddp_core.collectives import result_of

NO_TIMEOUT = timedelta(0)  # as in PyTorch: wait as long as the process group does


class LinkedGroup(dist.ProcessGroup):
    """A process group that runs collectives on `inner`, and completes each when the link has carried it as well.

    Pass it as a DDP's `process_group=`, and as the state of PyTorch's hooks; `torch.distributed` need not know it.
    Several works may wait at once, in threads of their own, because PyTorch's hooks wait for further collectives in the
    callbacks that run when one is done. It has the collectives that DDPs and their hooks call (all-reduce, broadcast,
    all-gather); for the others PyTorch raises an error ("No backend type associated"). `waits` records when collectives
    were in progress. Call `close` before `inner` is destroyed. If streams wait for the collectives of `inner`
    (`is_queued`), as with NCCL, they are only counted: no thread may hold them back.
    """

    def __init__(
        self, inner: dist.ProcessGroup, wire: Wire, waits: WaitClock | None = None, *, is_queued: bool = False
    ) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # 'Missing "store"': the stub has one constructor of two
        self.inner = inner
        self.wire = wire
        self.traffic: dict[str, KindTraffic] = {}
        """The bytes that this rank has sent, by kind of collective, as counted by `Collective.ring_bytes`."""
        self._waits, self._is_queued = waits, is_queued
        self._lock = threading.Lock()  # callbacks start collectives from several threads
        self._threads: list[threading.Thread] = []

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]  # 'Signature incompatible' with an overload
        """Start to sum a tensor over the ranks, in place."""
        options = options or dist.AllreduceOptions()
        return self._start("all-reduce", tensors, "allreduce", tensors, options)

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:  # type: ignore[override]  # as above
        """Start to overwrite a tensor with one rank's."""
        return self._start("broadcast", tensors, "broadcast", tensors, options)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]  # as above
        """Start to collect every rank's tensor."""
        options = options or AllgatherOptions()
        return self._start("all-gather", inputs, "allgather", outputs, inputs, options)

    def getBackendName(self) -> str:  # noqa: N802  # PyTorch's name
        """Return the name under which PyTorch's messages know this group."""
        return "linked"

    def close(self) -> None:
        """Wait until all works are done, successfully or not."""
        while self._threads:
            self._threads.pop().join()

    def _start(self, kind: str, sent: list[Tensor], method: str, *arguments: Any) -> dist.Work:
        """Start a collective of `inner`, count it, and queue it on the link."""
        ranks, payload = self.size(), sum(tensor_bytes(tensor) for tensor in sent)
        is_sparse = any(tensor.is_sparse for tensor in sent)
        with self._lock:
            counts = self.traffic.setdefault(kind, KindTraffic())
            counts.collectives += 1
            counts.payload_bytes += payload
            counts.moved_bytes += moved_bytes(kind, payload, ranks, is_sparse=is_sparse)
            course = course_of(kind, payload, ranks, is_sparse=is_sparse, is_private=False)
            arrival = self.wire.carry(course)
            inner: dist.Work = getattr(self.inner, method)(*arguments)
            if self._is_queued:
                return inner
            work = LinkedWork(inner, arrival, self.wire, self._waits, sent[0].device)
            self._threads = [*(thread for thread in self._threads if thread.is_alive()), work.thread]
        return work


class LinkedWork(dist.Work):
    """A work that is done when another one is and the link has carried its bytes."""

    def __init__(
        self,
        inner: dist.Work,
        arrival: float,
        wire: Wire,
        waits: WaitClock | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._outcome: Future[Any] = torch.futures.Future() if device is None else future_on(device)
        self._future: Future[Any] = self._outcome.then(_result)
        self._ended = threading.Event()
        # A daemon, so that a link of a few bits per second does not hold a process back that wants to end.
        self.thread: threading.Thread = threading.Thread(
            target=self._finish, args=(inner, arrival, wire, waits), name="linked work", daemon=True
        )
        self.thread.start()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the work is done; raise its error, or RuntimeError if it takes longer than a timeout."""
        if not self._ended.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"a collective over the emulated link is not done after {timeout.total_seconds():g} s")
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether the work has ended, successfully or not."""
        return self._ended.is_set()

    def get_future(self) -> Future[Any]:
        """Return the future of the inner work's result."""
        return self._future

    def _finish(self, inner: dist.Work, arrival: float, wire: Wire, waits: WaitClock | None) -> None:
        outcome: object
        begin = waits.clock() if waits else 0.0
        try:
            outcome = result_of(inner)
            wire.sleep_until(arrival)
        except Exception as error:  # whoever waits gets it
            outcome = error
        if waits:
            waits.note(begin, waits.clock())
        self._ended.set()  # first: callbacks run within set_result, and may take long
        self._outcome.set_result(outcome)


def _result(outcome: Future[Any]) -> Any:
    """Return the result, or raise the error.

    `Future.set_exception` would not do: C++ then takes the exception for the result, and PyTorch's DDP ends the process
    with a segmentation fault.
    """
    if isinstance(outcome.value(), Exception):
        raise outcome.value()
    return outcome.value()
