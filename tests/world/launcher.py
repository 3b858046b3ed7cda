"""Start the ranks, receive their reports, end them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.world.rank import STACK_SIGNAL, Assignment, Options, main, output_file, stack_file

ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 100.0  # after which a world hangs, however busy the machine is
GRACE_SECONDS = 3.0  # how long the other ranks may run on once one has failed
EXIT_SECONDS = 20.0  # how long a rank may take to end once told to leave
OUTPUT_LINES = 40  # of each rank, in an error

context = multiprocessing.get_context("forkserver")
_files_checked: set[str] = set()  # those of which one world's exits were checked, in this process
_one_at_a_time = threading.Lock()  # worlds may be started from several threads


class WorldError(RuntimeError):
    """At least one rank failed, died or did not end; the message has every rank's traceback or stack."""

    def __init__(self, message: str, outcomes: list[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


@dataclass(kw_only=True)
class Outcome:
    """What became of one rank."""

    rank: int
    value: Any = None
    returned: bool = False  # the function returned `value`
    traceback: str | None = None  # the function raised
    stack: str | None = None  # it had to be killed: where it was
    exit_code: int | None = None  # negative: the signal that ended it
    output: str = ""  # stdout and stderr
    seconds: float = 0.0  # from the start of the world to this rank's report or death

    @property
    def ok(self) -> bool:
        """Return whether the function returned and the process then ended with exit code 0."""
        return self.returned and self.stack is None and self.exit_code == 0

    def describe(self) -> str:
        """Describe what went wrong with this rank."""
        lines = [f"--- rank {self.rank}: {self._headline()}"]
        lines += [part.rstrip() for part in (self.traceback, self.stack) if part]
        if self.output and not self.ok:
            lines += ["its output ended with:", *self.output.splitlines()[-OUTPUT_LINES:]]
        return "\n".join(lines)

    def _headline(self) -> str:
        ending = exit_name(self.exit_code)
        if self.ok:
            return "returned"
        if self.stack is not None:
            return (
                "returned, but did not end and was killed; its stack" if self.returned else "still running; its stack"
            )
        if self.traceback is not None:
            return "raised"
        return f"returned its result, then ended with {ending}" if self.returned else f"died with {ending}"


def exit_name(code: int | None) -> str:
    """Describe an exit code."""
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def run_world(function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Run a module-level `function(rank, *args, **kwargs)` on every rank of a new world; return the results in order.

    kwargs: those of the function, and what else `run_world_outcomes` takes.
    Raises WorldError with the traceback of every rank that failed.
    """
    outcomes = run_world_outcomes(function, world_size, *args, grace=GRACE_SECONDS, **kwargs)
    for outcome in outcomes:
        if outcome.output:
            print(f"[rank {outcome.rank}] {outcome.output.rstrip()}")
    if not all(outcome.ok for outcome in outcomes):
        parts = "\n".join(outcome.describe() for outcome in outcomes)
        raise WorldError(f"{function.__name__} on {world_size} ranks failed\n{parts}", outcomes)
    return [outcome.value for outcome in outcomes]


def run_world_outcomes(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = HANG_SECONDS,
    backend: str | None = "gloo",
    check_exit: bool | None = None,
    destroy_group: bool = True,
    store: str = "file",
    environment: Mapping[str, str] | None = None,
    grace: float | None = None,
    **kwargs: Any,
) -> list[Outcome]:
    """Run a world as `run_world` does, but return what became of each rank and raise nothing.

    timeout: seconds until every rank still running is killed; also the process group's own timeout.
    backend: None leaves the process group to the function; "gloo in turn" runs one collective at a time, without which
        PyTorch's own sums of sparse tensors corrupt the heap now and then.
    check_exit: whether ranks end as a script does, which costs three times what the rest of a world does, or by
        `os._exit`. None: as `checks_exit` says; where no rank is meant to fail, leaving something in the process is
        an error then, too.
    destroy_group: False leaves the process group to the end of the process, as many scripts do.
    store: "file", or "tcp" (a TCPStore in rank 0, on a port that the system chose).
    environment: variables for the ranks, beside the parent's own.
    grace: seconds for which the other ranks may run on once one has failed; None: until `timeout`, for tests in which
        ranks are meant to fail.
    """
    checks = checks_exit(*args, *kwargs.values()) if check_exit is None else check_exit
    options = Options(
        timeout=timeout,
        backend=backend,
        check_exit=checks,
        check_left=checks and check_exit is None and destroy_group and grace is not None,
        destroy_group=destroy_group,
        store=store,
        environment={**os.environ, **(environment or {})},
    )
    return _run(pickle.dumps((function, args, kwargs)), world_size, options, timeout if grace is None else grace)


def checks_exit(*arguments: Any) -> bool:
    """Return whether the exits of a world that does not say so itself are checked: in the first of each test file.

    WORLD_EXITS=checked checks those of all worlds; a test about exits asks for it. None is checked if "torch" is among
    the arguments: a process that used PyTorch's own DDP over Gloo aborts in about 6 % of exits, without any hook.
    """
    if "torch" in arguments:
        return False
    file, _, _ = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")
    is_first = file not in _files_checked
    _files_checked.add(file)
    return is_first or os.environ.get("WORLD_EXITS") == "checked"


def _run(call: bytes, world_size: int, options: Options, grace: float) -> list[Outcome]:
    ensure_server()
    folder = tempfile.mkdtemp(prefix="world-")
    world = _World(folder, world_size)
    try:
        for rank in range(world_size):
            world.start(Assignment(rank=rank, world_size=world_size, folder=folder, options=options, call=call))
        world.listen(options.timeout, grace)
        world.dismiss()
        return world.outcomes
    finally:
        world.kill()
        shutil.rmtree(folder, ignore_errors=True)


def ensure_server() -> None:
    """Start the fork server, once, with torch imported and one thread per rank."""
    context.set_forkserver_preload(["tests.world.preload"])
    with (
        _one_at_a_time,
        _environment(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]), GLOO_SOCKET_IFNAME="lo"),
    ):
        held = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # all ranks inherit the server's mask
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


class _World:
    """The processes of one call of `run_world`."""

    def __init__(self, folder: str, world_size: int) -> None:
        self.folder = folder
        self.began = 0.0  # once every rank is started: the first of all ranks waits for the imports of the server
        self.processes: list[ForkServerProcess] = []
        self.connections: list[connection.Connection] = []
        self.outcomes = [Outcome(rank=rank) for rank in range(world_size)]

    def start(self, assignment: Assignment) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=main, args=(assignment, theirs), name=f"rank {assignment.rank}")
        self.processes.append(process)
        self.connections.append(ours)
        with _one_at_a_time:  # starting one polls all others of this process
            process.start()
        theirs.close()

    def listen(self, timeout: float, grace: float) -> None:
        """Receive every rank's report; kill those that have not reported in time."""
        self.began = time.monotonic()
        deadline = self.began + timeout
        silent = set(range(len(self.processes)))
        while silent and (left := deadline - time.monotonic()) > 0:
            ready = connection.wait([self.connections[rank] for rank in silent], timeout=left)
            for rank in [rank for rank in silent if self.connections[rank] in ready]:
                silent.remove(rank)
                self._hear(rank)
                if not self.outcomes[rank].returned:
                    deadline = min(deadline, time.monotonic() + grace)
        self._kill_with_stack(silent)

    def _hear(self, rank: int) -> None:
        outcome = self.outcomes[rank]
        try:
            kind, content = pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            kind, content = "died", None
        outcome.seconds = time.monotonic() - self.began
        outcome.returned = kind == "value"
        if kind == "value":
            outcome.value = content
        elif kind == "error":
            outcome.traceback = content

    def dismiss(self) -> None:
        """Tell every rank to leave, and collect how each of them ended."""
        for own in self.connections:
            with contextlib.suppress(OSError):
                own.send_bytes(b"leave")
        deadline = time.monotonic() + EXIT_SECONDS
        running = {
            rank
            for rank, process in enumerate(self.processes)
            if _exit_code(process, max(0.0, deadline - time.monotonic())) is None
        }
        self._kill_with_stack(running)
        for rank, outcome in enumerate(self.outcomes):
            outcome.exit_code = _exit_code(self.processes[rank])
            outcome.output = _text(output_file(self.folder, rank))

    def _kill_with_stack(self, ranks: set[int]) -> None:
        for rank in ranks:
            _signal(self.processes[rank], STACK_SIGNAL)
        if ranks:
            time.sleep(0.5)
        for rank in ranks:
            self.outcomes[rank].stack = _text(stack_file(self.folder, rank)) or "(no stack)"
            self.outcomes[rank].seconds = time.monotonic() - self.began
            _kill_session(self.processes[rank])

    def kill(self) -> None:
        """End whatever still runs, with the processes that the ranks started."""
        for process in self.processes:
            _kill_session(process)
        for own in self.connections:
            own.close()


def _kill_session(process: ForkServerProcess) -> None:
    """Kill a rank and what it started; its session outlives it when it left children behind."""
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    _signal(process, signal.SIGKILL)
    _exit_code(process, 5.0)


def _exit_code(process: ForkServerProcess, timeout: float = 0.0) -> int | None:
    """Wait for a process to end, and return its exit code, or None.

    The fork server says the code once, through a pipe: two threads that poll at once (a process that starts polls all
    others) both find the pipe ready, and the second reads its end, which multiprocessing takes for a code of 255.
    """
    connection.wait([process.sentinel], timeout)
    with _one_at_a_time:
        return process.exitcode


def _signal(process: ForkServerProcess, number: signal.Signals) -> None:
    if process.pid is not None and _exit_code(process) is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
