"""The process that writes a checkpoint: its name is part of what it writes, until that is complete.

So other processes that save in the same place know whose it is, and whether it was left behind.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import zlib
from pathlib import Path

ABANDONED_SECONDS = 3600.0
"""If nothing was written for this long, nobody is writing: unless told otherwise, collectives time out sooner."""
_MARK = re.compile(r"by-(\d+)-on-(.+)-([0-9a-f]{8})-[0-9a-f]{32}")
_UNKNOWN = "00000000"


@dataclasses.dataclass(frozen=True)
class Writer:
    """A process, named so that other processes, on any machine, can tell it from others."""

    pid: int
    host: str
    machine: str
    """Differs between machines, their boots, and containers: within one, no two processes have the same number."""

    @classmethod
    def here(cls) -> Writer:
        """Return this process."""
        return cls(os.getpid(), re.sub(r"[^\w.-]", "-", socket.gethostname())[:64] or "localhost", _machine())

    @classmethod
    def of(cls, name: str) -> Writer | None:
        """Return the process that a name with a mark names; None if it has none."""
        match = _MARK.search(name)
        return match and cls(int(match[1]), match[2], match[3])

    def mark(self, save: str) -> str:
        """Return the part of a name that says who writes; `save` is the save's own name, 32 hexadecimal digits."""
        return f"by-{self.pid}-on-{self.host}-{self.machine}-{save}"

    def abandoned(self, path: Path, now: float) -> bool:
        """Return whether this process no longer writes a file or folder; `now` is the time by the file system's clock.

        Raises `FileNotFoundError` if it is not there any more.
        """
        if self.has_ended:
            return True
        latest: float = max(one.stat().st_mtime for one in (path, *(path.iterdir() if path.is_dir() else ())))
        return now - latest > ABANDONED_SECONDS

    @property
    def has_ended(self) -> bool:
        """True if the process is known to have ended; False if it runs, or may run on another machine."""
        if self.machine == _UNKNOWN or self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # another user's
            pass
        return False

    def __str__(self) -> str:
        """Name it in an error."""
        return f"process {self.pid} on {self.host}"


def _machine() -> str:
    """Return 8 hexadecimal digits for this boot and this container, or zeros where the system does not tell."""
    try:
        boot, container = Path("/proc/sys/kernel/random/boot_id").read_text(), Path("/proc/self/ns/pid").readlink()
    except OSError:  # Linux alone tells
        return _UNKNOWN
    return f"{zlib.crc32(f'{boot} {container}'.encode()):08x}"
