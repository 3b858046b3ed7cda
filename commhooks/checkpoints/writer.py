"""The process that saves a checkpoint, by which other processes that save into the same directory know it."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import zlib
from pathlib import Path

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
