"""Collectives over a torch.distributed process group, or over a bare backend such as ProcessGroupGloo."""

from __future__ import annotations

import dataclasses
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.communicators.both_ways import all_to_all, gather_of_two, goes_both_ways
from commhooks.communicators.collective import Collective
from commhooks.devices import runs_later
from commhooks.errors import CollectiveError
from commhooks.language.requests import Group


class ProcessGroupCommunicator:
    """A communicator over `process_group` (default: the default group).

    A `ProcessGroup` and a bare backend (`ProcessGroupGloo`) have the same methods for this, so either may be passed.
    `open_for_sparse` returns another group of the same ranks, for sums of sparse tensors: over a Gloo group with two
    threads these occasionally corrupt the heap. Without it they go over `process_group`. `open_some` returns a group of
    some of the ranks; it is called for the first collective that names the group, after `wait` has made sure that all
    ranks have reached it. `open_back` returns another group of all ranks, or of the ranks that a group names, and is
    called like `open_some`: exchanges that are large enough then run over two groups (`both_ways.py`).
    `has_tensor_forms` is True if the group gathers and scatters whole tensors, as NCCL does, which copies lists of
    them.
    """

    def __init__(
        self,
        process_group: Any = None,
        open_for_sparse: Callable[[], Any] | None = None,
        open_some: Callable[[Group], Any] | None = None,
        wait: Callable[[WorkPending], None] | None = None,
        has_tensor_forms: bool = False,
        open_back: Callable[[Group | None], Any] | None = None,
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
        self._open_back = open_back
        self._of_some: dict[Group, Any] = {}
        self._back: dict[Group | None, Any] = {}
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

        It cannot be mistaken for a request's collective: Gloo ends the process if two of unequal sizes meet.
        """
        pending = WorkPending([self.group.barrier()], "barrier", torch.empty(0, dtype=torch.uint8, device="cpu"))
        self._under_way.append(pending)
        return pending

    def is_busy(self) -> bool:
        """Return whether a collective that was started is still running."""
        return any(not pending.is_completed() for pending in self._under_way)

    def groups(self) -> list[Any]:
        """Return every group that is open."""
        opened = (self.group, self._for_sparse, *self._of_some.values(), *self._back.values())
        return [group for group in opened if group is not None]

    def release(self) -> None:
        """Drop the groups and all works, so that remaining references to this object do not keep them alive.

        A traceback may hold such a reference. A Gloo work keeps the group's connections open, as the group does.
        """
        for pending in self._under_way:
            pending.release()
        self._under_way.clear()
        self._of_some.clear()
        self._back.clear()
        self.group = self._for_sparse = None
        self._open_for_sparse = self._open_some = self._open_back = self._wait = None

    def _start(self, collective: Collective) -> WorkPending:
        tensor, room = collective.tensor, collective.room_for_answer(self.world_size)
        group = self.group if collective.group is None else self._group_of_some(collective.group)
        what = f"{collective.kind} of {collective.payload_bytes} bytes"
        if collective.kind == "all-reduce":
            group = self._group_for_sparse() if tensor.is_sparse else group
            works = [group.allreduce([tensor])]
        elif self._goes_both_ways(collective):
            exchange = all_to_all if collective.kind == "all-to-all" else gather_of_two
            works = exchange(group, self._group_back(collective.group), tensor, room)
        elif collective.kind == "all-to-all":
            works = [group.alltoall_base(room, tensor, [], [])]
        elif collective.kind == "all-gather":
            if self._has_tensor_forms:
                works = [group._allgather_base(room.view(-1), tensor.view(-1))]
            else:
                works = [group.allgather([list(room.unbind(0))], [tensor])]
        elif self._has_tensor_forms:
            works = [group._reduce_scatter_base(room.view(-1), tensor.view(-1))]
        else:  # Gloo's own is an all-reduce of every row: twice the bytes, in a work that knows no timeout
            rows = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            of_rows = dataclasses.replace(collective, kind="all-to-all", tensor=tensor.contiguous(), room=rows)
            return RowsPending(self._start(of_rows), what, room)
        return WorkPending(works, what, room)

    def _goes_both_ways(self, collective: Collective) -> bool:
        ranks = collective.ranks_in(self.world_size)
        if self._open_back is None or runs_later(collective.tensor):  # Gloo copies a GPU's tensors through the host
            return False
        return goes_both_ways(collective.kind, collective.payload_bytes, ranks)

    def _group_back(self, group: Group | None) -> Any:
        if group not in self._back:
            assert self._open_back is not None, "there is no second group without it"
            self._meet()
            self._back[group] = self._open_back(group)
        return self._back[group]

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
        """Wait until every rank is about to open a group.

        A rank that has ended is detected here immediately, since its connections are closed. Ranks that open a group
        meet in the store, where its absence would go unnoticed.
        """
        wait = self._wait or WorkPending.wait
        wait(self.start(Collective("all-reduce", torch.zeros(1, dtype=torch.float32, device="cpu"))))

    def _group_for_sparse(self) -> Any:
        if self._open_for_sparse is None:
            return self.group
        if self._for_sparse is None:
            self._for_sparse = self._open_for_sparse()
        return self._for_sparse


_is_completed = operator.methodcaller("is_completed")


class WorkPending:
    """A c10d Work, or several that form a collective, and their result once they are done."""

    def __init__(self, works: Sequence[dist.Work], what: str, output: Tensor) -> None:
        self._works: Sequence[dist.Work] | None = works
        self._what = what
        self.result = output
        """The answer, valid once the works are done."""
        self._done = False

    def is_completed(self) -> bool:
        """Return whether the backend has finished this collective, successfully or not."""
        return self._done or self._works is None or all(map(_is_completed, self._works))

    def release(self) -> None:
        """Drop the works."""
        self._works = None

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when the result is ready; see `Pending.wait`."""
        if self._done:
            return
        try:
            self._wait_for_works(timeout_seconds)
        except RuntimeError as error:
            raise CollectiveError(f"{self._what} failed: {error}") from error
        self._done = True

    def _wait_for_works(self, timeout_seconds: float | None) -> None:
        if self._works is None:
            raise RuntimeError("the process group was dropped")
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        for work in self._works:
            if deadline == math.inf:
                work.wait()
                continue
            try:
                # Of less than a millisecond Gloo makes none, and that is no limit.
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError:
                # Gloo reports the end of a slice and a failure of the work in the same way.
                for other in self._works:
                    if other.is_completed():
                        other.wait()
                if not work.is_completed():
                    raise TimeoutError(f"{self._what} is not done after {timeout_seconds} s") from None


class RowsPending(WorkPending):
    """An exchange of rows, one from each rank, whose sum is the result: a reduce-scatter. It is added up by rank."""

    def __init__(self, exchange: WorkPending, what: str, output: Tensor) -> None:
        super().__init__(exchange._works or [], what, output)
        self._rows: Tensor | None = exchange.result

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until the sum is ready; see `Pending.wait`."""
        super().wait(timeout_seconds)
        if self._rows is not None:
            rows, self._rows = self._rows, None
            self.result.copy_(rows[0])
            for row in rows[1:]:
                self.result.add_(row)
