"""Ranks of `commhooks.experiments.launch` that the server of `tests.world` forks: it has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import SimpleNamespace

from tests.world.launcher import ensure_server


class ForkedRank(ForkServerProcess):
    """A process in the environment of its start, as a spawned one is, rather than in that of the server's start."""

    def start(self) -> None:
        ensure_server()
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.update(self.environment)
        super().run()


class ForkingContext(ForkServerContext):
    """Stands for `multiprocessing.get_context("spawn")`."""

    Process = ForkedRank


def forking() -> SimpleNamespace:
    """Return what stands for `multiprocessing` where ranks are to be forked."""
    return SimpleNamespace(**vars(multiprocessing) | {"get_context": lambda _: ForkingContext()})
