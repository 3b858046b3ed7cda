"""The growth of the cost with the work: the exponent of each curve, fitted by least squares in logarithms."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

import commhooks
from commhooks.experiments.hooks import make_hook
from commhooks.experiments.launch import Tell
from commhooks.experiments.report.words import seconds_in_words
from commhooks.experiments.results.summary import Spread
from commhooks.experiments.specs import Spec
from commhooks.experiments.training.registration import wrap_in_ddp
from commhooks.lockstep import average_in_lockstep, lockstep_connections
from experiments.studies.bench.given import forward_and_backward
from experiments.studies.bench.rows import EXPONENT, Row
from experiments.studies.ranks import on_ranks
from experiments.studies.turns import as_given, in_turns, turns_of

SENTENCE = (
    "The exponent of the cost as the work grows: 1 means that twice the work takes twice the time. Parameters come in "
    "matrices of 1,000×1,000, compressed by a worker that is alone; buckets of 160 kB each are averaged on a single "
    "rank by `ddp_core`, whose backward pass is part of it; ranks are workers of one process, each with a gradient of "
    "a million parameters, of which one worker's compute counts; r is PowerSGD's rank, for four matrices of "
    "1,024×1,024. CPU time on one thread. The message that fp16 allocates anew in every step, the allocator "
    "asks of the system if it is above 32 MiB, that is beyond 16 million parameters. And a million parameters fit in "
    "the caches."
)
TARGET = 1.03
COPY = "a copy"
HOOKS = ("all-reduce", "fp16", "int8", "top-k:ratio=0.01", "powersgd:rank=4")
Curve = Mapping[int, Sequence[float]]
"""The seconds of each round, by size."""


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return a row for each curve."""
    curves = on_ranks(partial(_measure_all, quick), 1, tell)
    copying = curves.pop(COPY)
    return [row_of(name, curve, copying if name.startswith("parameters") else None) for name, curve in curves.items()]


def row_of(name: str, curve: Curve, copying: Curve | None = None) -> Row:
    """Return the row of a curve's exponent, with a copy's exponent over the same sizes as its noise, if given."""
    first, *_, last = (Spread.of(seconds).median for seconds in curve.values())
    noise = None if copying is None else exponent_of(copying)
    return Row(
        name=name,
        quantity=f"from {min(curve):,} to {max(curve):,}",
        unit=EXPONENT,
        spread=exponent_of(curve),
        noise=noise,
        target=TARGET,
        absolute=f"{seconds_in_words(first)} to {seconds_in_words(last)}",
    )


def exponent_of(curve: Curve) -> Spread:
    """Return the slope of log(seconds) over log(size), round by round."""
    sizes = np.log(np.array(list(curve), dtype=float))
    return Spread.of([float(np.polyfit(sizes, np.log(seconds), 1)[0]) for seconds in zip(*curve.values(), strict=True)])


def _measure_all(quick: bool, tell: Tell) -> dict[str, Curve]:
    rounds = 2 if quick else 3
    millions = (1, 2, 4) if quick else (1, 3, 10, 30, 100, 200)
    tell("growth: parameters")
    curves: dict[str, Curve] = {}
    largest = torch.randn(max(millions) * 1_000_000)
    for text in (COPY, *(HOOKS[-1:] if quick else HOOKS)):
        tell(f"growth: parameters, {text}")
        name = COPY if text == COPY else f"parameters in millions: {text}"
        curves[name] = _curve(millions, rounds, partial(_worker_alone, text, largest))
    del largest
    tell("growth: buckets")
    for text in ("all-reduce", "powersgd:rank=4"):
        sizes = (1, 3) if quick else (1, 4, 16, 64, 200)
        curves[f"buckets: {text}"] = _curve(sizes, 4 * rounds, partial(_buckets, text))
    tell("growth: ranks")
    for text in HOOKS[-1:] if quick else HOOKS:
        workers = {count: _workers(text, count) for count in ((2, 3) if quick else (2, 3, 4, 6, 8))}
        curves[f"ranks: {text}"] = turns_of(workers, 2 * rounds, warm_up=2, order=as_given)
    tell("growth: PowerSGD's rank")
    curves["rank r: powersgd"] = _curve((1, 2, 4) if quick else (1, 2, 4, 8, 16, 32), 4 * rounds, _powersgd)
    return curves


def _curve(sizes: Sequence[int], rounds: int, make: Callable[[int], Callable[[], object]]) -> Curve:
    """Return the CPU seconds of the function that `make` returns for each size, in turns."""
    return in_turns({size: make(size) for size in sizes}, rounds, warm_up=1, clock=time.process_time)


def _worker_alone(text: str, memory: Tensor, millions: int) -> Callable[[], object]:
    """Return a function that averages this many million parameters among one worker, or copies them."""
    part = memory[: millions * 1_000_000]
    if text == COPY:
        return partial(torch.empty_like(part).copy_, part)
    matrices = part.view(millions, 1000, 1000)
    return _averaging(text, {f"layer{number}": matrix for number, matrix in enumerate(matrices)})


def _powersgd(rank: int) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    like = {f"layer{number}": torch.randn(1024, 1024, generator=generator) for number in range(4)}
    return _averaging(f"powersgd:rank={rank}", like)


def _averaging(text: str, gradients: Mapping[str, Tensor]) -> Callable[[], object]:
    """Return a function that averages these gradients, in place, among one worker."""
    (connection,) = lockstep_connections(1)
    exchanger = commhooks.Exchanger(gradients, make_hook(Spec.parse(text)), connection=connection)
    return partial(average_in_lockstep, [exchanger], [dict(gradients)])


def _buckets(text: str, count: int) -> Callable[[], object]:
    """Return a function that runs a backward pass with `count` buckets, on a single rank."""
    model = nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(count)))
    ddp = wrap_in_ddp(model, "core", 0.15)
    commhooks.attach(ddp, make_hook(Spec.parse(text)))
    return partial(forward_and_backward, ddp, torch.randn(8, 200))


def _workers(text: str, count: int) -> Callable[[], float]:
    """Return a function that averages among `count` workers, and returns the mean seconds of a worker's compression."""
    gradients = [torch.randn(1000, 1000, generator=torch.Generator().manual_seed(worker)) for worker in range(count)]
    hook = make_hook(Spec.parse(text))
    exchangers = [
        commhooks.Exchanger({"layer": gradients[0]}, hook, connection=connection)
        for connection in lockstep_connections(count)
    ]
    return partial(_compute_of, exchangers, gradients)


def _compute_of(exchangers: Sequence[commhooks.Exchanger], gradients: Sequence[Tensor]) -> float:
    average_in_lockstep(exchangers, [{"layer": own.clone()} for own in gradients])
    return sum(one.last_step().seconds_compressing for one in exchangers) / len(exchangers)
