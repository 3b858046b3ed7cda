"""Start ranks as frameworks expect them: a script under torchrun, or a function with its environment variables."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.world.agent import agents_store, environment_of
from tests.world.launcher import run_world

ROOT = Path(__file__).resolve().parents[2]
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "ACCELERATE_USE_CPU": "true",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def raised(act: Callable[[], Any]) -> str:
    """Return the class and text of what `act` raises; "nothing" if it raises nothing."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(words: str, act: Callable[..., Any], *args: Any, **named: Any) -> None:
    """Assert that a call raises an error whose class and text begin as a pattern says."""
    told = raised(functools.partial(act, *args, **named))
    assert re.match(words, told, re.DOTALL), told


def torchrun(script: Path, *arguments: str, ranks: int = 2, timeout: float = 55.0, cwd: Path | None = None) -> str:
    """Run a script under torchrun, and return what it printed; raise `AssertionError` with that if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return run_command([*command, str(script), *arguments], timeout=timeout, cwd=cwd)


def run_command(command: list[str], *, timeout: float, cwd: Path | None = None) -> str:
    """Run a command in its own session, and return what it printed; after `timeout` seconds all of it is killed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **QUIET, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"{command} did not end within {timeout} s. {late.stdout!r}") from late
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{output}"
    return output


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 55.0, **kwargs: Any) -> list[Any]:
    """Run a module-level `function(rank, *args)` on every rank, without a process group: a framework makes its own."""
    store = agents_store()
    environment = QUIET | environment_of(store, ranks)
    return run_world(
        _as_under_torchrun, ranks, function, args, timeout=timeout, backend=None, environment=environment, **kwargs
    )


def _as_under_torchrun(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return function(rank, *args)
