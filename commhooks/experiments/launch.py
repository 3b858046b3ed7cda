"""The ranks of a run: started on this machine, or joined in a world that torchrun started.

Nothing is left behind: the ranks end with this process, the port belongs to a store that this process holds (or rank 0
of a cluster), and no file is written. With a cluster, each rank starts on a host of its own
(`commhooks.experiments.cluster`).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not in its __all__
from torch.distributed.rendezvous import rendezvous

from commhooks.experiments.cluster import INTERFACE, Cluster
from commhooks.experiments.links.link import LinkSettings

Send = Callable[[object], None]
Tell = Callable[[str], None]
RankFunction = Callable[[int, int, Any, Send], None]  # (rank, ranks, argument, send)

_GRACE_SECONDS = 1.0  # for the other ranks' tracebacks, after the first failure
_TERMINATE_SECONDS = 2.0
_CHAPTER = re.compile(r"rank \d+ (failed|died):")
_WIND_UP_SECONDS = 30.0  # without a message, for ranks that were told to end
_EXIT_SECONDS = 30.0  # for a rank that has sent its last message, on a very busy machine


class WorldError(RuntimeError):
    """A rank that failed, died or fell silent; the message contains every traceback received."""


@dataclass(frozen=True)
class _Ended:
    """A rank's last message if it succeeded."""


@dataclass(frozen=True)
class _Failed:
    """A rank's last message if it raised an error; with no traceback, it stands for a rank that died."""

    traceback: str


def torchrun_world() -> tuple[int, int] | None:
    """Return (rank, ranks) if torchrun, or a similar launcher, started this process; otherwise None."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None


def ranks_here(ranks: int) -> int:
    """Return how many of a world's ranks run on this machine: torchrun's LOCAL_WORLD_SIZE, or all of them."""
    return ranks if torchrun_world() is None else int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def check_real(link: LinkSettings) -> None:
    """Raise ValueError if a link is the real network, but torchrun did not start this process."""
    if link.kind == "real" and torchrun_world() is None:
        raise ValueError(
            "link 'real' is the network between ranks that torchrun starts, but it did not start this process: start "
            "it with torchrun --nnodes ... --no-python commhooks ..., or name a link such as 100Mbit/s or unlimited"
        )


def run_in_torchrun(
    function: RankFunction, argument: object, on_message: Send, *, timeout: float, backend: str = "gloo"
) -> None:
    """Call the function in torchrun's world, with rank 0's argument; pass on each message as it is sent.

    The ranks use the backend if all of them name it; otherwise some lack a GPU of their own, and all use Gloo.
    """
    limit = timedelta(seconds=timeout)
    store, rank, ranks = next(rendezvous("env://", timeout=limit))
    store.set(f"commhooks/backend/{rank}", backend)
    named = {store.get(f"commhooks/backend/{other}").decode() for other in range(ranks)}
    agreed = named.pop() if len(named) == 1 else "gloo"
    dist.init_process_group(agreed, store=store, rank=rank, world_size=ranks, timeout=limit)
    try:
        shared = [argument]
        dist.broadcast_object_list(shared, src=0)
        function(dist.get_rank(), dist.get_world_size(), shared[0], on_message)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_world(
    function: RankFunction,
    ranks: int,
    argument: object,
    on_message: Send,
    *,
    timeout: float,
    backend: str = "gloo",
    cluster: Cluster | None = None,
    ranks_per_host: int = 1,
    on_interrupt: Callable[[], bool] = lambda: False,
) -> None:
    """Call `function(rank, ranks, argument, send)` in new processes with a process group; pass on their messages.

    Each rank has the environment that torchrun would give it.

    Args:
        function: Importable by name.
        ranks: The number of processes.
        argument: Picklable; passed to every rank.
        on_message: Called here with every object that a rank sends, in order of arrival.
        timeout: Seconds of silence from all ranks after which the world counts as stuck; also the group's timeout.
        backend: The backend of the group; see `commhooks.experiments.devices.backend_for`.
        cluster: The ranks run on its hosts, from host 0 on, which also has the group's store; None: beside this
            process.
        ranks_per_host: The number of ranks that share a host of the cluster, and its link.
        on_interrupt: Called at Ctrl-C; returns True if it has told the ranks to end by themselves. They then have time
            until a second Ctrl-C, or half a minute without a message. If it returns False, they are ended at once.

    Raises:
        ValueError: The cluster has too few hosts.
        WorldError: A rank raised an error or died, or all fell silent. The ranks are ended before it is raised.
        KeyboardInterrupt: Ctrl-C; the ranks are ended first.

    """
    if cluster is not None and ranks > cluster.hosts * ranks_per_host:
        raise ValueError(
            f"{ranks} ranks need {math.ceil(ranks / ranks_per_host)} hosts with {ranks_per_host} on each, but cluster "
            f"{cluster.name!r} has {cluster.hosts}: start fewer ranks, or more of them on each host (ranks_per_host)"
        )
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # a process's start would start it, and let interrupts through again
    if cluster is None:
        store = _loopback_store()
        address, port, listening = store.host, store.port, None
    else:  # rank 0 makes the store: PyTorch would warn here, where it cannot be told not to, that hosts have no names
        listening = cluster.inside(0, _bound)
        address, port = cluster.address(0), listening.getsockname()[1]
    world: dict[connection.Connection, tuple[int, SpawnProcess]] = {}
    try:
        for rank in range(ranks):
            host, local_rank = (0, rank) if cluster is None else divmod(rank, ranks_per_host)
            receiving, sending = context.Pipe(duplex=False)
            place = None if cluster is None else (cluster, host)
            stores = listening if rank == 0 else None
            arguments = (function, rank, ranks, argument, sending, timeout, backend, place, stores)
            process = context.Process(target=_rank_main, args=arguments, name=f"rank {rank}", daemon=True)
            torchruns = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(ranks if cluster is None else min(ranks_per_host, ranks - rank + local_rank)),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            }
            with environment(_rank_environment(cluster) | torchruns), _interrupts_held_back():
                process.start()
            sending.close()
            if stores is not None:
                stores.close()
            world[receiving] = (rank, process)
        try:
            _listen(world, on_message, timeout)
        except KeyboardInterrupt:
            if on_interrupt():
                with suppress(Exception):  # a message that was cut in half can raise anything
                    _listen(world, on_message, _WIND_UP_SECONDS)
            raise
        for _, process in world.values():
            process.join(_EXIT_SECONDS)
        _check_exit_codes(world)
    finally:
        _end(world)


def silent(message: object) -> None:
    """Send nothing: only rank 0 reports."""


def _loopback_store() -> TCPStore:
    """Return a store's server that other machines cannot reach; by itself one listens on all interfaces."""
    listening = _bound("127.0.0.1")
    address, port = listening.getsockname()
    return _store(address, port, listening)


def _store(address: str, port: int, listening: socket.socket | None, **settings: Any) -> TCPStore:
    """Return a client of a store, which also serves it if it is given a socket to listen on."""
    settings |= {"is_master": listening is not None, "wait_for_workers": False}
    if listening is None:
        return TCPStore(address, port, **settings)
    settings["master_listen_fd"] = listening.detach()
    try:
        return TCPStore(address, port, **settings)
    except NotImplementedError:  # PyTorch 2.6: of its two servers, the default one takes no socket
        return TCPStore(address, port, use_libuv=False, **settings)


def _bound(address: str = "") -> socket.socket:
    """Return a socket for a store, whose port nobody else can take before the store listens on it."""
    bound = socket.socket()
    bound.bind((address, 0))
    return bound


def _listen(world: Mapping[connection.Connection, tuple[int, SpawnProcess]], on_message: Send, timeout: float) -> None:
    """Pass on messages until every rank has ended; raise if one fails or all fall silent."""
    open_pipes = dict(world)
    while open_pipes:
        ready = connection.wait(list(open_pipes), timeout)
        if not ready:
            silent = ", ".join(str(rank) for rank, _ in open_pipes.values())
            raise WorldError(f"ranks {silent} reported nothing for {timeout:.0f} s; they were ended")
        for pipe in ready:
            assert isinstance(pipe, connection.Connection), "only pipes are waited for"
            message = _receive(pipe)
            if isinstance(message, _Failed):
                raise WorldError(_story(world, {pipe: message}))
            if isinstance(message, _Ended):
                del open_pipes[pipe]
            else:
                on_message(message)


def _receive(pipe: connection.Connection) -> object:
    """Return the next message; a rank that closed its pipe without one has died."""
    try:
        return pipe.recv()
    except EOFError:
        return _Failed("")


def _story(
    world: Mapping[connection.Connection, tuple[int, SpawnProcess]], failed: dict[connection.Connection, _Failed]
) -> str:
    """Wait briefly for the other ranks' tracebacks, then return all of them in order of arrival."""
    deadline = time.monotonic() + _GRACE_SECONDS
    waiting = [pipe for pipe in world if pipe not in failed]
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in connection.wait(waiting, left):
            assert isinstance(pipe, connection.Connection), "only pipes are waited for"
            message = _receive(pipe)
            if isinstance(message, _Failed | _Ended):
                waiting.remove(pipe)
            if isinstance(message, _Failed):
                failed[pipe] = message
    return "\n".join(_chapter(*world[pipe], failure) for pipe, failure in failed.items())


def _chapter(rank: int, process: SpawnProcess, failure: _Failed) -> str:
    if failure.traceback:
        return f"rank {rank} failed:\n{failure.traceback}"
    process.join(_GRACE_SECONDS)
    return f"rank {rank} died: {_exit_in_words(process.exitcode)}"


def reason_of(story: str) -> str:
    """Return the line of a WorldError's message that names the cause: the first failed rank's exception."""
    lines = [line for line in story.splitlines() if line.strip()]
    later = next((n for n, line in enumerate(lines) if n > 0 and _CHAPTER.match(line)), len(lines))
    first = lines[:later]
    # Behind the last traceback of a chain, and before notes that were added to the exception.
    begin = max((n for n, line in enumerate(first) if line.startswith("Traceback ")), default=None)
    if begin is not None:
        first = [line for line in first[begin + 1 :] if not line[0].isspace()][:1] or first
    return first[-1].strip() if first else "no reason given"


def _exit_in_words(code: int | None) -> str:
    if code is None:
        return "it closed its pipe and did not end"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _check_exit_codes(world: Mapping[connection.Connection, tuple[int, SpawnProcess]]) -> None:
    bad = [f"rank {rank}: {_exit_in_words(p.exitcode)}" for rank, p in world.values() if p.exitcode != 0]
    if bad:
        raise WorldError("all ranks finished their work, but did not end well: " + "; ".join(bad))


def _end(world: Mapping[connection.Connection, tuple[int, SpawnProcess]]) -> None:
    """End the processes that are still running, first politely; close every pipe."""
    processes = [process for _, process in world.values()]
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_TERMINATE_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    for pipe in world:
        pipe.close()


def _rank_main(
    function: RankFunction,
    rank: int,
    ranks: int,
    argument: object,
    pipe: connection.Connection,
    timeout: float,
    backend: str,
    place: tuple[Cluster, int] | None,
    listening: socket.socket | None,
) -> None:
    """Run one rank, on its host if there is a cluster, and with the store if it is given a socket for that.

    A failure is reported before the group ends, so that the cause comes before its effects.
    """
    multiprocessing.current_process().daemon = False  # a task may start processes, such as a DataLoader's workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group: the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    last_word: _Ended | _Failed
    try:
        if place is not None:
            cluster, host = place
            cluster.enter(host)  # before Gloo starts threads, which inherit it
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=timeout)
        store = _store(address, port, listening, timeout=limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
        function(rank, ranks, argument, pipe.send)
        dist.barrier()
        dist.destroy_process_group()
        code, last_word = 0, _Ended()
    except BaseException:
        code, last_word = 1, _Failed(traceback.format_exc())
    pipe.send(last_word)
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing is left to tear down. An orderly exit would wait for threads that wait for a collective, which costs
    # seconds on a busy machine.
    os._exit(code)


def _die_with_parent() -> None:
    """End this process when its parent is gone, however that one ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _rank_environment(cluster: Cluster | None) -> dict[str, str]:
    """Return variables that ranks need before they import torch; variables that are already set keep their values.

    One thread per rank. A loopback device: Gloo otherwise looks up this machine's own name, which may fail. A cache
    folder that exists: torch.optim otherwise creates one on import, for compiled code, and leaves it behind. On a
    cluster the interface is always the host's, and PyTorch does not warn at each connection that hosts have no names.
    """
    names = [name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}]
    wanted = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir()}
    if names:
        wanted["GLOO_SOCKET_IFNAME"] = names[0]
    if cluster is not None:
        wanted["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    found = {name: os.environ.get(name, value) for name, value in wanted.items()}
    return found if cluster is None else found | {"GLOO_SOCKET_IFNAME": INTERFACE}


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block, and keep it from the processes started inside.

    It reaches the whole foreground group, and a rank that it interrupts while Python starts prints a fatal error.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes started inside, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
