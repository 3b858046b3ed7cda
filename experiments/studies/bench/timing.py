"""Taking turns: contenders are timed one after another within each round, so that other load meets all of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from experiments.launch import RankFunction, environment, run_on_link
from experiments.links.link import LinkSettings

Tell = Callable[[str], None]
_KEEPS_FREED = {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_THRESHOLD_": "4294967296"}

Seconds = dict[str, list[float]]
"""By contender: what each round's turn took."""


def in_turns(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    calls: int = 1,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    prepare: Callable[[str], object] | None = None,
) -> Seconds:
    """Return the seconds of a call, for every contender and round.

    The order is drawn anew for each round, the same on all ranks. Ranks begin a turn together, and it counts as it was
    on the slowest.

    Args:
        contenders: What is called, by name.
        rounds: How many turns of each count.
        calls: How often a contender is called in a turn. Higher: less spread, but slower changes of the machine show.
        warm_up: Rounds that do not count.
        clock: Of the process that calls this; `time.process_time` counts all its threads, and nothing that others do.
        prepare: Called with the contender's name before each turn, outside the time taken.

    """
    order, drawn = list(contenders), random.Random(0)
    seconds: Seconds = {name: [] for name in contenders}
    for _ in range(warm_up + rounds):
        drawn.shuffle(order)
        for name in order:
            if prepare is not None:
                prepare(name)
            if dist.is_initialized():
                dist.barrier()  # also waits for what another turn's threads have left to do
            begun = clock()
            for _ in range(calls):
                contenders[name]()
            seconds[name].append((clock() - begun) / calls)
    return {name: _of_slowest(taken[warm_up:]) for name, taken in seconds.items()}


def on_ranks(
    function: RankFunction,
    ranks: int,
    argument: Any,
    tell: Tell,
    *,
    link: LinkSettings | None = None,
    keeps_freed: bool = False,
) -> list[Any]:
    """Call `function(rank, ranks, argument, send)` in new processes; tell texts that they send, and return the rest.

    With `keeps_freed`, memory that a rank frees stays with it. Whole models' gradients, freed in every step, would
    otherwise cost one contender or another page faults by chance; a hook's own temporaries should cost what they do.
    """
    with environment(_KEEPS_FREED if keeps_freed else {}):
        return run_on_link(function, ranks, argument, link or LinkSettings(), tell)


def _of_slowest(seconds: list[float]) -> list[float]:
    if not dist.is_initialized():
        return seconds
    together = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    slowest: list[float] = together.tolist()
    return slowest


def pooled(launches: Sequence[Seconds]) -> Seconds:
    """Return the rounds of all launches: processes differ in where their memory lies, which no further round shows."""
    return {name: [taken for launch in launches for taken in launch[name]] for name in launches[0]}
