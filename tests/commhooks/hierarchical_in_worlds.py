"""What the tests of machines run on every rank."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks import BucketView, Context, Exchange, Hierarchical, SettingsError, make_compressor
from commhooks.language.compressor import map_requests
from commhooks.language.requests import Asked
from commhooks.wrappers.wrapper import Wrapper
from tests.cases import BY_NAME
from tests.commhooks.inline_on_cpu import as_on_nccl
from tests.commhooks.mirrored import SHAPES, Mirrored, largest_error
from tests.commhooks.models import Given, wrap
from tests.commhooks.workers import normal, zeros


def like_lockstep(rank: int, kind: str, policy: str) -> list[str]:
    """Run machines of two over Gloo, with several buckets and randomly delayed ranks; list what differs from lockstep.

    Every group has two ranks, and a sum of two has one order.
    """
    differ = []
    dawdling = random.Random(rank)
    for name in ("powersgd-2", "top-k", "two-hop-sign"):
        both = Mirrored(kind, Hierarchical(inner=BY_NAME[name].make(), size=2), policy, 4)
        for step in range(3):
            time.sleep(dawdling.random() * 0.02)
            ours, expected = both.step(normal(zeros(*SHAPES), 4, seed=step))
            if not all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)):
                differ.append(f"{name}, step {step}: {largest_error(ours, expected)}")
        counted, simulated = both.attachment.statistics(), both.workers.traffic
        assert counted.by_group == simulated.by_group and counted.by_group.keys() == {"inner", "outer"}
        both.attachment.detach()
    return differ


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dying(Wrapper):
    """Kill rank 3 in some step, just before the request of this number in the first bucket."""

    step: int
    number: int

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        is_time = (dist.get_rank(), context.step, bucket.index) == (3, self.step, 0)
        yield from map_requests(_Countdown(self.number if is_time else -1).carry, self.inner.compress(bucket, context))


class _Countdown:
    def __init__(self, left: int) -> None:
        self.left = left

    def carry(self, asked: Asked) -> Generator[Asked, Any, Any]:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return (yield asked)


def killed(rank: int, kind: str, policy: str, dies_in: int, number: int) -> tuple[float, str]:
    """Train until rank 3 is killed; return after how many seconds the step raised, and what."""
    shapes = [(40, 40)] * 6
    model = wrap(kind, Given(*shapes), bucket_cap_mb=0.01)
    machines = Hierarchical(inner=make_compressor("powersgd", rank=2), size=2)
    commhooks.attach(model, Dying(inner=machines, step=dies_in, number=number), policy=policy)
    for step in range(4):
        begun = time.monotonic()
        try:
            model(*normal(zeros(*shapes), 4, seed=step)[rank]).backward()
        except Exception as error:
            return time.monotonic() - begun, str(error)
    return 0.0, "nothing"


def refused(rank: int) -> str:
    """Attach machines of two to three ranks; return what that raises. The model still accepts a valid compressor."""
    model = wrap("core", Given((4, 4)))
    with pytest.raises(SettingsError) as raised:
        commhooks.attach(model, Hierarchical(inner=make_compressor("powersgd"), size=2))
    attachment = commhooks.attach(model, Hierarchical(inner=make_compressor("powersgd"), size=3))
    model(torch.ones(4, 4)).backward()
    with pytest.raises(SettingsError, match="must be a multiple of size"):
        attachment.replace(Hierarchical(inner=make_compressor("powersgd"), size=2))
    model(torch.ones(4, 4)).backward()
    return str(raised.value)


def refused_on_nccl(rank: int) -> str:
    """Attach machines as on NCCL, and put them in the place of something else; return what either raises."""
    machines = Hierarchical(inner=make_compressor("powersgd"), size=2)
    model = wrap("core", Given((4, 4)))
    with as_on_nccl():
        with pytest.raises(SettingsError) as raised:
            commhooks.attach(model, machines)
        attachment = commhooks.attach(model, "powersgd")
        with pytest.raises(SettingsError) as again:
            attachment.replace(machines)
        with pytest.raises(SettingsError):
            commhooks.Exchanger({"a": torch.zeros(3)}, machines)
        model(torch.ones(4, 4)).backward()
    assert str(raised.value) == str(again.value)
    return str(raised.value)
