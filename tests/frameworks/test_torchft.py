"""torchft: a replica is killed in the middle of a step, the other goes on, and the killed one comes back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ManagedProcessGroup, ProcessGroupGloo

import commhooks
from commhooks.integrations.torchft import compress
from tests.frameworks.launch import QUIET, ROOT, refused, run_ranks, torchrun

pytestmark = pytest.mark.frameworks


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2_000, quorum_tick_ms=50, heartbeat_timeout_ms=1_000
    )
    yield server.address()
    server.shutdown()


@contextmanager
def replica(lighthouse: str, name: str, folder: Path, fate: str) -> Iterator[subprocess.Popen[str]]:
    """Start a replica, which does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.frameworks.torchft_replica", lighthouse, name, str(folder), fate],
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
        stdout=(folder / f"{name}-{fate}.log").open("w"),
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_replica_that_is_killed_in_a_step_comes_back_and_ends_as_the_other_does(
    lighthouse: str, tmp_path: Path
) -> None:
    with replica(lighthouse, "a", tmp_path, "lives") as first:
        with replica(lighthouse, "b", tmp_path, "dies") as killed:
            assert killed.wait(60) == -9, (tmp_path / "b-dies.log").read_text()[-2000:]
        with replica(lighthouse, "b", tmp_path, "lives") as second:
            assert second.wait(80) == 0, (tmp_path / "b-lives.log").read_text()[-2000:]
            assert first.wait(20) == 0, (tmp_path / "a-lives.log").read_text()[-2000:]
    a, b = (torch.load(tmp_path / f"{name}.pt") for name in "ab")
    assert a["undone"] == [True], "the step in which the other died must leave the hook's state as it was"
    assert a["alone"] > 0 and b["alone"] == 0
    for end in (a, b):
        assert end["ratio"] > 10 and end["bypassed"]
    for part in ("step", "model", "shared"):
        torch.testing.assert_close(a[part], b[part], rtol=0, atol=0)


def test_the_example_trains(lighthouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", lighthouse)
    script = ROOT / "docs" / "examples" / "torchft_ddp.py"
    with ThreadPoolExecutor(2) as pool:
        printed = list(pool.map(lambda name: torchrun(script, name, ranks=1, timeout=80), ["replica_0", "replica_1"]))
    for number, output in enumerate(printed):
        found = re.search(rf"replica_{number}: loss ([0-9.]+), ratio ([0-9.]+)", output)
        assert found and float(found[1]) < 1.5 and float(found[2]) > 5, output


def refusals(rank: int, lighthouse: str) -> None:
    """Refuse a quorum beside the step, buckets that move, compressors that gather, and a group that is managed."""
    dist.init_process_group("gloo")

    def step(manager: Manager, compressor: str, searches: bool) -> None:
        model = DistributedDataParallel(nn.Linear(64, 64), find_unused_parameters=searches)
        compress(model, compressor, manager, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
        manager.start_quorum()
        model(torch.ones(1, 64)).sum().backward()

    def managed(manager: Manager, way: str, *_: bool) -> None:
        group: Any = ManagedProcessGroup(manager)
        if way == "attach":
            commhooks.attach(DistributedDataParallel(nn.Linear(64, 64)), "powersgd", process_group=group)
        model = nn.Linear(64, 64)
        commhooks.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2, process_group=group)

    comes_and_goes = ".*ManagedProcessGroup is torchft's, and its ranks come and go"
    for words, act, given, searches, asynchronous in (
        (".*use_async_quorum=False", step, "powersgd", True, True),
        (".*find_unused_parameters=True", step, "powersgd", False, False),
        (".*Use one that only sums", step, "top-k", True, False),
        (comes_and_goes, managed, "attach", True, False),
        (comes_and_goes, managed, "DiLoCo", True, False),
    ):
        manager = Manager(
            pg=ProcessGroupGloo(),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=1,
            use_async_quorum=asynchronous,
            lighthouse_addr=lighthouse,
            hostname="127.0.0.1",
        )
        refused(words, act, manager, given, searches)
        manager.shutdown()


def test_what_cannot_work_is_refused(lighthouse: str) -> None:
    run_ranks(refusals, 1, lighthouse)
