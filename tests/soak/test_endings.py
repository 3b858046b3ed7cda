"""Processes that trained over Gloo with our DDP end with exit code 0, whether they destroy the process group or not.

Some are scripts started from nothing. The others are forked from a server that has imported torch, and then end as a
script does: the interpreter is shut down and C++ destructors run. They are cheap, and show less: 360 of them with
PyTorch's own DDP ended well, of which about 6 in 100 scripts abort.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.soak.training import train
from tests.tiers import THOROUGH
from tests.world import run_world_outcomes
from tests.world.launcher import ROOT, exit_name
from tests.world.rank import exit_like_a_script

WORLD_SIZE = 2
ENDINGS = [True, False]  # destroy the process group, or leave it


def forked(which: str, destroy: bool) -> list[str]:
    """Train in one world of forked ranks; return how each of them ended."""
    outcomes = run_world_outcomes(train_and_leave, WORLD_SIZE, which, destroy)
    return [o.describe() if o.exit_code or o.stack else exit_name(o.exit_code) for o in outcomes]


def train_and_leave(rank: int, which: str, destroy: bool) -> None:
    """Train, and end at once: a rank that first reports and waits gives Gloo's threads time to come to rest."""
    train(rank, which, destroy)
    exit_like_a_script(0)


def scripts(which: str, destroy: bool, folder: Path) -> list[str]:
    """Train in one world of `python -m` processes; return how each of them ended."""
    store = folder / f"store-{which}-{destroy}-{len(list(folder.iterdir()))}"
    ending = "destroy" if destroy else "keep"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.soak.training"]
    words = [str(WORLD_SIZE), str(store), which, ending]
    started = [
        subprocess.Popen([*command, str(rank), *words], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(WORLD_SIZE)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [
        f"{exit_name(process.returncode)}{f': {ending}: {error}' if process.returncode else ''}"
        for process, error in zip(started, errors, strict=True)
    ]


def count_endings(
    which: str, forked_processes: int, script_processes: int, folder: Path, endings: Sequence[bool] = ENDINGS
) -> Counter[str]:
    """Start so many processes of each kind, as many with each of the `endings`; count how they ended."""
    counted: Counter[str] = Counter()
    for destroy in endings:
        for _ in range(forked_processes // WORLD_SIZE // len(endings)):
            counted.update(forked(which, destroy))
        for _ in range(script_processes // WORLD_SIZE // len(endings)):
            counted.update(scripts(which, destroy, folder))
    return counted


@THOROUGH  # the ranks of each test file's first world end as scripts do, too
def test_six_processes_end_with_exit_code_0(tmp_path: Path) -> None:
    assert count_endings("ours", 4, 0, tmp_path) == {"exit code 0": 4}
    assert count_endings("ours", 0, 2, tmp_path, endings=[False]) == {"exit code 0": 2}


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_thousand_processes_end_with_exit_code_0(tmp_path: Path) -> None:
    endings = count_endings("ours", 600, 400, tmp_path)
    print(f"\nours, 600 forked and 400 scripts, half with destroy_process_group: {dict(endings)}")
    assert endings == {"exit code 0": 1000}
