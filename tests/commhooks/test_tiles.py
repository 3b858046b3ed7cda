"""What COMMHOOKS_CHECK_TILES, which all tests run under, finds in a compressor: memory used after it was reused."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks import CommHooksError, ErrorFeedback, PerParameter, make_compressor
from commhooks.communicators.collective import Collective
from commhooks.communicators.lockstep import LockstepCommunicator, LockstepPending
from commhooks.language import AllReduce, BucketView, Compressor, Context, Exchange, Judge, Loss, Slot, lending
from commhooks.language.tile import to_form
from tests.commhooks.workers import Workers, normal, zeros

FINE = torch.ones((), dtype=torch.bool)


def in_order(slots: Sequence[Slot]) -> None:
    for slot in slots:
        slot.keep(slot.form() * 0.5, FINE)
        slot.write(slot.room.fill_(1.0))


def kept_after_another_was_formed(slots: Sequence[Slot]) -> None:
    formed = [slot.form() for slot in slots]
    for slot, M in zip(slots, formed, strict=True):
        slot.keep(M, FINE)


def written_after_another_was_computed(slots: Sequence[Slot]) -> None:
    means = [slot.room.fill_(number) for number, slot in enumerate(slots)]
    for slot, mean in zip(slots, means, strict=True):
        slot.write(mean)


def formed_after_it_was_written(slots: Sequence[Slot]) -> None:
    for slot in slots:
        slot.write(torch.ones_like(slot.room))
        slot.keep(slot.form() * 0.5, FINE)


def formed_by_passes_after_it_was_written(slots: Sequence[Slot]) -> None:
    for slot in slots:
        slot.write(torch.ones_like(slot.room))
        to_form([slot.tile])


def kept_after_it_was_overwritten(slots: Sequence[Slot]) -> None:
    for slot in slots:
        M = slot.form()
        slot.write(torch.ones_like(M))
        slot.keep(M, FINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Using(Compressor):
    """Averages nothing, and uses its tiles as it is told."""

    use: Callable[[Sequence[Slot]], None]

    def loss(self, name: str, parameter: Tensor) -> Loss:
        return Loss(0.25)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        yield AllReduce(bucket.slots[0].part(torch.zeros(1)), last=True)
        yield Judge()
        self.use(bucket.slots)


def run(use: Callable[[Sequence[Slot]], None], dtype: torch.dtype) -> None:
    workers = Workers(ErrorFeedback(inner=Using(use=use)), 1, zeros((4,), (4,), dtype=dtype))
    workers.step(normal(workers.parameters, 1, seed=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_used_in_order_passes(dtype: torch.dtype) -> None:
    run(in_order, dtype)


@pytest.mark.parametrize(
    ("use", "dtype", "message"),
    [
        (kept_after_another_was_formed, torch.bfloat16, "what is kept lies in memory that another tile has used"),
        (written_after_another_was_computed, torch.bfloat16, "what is written lies in memory that another tile"),
        (formed_after_it_was_written, torch.float32, "a gradient was formed again after its mean had taken its place"),
        (formed_after_it_was_written, torch.bfloat16, "a gradient was formed again after its mean had taken its place"),
        (formed_by_passes_after_it_was_written, torch.float32, "a gradient was formed again after its mean had taken"),
        (kept_after_it_was_overwritten, torch.float32, "what is kept was overwritten by the mean before"),
    ],
)
def test_what_is_used_out_of_order_raises(
    use: Callable[[Sequence[Slot]], None], dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(CommHooksError, match=message):
        run(use, dtype)


def test_a_training_run_does_not_check_and_tests_do() -> None:
    script = "from commhooks.language import lending; print(lending.IS_CHECKED)"
    environment = {name: value for name, value in os.environ.items() if name != "COMMHOOKS_CHECK_TILES"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False" and os.environ["COMMHOOKS_CHECK_TILES"] == "1" and lending.IS_CHECKED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breaking(Compressor):
    """Raises before its first request."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        if context.step == 2:
            raise ValueError("broken")
        yield AllReduce(bucket.slots[0].part(torch.zeros(1)), last=True)


def of_first(workers: Workers) -> dict[tuple[str, str], Tensor]:
    """Return copies of the first worker's state."""
    state = workers.states[0]
    named = zip(workers.names, workers.parameters, strict=True)
    return {(name, key): own.clone() for name, p in named for key, own in state.of(p).tensors.items()}


@pytest.mark.parametrize("policy", ["fifo", "fused"])
@pytest.mark.parametrize("name", ["int8", "sign", "top-k", "per-parameter", "atomic", "unused"])
def test_state_that_was_overwritten_before_a_verdict_that_never_comes_is_put_back(
    name: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 fails at each of its collectives in turn: the state of the worker that fails is as it was."""
    made = make_compressor(name if name in ("sign", "top-k") else "int8")
    if name == "per-parameter":  # the other rule fails when this one has overwritten its residuals
        made = PerParameter(rules=(("layer0", made),), otherwise=Breaking())
    settings: dict[str, Any] = {"atomic": {"atomic": True}, "unused": {"may_be_unused": True}}.get(name, {})
    collectives = LockstepCommunicator.start
    for done in itertools.count():
        workers = Workers(
            made, 2, zeros((64, 256), (32, 512)), policy=policy, buckets=1 + (policy == "fused"), **settings
        )
        for step in range(2):
            workers.step(normal(workers.parameters, 2, seed=step))
        before, left = of_first(workers), [done]

        def start(end: LockstepCommunicator, collective: Collective, left: list[int] = left) -> LockstepPending:
            left[0] -= end.rank == 0
            if left[0] < 0 and name != "per-parameter":
                raise ValueError("broken")
            return collectives(end, collective)

        monkeypatch.setattr(LockstepCommunicator, "start", start)
        try:
            workers.step(normal(workers.parameters, 2, seed=2))
        except CommHooksError:
            after = of_first(workers)
            assert before and [key for key, own in before.items() if not torch.equal(own, after[key])] == [], done
        else:
            break
        finally:
            monkeypatch.undo()
        if name == "per-parameter":
            break
    assert done or name == "per-parameter"
