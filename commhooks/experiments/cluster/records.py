"""The record of a cluster that survives the process which made it: a file that names the owner of its namespaces.

The file is written before the first namespace is made and removed after the last one. The next process thus finds the
record of a dead owner, and removes whatever is left.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from commhooks.experiments.cluster.iproute import ClusterError

FOLDER = Path("/run/commhooks")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True)
class Owner:
    """A process that removes its cluster when it ends."""

    pid: int
    started: str  # of the process, in ticks since boot: another process may get the same number later
    boot: str

    @classmethod
    def this_process(cls) -> Owner:
        """Return this process as an owner."""
        started = _started(os.getpid())
        assert started is not None, "this process is running"
        return cls(os.getpid(), started, _BOOT.read_text().strip())

    @property
    def is_alive(self) -> bool:
        """True if the process is still running."""
        return self.boot == _BOOT.read_text().strip() and self.started == _started(self.pid)


@dataclasses.dataclass(frozen=True)
class Record:
    """The record of a cluster that exists, wholly or in parts."""

    name: str
    hosts: int
    owner: Owner | None  # None: kept until somebody removes it

    @property
    def is_abandoned(self) -> bool:
        """True if its owner ended without removing it."""
        return self.owner is not None and not self.owner.is_alive

    def write(self) -> None:
        """Write the record, replacing an earlier one; the caller holds the lock."""
        new = FOLDER / "new"  # no other name is needed under the lock; a crash's leftover is overwritten
        new.write_text(json.dumps(dataclasses.asdict(self)))
        new.rename(_path(self.name))

    def delete(self) -> None:
        """Delete the record."""
        _path(self.name).unlink(missing_ok=True)


@contextmanager
def locked() -> Iterator[int]:
    """Keep other processes from making or removing clusters meanwhile, and yield the descriptor of the locked file.

    The kernel unlocks it when this process ends, and every command to which the file was passed on. A killed process's
    last command may still make a namespace: nobody looks for what is left before it has ended.
    """
    FOLDER.mkdir(exist_ok=True)
    with open(FOLDER / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def records() -> list[Record]:
    """Return all records, sorted by name."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        try:
            fields = json.loads(path.read_text())
            owner = fields["owner"]
            found.append(Record(fields["name"], fields["hosts"], None if owner is None else Owner(**owner)))
        except FileNotFoundError:  # removed meanwhile
            continue
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ClusterError(
                f"{path} is not the record of a cluster ({error}): delete it, and the network namespaces "
                f"commhooks-{path.stem}-* with `ip netns delete`"
            ) from error
    return found


def record_of(name: str) -> Record | None:
    """Return the record of a cluster; None if there is none."""
    return next((record for record in records() if record.name == name), None)


def _path(name: str) -> Path:
    return FOLDER / f"{name}.json"


def _started(pid: int) -> str | None:
    """Return a process's start in ticks since boot; None if it has ended, even if nobody has waited for it yet."""
    try:
        # After the name, which may contain anything: the state is the first field, the start the twentieth.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]
