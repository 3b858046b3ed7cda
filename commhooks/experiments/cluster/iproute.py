"""The commands of iproute2, and threads that work inside a network namespace."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_SECONDS = 30.0  # for a command that takes milliseconds

_T = TypeVar("_T")


class ClusterError(RuntimeError):
    """A cluster that cannot be made or changed on this machine; the message says why, and what to do."""


def run(*command: str, lines: Iterable[str] = (), lock: int | None = None) -> str:
    """Run `ip` or `tc` and return its output.

    Args:
        command: The command and its arguments.
        lines: Commands for `-batch -`, one per line, which run in one process instead of many.
        lock: A locked file, which the command keeps locked if this process is killed meanwhile.

    Raises:
        ClusterError: The command failed; the message contains the command and its own message.

    """
    text = "".join(f"{line}\n" for line in lines)
    # A session of its own: Ctrl-C must not interrupt it halfway, the caller decides what happens next.
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            start_new_session=True,
            pass_fds=[] if lock is None else [lock],
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(command)} took more than {_SECONDS:.0f} s, and was ended") from error
    if done.returncode != 0:
        raise ClusterError(
            f"{' '.join(command)} failed: {done.stderr.strip()}" + (f"\nIts input:\n{text}" if text else "")
        )
    return done.stdout


def enter(namespace: str) -> None:
    """Move this thread into a network namespace, with every thread and process that it starts from now on.

    Raises:
        ClusterError: The namespace does not exist, or cannot be entered.

    """
    try:
        with open(NAMESPACES / namespace) as file:
            _call("setns", file.fileno(), _CLONE_NEWNET)
    except OSError as error:
        raise ClusterError(
            f"network namespace {namespace} cannot be entered ({error.strerror}); if it was deleted, "
            "remove its cluster: commhooks cluster list, commhooks cluster remove NAME"
        ) from error


def inside(namespace: str, function: Callable[[], _T]) -> _T:
    """Call the function on another thread, whose sockets belong to the namespace, and return its result."""
    return _in_thread(lambda: enter(namespace), function)


def inside_new(function: Callable[[], _T]) -> _T:
    """Call the function in a new network namespace, which has no name and ends with the call."""
    return _in_thread(lambda: _call("unshare", _CLONE_NEWNET), function)


def _in_thread(begin: Callable[[], None], function: Callable[[], _T]) -> _T:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(begin).result()
        return thread.submit(function).result()


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library (Python has `os.setns` and `os.unshare` from 3.12)."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
