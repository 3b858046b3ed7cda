"""What the tests of replacing a compressor between steps run on every rank."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import Tensor

import commhooks
from commhooks import make_compressor
from tests.commhooks.mirrored import SHAPES, Mirrored, backward, given, largest_error
from tests.commhooks.models import digest_of
from tests.commhooks.told import Told, told_by
from tests.commhooks.workers import mean_of, normal, zeros

SEQUENCE = [
    make_compressor("fp16"),
    make_compressor("powersgd", rank=2),
    make_compressor("powersgd", rank=4),
    make_compressor("all-reduce"),
    make_compressor("fp16", error_feedback=True),
]
STEPS_OF_EACH = 3


@dataclasses.dataclass(frozen=True)
class Replaced:
    """The outcome of a sequence of compressors on one rank."""

    digests: list[bytes]
    not_lockstep: list[str]
    losses: list[float]
    """By step: the largest element of what was to be sent so far, less what was sent, less the mean residual."""
    owed: list[float]
    """By step: the mean residual's largest element."""


def sequence(rank: int, kind: str, policy: str) -> Replaced:
    """Let one compressor after another take over, and record what was sent and what is left in residuals."""
    both = Mirrored(kind, SEQUENCE[0], policy)
    ledger = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    replaced = Replaced([], [], [], [])
    for step in range(STEPS_OF_EACH * len(SEQUENCE)):
        if step and step % STEPS_OF_EACH == 0:
            both.replace(SEQUENCE[step // STEPS_OF_EACH])
        gradients = [[g.mul(64).round().div(64) for g in one] for one in normal(zeros(*SHAPES), 2, seed=step)]
        ours, expected = both.step(gradients)
        if not all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)):
            replaced.not_lockstep.append(f"step {step}: {largest_error(ours, expected)}")
        for index, sent in enumerate(ours):
            ledger[index] += mean_of(gradients, index) - sent
        owed = [_mean_residual(both, parameter) for parameter in both.model.parameters()]
        replaced.digests.append(digest_of(ours))
        replaced.losses.append(largest_error(ledger, owed))
        replaced.owed.append(max(float(one.abs().max()) for one in owed))
    assert both.attachment.steps == STEPS_OF_EACH * len(SEQUENCE)
    both.attachment.detach()
    return replaced


def _mean_residual(both: Mirrored, parameter: Tensor) -> Tensor:
    kept = both.attachment.state.of(parameter).tensors.get("residual")
    total = torch.zeros(parameter.shape, dtype=torch.float64) if kept is None else kept.double().view(parameter.shape)
    dist.all_reduce(total)
    return total / 2


def refusals(rank: int, kind: str, policy: str) -> dict[str, Told]:
    """Request impossible replacements; after each, the old compressor must go on as if nothing had happened."""
    both = Mirrored(kind, make_compressor("powersgd", rank=2), policy)
    replace, told = both.attachment.replace, {}
    step = iter(range(20))

    def demand_lockstep() -> None:
        ours, expected = both.step(normal(zeros(*SHAPES), 2, seed=next(step)))
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))

    demand_lockstep()
    told["skip"] = told_by(lambda: replace(make_compressor("powersgd", rank=2, skip=("head.*",))))
    demand_lockstep()
    told["name"] = told_by(lambda: replace("powersdg"))
    demand_lockstep()
    told["type"] = told_by(lambda: replace(3))  # type: ignore[arg-type]  # 'expected "Compressor | str"'
    demand_lockstep()
    last = next(both.model.parameters())  # its gradient comes last, when all buckets but one were handed in
    handle = last.register_hook(lambda _: told.__setitem__("in mid-step", told_by(lambda: replace("fp16"))))
    demand_lockstep()
    handle.remove()
    demand_lockstep()
    both.replace(make_compressor("bf16", error_feedback=True))
    demand_lockstep()
    both.attachment.detach()
    told["detached"] = told_by(lambda: replace("fp16"))
    return told


def without_a_peer(rank: int, kind: str, how: str) -> tuple[Told, Told] | None:
    """Replace when rank 1 does not: it was killed, detached, or is late; return what this and the next step raise."""
    model = given(kind)
    attachment = commhooks.attach(model, "powersgd", hook_timeout=1.0 if how == "late" else None)
    gradients = normal(zeros(*SHAPES), dist.get_world_size(), seed=0)[rank]
    backward(model, gradients)
    backward(model, gradients)
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "detached":
            attachment.detach()
            return None
        time.sleep(4.0)
    told = told_by(functools.partial(attachment.replace, "fp16"))
    return told, told_by(functools.partial(backward, model, gradients))


def alone(rank: int, kind: str, policy: str, what: str) -> Told:
    """Replace on rank 1 only, or with a name that exists on rank 0 only; return what this or the next step raises."""
    model = given(kind)
    attachment = commhooks.attach(model, "top-k", policy=policy)
    gradients = normal(zeros(*SHAPES), 2, seed=0)[rank]
    for _ in range(2):  # the second iteration begins with a collective of the DDP's own
        backward(model, gradients)
    if what == "one rank" and rank == 0:
        return told_by(functools.partial(backward, model, gradients))
    name = "fp17" if what == "unknown name" and rank == 1 else "fp16"
    told = told_by(functools.partial(attachment.replace, name))
    if what == "unknown name":  # refused by both: the old compressor goes on
        assert attachment.compressor == make_compressor("top-k")
        backward(model, gradients)
    return told
