"""Turns: contenders act one after another within each round, so that other load affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from commhooks.experiments.turns import drawn, on_slowest

__all__ = ["Order", "drawn", "forth_and_back", "in_turns", "on_slowest", "rotated", "turns_of"]

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Order = Callable[[int, list[Any]], Sequence[Any]]
"""A function from a round's number and the contenders' names to the order of its turns."""


def forth_and_back(number: int, names: list[K]) -> Sequence[K]:
    """Return the order as given, and reversed in every second round."""
    return names if number % 2 == 0 else names[::-1]


def rotated(number: int, names: list[K]) -> Sequence[K]:
    """Return the names rotated by the round's number, so that each is first equally often."""
    first = number % len(names)
    return names[first:] + names[:first]


def turns_of(
    contenders: Mapping[K, Callable[[], T]],
    rounds: int,
    *,
    warm_up: int = 0,
    order: Order = drawn,
    tell: Callable[[str], None] | None = None,
) -> dict[K, list[T]]:
    """Return every contender's results, one for each round.

    Args:
        contenders: The functions to call, by name.
        rounds: The number of turns of each that count.
        warm_up: The number of rounds before these, which do not count; their numbers are negative.
        order: The order of the turns in each round.
        tell: Called after each round with a text for progress.

    """
    found: dict[K, list[T]] = {name: [] for name in contenders}
    for number in range(-warm_up, rounds):
        for name in order(number, list(contenders)):
            value = contenders[name]()
            if number >= 0:
                found[name].append(value)
        if tell is not None:
            tell(f"  warming up, {-number} to go" if number < 0 else f"  {number + 1} of {rounds} turns")
    return found


def in_turns(
    contenders: Mapping[K, Callable[[], object]],
    rounds: int,
    *,
    calls: int = 1,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    prepare: Callable[[K], object] | None = None,
    tell: Callable[[str], None] | None = None,
) -> dict[K, list[float]]:
    """Return the seconds of a call, for every contender and round.

    Ranks begin a turn together, and the slowest rank's time counts.

    Args:
        contenders: The functions to call, by name.
        rounds: The number of turns of each that count.
        calls: The number of calls of a contender in a turn. Higher: less spread, but slower changes of the machine
            show.
        warm_up: The number of rounds before these, which do not count.
        clock: The clock of this process; `time.process_time` counts all its threads, and no other process.
        prepare: Called with the contender's name before each turn; its time does not count.
        tell: Called after each round with a text for progress.

    """

    def seconds_of(name: K) -> float:
        if prepare is not None:
            prepare(name)
        if dist.is_initialized():
            dist.barrier()  # also waits for what another turn's threads have left to do
        begun = clock()
        for _ in range(calls):
            contenders[name]()
        return (clock() - begun) / calls

    turns = {name: partial(seconds_of, name) for name in contenders}
    taken = turns_of(turns, rounds, warm_up=warm_up, tell=tell)
    return {name: on_slowest(seconds) for name, seconds in taken.items()}
