"""The cost of a compressor for workers of one process, in copies of the gradients, compiled and eager."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from commhooks.engine.engine import Engine
from commhooks.experiments.hooks import make_hook
from commhooks.experiments.launch import environment
from commhooks.experiments.results.summary import Spread
from commhooks.experiments.specs import Spec
from commhooks.lockstep import lockstep_connections
from commhooks.native.library import VARIABLE
from commhooks.scheduling.lockstep import run_in_turns
from experiments.studies.bench.given import GPT_SHAPES, GivenBucket, Shape, resnet18_shapes
from experiments.studies.turns import turns_of

EAGER = "off"
"""The word for eager passes, in place of a level."""
MODELS: Mapping[str, Sequence[Shape]] = {"ResNet-18": resnet18_shapes(), "GPT": GPT_SHAPES[:8]}
"""The gradients: ResNet-18 for CIFAR, 11.2 million, and one layer of a GPT of width 768, 7.1 million."""
TINY: Sequence[Shape] = [(64, 64), (64,)]
BESIDES: Mapping[str, float] = {
    "all-reduce": -8,  # the gradient is the message
    "adaptive-rank": 8,  # as for powersgd
    "powersgd": 8,  # M is written, read again for Q and once more at the end, so the old residual need not be kept
    "powersgd-unbiased": 4,  # the gradient is read again for Q
}
"""The bytes of an element that a compressor must move in addition to `Worked.floor`."""
_COPIES = 3  # on either side of what is timed
_APART = 4097  # elements between the workers' parts of one random vector
_WORD = 4  # bytes of an element


class Worked:
    """Workers of one process that average one bucket of gradients, each its own."""

    def __init__(self, text: str, shapes: Sequence[Shape], workers: int) -> None:
        spec = Spec.parse(text)
        compressor = make_hook(spec)
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self.connections = lockstep_connections(workers)
        self.engines = [Engine(compressor, connection) for connection in self.connections]
        for engine in self.engines:
            engine.bind([(f"layer{number}", parameter) for number, parameter in enumerate(parameters)])
        self.buckets = [GivenBucket(parameters) for _ in self.connections]
        elements = self.buckets[0].buffer().numel()
        drawn = torch.randn(elements + _APART * workers, generator=torch.Generator().manual_seed(0))
        self.gradients = [drawn[_APART * rank :][:elements] for rank in range(workers)]
        self._room = torch.empty(elements)
        self._besides = BESIDES.get(spec.name, 0)

    def step(self, level: str) -> float:
        """Average once with these compiled passes, or with `EAGER`; return what a worker takes, in copies.

        It is CPU time of this thread, so other processes disturb it only through caches and memory.
        """
        for bucket, gradient in zip(self.buckets, self.gradients, strict=True):
            bucket.buffer().copy_(gradient)
        with environment({VARIABLE: level}):
            copies = between_copies(self._average, partial(self._room.copy_, self.gradients[0]), time.thread_time)
        return copies / len(self.connections)

    def floor(self) -> float:
        """Return the least memory traffic of a worker's last step, in copies of 8 bytes an element.

        The gradient is read and the mean is written; state is read, and written to new memory while the old values are
        kept until all ranks have judged the step; sent messages are written, and received ones are read. So int8 with
        residuals on both hops moves 8 + 12 + 12/W bytes an element, and 1 + 1 + 1/W + 1 of codes: 3.1 copies among 8
        workers.
        """
        report, sent = self.engines[0].memory(), self.engines[0].statistics()
        moved: float = 2 * report.gradients + 3 * (report.residuals + report.bases)
        for kind, traffic in sent.by_kind.items():
            comes = len(self.connections) if kind == "all-gather" else 1
            moved += (1 + comes) * traffic.payload_bytes / sent.steps
        return (moved / len(self.gradients[0]) + self._besides) / (2 * _WORD)

    def _average(self) -> None:
        for engine, bucket in zip(self.engines, self.buckets, strict=True):
            engine.run(bucket)
        run_in_turns(self.connections)


def in_copies(worked: Worked, levels: Sequence[str], rounds: int) -> dict[str, Spread]:
    """Return a worker's cost of a step at each level, measured in turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = turns_of({level: partial(worked.step, level) for level in levels}, rounds, warm_up=1)
    finally:
        torch.set_num_threads(threads)
    return {level: Spread.of(ratios) for level, ratios in found.items()}


def between_copies(work: Callable[[], object], copy: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return what the work takes in copies: the unit is the median of those just before it and just after.

    Whatever slows down the memory for a while slows down both; a median, since a copy is short enough for one
    interruption to double it.
    """
    before = [_seconds(copy, clock) for _ in range(_COPIES)]
    taken = _seconds(work, clock)
    return taken / statistics.median(before + [_seconds(copy, clock) for _ in range(_COPIES)])


def _seconds(function: Callable[[], object], clock: Callable[[], float]) -> float:
    begun = clock()
    function()
    return clock() - begun
