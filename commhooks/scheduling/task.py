"""A bucket on its path through a compressor."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from commhooks.communicators import Pending
from commhooks.communicators.collective import ring_bytes
from commhooks.devices import Mark
from commhooks.errors import CompressorError
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Exchange
from commhooks.language.requests import Judge, Layout, Part, Request
from commhooks.scheduling.packing import Message, PackedCollective, check, empty_answers


class Asking(NamedTuple):
    """The bytes of a request, and the layouts that divide them among parameters."""

    layouts: tuple[Layout, ...]
    """The layouts of its parts."""
    part_bytes: tuple[int, ...]
    payload_bytes: int
    moved_bytes: int
    """Bytes sent per rank for the request."""


class Undo(Protocol):
    """The part of the undo log that judges a step's means, and may undo the step."""

    def settle(self, mean: Tensor) -> None:
        """Include a bucket's mean; after the step's last one, undo the step if one was not finite."""
        ...


@dataclasses.dataclass(eq=False)
class BucketTask:
    """The exchange of a bucket or of several, its current requests, and the futures that wait for the means."""

    exchange: Exchange
    bucket: BucketView
    futures: Sequence[torch.futures.Future[Tensor]]
    """One for each of the bucket's members."""
    step: int
    is_last: bool
    parameters: Callable[[], str]
    """A function that names the bucket's parameters, for messages; called only on failures."""
    world_size: int
    undo: Undo | None = None
    """The undo log, which judges the means of a step's buckets together."""
    ready: Sequence[Mark] = ()
    """Marks, on a GPU, behind the work queued before each member was handed in, such as its gradients."""
    submitted: float = dataclasses.field(default_factory=time.perf_counter)
    judge: Judge | None = None
    """The pending request for a verdict."""
    requests: tuple[Request, ...] = ()
    """The other pending requests."""
    asks_last: bool = False
    """True if those are the last ones."""
    under_way: deque[tuple[Pending, PackedCollective, Sequence[tuple[BucketTask, int]]]] = dataclasses.field(
        default_factory=deque
    )
    """Collectives that this task waits for; for each, the tasks and the numbers of their requests in it."""
    messages: list[Message] = dataclasses.field(default_factory=list)
    """The messages that it has sent, and owns until its end, since answers may be views of them."""
    seconds_compressing: float = 0.0
    asked: list[Asking] = dataclasses.field(default_factory=list)
    """The layouts and sizes of all requests so far."""
    is_done: bool = False
    _answers: list[list[Tensor]] = dataclasses.field(default_factory=list)
    _wants_one: bool = False
    """True if it yielded a single request rather than a tuple of them."""

    def begin(self) -> None:
        """Run the compressor up to its first request; a second call does nothing."""
        if self.is_done or self.requests or self.judge is not None:
            return
        for mark in self.ready:  # this may be another stream than that of the hook's caller
            mark.wait()
        self._run(None)

    def take(self, number: int, position: int, answer: Tensor) -> None:
        """Store the answer to one part of a request."""
        self._answers[number][position] = answer

    def resume(self) -> None:
        """Send the compressor its answers, and run it up to its next request or its end."""
        was_last = self.asks_last
        answers, self._answers = self._answers, []
        self._run(answers[0] if self._wants_one else answers)
        if was_last and self.requests:
            raise CompressorError(
                f"the compressor asked for an {self.requests[0].kind} after a request marked last=True."
            )

    def answer_verdict(self, finite: Tensor) -> None:
        """Send the compressor the verdict that it has requested, and run it to its end."""
        self._run(finite)
        if not self.is_done:
            raise CompressorError("the compressor asked for something after Judge, which must be the last.")

    def throw(self, error: BaseException) -> None:
        """Throw a failure into the compressor at its `yield`, so that it can clean up; it cannot continue."""
        self.under_way.clear()
        try:
            self.exchange.throw(error)
        except BaseException:  # its own error or the one thrown in: either way the exchange is over
            return
        self.exchange.close()

    def where(self, place: str) -> str:
        """Name the bucket, for messages, after `place`: the rank, the step, and the channel if there are several."""
        try:
            parameters = self.parameters()
        except Exception as error:  # a message about a failure must not fail
            parameters = f"parameters that cannot be named: {error}"
        first, last = (self.bucket.members[at].index for at in (0, -1))
        return f"{place}, {f'bucket {first}' if first == last else f'buckets {first} to {last}'} ({parameters})"

    def settle(self) -> None:
        """Pass the means to the undo log, if there is one; after the step's last bucket it may undo the step."""
        if self.undo is not None:
            for member in self.bucket.members:
                self.undo.settle(member.mean)

    @property
    def has_ended(self) -> bool:
        """True once its futures are completed."""
        return all(future.done() for future in self.futures)

    def succeed(self) -> None:
        """Complete each future with its mean."""
        self._give_back()
        for future, member in zip(self.futures, self.bucket.members, strict=True):
            future.set_result(member.mean)

    def fail(self, error: Exception) -> None:
        """Complete the futures with the error."""
        self._give_back()
        for future in self.futures:
            if not future.done():
                future.set_exception(error)  # type: ignore[arg-type]  # torch declares "expected Tensor"

    def _give_back(self) -> None:
        while self.messages:
            self.messages.pop().give_back()
        if self.bucket.scratch.loans.blocks:
            self.bucket.scratch.loans.end()

    def _run(self, answer: Any) -> None:
        self.judge = None
        started = time.perf_counter()
        try:
            while not self._note(next(self.exchange) if answer is None else self.exchange.send(answer)):
                # Requests for which nothing is sent are answered immediately, until the compressor requests something
                # else.
                answers = [empty_answers(request, self.world_size) for request in self.requests]
                answer = answers[0] if self._wants_one else answers
        except StopIteration:
            self.requests, self.is_done = (), True
            if self.bucket.scratch.taken:
                raise CompressorError("the compressor overwrote state and did not settle it; see Tile.took.") from None
        finally:
            self.seconds_compressing += time.perf_counter() - started

    def _note(self, asked: Any) -> bool:
        """Record what the compressor requests; return False if nothing needs to be sent for it."""
        if isinstance(asked, Judge):
            self.requests, self.judge = (), asked
            return True
        self._wants_one = not isinstance(asked, tuple)
        requests: list[Request] = []
        self.requests, self._answers, self.asks_last = (), [], True
        travels = False
        for request in (asked,) if self._wants_one else asked:  # one loop: this runs for every request of every bucket
            if not isinstance(request, Request):
                raise CompressorError(f"the compressor asked for something that is not a request (got {asked!r}).")
            check(request, self.world_size)
            requests.append(self._complete(request))
            self._answers.append([part.tensor for part in request.parts])
            self.asks_last = self.asks_last and request.last
            travels = travels or not request.is_empty
        if not requests:
            raise CompressorError(f"the compressor asked for something that is not a request (got {asked!r}).")
        self.requests = tuple(requests)
        if travels:
            self.asked += map(self._asking, requests)
        return travels

    def _complete(self, request: Request) -> Request:
        """Return a request with a layout in every part: the bucket's for parts without one."""
        for part in request.parts:
            if part.layout is None:
                layout = self.bucket.layout
                return request.with_parts(
                    [part if part.layout else Part(part.tensor, layout, part.wire) for part in request.parts]
                )
        return request

    def _asking(self, request: Request) -> Asking:
        sizes = request.part_bytes
        layouts = tuple([part.layout or self.bucket.layout for part in request.parts])
        ranks = self.world_size if request.group is None else request.group.count(self.world_size)
        moved = ring_bytes(request.kind, sum(sizes), ranks, is_sparse=request.parts[0].tensor.is_sparse)
        return Asking(layouts, sizes, sum(sizes), moved)
