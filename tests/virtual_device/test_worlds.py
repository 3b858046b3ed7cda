"""Ranks in lockstep on the virtual device compute what they compute on the CPU."""

from __future__ import annotations

import pytest
import torch

import commhooks
from commhooks.devices import wait_for_device
from tests.commhooks.models import Shape
from tests.commhooks.workers import Workers, normal, zeros
from tests.virtual_device import begin, report
from tests.virtual_device.worlds import DeviceWorld, see, steps

pytestmark = pytest.mark.virtual_device

SHAPES: list[Shape] = [(30, 50), (50,), (40, 30), (1,), (16, 24), (7,)]
GRADIENTS = [normal(zeros(*SHAPES), 2, seed=step) for step in range(3)]


@pytest.mark.parametrize("compressor", ["all-reduce", "top-k"])
def test_a_world_on_devices_computes_what_workers_on_the_cpu_do(compressor: str) -> None:
    workers = Workers(commhooks.make_compressor(compressor), 2, zeros(*SHAPES), buckets=3)
    expected = [mean for given in GRADIENTS for own in workers.step(given) for mean in own]
    for run in ("eager", "late", "random:1"):
        seen = see(lambda: steps(lambda: DeviceWorld(commhooks.make_compressor(compressor), 2, SHAPES), GRADIENTS), run)
        assert not seen.error
        assert all(torch.equal(*pair) for pair in zip(seen.values, expected, strict=False))
        assert len(seen.values) >= len(expected)
        assert seen.races == ()
        assert not seen.waits
        assert seen.kernels > 100


def test_the_host_waits_for_the_device_that_it_names_whichever_is_the_current_one() -> None:
    begin("late")
    read = torch.zeros(3, pin_memory=True)
    with torch.cuda.device(1):
        read.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    wait_for_device(torch.device("cuda", 1))
    assert read.tolist() == [1.0] * 3
    assert report().races == ()
