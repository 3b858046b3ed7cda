"""What a training step takes if Gloo's event loop does not interrupt other threads, over what it takes if it does."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ..cluster import why_not
from ..launch import Send
from ..links.link import LinkSettings
from .real_step import training_step
from .rows import AGAIN, OURS, THEIRS, Row, beside
from .timing import Seconds, Tell, in_turns, on_ranks

SENTENCE = (
    "A training step on 2 ranks of one thread each, by `ddp_core`, on two hosts (network namespaces) whose link has no "
    "limit, or on the loopback where there can be none: over the private group of `attach`, whose event loop "
    "interrupts no other thread when it wakes up, against the same with the kernel's usual policy (`SCHED_OTHER`). "
    "Noise: the usual policy against itself, by another copy of the model."
)
TARGET = 1.0
RANKS = 2
TASKS = ("digits:size=medium", "gpt:size=medium")
HOOKS = {"all-reduce": "all-reduce", "fp16": "fp16", "PowerSGD, rank 4": "powersgd:rank=4"}
_THREADS = {"gloo_tcp_loop", "pt_gloo_runloop"}  # what Gloo and PyTorch call them


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return a row for each task and hook."""
    link = LinkSettings() if why_not() else LinkSettings(kind="hosts")
    rows = []
    for task in ["gpt:size=tiny"] if quick else TASKS:
        for name, spec in HOOKS.items():
            tell(f"wakeups: three copies of {task} in turns, {name}")
            asked = (task, spec, 3 if quick else 30)
            (seconds,) = on_ranks(_take_turns, RANKS, asked, tell, link=link)
            rows.append(beside("usual", f"{name}, {task}", "step time", seconds, _milliseconds, target=TARGET))
    return rows


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _take_turns(rank: int, ranks: int, asked: tuple[str, str, int], send: Send) -> None:
    """Train three copies on one rank; rank 0 sends the seconds of a step."""
    torch.set_num_threads(1)
    task, spec, rounds = asked
    steps: dict[str, Callable[[], None]] = {OURS: training_step(task, spec, rank, ranks)}
    for contender in (THEIRS, AGAIN):
        steps[contender] = _with_usual_threads(partial(training_step, task, spec, rank, ranks))
    seconds: Seconds = in_turns(steps, rounds, calls=3)
    if rank == 0:
        send(seconds)


def _with_usual_threads(make: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Return what is made, with the usual policy for Gloo's threads that came with it."""
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
