"""One bucket on its way through a compressor."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from commhooks.communicators import Pending
from commhooks.engine.undo import Journal
from commhooks.errors import CompressorError
from commhooks.language.compressor import Exchange, Result, StepVerdict
from commhooks.language.requests import Layout, Request


@dataclasses.dataclass(eq=False)
class BucketTask:
    """A bucket's exchange, the request that it waits on, and the future that waits for its mean."""

    exchange: Exchange
    future: torch.futures.Future[Tensor]
    memory: Tensor
    step: int
    index: int
    is_last: bool
    parameters: Callable[[], str]
    """Names the bucket's parameters, for messages; not called unless something fails."""
    layout: Layout
    """Whose elements the bucket's are."""
    world_size: int
    verdict: StepVerdict | None = None
    """What the buckets of one step judge together, where the policy lets them."""
    journal: Journal | None = None
    """Where the means of one step's buckets are judged together."""
    ready: Any = None
    """On a GPU, the event recorded when the bucket was handed in."""
    handed_in: float = dataclasses.field(default_factory=time.perf_counter)
    request: Request | None = None
    pending: Pending | None = None
    result: Result | None = None
    begun: bool = False
    seconds_compressing: float = 0.0
    asked: list[tuple[Layout, int, int]] = dataclasses.field(default_factory=list)
    """For every request so far: whose it was, its payload's bytes, and the bytes that this rank moves for it."""

    def begin(self) -> None:
        """Run the compressor up to its first request; a second call does nothing."""
        if self.begun:
            return
        self.begun = True
        if self.ready is not None:
            self.ready.wait()
        self._run(None)

    def resume(self, answer: Tensor) -> None:
        """Hand the compressor its answer, and run it up to its next request or its end."""
        if self.request is None:
            raise CompressorError("a compressor was answered that had not asked: a bug in commhooks.")
        was_last = self.request.last
        self._run(answer)
        if was_last and self.request is not None:
            raise CompressorError(f"the compressor asked for an {self.request.kind} after a request marked last=True.")

    def judge(self) -> None:
        """Let the journal, if there is one, look at the mean; after the step's last bucket it may undo the step."""
        if self.journal is not None and self.result is not None:
            self.journal.judge(self.result.mean)

    def throw(self, error: BaseException) -> None:
        """Throw a failure into the compressor at its `yield`, so that it can clean up; it cannot go on."""
        try:
            self.exchange.throw(error)
        except BaseException:  # its own, or the one thrown in: either way the exchange is over
            return
        self.exchange.close()

    def where(self, rank: int) -> str:
        """Name the rank, step and bucket, for messages."""
        try:
            parameters = self.parameters()
        except Exception as error:  # a message about a failure must not fail
            parameters = f"parameters that cannot be named: {error}"
        return f"rank {rank}, step {self.step}, bucket {self.index} ({parameters})"

    def fail(self, error: Exception) -> None:
        """Give the error to whoever waits for the mean."""
        if not self.future.done():
            self.future.set_exception(error)  # type: ignore[arg-type]  # torch declares "expected Tensor"

    def _run(self, answer: Tensor | None) -> None:
        started = time.perf_counter()
        try:
            self.request = next(self.exchange) if answer is None else self.exchange.send(answer)
        except StopIteration as stop:
            self.request, self.result = None, self._checked(stop.value)
        else:
            request = self.request
            moved = request.ring_bytes(self.world_size)
            self.asked.append((request.layout or self.layout, request.payload_bytes, moved))
        finally:
            self.seconds_compressing += time.perf_counter() - started

    def _checked(self, result: object) -> Result:
        if not isinstance(result, Result) or result.mean.shape != self.memory.shape:
            raise CompressorError(
                f"the compressor must return a Result whose mean has the bucket's shape {tuple(self.memory.shape)} "
                f"(got {result!r})."
            )
        return result
