"""A script that trains two models on one rank, is forked at several moments, and prints what became of each child."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import commhooks
from tests.commhooks.models import Given, wrap

SHAPES = [(40, 40)] * 3
CHILD_SECONDS = 10


def fork() -> int:
    """Fork; the child is ended after a while, even if it hangs."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_SECONDS)
    return child


def in_a_fork(run: Callable[[], object]) -> int:
    """Run something in a forked process that ends by `sys.exit(7)`, and return its exit code."""
    child = fork()
    if child == 0:
        run()
        sys.exit(7)
    return exit_code_of(child)


def exit_code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Training:
    """A model with a compressor attached, and what children do with it."""

    def __init__(self, kind: str) -> None:
        self.model = wrap(kind, Given(*SHAPES), bucket_cap_mb=0.005)
        self.attachment = commhooks.attach(self.model, commhooks.make_compressor("powersgd", rank=2))
        self.gradients = [torch.randn(shape) for shape in SHAPES]
        self.children: list[int] = []

    def step(self) -> None:
        self.model(*self.gradients).backward()

    def step_and_drop(self) -> None:
        try:
            self.step()
        except Exception as error:
            print("told:", str(error).splitlines()[0], flush=True)
        self.attachment.detach()
        del self.model, self.attachment

    def fork_in_the_next_step(self) -> None:
        next(self.model.parameters()).register_hook(self._fork_once)

    def _fork_once(self, _: torch.Tensor) -> None:
        if not self.children:
            self.children.append(fork())
            if self.children[0] == 0:
                sys.exit(7)


def main(store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, 1), rank=0, world_size=1)
    core, torchs = Training("core"), Training("torch")
    for _ in range(3):
        core.step()
        torchs.step()
    print("trains and drops:", in_a_fork(core.step_and_drop), flush=True)
    torchs.fork_in_the_next_step()
    torchs.step()
    print("in mid-step:", exit_code_of(torchs.children[0]), flush=True)
    for training in (core, torchs):
        training.step()
    print("the parent trained on", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
