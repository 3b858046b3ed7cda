"""The time of a training step if Gloo's event loop does not interrupt other threads, over the time if it does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist

from commhooks.experiments.cluster import why_not
from commhooks.experiments.launch import Tell
from commhooks.experiments.links.link import LinkSettings
from experiments.studies.bench.real_step import training_step
from experiments.studies.bench.rows import AGAIN, OURS, THEIRS, Row, Seconds, beside
from experiments.studies.ranks import on_ranks
from experiments.studies.turns import in_turns

SENTENCE = (
    "A training step on 2 ranks of one thread each, by `ddp_core`, on two hosts (network namespaces) whose link has no "
    "limit, or on the loopback where there can be none: over the private group of `attach`, whose event loop "
    "interrupts no other thread when it wakes up, against the same with the kernel's usual policy (`SCHED_OTHER`). "
    "Noise: the usual policy against itself, by another copy of the model. Beside loaders and programs, on the "
    "loopback, two more processes compute: a loader half of the time, 10 ms of 20, and a program all the time. Ranks "
    "have a core each if the row says so; otherwise they and the other processes may use any."
)
TARGET = 1.0
RANKS = 2
TASKS = ("digits:size=medium", "gpt:size=medium")
HOOKS = {"all-reduce": "all-reduce", "fp16": "fp16", "PowerSGD, rank 4": "powersgd:rank=4"}
_THREADS = {"gloo_tcp_loop", "pt_gloo_runloop"}  # what Gloo and PyTorch call them
_LOADED_TASK = "digits:size=medium"  # of the shorter steps, in which waiting weighs more
_LOADS = {"loaders": 0.01, "programs": 0.0}  # seconds to sleep after 10 ms of work
_PROGRAM = """
import sys, time
while True:
    begun = time.perf_counter()
    while time.perf_counter() - begun < 0.01:
        pass
    time.sleep(float(sys.argv[1]))
"""


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return a row for each task and hook, and for a task beside other processes."""
    link, rounds = LinkSettings() if why_not() else LinkSettings(kind="hosts"), 3 if quick else 30
    rows = []
    for task in ["gpt:size=tiny"] if quick else TASKS:
        for name, spec in HOOKS.items():
            tell(f"wakeups: three copies of {task} in turns, {name}")
            seconds = on_ranks(partial(_take_turns, task, spec, rounds), RANKS, tell, link=link)
            rows.append(beside("usual", f"{name}, {task}", "step time", seconds, _milliseconds, target=TARGET))
    return rows + ([] if quick else _loaded(rounds, tell))


def _loaded(rounds: int, tell: Tell) -> list[Row]:
    rows = []
    for name, spec in HOOKS.items():
        for load, pause in _LOADS.items():
            for is_bound in (False, True):
                what = f"{name}, {_LOADED_TASK}, beside {RANKS} {load}" + (", a core for each rank" if is_bound else "")
                tell(f"wakeups: {what}")
                take = partial(_take_turns, _LOADED_TASK, spec, rounds, is_bound=is_bound)
                with _other_processes(pause):
                    seconds = on_ranks(take, RANKS, tell)
                rows.append(beside("usual", what, "step time", seconds, _milliseconds))
    return rows


@contextmanager
def _other_processes(pause: float) -> Iterator[None]:
    """Run one other process for each rank, which computes and pauses for `pause` seconds after each 10 ms."""
    others = [subprocess.Popen([sys.executable, "-c", _PROGRAM, str(pause)]) for _ in range(RANKS)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _take_turns(task: str, spec: str, rounds: int, tell: Tell, *, is_bound: bool = False) -> Seconds:
    """Train three copies on one rank; return the seconds of a step."""
    if is_bound:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    make = partial(training_step, task, spec)
    steps: dict[str, Callable[[], None]] = {OURS: make()}
    for contender in (THEIRS, AGAIN):
        steps[contender] = _with_usual_threads(make)
    return in_turns(steps, rounds, calls=3)


def _with_usual_threads(make: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Return the result of `make`, whose new Gloo threads get the usual scheduling policy."""
    before = set(_gloo_threads())
    made = make()
    made()  # a group for sparse sums, or for some of the ranks, is opened in the first step that needs it
    for thread in set(_gloo_threads()) - before:
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    return made


def _gloo_threads() -> list[int]:
    """Return the threads of this process that carry collectives."""
    threads = Path("/proc/self/task").iterdir()
    return [int(thread.name) for thread in threads if (thread / "comm").read_text().strip() in _THREADS]
