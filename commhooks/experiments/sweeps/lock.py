"""One process at a time in a folder of results."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

LOCK = ".commhooks.lock"
OWNER = '{"pid": '  # how the text of the file begins


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Reserve the folder for this process, so that no other one writes results there at the same time.

    The kernel holds the lock on behalf of the process, and so releases it however the process ends.

    Raises:
        ValueError: Another process has the folder, or it cannot be written.

    """
    try:
        if out.exists() and not out.is_dir():
            raise ValueError(f"out: {out} is a file; name a folder")
        out.mkdir(parents=True, exist_ok=True)
        lock = _take(out)
    except OSError as error:
        raise ValueError(f"out: {out} cannot be used as a folder for results ({error}); name another one") from error
    try:
        yield
    finally:
        (out / LOCK).unlink(missing_ok=True)
        os.close(lock)


def _take(out: Path) -> int:
    """Return the lock file, open and locked, after checking that its last owner has not just removed it."""
    path = out / LOCK
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            text = os.read(lock, 1000).decode(errors="replace")
            if text and not text.startswith(OWNER):
                raise ValueError(f"out: {path} is not this program's lock file; name another folder")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                mine = {
                    "pid": os.getpid(),
                    "host": socket.gethostname(),
                    "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
                }
                os.ftruncate(lock, 0)
                os.pwrite(lock, json.dumps(mine).encode(), 0)
                return lock
        except OSError as error:
            os.close(lock)
            if error.errno not in {errno.EAGAIN, errno.EACCES}:
                raise
            raise ValueError(
                f"out: {out} is in use by {_owner(text)}; wait until it has ended, or name another folder with --out"
            ) from error
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _owner(text: str) -> str:
    try:
        owner = json.loads(text)
        return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (ValueError, KeyError, TypeError, RecursionError):  # it is being written, or damaged
        return "another process"
