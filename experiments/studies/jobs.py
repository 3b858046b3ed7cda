"""Independent jobs, such as training runs in lockstep, divided among processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from commhooks.experiments.launch import Send, run_world

SILENCE_SECONDS = 900.0  # after which the processes count as stuck: the slowest job takes less than a minute


class Job(Protocol):
    """One piece of work, which can be sent to another process."""

    def run(self) -> object:
        """Do the work, with one thread, and return its result, which is sent back."""


def run_jobs(
    jobs: Sequence[Job], processes: int, on_result: Callable[[object], None], *, alone: Sequence[Job] = ()
) -> None:
    """Run the jobs and pass on each result as it comes.

    Args:
        jobs: The jobs, in any order.
        processes: The number of processes that share the jobs. With 1, the jobs run in this process.
        on_result: Called in this process with each result.
        alone: Jobs that measure time: they run one after the other once all others are done.

    Raises:
        WorldError: A job raised an error in a process, or a process died or fell silent.

    """
    if processes == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for job in (*jobs, *alone):
                on_result(job.run())
        finally:
            torch.set_num_threads(threads)
    else:
        run_world(_share, processes, (jobs, alone), on_result, timeout=SILENCE_SECONDS)


def _share(process: int, processes: int, work: tuple[Sequence[Job], Sequence[Job]], send: Send) -> None:
    """Do this process's share of the jobs; when all are done, the first process does the jobs that run alone."""
    torch.set_num_threads(1)
    jobs, alone = work
    for job in jobs[process::processes]:
        send(job.run())
    dist.barrier()
    for job in alone if process == 0 else ():
        send(job.run())
