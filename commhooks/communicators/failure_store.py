"""Reports of failures through the store that ranks share; one thread calls it, so a silent store blocks no other.

A store whose host has stopped, or is disconnected, never answers a call, and none of the store's own timeouts limits
that wait. So a thread that waits for a collective or completes a future never calls the store itself: it passes its
calls to the store's thread, and waits for the answer for a limited time, or not at all.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import dataclasses
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from commhooks.errors import CollectiveError, CommHooksError

Answer = TypeVar("Answer")

ANSWER_SECONDS = 1.0
"""Seconds to wait for an answer of the store, or of a rank in a roll call."""

OUT_OF_INPUTS = "none: it has run out of inputs"
"""The loss scale of a rank that has joined, whose zeros have none."""
FIRST_SCALE = "1.0"
"""The loss scale of a rank that has told of none."""

_FAILURE_KEY = "failure"
_ROLL_CALL_KEY = "roll-call"
_ANNOUNCEMENT_KEY = "announcement"
_POLL_SECONDS = 0.02


class SilentStoreError(CollectiveError):
    """A call to the store was not answered in time, or its connection broke."""


@dataclasses.dataclass(frozen=True)
class _Call:
    run: Callable[[], Any]
    answer: concurrent.futures.Future[Any]


class StoreThread:
    """A daemon thread that calls `store`, one call after another; the first call starts it.

    A call that is never answered blocks those behind it, which then time out too. Nothing can wake such a thread, so it
    is abandoned; as a daemon it delays the end of the process by no more than `ANSWER_SECONDS`.
    """

    def __init__(self, store: Store) -> None:
        self._where = address_of(store)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._process = os.getpid()
        _threads.add(self)

    def submit(self, run: Callable[[], Answer]) -> concurrent.futures.Future[Answer]:
        """Return the future of `run()`, which the thread calls after everything submitted before.

        If the store is gone, the future fails with `SilentStoreError`.
        """
        if os.getpid() != self._process:  # a fork lacks the thread, and shares its parent's connection to the store
            raise SilentStoreError("this process was forked from the one that opened the store.")
        with self._starting:  # on NCCL the training thread and the watch both call
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="commhooks store", daemon=True)
                self._thread.start()
        answer: concurrent.futures.Future[Answer] = concurrent.futures.Future()
        self._calls.put(_Call(run, answer))
        return answer

    def call(self, run: Callable[[], Answer], seconds: float) -> Answer:
        """Return `run()`; raise `SilentStoreError` if it takes longer than `seconds`, or if the store is gone."""
        return self.result(self.submit(run), seconds)

    def result(self, answer: concurrent.futures.Future[Answer], seconds: float) -> Answer:
        """Return the result of a future that `submit` returned, as `call` does."""
        try:
            return answer.result(seconds)
        except concurrent.futures.TimeoutError:
            raise SilentStoreError(f"{self._where} does not answer: its host has stopped, or is cut off.") from None

    def close(self) -> None:
        """End the thread after the calls that were submitted."""
        self._calls.put(None)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, for at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.answer.set_result(call.run())
            except CommHooksError as error:
                call.answer.set_exception(error)
            except RuntimeError as error:  # a DistError: the process that held the store has ended
                text = str(error).strip() or type(error).__name__
                why = text.splitlines()[0].rstrip(".")  # many lines of a C++ backtrace follow
                call.answer.set_exception(SilentStoreError(f"{self._where} does not answer: {why}."))
            except BaseException as error:  # whatever it is, another thread is waiting for the answer
                call.answer.set_exception(error)
            del call  # its future may hold the last reference to a process group, until the next call


class FailureStore:
    """An attachment's section of the store, in which a failing rank reports the cause to the others.

    `section` returns None until the ranks have met in it; until then, nothing is written and nothing is known.
    Except for `look`, which `store_thread` runs, methods return immediately or after about `ANSWER_SECONDS`
    (`silent_ranks` after twice that).
    """

    def __init__(
        self, section: Callable[[], Store | None], store_thread: StoreThread, rank: int, world_size: int
    ) -> None:
        self._section = section
        self._thread = store_thread
        self._rank = rank
        self._here = [f"here/{rank}" for rank in range(world_size)]
        """The keys under which ranks answer a roll call."""
        self._look: concurrent.futures.Future[str | None] | None = None
        self._found: str | None = None
        self._changes = 0
        """How often this rank has told of its loss scale."""
        self._counts: collections.deque[str] = collections.deque()
        """The keys in which ranks count who has changed to a scale in a step."""
        self.announced: tuple[int, str] = -1, ""
        """The last known announcement of a comparison: its number, and the rank and its call in words."""

    def announce(self, number: int, call: str) -> None:
        """Announce, without waiting, that this rank compares settings, as item `number` of its queue."""
        announcement = f"{number} rank {self._rank} calls {call}"
        self._thread.submit(lambda: self._write(_ANNOUNCEMENT_KEY, announcement))

    def failure(self) -> str | None:
        """Return the cause of a rank's failure, if known by now, and look again in the background.

        Raises `SilentStoreError` if the store is gone, but not if it is merely silent: it may answer again.
        """
        if self._found is None and (self._look is None or self._look.done()):
            look, self._look = self._look, self._thread.submit(self.look)
            self._found = look.result() if look is not None else None
        return self._found

    def failure_now(self) -> str | None:
        """Look now, and return a rank's reported failure or None; raise `SilentStoreError` if the store is silent."""
        if self._found is None:
            if self._look is None or self._look.done():  # a look already under way answers the same question
                self._look = self._thread.submit(self.look)
            self._found = self._thread.result(self._look, ANSWER_SECONDS)
        return self._found

    def silent_ranks(self) -> list[int]:
        """Call the roll, and return the ranks that do not answer within `ANSWER_SECONDS`.

        A failed Gloo collective does not show whose process is gone, but every rank that failed with it, or still
        waits, answers a roll call. Raises `SilentStoreError` if the store does not answer.
        """
        return self._thread.call(self._call_the_roll, 2 * ANSWER_SECONDS)

    def post(self, cause: str) -> None:
        """Report this rank's failure to the others, unless another one was posted first. Raises nothing."""
        done = self._thread.submit(lambda: self._write(_FAILURE_KEY, cause, is_first=True))
        concurrent.futures.wait([done], ANSWER_SECONDS)

    def look(self) -> str | None:
        """Return the reason that was posted, and answer a roll call; runs on the store's thread."""
        store = self._section()
        if store is None:
            return None
        if store.check([_FAILURE_KEY]):
            return str(store.get(_FAILURE_KEY).decode())
        if store.check([_ROLL_CALL_KEY]):
            store.set(self._here[self._rank], "")
        if store.check([_ANNOUNCEMENT_KEY]):
            number, _, call = store.get(_ANNOUNCEMENT_KEY).decode().partition(" ")
            self.announced = int(number), call
        return None

    def note_scale(self, number: int, scale: str) -> None:
        """Tell the other ranks that this rank's loss scale is another, `scale`, from its step `number` on.

        Steps are numbered as they begin, the same on all ranks, and no number comes twice. It waits for the store, so
        that whoever has ended this step knows; a silent one is not waited for.
        """
        done = self._thread.submit(functools.partial(self._note_scale, number, scale))
        concurrent.futures.wait([done], ANSWER_SECONDS)

    def other_scales(self, number: int, scale: str) -> dict[int, str]:
        """Return the loss scales of ranks that had another than `scale` in step `number`, which has ended.

        They are looked at only if some rank did not change to it then, and once more a little later, since a store may
        be slow.
        """
        look = functools.partial(self._other_scales, number, scale)
        try:
            if not self._thread.call(look, ANSWER_SECONDS):
                return {}
            time.sleep(ANSWER_SECONDS)
            return self._thread.call(look, ANSWER_SECONDS)
        except SilentStoreError:  # which proves nothing; that it is gone is told where ranks wait
            return {}

    def close(self) -> None:
        """End the store's thread."""
        self._thread.close()

    def _note_scale(self, number: int, scale: str) -> None:
        if (store := self._section()) is not None:
            # A rank is at most one step ahead of those that read this: they need the last two changes.
            store.set(f"scale/{self._rank}/{self._changes % 2}", f"{number} {scale}")
            store.add(count := _count_of(number, scale), 1)
            self._counts.append(count)
            if len(self._counts) > 2:  # all ranks have read it
                store.delete_key(self._counts.popleft())
            self._changes += 1

    def _other_scales(self, number: int, scale: str) -> dict[int, str]:
        store = self._section()
        if store is None or store.add(_count_of(number, scale), 0) == len(self._here):
            return {}
        scales = {rank: self._scale_in(store, rank, number) for rank in range(len(self._here))}
        return {rank: other for rank, other in scales.items() if other not in (scale, OUT_OF_INPUTS)}

    def _scale_in(self, store: Store, rank: int, number: int) -> str:
        """Return a rank's loss scale in a step: that of its last change until then."""
        keys = [key for key in (f"scale/{rank}/0", f"scale/{rank}/1") if store.check([key])]
        changes = [store.get(key).decode().split(" ", 1) for key in keys]
        until_then = [(int(since), scale) for since, scale in changes if int(since) <= number]
        return max(until_then)[1] if until_then else FIRST_SCALE

    def _write(self, key: str, text: str, *, is_first: bool = False) -> None:
        store = self._section()
        if store is not None and is_first:
            store.compare_set(key, "", text)
        elif store is not None:
            store.set(key, text)

    def _call_the_roll(self) -> list[int]:
        store = self._section()
        if store is None:
            return []
        deadline = time.monotonic() + ANSWER_SECONDS
        store.set(_ROLL_CALL_KEY, "")
        store.set(self._here[self._rank], "")
        while time.monotonic() < deadline and not store.check(self._here):
            time.sleep(_POLL_SECONDS)
        return [rank for rank, key in enumerate(self._here) if not store.check([key])]


def _count_of(number: int, scale: str) -> str:
    return f"scale {scale} since step {number}"


_threads: weakref.WeakSet[StoreThread] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Wait for pending calls before the interpreter shuts down: one that returns later ends in SIGABRT."""
    deadline = time.monotonic() + ANSWER_SECONDS
    left = list(_threads)
    for store_thread in left:
        store_thread.close()
    for store_thread in left:
        store_thread.join(max(0.0, deadline - time.monotonic()))


def address_of(store: Store) -> str:
    """Return a store's name in errors: "the store at host:port" for a `TCPStore`, otherwise its path or type."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host, port, path = (getattr(store, name, None) for name in ("host", "port", "path"))
    if host is not None and port is not None:
        return f"the store at {host}:{port}"
    return f"the store in {path}" if path else f"the store, a {type(store).__name__},"
