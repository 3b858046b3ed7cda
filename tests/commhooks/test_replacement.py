"""One compressor takes over from another between steps."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commhooks
from commhooks import make_compressor
from tests.commhooks.mirrored import SHAPES, Mirrored, backward, given, largest_error
from tests.commhooks.models import digest_of
from tests.commhooks.ranks import be_impatient
from tests.commhooks.told import Told, told_by
from tests.commhooks.workers import mean_of, normal, zeros
from tests.ddp_core.facts import BOTH_DDPS
from tests.tiers import in_turn, thorough
from tests.world import on_ranks

POLICIES = ("fifo", "fused")
LOSS_OF_A_STEP = 8 * 2**-24 * 32
"""What a step may lose in fp32: means and residuals come of sums of at most 4 + 2 terms, none of them larger than the
norm of a column of gradient and residual, which is below 32."""
LOSS_OF_FP16 = 2**-9
"""What a step of fp16 may lose besides: half of the last digit of the sum on the wire, which is below 8. It is in no
rank's own cast, so in no residual. (Without error feedback nothing is lost: these gradients are whole 64ths.)"""
SEQUENCE = [
    make_compressor("fp16"),
    make_compressor("powersgd", rank=2),
    make_compressor("powersgd", rank=4),
    make_compressor("all-reduce"),
    make_compressor("fp16", error_feedback=True),
]
STEPS_OF_EACH = 3


@on_ranks(2, check_exit=True)
@pytest.mark.kernels
@pytest.mark.parametrize(("kind", "policy"), in_turn(BOTH_DDPS, POLICIES))
def test_compressors_that_take_over_from_each_other_are_what_they_are_in_lockstep_and_lose_nothing(
    rank: int, kind: str, policy: str
) -> list[bytes]:
    """Of one after another; return the digest of each step's means."""
    both = Mirrored(kind, SEQUENCE[0], policy)
    ledger = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    digests: list[bytes] = []
    owed_by_step: list[float] = []  # the mean residual's largest element
    for step in range(STEPS_OF_EACH * len(SEQUENCE)):
        if step and step % STEPS_OF_EACH == 0:
            both.replace(SEQUENCE[step // STEPS_OF_EACH])
        gradients = [[g.mul(64).round().div(64) for g in one] for one in normal(zeros(*SHAPES), 2, seed=step)]
        ours, expected = both.step(gradients)
        same = all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
        assert same, f"step {step}: {largest_error(ours, expected)}"
        for index, sent in enumerate(ours):
            ledger[index] += mean_of(gradients, index) - sent
        owed = [_mean_residual(both, parameter) for parameter in both.model.parameters()]
        digests.append(digest_of(ours))
        loss = largest_error(ledger, owed)  # of what was to be sent so far, less what was sent
        assert loss <= (step + 1) * LOSS_OF_A_STEP + max(step - 11, 0) * LOSS_OF_FP16, step
        owed_by_step.append(max(float(one.abs().max()) for one in owed))
    sent_dense, powersgd, waiting, last = owed_by_step[:3], owed_by_step[3:9], owed_by_step[9:12], owed_by_step[-1]
    assert sent_dense == [0.0] * 3 and min(powersgd) > 1
    assert waiting == powersgd[-1:] * 3  # nobody sends it, and nobody forgets it
    assert last < 2**-10  # the residual of a cast: of all that PowerSGD owed, nothing is left
    assert both.attachment.steps == STEPS_OF_EACH * len(SEQUENCE)
    both.attachment.close()
    return digests


def _mean_residual(both: Mirrored, parameter: Tensor) -> Tensor:
    kept = both.attachment.state.of(parameter).tensors.get("residual")
    total = torch.zeros(parameter.shape, dtype=torch.float64) if kept is None else kept.double().view(parameter.shape)
    dist.all_reduce(total)
    return total / 2


@on_ranks(2)
@pytest.mark.parametrize(("kind", "policy"), in_turn(BOTH_DDPS, POLICIES))
def test_a_replacement_that_cannot_be_is_refused_and_the_old_compressor_goes_on(
    rank: int, kind: str, policy: str
) -> None:
    both = Mirrored(kind, make_compressor("powersgd", rank=2), policy)
    told: dict[str, Told] = {}
    step = iter(range(20))

    def refused(what: str, compressor: Any) -> None:
        told[what] = told_by(lambda: both.attachment.replace(compressor))

    def demand_lockstep() -> None:
        ours, expected = both.step(normal(zeros(*SHAPES), 2, seed=next(step)))
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))

    demand_lockstep()
    for what, wrong in (
        ("skip", make_compressor("powersgd", rank=2, skip=("head.*",))), ("name", "powersdg"), ("type", 3)
    ):  # fmt: skip
        refused(what, wrong)
        demand_lockstep()
    last = next(both.model.parameters())  # its gradient comes last, when all buckets but one were handed in
    handle = last.register_hook(lambda _: refused("in mid-step", "fp16"))
    demand_lockstep()
    handle.remove()
    demand_lockstep()
    both.replace(make_compressor("bf16", error_feedback=True))
    demand_lockstep()
    both.attachment.close()
    refused("detached", "fp16")
    for what, error, words in (
        ("skip", "SettingsError", "'head.*' must match a parameter's name; there are weights.0, weights.1"),
        ("name", "SettingsError", "Did you mean 'powersgd'"),
        ("type", "SettingsError", "expected a Compressor or a name (got 3)"),
        ("in mid-step", "AttachError", "replace: step 4 is under way; call it between two steps"),
        ("detached", "AttachError", "replace: this attachment was closed"),
    ):
        assert told[what].error == error and words in told[what].text, told[what]


@on_ranks(3, check_exit=False)
@pytest.mark.parametrize("kind", thorough(BOTH_DDPS, unless="torch".__eq__))
def test_replacing_when_a_peer_has_detached_raises_at_once_and_so_does_the_next_step(rank: int, kind: str) -> None:
    model = given(kind)
    attachment = commhooks.attach(model, "powersgd")
    gradients = normal(zeros(*SHAPES), 3, seed=0)[rank]
    for _ in range(2):
        backward(model, gradients)
    if rank == 1:
        attachment.close()
        return
    for call in (functools.partial(attachment.replace, "fp16"), functools.partial(backward, model, gradients)):
        assert "replace before step 2: CollectiveError: barrier failed" in told_by(call).text


@on_ranks(2, check_exit=False)
@pytest.mark.parametrize(("kind", "policy"), in_turn(BOTH_DDPS, POLICIES))
def test_replacing_on_one_rank_only_is_named_on_every_rank_at_once(rank: int, kind: str, policy: Any) -> None:
    model = given(kind)
    attachment = commhooks.attach(model, "top-k", policy=policy)
    gradients = normal(zeros(*SHAPES), 2, seed=0)[rank]
    for _ in range(2):  # the second iteration begins with a collective of the DDP's own
        backward(model, gradients)
    told = told_by(lambda: attachment.replace("fp16") if rank else backward(model, gradients))
    assert "rank 1 calls replace before step 2, and this rank does not" in told.text


@contextlib.contextmanager
def interrupting() -> Iterator[None]:
    """Press Ctrl-C while the main thread waits in `agree`, until it is felt.

    Python loses one that comes just before its main thread goes to sleep, and what is raised where an object is
    finalised. So another one follows, but not at once: what the first one interrupted may be tidying up.
    """
    felt = -math.inf

    def interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal felt
        if waits_in_agree(frame) and time.monotonic() - felt > 5.0:
            felt = time.monotonic()
            raise KeyboardInterrupt

    def press() -> None:
        main = threading.main_thread().ident
        while not is_over.wait(0.02):
            if waits_in_agree(sys._current_frames()[main]):  # type: ignore[index]  # "int | None": it has begun
                os.kill(os.getpid(), signal.SIGINT)

    is_over = threading.Event()
    signal.signal(signal.SIGINT, interrupt)
    threading.Thread(target=press, daemon=True).start()
    yield
    is_over.set()


def waits_in_agree(frame: FrameType | None) -> bool:
    names = {one.f_code.co_name for one, _ in traceback.walk_stack(frame)}
    return {"agree", "result"} <= names


@on_ranks(2, check_exit=False)
def test_replacing_that_is_interrupted_on_one_rank_ends_the_line_on_every_rank(rank: int) -> None:
    """Rank 1 is interrupted while it waits for rank 0, which comes later and would go on with another compressor."""
    be_impatient()
    exchanger = commhooks.Exchanger({"w": torch.zeros(8)}, "random-k", hook_timeout=20.0)
    exchanger.average({"w": torch.ones(8)})
    store = dist.distributed_c10d._get_default_store()
    if rank:
        with interrupting(), pytest.raises(KeyboardInterrupt):
            exchanger.replace("random-k:seed=1")
        store.set("interrupted", "")
    else:
        while not store.check(["interrupted"]):
            time.sleep(0.02)
        told_by(lambda: exchanger.replace("random-k:seed=1"))
    told = told_by(lambda: exchanger.average({"w": torch.ones(8)}))
    assert "rank 1: replace before step 1 was interrupted" in told.text
    assert told.seconds < 20.0, "rank 0 waited for hook_timeout"
