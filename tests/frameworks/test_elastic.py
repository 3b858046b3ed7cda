"""DiLoCo under torchrun's elastic restarts: two agents, of which one is killed and comes back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.launch import QUIET, ROOT
from tests.world.agent import agents_store

pytestmark = pytest.mark.frameworks

SCRIPT = ROOT / "tests" / "frameworks" / "elastic_diloco.py"


@contextlib.contextmanager
def agent(ranks: int, port: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run torchrun with so many ranks of a job of one or two agents; on leaving, kill all of it."""
    conf = "is_host=0,last_call_timeout=2,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=4"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--rdzv-conf", conf]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", str(SCRIPT), str(folder)]
    own = {"PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    log = folder / f"{ranks}-{time.time_ns()}.log"
    process = subprocess.Popen(
        command,
        env={**os.environ, **QUIET, **own},
        stdin=subprocess.DEVNULL,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in [process.pid, *workers_of(process.pid)]:  # each worker has a session of its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def workers_of(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def told_by(folder: Path, ranks: int, after: int, seconds: float = 60.0) -> list[dict[str, Any]]:
    """Return what the ranks of the next life with so many ranks tell, by rank, once a checkpoint of theirs exists."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = sorted((folder / "told").glob(f"*-of-{ranks}.json"))
        found = [path for path in found if int(path.name.split("-")[0]) > after]
        lines = {path.name.split("-")[1]: json.loads(path.read_text()) for path in found}
        saved = [int(path.name.rsplit("-", 1)[1]) for path in (folder / "checkpoints").glob("checkpoint-*")]
        if len(lines) == ranks and max(saved, default=0) >= lines["rank0"]["step"] + 15:
            return [lines[f"rank{rank}"] for rank in range(ranks)]
        time.sleep(0.1)
    logs = "\n".join(f"{path.name}\n{path.read_text()[-1500:]}" for path in folder.glob("*.log"))
    raise AssertionError(f"{ranks} ranks did not train within {seconds} s\n{logs}")


def test_ranks_that_leave_and_come_back_go_on_with_their_own_residuals(tmp_path: Path) -> None:
    """4, 3 and 4 ranks again: torchrun's rendezvous starts them anew, from the newest checkpoint."""
    (tmp_path / "told").mkdir()
    store = agents_store()
    with agent(3, store.port, tmp_path) as first:
        with agent(1, store.port, tmp_path):
            four = told_by(tmp_path, 4, 0)
        three = told_by(tmp_path, 3, 0)
        began = time.time_ns()
        with agent(1, store.port, tmp_path) as second:
            again = told_by(tmp_path, 4, began)
            (tmp_path / "stop").touch()
            assert (first.wait(30), second.wait(30)) == (0, 0)
    assert four[0]["step"] == 0 and three[0]["saved by"] == 4 and again[0]["saved by"] == 3
    for life in (three, again):
        assert len({told["step"] for told in life}) == 1 and life[0]["step"] >= 15
        for told in life:
            assert told["outer copies"] and told["at the outer copies"]
            assert told["own residual"] and not told["was empty"] if told["was there"] else told["no residual"]
    assert all(told["was there"] for told in three)
    assert [told["was there"] for told in again].count(False) == 1, "one rank has joined"
