"""Several facts about ranks in one world: starting the processes is most of a small test's time.

A fact is a function of the rank that asserts something. Facts run in turn on every rank; the first that fails fails
its own test, and those after it are reported as not run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.tiers import THOROUGH
from tests.world import WorldError, run_world

Fact = Callable[..., None]
Call = tuple[Fact, tuple[Any, ...]]
MARK = "fact: "


class Facts:
    """The facts of one world; decorate them with it, and write ``test = facts.tests()`` below the last.

    turns: values that those facts take turns with that have a second parameter, such as policies. `make test` runs
        each with one of them, in one world; `make test-all` with the others too, in as many worlds more.
    """

    def __init__(self, world_size: int = 2, turns: Sequence[Any] = (), **options: Any) -> None:
        self.world_size = world_size
        self.turns = turns
        self.options = options
        self.functions: list[Fact] = []
        self._failures: dict[int, tuple[int, str] | None] = {}

    def __call__(self, fact: Fact) -> Fact:
        """Add a fact."""
        self.functions.append(fact)
        return fact

    def calls(self, world: int) -> list[Call]:
        """Return what one of the worlds runs: each fact with its turn, and those without one in the first world."""
        calls: list[Call] = []
        for number, fact in enumerate(self.functions):
            if len(inspect.signature(fact).parameters) > 1:
                calls.append((fact, (self.turns[(number + world) % len(self.turns)],)))
            elif world == 0:
                calls.append((fact, ()))
        return calls

    def failure(self, world: int) -> tuple[int, str] | None:
        """Run all facts of a world, once; return the position of the first that failed, and why."""
        if world not in self._failures:
            self._failures[world] = None
            try:
                run_world(run_in_turn, self.world_size, self.calls(world), **self.options)
            except WorldError as error:
                failed = [outcome.output for outcome in error.outcomes if not outcome.ok]
                reached = [output.count(MARK) - 1 for output in failed]
                self._failures[world] = max(0, min(reached)), str(error)
        return self._failures[world]

    def tests(self) -> Callable[..., None]:
        """Return one test for each fact and turn."""
        of_worlds = [(world, self.calls(world)) for world in range(max(1, len(self.turns)))]

        @pytest.mark.parametrize(
            ("world", "position"),
            [
                pytest.param(world, position, marks=THOROUGH if world else (), id=name_of(call))
                for world, calls in of_worlds
                for position, call in enumerate(calls)
            ],
        )
        def test(world: int, position: int) -> None:
            failure = self.failure(world)
            if failure is None or position < failure[0]:
                return
            first, why = failure
            if position > first:
                pytest.fail(f"not run: {name_of(self.calls(world)[first])} failed before it", pytrace=False)
            pytest.fail(why, pytrace=False)

        return test


def name_of(call: Call) -> str:
    """Return the name of a fact, with its turn."""
    fact, arguments = call
    return "-".join([fact.__name__, *map(str, arguments)])


def run_in_turn(rank: int, calls: Sequence[Call]) -> None:
    """Run every fact on this rank."""
    for call in calls:
        print(f"{MARK}{name_of(call)}", flush=True)
        torch.manual_seed(0)
        fact, arguments = call
        fact(rank, *arguments)
