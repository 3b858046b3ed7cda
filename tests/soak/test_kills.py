"""A run whose ranks are killed, at chosen places or at any time, ends as one that nobody disturbed: bit for bit.

`torchrun --max-restarts` starts the ranks anew, and the script goes on from its newest checkpoint. While all this goes
on, every checkpoint that is there under its name is read again and again: none may be refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from commhooks import CheckpointError, LoadRules
from commhooks.saving.contents import read_contents
from commhooks.saving.folder import checkpoints_in
from tests.commhooks.resuming import distance
from tests.soak.places import PLACES
from tests.soak.train_and_resume import read_arguments, train
from tests.tiers import THOROUGH
from tests.world import run_world
from tests.world.launcher import ROOT

WORLD_SIZE = 2
RESTARTS_TO_SPARE = 4  # PyTorch's DDP aborts in about 6 % of exits, and torchrun takes that for a failure
POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained, and who is to be killed."""

    ddp: str = "core"
    hook: str = "powersgd"
    policy: str = "fifo"
    steps: int = 60
    pause: float = 0.0
    places: tuple[str, ...] = ()
    """Each as `<place>@<rank>@<how often it is passed>`; see `places`."""
    kills_at_any_time: int = 0
    seed: int = 0

    def arguments(self, folder: Path, save_every: int = 4) -> list[str]:
        named = {"ddp": self.ddp, "hook": self.hook, "policy": self.policy, "steps": self.steps, "pause": self.pause}
        named |= {"save-every": save_every, "directory": folder / "checkpoints", "out": folder}
        return [word for name, value in named.items() for word in (f"--{name}", str(value))]


def never_killed(_: int, _ddp: str, arguments: list[str]) -> None:
    """Train without a break, and without saving."""
    train(read_arguments(arguments))


class Watch:
    """Read every checkpoint that is there, again and again."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.times_read = 0
        self.refused: list[str] = []

    def look(self) -> None:
        for path in checkpoints_in(self._root) if self._root.exists() else []:
            for rank in range(WORLD_SIZE):
                try:
                    read_contents(path, rank, WORLD_SIZE, LoadRules())
                except CheckpointError as error:
                    if path.exists():  # it may have been removed meanwhile, and made room for a newer one
                        self.refused.append(str(error))
            self.times_read += 1


class Killer:
    """Kill a rank of each life of a run, some time after it was started or has begun to train."""

    def __init__(self, kills: int, seed: int) -> None:
        self._left = kills
        self._chance = random.Random(seed)
        self._seen: set[int] = set()
        self._due: float | None = None
        self._waits_for_training = True
        self.killed: list[str] = []

    def act(self, workers: Sequence[psutil.Process], log: str) -> None:
        """Plan a kill for workers not seen before, or carry out the one that is due."""
        pids = [worker.pid for worker in workers]
        if self._left == 0 or len(pids) < WORLD_SIZE:
            return
        if self._seen.isdisjoint(pids):
            self._seen |= set(pids)
            self._waits_for_training = self._chance.random() < 0.8
            self._due = None if self._waits_for_training else time.monotonic() + self._chance.uniform(0, 4)
        if self._waits_for_training and all(f"process {pid} trains" in log for pid in pids):
            self._waits_for_training = False
            self._due = time.monotonic() + self._chance.uniform(0, 2)
        if self._due is not None and time.monotonic() > self._due:
            self._due = None
            self._left -= 1
            os.kill(self._chance.choice(pids), signal.SIGKILL)
            self.killed.append("while training" if f"process {pids[0]} trains" in log else "while starting")


def run_and_kill(job: Job, folder: Path, limit_seconds: float) -> tuple[Counter[str], Watch]:
    """Run a job under torchrun until it ends, killing as planned; return what was killed where."""
    marks = folder / "marks"
    marks.mkdir()
    watch, killer = Watch(folder / "checkpoints"), Killer(job.kills_at_any_time, job.seed)
    log, deadline = folder / "log.txt", time.monotonic() + limit_seconds
    with torchrun(job, folder, log) as process:
        while process.poll() is None:
            assert time.monotonic() < deadline, f"{job} did not end in {limit_seconds} s\n{log.read_text()}"
            killer.act(ranks_of(process), log.read_text())
            watch.look()
            time.sleep(POLL_SECONDS)
    watch.look()
    assert process.returncode == 0, f"{job}\n{log.read_text()}"
    assert len(list(marks.iterdir())) == len(job.places), f"not every place was passed: {job}\n{log.read_text()}"
    return Counter([mark.name.split("-", 1)[1] for mark in marks.iterdir()] + killer.killed), watch


@contextlib.contextmanager
def torchrun(job: Job, folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start torchrun; whatever happens, nothing of it is left at the end."""
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(folder / "tmp"),
        # torchrun's own store outlives the ranks, and ranks that were restarted find the addresses of dead ones in
        # it and cannot connect (pytorch/pytorch issues 135712 and 167288). So rank 0 has a store, which dies with it.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "KILL_AT": ",".join(job.places),
        "KILL_MARKS": str(folder / "marks"),
    }
    restarts = len(job.places) + job.kills_at_any_time + RESTARTS_TO_SPARE
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD_SIZE)]
    command += ["--max-restarts", str(restarts), "-m", "tests.soak.train_and_resume", *job.arguments(folder)]
    with log.open("ab") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        kill_everything(process, folder)


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children()
        return [child for child in children if "tests.soak.train_and_resume" in child.cmdline()]
    return []


def kill_everything(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill torchrun, and every rank that it started, whose command line names the folder."""
    process.kill()
    process.wait()
    for other in psutil.process_iter(["cmdline"]):
        if str(folder / "checkpoints") in (other.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                other.kill()
                other.wait(20)


def check_same_ending(job: Job, folder: Path) -> None:
    """Demand parameters, optimiser and the hook's state of every rank as in a run that was never killed."""
    alone = folder / "never-killed"
    alone.mkdir()
    run_world(never_killed, WORLD_SIZE, job.ddp, job.arguments(alone, save_every=job.steps + 1))
    for rank in range(WORLD_SIZE):
        ours, theirs = (torch.load(where / f"rank{rank}.pt") for where in (folder, alone))
        for part in ("model", "optimizer"):
            assert distance(ours[part], theirs[part]) == 0, f"{job}, rank {rank}: {part} differs"
        for label, own in groups_of(ours["hooks"]).items():
            other = groups_of(theirs["hooks"])[label]
            for part in ("step", "grad_scale", "settings", "shapes", "replicated", "local"):
                assert distance(own[part], other[part]) == 0, f"{job}, rank {rank}{label}: {part} differs"
        shared = [hooks.get("shared", hooks) for hooks in (ours["hooks"], theirs["hooks"])]
        assert job.ddp != "diloco" or distance(*shared) == 0, f"{job}, rank {rank}: outer copies differ"
        assert shared[0]["step"] == job.steps


def groups_of(hooks: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the states of DiLoCo's fragments, or an attachment's only one."""
    return {f", {label}": group for label, group in hooks["groups"].items()} if "groups" in hooks else {"": hooks}


@THOROUGH
def test_a_run_that_is_killed_while_saving_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    job = Job(steps=12, places=("shared.pt@0@2",))
    _, watch = run_and_kill(job, tmp_path, 120)
    assert not watch.refused
    check_same_ending(job, tmp_path)


CHOSEN = [
    Job(
        "core",
        policy="fifo",
        places=(
            "forward@1@11", "shared.pt@0@2", "clearing@0@1", "loading@1@1", "rank1.pt@1@2", "after rename@0@2",
            "collective@1@9",
        ),
    ),
    Job(
        "torch",
        policy="fused",
        places=("backward@0@13", "rank0.pt@0@2", "manifest@0@2", "old renamed@0@2", "removing@0@1", "collective@0@12"),
    ),
    Job(
        "core",
        policy="fused",
        places=("collective@0@14", "before rename@0@3", "manifest@0@1", "flush@1@2", "removing@0@1", "backward@1@15"),
    ),
    Job(
        "torch",
        policy="fifo",
        places=("rank1.pt@1@3", "clearing@0@1", "flush@0@3", "loading@0@2", "forward@0@9", "after rename@0@1"),
    ),
]  # fmt: skip
ROUNDS = [
    Job(
        "diloco",
        hook="top-k",
        places=("collective@1@9", "shared.pt@0@2", "forward@0@23", "rank1.pt@1@2", "collective@0@7"),
    ),
    Job("diloco", hook="int4", steps=250, pause=0.02, kills_at_any_time=6, seed=4),
]
"""In the middle of a round, of an exchange, and of saving while one is under way."""
ANY_TIME = [
    Job(ddp, policy=policy, steps=250, pause=0.02, kills_at_any_time=6, seed=seed)
    for seed, (ddp, policy) in enumerate([("core", "fifo"), ("torch", "fused"), ("core", "fused"), ("torch", "fifo")])
]


def test_every_place_is_among_the_chosen_ones() -> None:
    assert {place.split("@")[0] for job in CHOSEN for place in job.places} == set(PLACES)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("job", CHOSEN + ANY_TIME + ROUNDS, ids=lambda job: f"{job.ddp}-{job.policy}-{len(job.places)}")
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(job: Job, tmp_path: Path) -> None:
    """Thirty kills at chosen places, and thirty at any time."""
    kills, watch = run_and_kill(job, tmp_path, 1000)
    print(
        f"\n{job.ddp}, {job.policy}: killed {kills.total()} times, {dict(kills)}; read {watch.times_read} checkpoints"
    )
    assert not watch.refused
    assert kills.total() == len(job.places) + job.kills_at_any_time
    check_same_ending(job, tmp_path)
