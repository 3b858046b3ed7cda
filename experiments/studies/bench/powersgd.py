"""PowerSGD against the memory traffic that it cannot avoid, and against PyTorch's hook."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as stock

import commhooks
from commhooks.experiments.launch import Tell, environment
from commhooks.experiments.results.summary import Spread
from commhooks.native import compiled
from commhooks.native.library import VARIABLE
from experiments.studies.bench.codecs import TITLES
from experiments.studies.bench.copies import EAGER, TINY, between_copies
from experiments.studies.bench.given import GPT_SHAPES, GivenBucket, Shape, resnet18_shapes
from experiments.studies.bench.rows import Row
from experiments.studies.ranks import on_ranks
from experiments.studies.turns import turns_of

SENTENCE = (
    "The time of `powerSGD_hook` in a backward pass, over that of moving 28 bytes an element: "
    "the gradient and the residual are read and M is written (12), M is read again for Q (4), and once more at the "
    "end, where residual and mean are written (12). The limit is 3.5 times one copy of the whole model's gradients, "
    "which moves 8 bytes an element; each call is timed between three such copies and three more, whose median is its "
    "unit, and calls take turns in drawn order. On one thread it is CPU time, on two wall time, since CPU time would "
    "count both. "
    "At each level of the compiled passes that this processor has, and without them (*eager*); *PyTorch's* is its hook "
    "over the same limit, and *over PyTorch's* ours at the highest level over that, where there is one bucket: with "
    "two, its hook fails on Gloo. ResNet-18 is that for CIFAR, 11.2 million parameters, and GPT four layers of width "
    "768, 28.3 million."
)
COPIES = 28 / 8
RANKS = (4, 1, 2, 8)
MODELS: Mapping[str, Sequence[Shape]] = {"ResNet-18": resnet18_shapes(), "GPT": GPT_SHAPES}
BUCKETS = (1, 4)
THEIRS, OVER_THEIRS = "PyTorch's", "over PyTorch's"
_AVX = {1: 1.3, 2: 1.3, 4: 1.3, 8: 1.8}
TARGETS: Mapping[str, Mapping[int, float]] = {
    "avx512": _AVX | {8: 1.5},
    "avx2": _AVX,
    "sse42": dict.fromkeys(RANKS, 1.8),
}
"""The targets of each level and rank, over the limit."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What takes turns: the hook at several levels, and PyTorch's, on the same gradients."""

    rank: int
    model: str
    shapes: Sequence[Shape]
    buckets: int
    threads: int
    columns: tuple[str, ...]  # levels, and THEIRS

    def __str__(self) -> str:
        """Return the name of its rows."""
        return f"rank {self.rank}, {self.model}, {self.buckets} bucket{'s' if self.buckets > 1 else ''}"

    def title(self, column: str) -> str:
        """Return the heading of a level's column."""
        return TITLES.get(column, column) + (f", {self.threads} threads" if self.threads > 1 else "")

    def target(self, column: str) -> float | None:
        """Return the target at a level; GPT's matrices are larger, so that rank 8 costs it less."""
        if column == "avx512" and self.model == "GPT":
            return 1.3
        return TARGETS.get(column, {}).get(self.rank)


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return a row for each rank, model, number of buckets, and column."""
    rows = []
    for threads in (1, 2):
        chosen = _cases(quick, threads)
        take = partial(_take_turns, chosen, 2 if quick else 10)
        found = on_ranks(take, 1, tell, variables={"OMP_NUM_THREADS": str(threads)})
        rows += [row for case, copies in zip(chosen, found, strict=True) for row in rows_of(case, copies)]
    return rows


def _cases(quick: bool, threads: int) -> list[Case]:
    levels = [level for level in TITLES if level in compiled().levels] + [EAGER]
    models, ranks = ({"tiny": TINY}, RANKS[:1]) if quick else (MODELS, RANKS)
    chosen = []
    for buckets, rank, (model, shapes) in itertools.product(BUCKETS, ranks, models.items()):
        columns = (*levels[: 1 if threads > 1 else None], *([THEIRS] if buckets == 1 else []))
        chosen.append(Case(rank=rank, model=model, shapes=shapes, buckets=buckets, threads=threads, columns=columns))
    return chosen


def rows_of(case: Case, copies: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return a row for each column, and one for the ratio of the first level to PyTorch's hook."""
    rows = [
        Row(
            name=str(case),
            quantity=case.title(column),
            spread=Spread.of([one / COPIES for one in taken]),
            target=case.target(column),
        )
        for column, taken in copies.items()
    ]
    first = case.columns[0]
    if THEIRS in copies and first != THEIRS:
        over = [ours / theirs for ours, theirs in zip(copies[first], copies[THEIRS], strict=True)]
        rows.append(Row(name=str(case), quantity=case.title(OVER_THEIRS), spread=Spread.of(over)))
    return rows


def _take_turns(cases: Sequence[Case], rounds: int, tell: Tell) -> list[dict[str, list[float]]]:
    found = []
    for case in cases:
        tell(f"powersgd: {case}, {', '.join(map(case.title, case.columns))}")
        torch.set_num_threads(case.threads)
        called = _Called(case)
        turns = {column: partial(called.turn, column) for column in case.columns}
        found.append(turns_of(turns, rounds, warm_up=4))
    return found


class _Called:
    """Both hooks, called in a backward pass, and the gradients that they average."""

    def __init__(self, case: Case) -> None:
        parts = divided(case.shapes, case.buckets)
        self._buckets = [
            GivenBucket([torch.zeros(shape) for shape in part], number, is_last=number == len(parts) - 1)
            for number, part in enumerate(parts)
        ]
        self._gradient = torch.randn(sum(bucket.buffer().numel() for bucket in self._buckets))
        self._room = torch.empty_like(self._gradient)
        self._ours = commhooks.PowerSGDState(None, case.rank, start_powerSGD_iter=2)
        self._theirs = stock.PowerSGDState(None, case.rank, start_powerSGD_iter=2)
        self._clock = time.process_time if case.threads == 1 else time.perf_counter

    def turn(self, column: str) -> float:
        """Call PyTorch's hook, or ours at this level; return what it takes in copies."""
        sizes = [bucket.buffer().numel() for bucket in self._buckets]
        for bucket, gradient in zip(self._buckets, self._gradient.split(sizes), strict=True):
            bucket.buffer().copy_(gradient)
        call = partial(_in_a_backward_pass, partial(self._call, column == THEIRS))
        with environment({} if column == THEIRS else {VARIABLE: column}):
            return between_copies(call, partial(self._room.copy_, self._gradient), self._clock)

    def _call(self, is_theirs: bool) -> None:
        hook: Any = stock.powerSGD_hook if is_theirs else commhooks.powerSGD_hook
        state = self._theirs if is_theirs else self._ours
        for future in [hook(state, bucket) for bucket in self._buckets]:
            future.wait()


def divided(shapes: Sequence[Shape], buckets: int) -> list[list[Shape]]:
    """Return the shapes in order, in buckets of about as many elements."""
    sizes = [math.prod(shape) for shape in shapes]
    middles = [before + size / 2 for before, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)]
    numbers = [int(buckets * middle / sum(sizes)) for middle in middles]
    return [
        [shape for shape, place in zip(shapes, numbers, strict=True) if place == one] for one in sorted(set(numbers))
    ]


def _in_a_backward_pass(call: Callable[[], None]) -> None:
    """Call a function from within a backward pass, as DDPs call hooks."""
    leaf = torch.zeros((), requires_grad=True)
    leaf.register_hook(lambda _: call())
    leaf.clone().backward()
