"""Two ranks that serve one test after another: starting ranks for each would cost more than everything else."""

from __future__ import annotations

import gc
import queue
import threading
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch.distributed as dist

from commhooks.experiments.launch import RankFunction, Send, WorldError, run_world

RANKS = 2
_DONE = "the function has returned on this rank"
_KEY = b"standing ranks"
_IDLE = 3600.0  # seconds without a call, between which other tests run


class StandingRanks:
    """Calls functions as `run_world` does, on ranks that are started with the first call."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._said: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._connections: list[Connection[Any, Any]] = []
        self._world: threading.Thread | None = None

    def run(
        self, function: RankFunction, ranks: int, argument: object, on_message: Send, *, timeout: float, **_: object
    ) -> None:
        """Call the function; another number of ranks than two gets a world of its own."""
        if ranks != RANKS:
            run_world(function, ranks, argument, on_message, timeout=timeout)
            return
        if self._world is None:
            self._start()
        for connection in self._connections:
            connection.send((function, argument))
        left = RANKS
        while left:
            try:
                message = self._said.get(timeout=self._timeout)
            except queue.Empty:
                message = WorldError(f"the standing ranks reported nothing for {self._timeout:.0f} s")
            if isinstance(message, BaseException):
                self.close()
                raise message
            if message == _DONE:
                left -= 1
            else:
                on_message(message)

    def close(self) -> None:
        """End the ranks."""
        for connection in self._connections:
            connection.close()
        if self._world is not None:
            self._world.join(self._timeout)
        self._connections, self._world = [], None

    def _start(self) -> None:
        with Listener(("127.0.0.1", 0), authkey=_KEY) as listener:
            self._world = threading.Thread(target=self._watch, args=(listener.address,), daemon=True)
            self._world.start()
            self._connections = [listener.accept() for _ in range(RANKS)]

    def _watch(self, address: tuple[str, int]) -> None:
        try:
            run_world(serve, RANKS, address, self._said.put, timeout=_IDLE)
        except BaseException as error:
            self._said.put(error)


def serve(rank: int, ranks: int, address: Any, send: Send) -> None:
    """Call what comes over the connection, until it is closed."""
    with Client(address, authkey=_KEY) as connection:
        while True:
            try:
                function, argument = connection.recv()
            except EOFError:
                return
            function(rank, ranks, argument, send)
            gc.collect()  # a DDP of one test must not be there in the next
            dist.barrier()
            send(_DONE)
