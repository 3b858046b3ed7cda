"""PowerSGD's memory: what it keeps, and what a step takes beside it, compared with PyTorch's own hook."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import commhooks
from commhooks.scheduling.lockstep import run_in_turns
from experiments.studies.bench.given import Shape
from tests.cases import BY_NAME, CASES, Case, forms_first
from tests.commhooks.workers import GivenBucket, Workers, normal, zeros
from tests.tiers import A_ROW, in_turn

MIXED: list[Shape] = [(200, 300), (200, 300), (300,), (64, 24, 3, 3)]


class NewMemory(TorchDispatchMode):
    """Note the largest memory that an operation makes, and how much of what was made lives at the same time, at most.

    What an operation takes and gives back inside is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest_bytes = 0
        self.peak_bytes = 0
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {a.untyped_storage().data_ptr() for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)}
        result = func(*args, **(kwargs or {}))
        self._living = {place: made for place, made in self._living.items() if not made[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage(), given)
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._living.values()))
        return result

    def _note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        place = storage.data_ptr()
        if place not in given and place not in self._living:
            self._living[place] = (StorageWeakRef(storage), storage.nbytes())
            self.largest_bytes = max(self.largest_bytes, storage.nbytes())


def step_as_it_is(workers: Workers) -> None:
    """Average what the workers' only buckets hold, and copy nothing in or out."""
    for engine, memory in zip(workers.engines, workers.memories, strict=True):
        engine.run(GivenBucket(0, memory, workers.parameters, is_last=True))
    run_in_turns(workers.connections)


DTYPES = [torch.float32, torch.bfloat16]
POWERSGD = [case for case in CASES if case.name.startswith("powersgd")]


@pytest.mark.parametrize(("case", "dtype"), in_turn(POWERSGD, DTYPES), ids=str)
def test_a_steady_step_makes_nothing_of_a_gradients_size(case: Case, dtype: torch.dtype) -> None:
    """Its largest memory is a message, of every matrix's factors; the smallest matrix here is 13,824 elements."""
    workers = Workers(case.make(), 2, zeros(*MIXED, dtype=dtype))
    gradients = normal(workers.parameters, 2, seed=0)
    for _ in range(2):
        workers.step(gradients)
    with NewMemory() as memory:
        step_as_it_is(workers)
    itemsize = max(4, dtype.itemsize)
    assert 0 < memory.largest_bytes < itemsize * 6000
    whole = itemsize * sum(p.numel() for p in workers.parameters)
    assert memory.peak_bytes < whole / 3


STARTING = dataclasses.replace(
    BY_NAME["powersgd-2"],
    name="powersgd-1-before-2",
    make=lambda: commhooks.StartAfter(
        before=commhooks.make_compressor("powersgd"), inner=BY_NAME["powersgd-2"].make(), steps=9
    ),
)


@A_ROW
@pytest.mark.parametrize("case", [*forms_first(CASES), STARTING], ids=str)
def test_buckets_that_were_dealt_anew_leave_nothing_behind(case: Case) -> None:
    """Also if nobody collects cycles, as in loops that collect at moments of their own choice."""
    workers = Workers(case.make(), 2, zeros(*MIXED), atomic=case.error_feedback)
    workers.step(normal(workers.parameters, 2, seed=0))
    gc.collect()
    gc.disable()
    try:
        views = [weakref.ref(view) for engine in workers.engines for view in engine.buckets.views()]
        memories = [StorageWeakRef(memory.untyped_storage()) for memory in workers.memories]
        workers.deal([[1, 3], [0, 2]])
        for step in range(2):
            workers.step(normal(workers.parameters, 2, seed=step))
        assert len(views) == 2 and all(view() is None for view in views)
        assert len(memories) == 2 and all(memory.expired() for memory in memories)
    finally:
        gc.enable()


SETTINGS: list[dict[str, Any]] = [{}, {"rank": 4}, {"alternating": True}, {"skip": ("layer0", "layer1?")}]
