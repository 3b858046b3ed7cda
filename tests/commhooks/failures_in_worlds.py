"""What the tests of failure run on every rank."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import os
import signal
import threading
import time
import weakref
from typing import Any

import torch

import commhooks
import ddp_core
from commhooks import AllReduce, BucketView, Compressor, Context, Exchange
from commhooks.hooks.sockets import COLLECTIVES_A_BUCKET
from tests.commhooks.models import Given, Shape, gradients_of, wrap
from tests.commhooks.workers import normal, zeros

GROUP_TIMEOUT = 50.0  # `run_world`'s
SHAPES: list[Shape] = [(40, 40)] * 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failing(Compressor):
    """Fail on rank 1, in step 2, at bucket 1, in one way or another; ask for a mean once, or twice in a row."""

    how: str
    rounds: int = 2
    stall_seconds: float = 3.0

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        fails = (context.rank, context.step, bucket.index) == (1, 2, 1)
        (tile,) = bucket.tiles
        if fails:
            self._fail()
        if self.rounds == 2:
            yield AllReduce(tile.part(), average=True)
        if fails and self.how == "None":
            yield None  # type: ignore[misc]  # '"yield" has type "None"'
        (mean,) = yield AllReduce(tile.part(), average=True, last=True)
        if fails and self.how == "raise late":
            raise ValueError("a compressor went wrong")
        tile.write(mean[1:] if fails and self.how == "shape" else mean)

    def _fail(self) -> None:
        if self.how == "raise":
            raise ValueError("a compressor went wrong")
        if self.how == "exit":
            raise SystemExit(3)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "stall":
            time.sleep(self.stall_seconds)


@dataclasses.dataclass(frozen=True)
class Told:
    """What became of one training on one rank."""

    error: str = "nothing"
    text: str = ""
    next_text: str = ""
    """What the step after the one that failed was told."""
    seconds: float = 0.0


def failures(rank: int, kind: str, policy: str, ways: list[tuple[str, int]]) -> list[Told]:
    """Fail in each way, with compressors of one round or of two, on one model after another."""
    return [fail(rank, kind, policy, Failing(how=how, rounds=rounds)) for how, rounds in ways]


def fail(rank: int, kind: str, policy: str, compressor: Failing, hook_timeout: float | None = None) -> Told:
    """Train until it fails."""
    model = wrap(kind, Given(*SHAPES), bucket_cap_mb=0.01)
    commhooks.attach(model, compressor, policy=policy, hook_timeout=hook_timeout)
    if isinstance(model, ddp_core.DistributedDataParallel):
        registered = model.reducer.hook
        assert registered is not None
        assert registered.timeout == (GROUP_TIMEOUT if hook_timeout is None else hook_timeout) * COLLECTIVES_A_BUCKET
    for step in range(4):
        begun = time.monotonic()
        try:
            model(*normal(zeros(*SHAPES), 4, seed=step)[rank]).backward()
        except Exception as error:
            seconds = time.monotonic() - begun
            return Told(type(error).__name__, str(error), _text_of_another_step(model, rank), seconds)
    return Told()


def _text_of_another_step(model: torch.nn.Module, rank: int) -> str:
    try:
        model(*normal(zeros(*SHAPES), 4, seed=9)[rank]).backward()
    except Exception as error:
        return str(error)
    return "nothing"


def killed_at_any_time(rank: int, kind: str, policy: str, delay_seconds: float) -> Told:
    """Train until a separate thread kills rank 1, this long after the second step."""
    model = wrap(kind, Given(*SHAPES), bucket_cap_mb=0.01)
    commhooks.attach(model, commhooks.make_compressor("powersgd", rank=2), policy=policy)
    gradients = normal(zeros(*SHAPES), 4, seed=0)[rank]
    for step in itertools.count():
        if (rank, step) == (1, 2):
            threading.Timer(delay_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        begun = time.monotonic()
        try:
            model(*gradients).backward()
        except Exception as error:
            seconds = time.monotonic() - begun
            return Told(type(error).__name__, str(error), _text_of_another_step(model, rank), seconds)
    raise AssertionError("steps came to an end")


def inf_on_one_rank(rank: int, kind: str) -> tuple[list[bool], float]:
    """Spoil one gradient of rank 1 in step 2; return which steps were finite, and how far the end is off."""
    models = [wrap(kind, Given(*SHAPES), bucket_cap_mb=0.01) for _ in range(2)]
    for model in models:
        commhooks.attach(model, commhooks.make_compressor("powersgd", rank=2))
    finite, distance = [], math.inf
    for step in range(5):
        gradients = normal(zeros(*SHAPES), 2, seed=step)[rank]
        if step != 2:
            models[1](*gradients).backward()
        elif rank == 1:
            gradients = [torch.full_like(g, math.inf) for g in gradients]
        models[0](*gradients).backward()
        finite.append(all(bool(torch.isfinite(g).all()) for g in gradients_of(models[0])))
        if step != 2:
            pairs = zip(gradients_of(models[0]), gradients_of(models[1]), strict=True)
            distance = max(float((a - b).abs().max()) for a, b in pairs)
        for model in models:
            model.zero_grad()
    return finite, distance


def forgotten(rank: int, kind: str) -> bool:
    """Drop a model with its attachment; return whether its thread and its memory are gone."""
    before = threading.active_count()
    model = wrap(kind, Given(*SHAPES))
    attachment: Any = commhooks.attach(model, "powersgd")
    for step in range(3):
        model(*normal(zeros(*SHAPES), 2, seed=step)[rank]).backward()
    gone = weakref.ref(attachment)
    del attachment
    gc.collect()
    assert gone() is not None, "it lives as long as the model"
    del model
    deadline = time.monotonic() + 5  # the thread may still be on its way out of the last task
    while time.monotonic() < deadline and (gone() is not None or threading.active_count() > before):
        gc.collect()
        time.sleep(0.01)
    return gone() is None and threading.active_count() == before


def ends_without_a_word(rank: int, how: str) -> None:
    """Exit in all the ways in which scripts exit, with a scheduler's thread idle; the world checks the exit code."""
    model = wrap("core", Given(*SHAPES), bucket_cap_mb=0.01)
    global _kept
    _kept = (model, commhooks.attach(model, "powersgd"))
    for step in range(2):
        model(*normal(zeros(*SHAPES), 2, seed=step)[rank]).backward()
    if how == "destroy":
        torch.distributed.destroy_process_group()


_kept: Any = None
