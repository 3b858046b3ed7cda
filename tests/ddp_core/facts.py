"""Several facts about ranks in one world, since starting the processes is most of a small test's time.

A fact is a function of the rank that asserts something; one with a parameter `folder` is given an empty one. The first
that fails fails its own test, and those after it are reported as not run.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiers import THOROUGH
from tests.world import WorldError, run_world
from tests.world.leftovers import defaults

Fact = Callable[..., None]
Call = tuple[Fact, tuple[Any, ...]]
MARK = "fact: "
BOTH_DDPS = ("core", "torch")


class Facts:
    """The facts of a world; decorate them with it, and write ``test = facts.tests()`` below the last.

    kinds: each has a world of its own, in which facts that have a second parameter `kind` are given it.
    turns: values that those facts take turns with that have a second parameter, such as policies. `make test` runs
        each with one of them, in one world; `make test-all` with the others too, in as many worlds more.
    """

    def __init__(
        self, world_size: int = 2, *, kinds: Sequence[str] = (), turns: Sequence[Any] = (), **options: Any
    ) -> None:
        assert not (kinds and turns), "a world is of a kind, or of a turn"
        self.world_size = world_size
        self.kinds = kinds
        self.turns = turns
        self.options = options
        self.functions: list[Fact] = []
        self.of_first: list[Fact] = []
        self._failures: dict[int, tuple[int, str] | None] = {}

    def __call__(self, fact: Fact) -> Fact:
        """Add a fact."""
        self.functions.append(fact)
        return fact

    def once(self, fact: Fact) -> Fact:
        """Add a fact that is no matter of kinds: the first one's world has it."""
        self.of_first.append(fact)
        return fact

    def calls(self, world: int) -> list[Call]:
        """Return what one of the worlds runs: each fact, and what it is given beside the rank."""
        first = [(fact, ()) for fact in self.of_first] if world == 0 else []
        if self.kinds:
            return [(fact, (self.kinds[world],)) for fact in self.functions] + first
        calls: list[Call] = []
        for number, fact in enumerate(self.functions):
            if self.turns and len(inspect.signature(fact).parameters) > 1:
                calls.append((fact, (self.turns[(number + world) % len(self.turns)],)))
            elif world == 0:
                calls.append((fact, ()))
        return calls + first

    def failure(self, world: int) -> tuple[int, str] | None:
        """Run all facts of a world, once; return the position of the first that failed, and why."""
        if world not in self._failures:
            found = None
            own = self.kinds[world : world + 1]  # by which the launcher knows a world with PyTorch's class
            try:
                with tempfile.TemporaryDirectory() as folder:
                    run_world(run_in_turn, self.world_size, self.calls(world), folder, *own, **self.options)
            except WorldError as error:
                failed = [outcome.output for outcome in error.outcomes if not outcome.ok]
                reached = [output.count(MARK) - 1 for output in failed]
                at = max(0, min(reached))
                found = at if at < len(self.calls(world)) else 0, str(error)  # what shows at the end is no one fact's
            self._failures[world] = found
        return self._failures[world]

    def tests(self) -> Callable[..., None]:
        """Return one test for each fact and kind or turn."""
        rows = [
            pytest.param(world, position, marks=THOROUGH if world and self.turns else (), id=name_of(call))
            for world in range(max(1, len(self.kinds), len(self.turns)))
            for position, call in enumerate(self.calls(world))
        ]

        @pytest.mark.parametrize(("world", "position"), rows)
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
    """Return the name of a fact, with what it is given."""
    fact, arguments = call
    return "-".join([fact.__name__, *map(str, arguments)])


def run_in_turn(rank: int, calls: Sequence[Call], folder: str, *_kind: str) -> None:
    """Run every fact on this rank."""
    for call in calls:
        print(f"{MARK}{name_of(call)}", flush=True)
        torch.manual_seed(0)
        fact, arguments = call
        before = defaults()
        wanted = inspect.signature(fact).parameters
        if "folder" in wanted:
            own = Path(folder, fact.__name__)
            own.mkdir(exist_ok=True)
            arguments = (*arguments, own)
        fact(rank, *arguments)
        assert defaults() == before, "it changes what the facts after it run with"
    print(f"{MARK}none is left", flush=True)
