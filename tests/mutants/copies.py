"""Copies of the working tree, in which faults are seeded: the checkout itself is never changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from tests.mutants.fault import Fault

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / ".mutants"
"""What was run so far, which git ignores."""
LIBRARY = Path("commhooks/native/_kernels.so")
DEVICE = ROOT / "build" / "virtual_device"
"""The virtual device, which takes a minute to build and is the same in every copy."""
BUILD_SECONDS = 600.0


class Copy:
    """A copy of the tree in a folder, with what was built in the checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (*names_of_files(), str(LIBRARY)):
            if (ROOT / name).is_symlink() or (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        if DEVICE.is_dir():
            shutil.copytree(DEVICE, folder / DEVICE.relative_to(ROOT))

    def write(self, file: Path, text: str) -> None:
        """Replace a file, and remove its bytecode: Python takes a file of the same size and second for the same."""
        path = self.folder / file
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def seed(self, fault: Fault) -> None:
        """Apply a fault."""
        self.write(fault.file, fault.applied((ROOT / fault.file).read_text()))
        if fault.is_native:
            self._build()

    def mend(self, fault: Fault) -> None:
        """Undo a fault."""
        self.write(fault.file, (ROOT / fault.file).read_text())
        if fault.is_native:
            shutil.copy2(ROOT / LIBRARY, self.folder / LIBRARY)

    def _build(self) -> None:
        before = (self.folder / LIBRARY).read_bytes()
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        self.run(command, BUILD_SECONDS, {}, subprocess.DEVNULL)
        if (self.folder / LIBRARY).read_bytes() == before:
            raise RuntimeError("the library could not be built with the fault: a C compiler is needed")

    def run(
        self, command: Sequence[str], seconds: float, variables: Mapping[str, str], output: IO[str] | int | None
    ) -> int | None:
        """Run a command in the copy, and return its exit code; None if it had to be killed after so many seconds."""
        environment = {**os.environ, **variables, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        process = psutil.Popen(
            command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code: int = process.wait(seconds)
        except psutil.TimeoutExpired:
            return None
        finally:
            _kill(process)
        return code


def names_of_files(*patterns: str) -> list[str]:
    """Return the paths of the files that git does not ignore, and that match one of the patterns, if there are any."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(filter(None, listed.split("\0")))


def _kill(process: psutil.Popen) -> None:
    """Kill a process and its children; ranks then end by themselves, since they end with what started them."""
    every: list[psutil.Process] = []
    find: Callable[[], list[psutil.Process]] = lambda: process.children(recursive=True)
    try:
        every = [*find(), process]
    except psutil.NoSuchProcess:
        return
    for one in every:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(every, timeout=10)
