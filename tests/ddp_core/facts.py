"""Several facts about ranks in one world: starting the processes is most of a small test's time.

A fact is a function of the rank that asserts something. Facts run in turn on every rank; the first that fails fails
its own test, and those after it are reported as not run. With kinds, such as those of `BOTH_DDPS`, each has a world,
and a fact is a function of rank and kind. One that has a parameter `folder` is given an empty one, the same on every
rank.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.world import WorldError, run_world

Fact = Callable[..., None]
MARK = "fact: "
BOTH_DDPS = ("core", "torch")


class Facts:
    """The facts of one world; decorate them with it, and write ``test = facts.tests()`` below the last."""

    def __init__(self, world_size: int = 2, *, kinds: Sequence[str] = (), **options: Any) -> None:
        self.world_size = world_size
        self.kinds = kinds
        self.options = options
        self.functions: list[Fact] = []
        self.of_first: list[Fact] = []

    def __call__(self, fact: Fact) -> Fact:
        """Add a fact."""
        self.functions.append(fact)
        return fact

    def once(self, fact: Fact) -> Fact:
        """Add a fact that is no matter of kinds: the first one's world has it."""
        self.of_first.append(fact)
        return fact

    def world_of(self, kind: str) -> list[Fact]:
        """Return the facts of the world of one kind."""
        return self.functions + self.of_first * (not self.kinds or kind == self.kinds[0])

    @functools.cache  # noqa: B019  # 'can lead to memory leaks': as many as there are worlds
    def failure(self, kind: str) -> tuple[int, str] | None:
        """Run all facts; return the position of the first that failed, and why."""
        own = [kind] * bool(self.kinds)
        try:
            with tempfile.TemporaryDirectory() as folder:
                run_world(run_in_turn, self.world_size, self.world_of(kind), folder, *own, **self.options)
        except WorldError as error:
            failed = [outcome.output for outcome in error.outcomes if not outcome.ok]
            reached = [output.count(MARK) - 1 for output in failed]
            return max(0, min(reached)), str(error)
        return None

    def tests(self) -> Callable[..., None]:
        """Return one test per fact."""
        rows = [
            pytest.param(kind, position, id="-".join(filter(None, [fact.__name__, kind * (fact in self.functions)])))
            for kind in self.kinds or [""]
            for position, fact in enumerate(self.world_of(kind))
        ]

        @pytest.mark.parametrize(("kind", "position"), rows)
        def test(kind: str, position: int) -> None:
            failure = self.failure(kind)
            if failure is None or position < failure[0]:
                return
            first, why = failure
            if position > first:
                pytest.fail(f"not run: {self.world_of(kind)[first].__name__} failed before it", pytrace=False)
            pytest.fail(why, pytrace=False)

        return test


def run_in_turn(rank: int, facts: Sequence[Fact], folder: str, *kind: str) -> None:
    """Run every fact on this rank."""
    for fact in facts:
        print(f"{MARK}{fact.__name__}", flush=True)
        torch.manual_seed(0)
        wanted = inspect.signature(fact).parameters
        own = {"folder": Path(folder, fact.__name__)} if "folder" in wanted else {}
        for path in own.values():
            path.mkdir(exist_ok=True)
        fact(rank, *kind[: "kind" in wanted], **own)
