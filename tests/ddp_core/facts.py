"""Several facts about ranks in one world: starting the processes is most of a small test's time.

A fact is a function of the rank that asserts something. Facts run in turn on every rank; the first that fails fails
its own test, and those after it are reported as not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.world import WorldError, run_world

Fact = Callable[[int], None]
MARK = "fact: "


class Facts:
    """The facts of one world; decorate them with it, and write ``test = facts.tests()`` below the last."""

    def __init__(self, world_size: int = 2, **options: Any) -> None:
        self.world_size = world_size
        self.options = options
        self.functions: list[Fact] = []

    def __call__(self, fact: Fact) -> Fact:
        """Add a fact."""
        self.functions.append(fact)
        return fact

    @functools.cached_property
    def failure(self) -> tuple[int, str] | None:
        """Run all facts; return the position of the first that failed, and why."""
        try:
            run_world(run_in_turn, self.world_size, self.functions, **self.options)
        except WorldError as error:
            failed = [outcome.output for outcome in error.outcomes if not outcome.ok]
            reached = [output.count(MARK) - 1 for output in failed]
            return max(0, min(reached)), str(error)
        return None

    def tests(self) -> Callable[..., None]:
        """Return one test per fact."""

        @pytest.mark.parametrize("position", range(len(self.functions)), ids=[f.__name__ for f in self.functions])
        def test(position: int) -> None:
            if self.failure is None or position < self.failure[0]:
                return
            first, why = self.failure
            if position > first:
                pytest.fail(f"not run: {self.functions[first].__name__} failed before it", pytrace=False)
            pytest.fail(why, pytrace=False)

        return test


def run_in_turn(rank: int, facts: Sequence[Fact]) -> None:
    """Run every fact on this rank."""
    for fact in facts:
        print(f"{MARK}{fact.__name__}", flush=True)
        torch.manual_seed(0)
        fact(rank)
