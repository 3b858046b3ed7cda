"""What happens inside one rank's process."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import inspect
import os
import pickle
import reprlib
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo, Store, TCPStore, set_debug_level_from_env

from tests.world.leftovers import defaults, left_since

PR_SET_PDEATHSIG = 1
STACK_SIGNAL = signal.SIGUSR1
IN_TURN = "gloo in turn"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a world is set up; see `run_world`."""

    timeout: float  # seconds
    backend: str | None  # None: no process group; IN_TURN: Gloo, of which one collective runs at a time
    check_exit: bool
    check_left: bool  # whether what the function leaves in the process is an error, once its group is destroyed
    destroy_group: bool
    store: str  # "file" or "tcp"
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a rank is to do; the call travels pickled, so that nothing is imported before the environment is set."""

    rank: int
    world_size: int
    folder: str
    options: Options
    call: bytes  # pickled (function, args, kwargs)


def output_file(folder: str, rank: int) -> Path:
    """Name the file that takes a rank's stdout and stderr."""
    return Path(folder, f"output-{rank}.txt")


def stack_file(folder: str, rank: int) -> Path:
    """Name the file into which a rank writes its stack on STACK_SIGNAL."""
    return Path(folder, f"stack-{rank}.txt")


def main(assignment: Assignment, connection: Connection) -> NoReturn:
    """Run the assignment, report over the connection, wait for the word to leave, and exit as a script would."""
    _settle_in(assignment)
    before = defaults() if assignment.options.check_left else {}
    try:
        report = pickle.dumps(("value", _run(assignment)))
        code = 0
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the parent must hear of every end
        report = pickle.dumps(("error", traceback.format_exc() + _values_at(error)))
        code = 1
    connection.send_bytes(report)
    if code == 0:
        _wait_for_leave(connection, assignment.options.destroy_group)
        if before and (left := left_since(before)):
            print("left in the process:", *left, sep="\n  ")
            code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if not assignment.options.check_exit:
        os._exit(code)
    if assignment.rank > 0:
        _keep_cpp_objects()
    exit_like_a_script(code)


def _values_at(error: BaseException) -> str:
    """Return the local values where an assertion failed without a message: pytest rewrites none in a rank."""
    if not isinstance(error, AssertionError) or error.args:
        return ""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return "".join(f"    {name} = {_brief.repr(value)}\n" for name, value in frame.f_locals.items())


_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 400


def exit_like_a_script(code: int) -> NoReturn:
    """Shut the interpreter down and run C++ destructors, which a child of multiprocessing would skip (`os._exit`)."""
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("Py_Exit returned")


def _keep_cpp_objects() -> None:
    """End this process once its interpreter has shut down: torch's own static objects cost more than all before."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # called first of all exit handlers, with the exit code


def _settle_in(assignment: Assignment) -> None:
    """Make this process one that dies with its parent, keeps its output in a file, and shows its stack on demand."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the ranks
    _let_the_fork_server_go()
    output = os.open(output_file(assignment.folder, assignment.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    stack = open(stack_file(assignment.folder, assignment.rank), "w")  # noqa: SIM115 (stays open for the handler)
    faulthandler.enable()  # a segmentation fault shows its stack among the rank's output
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    os.environ.update(assignment.options.environment)
    torch.set_num_threads(1)
    set_debug_level_from_env()


def _let_the_fork_server_go() -> None:
    """Close the pipe that keeps the fork server alive, so that it ends, and we with it, when the parent is killed."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _run(assignment: Assignment) -> Any:
    function, args, kwargs = _unpickled_call(assignment.call)
    with _around(assignment.rank):
        return _run_in_group(assignment, function, args, kwargs)


def _around(rank: int) -> AbstractContextManager[None]:
    """Return the context that WORLD_AROUND names as module:function."""
    module, _, name = os.environ.get("WORLD_AROUND", "").partition(":")
    return getattr(importlib.import_module(module), name)(rank) if name else nullcontext()


def _run_in_group(
    assignment: Assignment, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if assignment.options.backend is None:
        return function(assignment.rank, *args, **kwargs)
    in_turn = assignment.options.backend == IN_TURN
    with mock.patch.object(dist.distributed_c10d, "ProcessGroupGloo", _GlooInTurn) if in_turn else nullcontext():
        dist.init_process_group(
            "gloo" if in_turn else assignment.options.backend,
            store=_open_store(assignment),
            rank=assignment.rank,
            world_size=assignment.world_size,
            timeout=timedelta(seconds=assignment.options.timeout),
        )
    value = function(assignment.rank, *args, **kwargs)
    gc.collect()  # a model in a reference cycle must go before its process group does
    return value


class _GlooInTurn(ProcessGroupGloo):
    """A group of one thread, not two: Gloo's own sum of sparse tensors is safe there (ddp_core/sparse.py).

    PyTorch 2.14 and newer also say whether the group is to change its size later.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, enable_reconfigure: bool = False
    ) -> None:
        assert not enable_reconfigure, "no test gives such a group one thread"
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub calls it Options
        options._devices, options._timeout, options._threads = [self.create_default_device()], timeout, 1
        super().__init__(store, rank, size, options)


def _unpickled_call(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    function, args, kwargs = pickle.loads(call)
    return inspect.unwrap(function), args, kwargs  # what `on_ranks` decorates is pickled by the name of the test


def _open_store(assignment: Assignment) -> Store:
    if assignment.options.store == "file":
        return FileStore(str(Path(assignment.folder, "store")), assignment.world_size)
    port_file = Path(assignment.folder, "port")
    if assignment.rank == 0:
        store = TCPStore("127.0.0.1", 0, assignment.world_size, is_master=True, wait_for_workers=False)
        written = port_file.with_suffix(".part")
        written.write_text(str(store.port))
        written.rename(port_file)
        return store
    deadline = time.monotonic() + assignment.options.timeout
    while not port_file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("rank 0 did not open its store")
        time.sleep(0.01)
    return TCPStore("127.0.0.1", int(port_file.read_text()), assignment.world_size, is_master=False)


def _wait_for_leave(connection: Connection, destroy_group: bool) -> None:
    """Stay until every rank has reported: a store or a socket that peers still use must not go with us."""
    try:
        connection.recv_bytes()
    except EOFError:
        os._exit(1)
    if destroy_group and dist.is_initialized():
        dist.destroy_process_group()
