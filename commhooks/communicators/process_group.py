"""Collectives over a torch.distributed process group, or over a bare backend such as ProcessGroupGloo."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.communicators.collective import Collective
from commhooks.errors import CollectiveError
from commhooks.language.requests import Group


class ProcessGroupCommunicator:
    """Runs collectives over `process_group` (default: the default group).

    A `ProcessGroup` and a bare backend (`ProcessGroupGloo`) have the same methods for this, so either may be passed.
    `open_for_sparse` returns another group of the same ranks, for sums of sparse tensors: over a Gloo group with two
    threads these occasionally corrupt the heap. Without it they go over `process_group`. `open_some` returns a group of
    some of the ranks; it is called for the first collective that names the group, at the same point on all ranks, which
    `wait` waits for. `has_tensor_forms` tells that the group gathers and scatters whole tensors, as NCCL does, which
    copies lists of them.
    """

    def __init__(
        self,
        process_group: Any = None,
        open_for_sparse: Callable[[], Any] | None = None,
        open_some: Callable[[Group], Any] | None = None,
        wait: Callable[[WorkPending], None] | None = None,
        has_tensor_forms: bool = False,
    ) -> None:
        group = dist.group.WORLD if process_group is None else process_group
        if group is None:
            raise CollectiveError(
                "ProcessGroupCommunicator: there is no default process group; "
                "call torch.distributed.init_process_group first."
            )
        self.group: Any = group
        self._open_for_sparse = open_for_sparse
        self._for_sparse: Any = None
        self._open_some = open_some
        self._wait = wait
        self._has_tensor_forms = has_tensor_forms
        self._of_some: dict[Group, Any] = {}
        self.rank: int = self.group.rank()
        self.world_size: int = self.group.size()
        self._under_way: deque[WorkPending] = deque()

    def start(self, collective: Collective) -> WorkPending:
        """Start a collective."""
        pending = self._start(collective)
        while self._under_way and self._under_way[0].is_completed():
            self._under_way.popleft()
        self._under_way.append(pending)
        return pending

    def start_to_meet(self) -> WorkPending:
        """Start to wait for every rank.

        No request's collective can be taken for this one, as Gloo ends the process if two of unequal sizes are.
        """
        pending = WorkPending(self.group.barrier(), "barrier", torch.empty(0))
        self._under_way.append(pending)
        return pending

    def is_busy(self) -> bool:
        """Return whether a collective that was started is still running."""
        return any(not pending.is_completed() for pending in self._under_way)

    def groups(self) -> list[Any]:
        """Return every group that is open."""
        return [group for group in (self.group, self._for_sparse, *self._of_some.values()) if group is not None]

    def release(self) -> None:
        """Drop the groups and all works, so that remaining references to this object do not keep them alive.

        A traceback, for example, holds such a reference; and a Gloo work keeps the group's connections open, as the
        group does.
        """
        for pending in self._under_way:
            pending.release()
        self._under_way.clear()
        self._of_some.clear()
        self.group = self._for_sparse = self._open_for_sparse = self._open_some = self._wait = None

    def _start(self, collective: Collective) -> WorkPending:
        tensor, room = collective.tensor, collective.room_for_answer(self.world_size)
        group = self.group if collective.group is None else self._group_of_some(collective.group)
        if collective.kind == "all-reduce":
            group = self._group_for_sparse() if tensor.is_sparse else group
            work = group.allreduce([tensor])
        elif collective.kind == "all-to-all":
            work = group.alltoall_base(room, tensor, [], [])
        elif collective.kind == "all-gather":
            if self._has_tensor_forms:
                work = group._allgather_base(room.view(-1), tensor.view(-1))
            else:
                work = group.allgather([list(room.unbind(0))], [tensor])
        elif self._has_tensor_forms:
            work = group._reduce_scatter_base(room.view(-1), tensor.view(-1))
        else:
            work = group.reduce_scatter([room], [list(tensor.unbind(0))])
        return WorkPending(work, f"{collective.kind} of {collective.payload_bytes} bytes", room)

    def _group_of_some(self, group: Group) -> Any:
        if self._open_some is None:
            raise CollectiveError(
                f"this run cannot open {group}, which a request names: only attachments and Exchangers off NCCL have "
                "groups of some of the ranks."
            )
        if group not in self._of_some:
            self._meet()
            self._of_some[group] = self._open_some(group)
        return self._of_some[group]

    def _meet(self) -> None:
        """Return when every rank is about to open a group.

        A rank that has ended is detected here immediately, since its connections are closed. Ranks that open a group
        meet in the store, where its absence would go unnoticed.
        """
        wait = self._wait or WorkPending.wait
        wait(self.start(Collective("all-reduce", torch.zeros(1))))

    def _group_for_sparse(self) -> Any:
        if self._open_for_sparse is None:
            return self.group
        if self._for_sparse is None:
            self._for_sparse = self._open_for_sparse()
        return self._for_sparse


class WorkPending:
    """A c10d Work, and its result once it is done."""

    def __init__(self, work: dist.Work, what: str, output: Tensor) -> None:
        self._work: dist.Work | None = work
        self._what = what
        self.result = output
        """The answer, once it is there."""
        self._done = False

    def is_completed(self) -> bool:
        """Return whether the backend has finished this collective, successfully or not."""
        return self._work is None or self._work.is_completed()

    def release(self) -> None:
        """Drop the work."""
        self._work = None

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when the result is ready; see `Pending.wait`."""
        if self._done:
            return
        try:
            self._wait_for_work(timeout_seconds)
        except RuntimeError as error:
            raise CollectiveError(f"{self._what} failed: {error}") from error
        self._done = True

    def _wait_for_work(self, timeout_seconds: float | None) -> None:
        if self._work is None:
            raise RuntimeError("the process group was dropped")
        if timeout_seconds is None:
            self._work.wait()
            return
        try:
            self._work.wait(timedelta(seconds=timeout_seconds))
        except RuntimeError:
            # Gloo reports the end of a slice and a failure of the work in the same way.
            if not self._work.is_completed():
                raise TimeoutError(f"{self._what} is not done after {timeout_seconds} s") from None
            self._work.wait()
