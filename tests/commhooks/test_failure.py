"""A failure on one rank soon reaches every rank, in words."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import os
import re
import signal
import threading
import weakref
from typing import Any

import pytest

import commhooks
import ddp_core
from commhooks.hooks.hook_functions import COLLECTIVES_A_BUCKET
from commhooks.language import AllReduce, BucketView, Compressor, Context, Exchange
from tests.commhooks.mirrored import backward
from tests.commhooks.models import Given, Shape, wrap
from tests.commhooks.ranks import survived
from tests.commhooks.told import Told, told_by
from tests.commhooks.workers import normal, zeros
from tests.ddp_core.facts import BOTH_DDPS
from tests.tiers import in_turn
from tests.waiting import until
from tests.world import on_ranks, run_world_outcomes, tell
from tests.world.launcher import HANG_SECONDS

CAUSES = {
    "raise": "ValueError: a compressor went wrong",
    "raise late": "ValueError: a compressor went wrong",
    "exit": "SystemExit: 3",
    "None": "the compressor asked for something that is not a request (got None)",
    "shape": "a mean of shape (3199,) was written for gradients of shape (3200,)",
}
SHAPES: list[Shape] = [(40, 40)] * 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failing(Compressor):
    """Fail on rank 1, in step 2, at bucket 1, in one way or another; ask for a mean once, or twice in a row."""

    how: str
    rounds: int = 2

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


def fail(rank: int, kind: str, policy: Any, compressor: Failing) -> tuple[Told, Told]:
    """Train until it fails; return what that step and the one after it told."""
    model = wrap(kind, Given(*SHAPES), bucket_cap_mb=0.01)
    commhooks.attach(model, compressor, policy=policy)
    if isinstance(model, ddp_core.DistributedDataParallel):
        registered = model.reducer.hook
        assert registered is not None and registered.timeout == HANG_SECONDS * COLLECTIVES_A_BUCKET
    for step in range(4):
        run = functools.partial(backward, model, normal(zeros(*SHAPES), 4, seed=step)[rank])
        if (told := told_by(run)).error != "nothing":
            again = told_by(run)
            tell(rank)
            return told, again
    raise AssertionError("nothing failed")


def fail_in_each_way(rank: int, kind: str, policy: str) -> None:
    """Fail with compressors of one round or of two, on one model after another."""
    for how, rounds in itertools.product(CAUSES, (1, 2)):
        (told, again), cause = fail(rank, kind, policy, Failing(how=how, rounds=rounds)), CAUSES[how]
        # What fails after its last collective kept nobody waiting: the others hear of it when they next wait.
        step = "2" if rank == 1 or how in ("raise", "exit", "None") else "[23]"
        assert re.search(f"rank {rank}, step {step}, bucket ", told.text), (how, rounds)
        assert "rank 1, step 2, bucket 1 (parameters weights." in told.text and cause in told.text, (how, rounds)
        assert cause in again.text, (how, rounds)
        if kind == "core":  # PyTorch's reducer knows RuntimeError only
            assert told.error == ("CompressorError" if rank == 1 else "CollectiveError"), (how, rounds)


@pytest.mark.parametrize(("kind", "policy"), in_turn(BOTH_DDPS, ("fused", "fifo")))
def test_a_compressor_that_fails_on_one_rank_is_named_on_every_rank(kind: str, policy: str) -> None:
    for outcome in run_world_outcomes(fail_in_each_way, 3, kind, policy, check_exit=True):
        assert survived(outcome), outcome.describe()


@on_ranks(2, check_exit=False)
def test_an_attachment_that_nobody_uses_any_more_is_collected_with_its_thread(rank: int) -> None:
    for kind in BOTH_DDPS:
        before = threading.active_count()
        model = wrap(kind, Given(*SHAPES))
        attachment: Any = commhooks.attach(model, "powersgd")
        for step in range(3):
            model(*normal(zeros(*SHAPES), 2, seed=step)[rank]).backward()
        gone = weakref.ref(attachment.engine)
        del attachment
        gc.collect()
        assert gone() is not None, "it lives as long as the model"
        del model
        # The thread may still be on its way out of the last task.
        assert until(lambda gone=gone, before=before: _is_collected(gone) and threading.active_count() == before)  # type: ignore[misc]


def _is_collected(gone: weakref.ref[Any]) -> bool:
    return gc.collect() >= 0 and gone() is None


@pytest.mark.parametrize(("kind", "policy"), in_turn(BOTH_DDPS, ("fifo", "fused")))
def test_when_a_rank_is_killed_the_others_raise(kind: str, policy: str) -> None:
    killer = Failing(how="kill", rounds=1 if policy == "fifo" else 2)
    outcomes = run_world_outcomes(fail, 3, kind, policy, killer)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert survived(outcome), outcome.describe()
        told, again = outcome.value
        assert f"rank {outcome.rank}, step 2, bucket " in told.text and "parameters weights." in told.text, told.text
        assert "No answer from rank 1." in told.text and "No answer from rank 1." in again.text, told
