"""What ranks tell each other, and how they end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from commhooks.communicators import failure_store
from commhooks.scheduling import worker
from tests.world import Outcome
from tests.world.rank import exit_like_a_script


def of_every_rank(value: Any) -> list[Any]:
    """Return what every rank passes, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def exit_code_of_a_fork(run: Callable[[], object] = bool) -> int:
    """Fork this rank; the child runs something, and ends as a script does, with 7, or by a signal if it hangs."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        run()
        exit_like_a_script(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ask_briefly() -> None:
    """Give the peers of this rank less time to answer a roll call: the one that it asks is away on purpose."""
    failure_store.ANSWER_SECONDS = 0.4


def be_impatient() -> None:
    """Wait less for the peers of this rank, also for what they leave unfinished: its exit must not count."""
    ask_briefly()
    worker.PATIENCE_SECONDS = 0.3


def survived(outcome: Outcome) -> bool:
    """Return whether a rank whose peer was killed, or dropped its connections, came to its end by itself.

    In about 2 of 100 such ends Gloo never ends one of the survivors' collectives, though both peers are gone by then:
    most often on a busy machine, and with PyTorch 2.14 and newer. Its group cannot be destroyed; such a process leaves
    with exit code 1, and says why.
    """
    stuck = outcome.returned and outcome.exit_code == 1 and "a collective is still under way at exit" in outcome.output
    return outcome.ok or stuck
