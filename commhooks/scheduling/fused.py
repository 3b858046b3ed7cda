"""The policy that makes one collective of a round, whatever the number of buckets.

Compressors only yield requests, so the requests of all buckets can be packed: those of one kind, dtype and purpose lie
one after the other in one message. Sums are packed in the order of parameters' names, not of buckets. A ring adds up
an element's terms in an order that depends on where in the message it lies, so with more than two ranks the last bits
of a sum would otherwise depend on how parameters were cut into buckets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from commhooks.communicators import Communicator, Pending
from commhooks.errors import CollectiveError
from commhooks.language.requests import AllGather, AllReduce, AllToAll, Layout, Request
from commhooks.scheduling.policy import Finish, Policy, Wait, answer_empty_requests
from commhooks.scheduling.task import BucketTask

_STEPS_TO_KEEP = 4
"""A message's memory is kept for so many steps after its last use: alternating compressors come back to it."""


class Fused(Policy):
    """Hold a step's buckets until the last one has come, then run each round of all of them at once.

    Buckets are compressed as they come, up to their first request, while the backward pass goes on. Requests marked
    `last` are answered together, when no compressor of the step asks for anything else, so a step's state is written
    after its last collective; and all its compressors share one verdict on what came back.
    """

    def __init__(self, communicator: Communicator, wait: Wait, finish: Finish) -> None:
        super().__init__(communicator, wait, finish)
        self._handed_in: deque[BucketTask] = deque()
        self._step: list[BucketTask] = []
        self._rounds_begun = False
        self._under_way: deque[tuple[Pending, Bundle]] = deque()
        self._answers: dict[BucketTask, Tensor] = {}
        self._held: dict[BucketTask, Tensor] = {}
        self._packings = Packings()

    def add(self, task: BucketTask) -> None:
        """Take the next bucket."""
        self._handed_in.append(task)

    def turn(self) -> bool:
        """Wait for a collective, or compress a bucket that came, or begin the rounds if it was the step's last."""
        if self._under_way:
            self._take_answer_if_there()
        elif self._rounds_begun:
            self._go_on()
        elif self._handed_in:
            self._begin(self._handed_in.popleft())
        else:
            return False
        return True

    def unfinished(self) -> list[BucketTask]:
        """Return every task whose future is not completed."""
        return [*self._step, *self._handed_in]

    def working_memory(self) -> list[Tensor]:
        """Return the memory of packed messages."""
        return self._packings.memories()

    def _begin(self, task: BucketTask) -> None:
        self.touching = task
        self._drop_a_step_that_was_cut_short(task)
        self._step.append(task)
        task.begin()
        self._rounds_begun = task.is_last

    def _drop_a_step_that_was_cut_short(self, task: BucketTask) -> None:
        """Let go of an earlier step's buckets, whose last one never came: a backward pass that raised, for example."""
        if self._step and self._step[0].step != task.step:
            for stale in self._step:
                stale.fail(CollectiveError(f"step {stale.step} was cut short: step {task.step} began before its end."))
            self._step.clear()

    def _take_answer_if_there(self) -> None:
        pending, bundle = self._under_way[0]
        self.touching = bundle.tasks[0]
        if not self.wait(pending):
            return
        self._under_way.popleft()
        with self._counted():
            # Only what every rank received alike: one rank must not drop a step that the others commit.
            if self._step[0].verdict is not None and bundle.request.answers_alike:
                self._step[0].verdict.note(pending.result)
            answers = bundle.answers(pending.result)
        for task, answer in zip(bundle.tasks, answers, strict=True):
            assert task.request is not None, "a task was asked for, and answered, without a request"
            (self._held if task.request.last else self._answers)[task] = answer

    def _go_on(self) -> None:
        """Resume those that may go on, and start the next round; or end the step."""
        self._resume(self._answers)
        asking = [task for task in self._step if task.request is not None and task not in self._held]
        if not asking:
            self._resume(self._held)
            asking = [task for task in self._step if task.request is not None]
        with self._counted():
            packed = bundles(asking, self._packings)
        for bundle in packed:
            self.touching = bundle.tasks[0]
            self._under_way.append((self.communicator.start(bundle.request), bundle))
        if not asking:
            self._end_step()

    def _resume(self, answers: dict[BucketTask, Tensor]) -> None:
        for task in self._step:
            self.touching = task
            if task in answers:
                task.resume(answers.pop(task))
            answer_empty_requests(task)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count seconds of packing as seconds of compressing."""
        begun = time.perf_counter()
        yield
        self._step[0].seconds_compressing += time.perf_counter() - begun

    def _end_step(self) -> None:
        self._packings.end_step()
        self._rounds_begun = False
        while self._step:
            self.finish(self._step[0])
            self._step.pop(0)
        self.touching = None


class Bundle(ABC):
    """Carry several tasks' requests as one."""

    request: Request

    def __init__(self, tasks: Sequence[BucketTask]) -> None:
        self.tasks = tasks

    @abstractmethod
    def answers(self, result: Tensor) -> Sequence[Tensor]:
        """Return what to answer each task, given the answer to the one request."""


class _Single(Bundle):
    """Pass a single request on."""

    def __init__(self, task: BucketTask) -> None:
        super().__init__([task])
        self.request = _request_of(task)

    def answers(self, result: Tensor) -> Sequence[Tensor]:
        return [result]


class _Sum(Bundle):
    """Pack sums in the order of parameters' names; their answers are written where they came from."""

    def __init__(self, tasks: Sequence[BucketTask], packing: _Packing) -> None:
        super().__init__(tasks)
        self._tensors = [_request_of(task).tensor for task in tasks]
        self._packing = packing
        first = _request_of(tasks[0])
        memory = packing.pack(self._tensors)
        self.request = dataclasses.replace(first, tensor=memory, layout=packing.layout, last=False)

    def answers(self, result: Tensor) -> Sequence[Tensor]:
        self._packing.unpack(self._tensors)
        return self._tensors


class _Exchange(Bundle):
    """Lay gathers, or all-to-alls, side by side: what belongs to one rank stays together."""

    def __init__(self, tasks: Sequence[BucketTask]) -> None:
        super().__init__(tasks)
        first = _request_of(tasks[0])
        self._shapes = [_request_of(task).tensor.shape for task in tasks]
        self._kind = type(first)
        rows = [self._as_rows(_request_of(task).tensor) for task in tasks]
        self._widths = [row.shape[1] for row in rows]
        joined = torch.cat(rows, dim=1)
        self.request = self._kind(joined if self._kind is AllToAll else joined[0])

    def answers(self, result: Tensor) -> Sequence[Tensor]:
        parts = result.split(self._widths, dim=1)
        if self._kind is AllToAll:
            return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return [part.reshape(-1, *shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _as_rows(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(tensor.shape[0] if self._kind is AllToAll else 1, -1)


class _Packing:
    """Place the parts of several tensors in one message, in the order of their keys."""

    def __init__(self, layouts: Sequence[Layout], like: Tensor) -> None:
        self._sizes = [layout.sizes for layout in layouts]
        parts = [(key, size) for layout in layouts for key, size in zip(layout.keys, layout.sizes, strict=True)]
        self._order = sorted(range(len(parts)), key=lambda number: parts[number][0])  # stable: equal keys stay in turn
        keys, sizes = zip(*(parts[number] for number in self._order), strict=True)
        self.layout = Layout(keys, sizes)
        self.memory = like.new_empty(self.layout.elements)
        self._places = list(self.memory.split(list(sizes)))
        self.unused_for = 0

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy the tensors' parts to their places, and return the message."""
        torch._foreach_copy_(self._places, self._parts(tensors))
        self.unused_for = 0
        return self.memory

    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Copy the message's parts back to where they came from."""
        torch._foreach_copy_(self._parts(tensors), self._places)

    def _parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        parts = [
            part
            for tensor, sizes in zip(tensors, self._sizes, strict=True)
            for part in tensor.view(-1).split(list(sizes))
        ]
        return [parts[number] for number in self._order]


class Packings:
    """Find the packing of the same requests again, step after step."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Packing] = {}
        self._pieces: dict[tuple[str, int], Layout] = {}

    def __len__(self) -> int:
        return len(self._known)

    def memories(self) -> list[Tensor]:
        """Return the messages' memory."""
        return [packing.memory for packing in list(self._known.values())]

    def of(self, kind: Hashable, tasks: Sequence[BucketTask]) -> _Packing:
        """Return the packing of these tasks' requests."""
        layouts = [_request_of(task).layout or self._piece(task) for task in tasks]
        key = (kind, *layouts)
        if key not in self._known:
            self._known[key] = _Packing(layouts, like=_request_of(tasks[0]).tensor)
        return self._known[key]

    def _piece(self, task: BucketTask) -> Layout:
        """Return the layout of a request that has none: one piece, in the place of its bucket's first parameter."""
        name = (task.layout.keys[0], _request_of(task).tensor.numel())
        return self._pieces.setdefault(name, Layout(name[:1], name[1:]))

    def end_step(self) -> None:
        """Forget what was not used for some steps."""
        for packing in self._known.values():
            packing.unused_for += 1
        self._known = {key: packing for key, packing in self._known.items() if packing.unused_for <= _STEPS_TO_KEEP}


def bundles(tasks: Sequence[BucketTask], packings: Packings) -> list[Bundle]:
    """Pack the tasks' requests into as few as possible."""
    alike: dict[Hashable, list[BucketTask]] = {}
    for task in tasks:
        alike.setdefault(_kind_of(task), []).append(task)
    return [_bundle(kind, group, packings) for kind, group in alike.items()]


def _bundle(kind: Hashable, tasks: Sequence[BucketTask], packings: Packings) -> Bundle:
    first = _request_of(tasks[0])
    if isinstance(first, AllReduce) and not first.tensor.is_sparse:
        in_order = first.layout is None or list(first.layout.keys) == sorted(first.layout.keys)
        if len(tasks) > 1 or not in_order:
            return _Sum(tasks, packings.of(kind, tasks))
    return _Single(tasks[0]) if len(tasks) == 1 else _Exchange(tasks)


def _kind_of(task: BucketTask) -> Hashable:
    """Return what must be the same for requests to travel together; sparse and foreign ones travel alone."""
    request = _request_of(task)
    device, dtype = request.tensor.device, request.tensor.dtype
    if isinstance(request, AllReduce) and not request.tensor.is_sparse:
        return AllReduce, dtype, device, request.average, request.wire
    if isinstance(request, (AllGather, AllToAll)):
        return type(request), dtype, device
    return task


def _request_of(task: BucketTask) -> Request:
    assert task.request is not None, "a task is packed that asks for nothing"
    return task.request
