"""The split of a step: every moment counts once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commhooks.experiments.devices import Stopwatch
from commhooks.experiments.links.waits import WaitClock
from commhooks.experiments.training.measure import StepClock


def test_a_step_is_split_into_parts_that_add_up() -> None:
    now = [0.0]
    waits = WaitClock(clock=lambda: now[0])
    model = nn.Linear(2, 2)

    def buffers(module: nn.Module, inputs: object) -> None:
        waits.note(now[0], now[0] + 0.5)
        now[0] += 0.5

    ddp = nn.Sequential(model)
    ddp.register_forward_pre_hook(buffers)  # as a DDP waits for them: when it is called, before it calls the model
    clock = StepClock(ddp, model, waits, Stopwatch(clock=waits.clock))
    clock.begin()
    now[0] = 1.0  # the loss prepares its batch
    loss = ddp(torch.ones(1, 2)).sum()
    now[0] = 3.0  # and calls the model twice
    loss = loss + ddp(torch.ones(1, 2)).sum()
    now[0] = 5.0  # forward and backward
    loss.backward()
    waits.note(4.5, 5.5)  # half of it hidden behind the backward pass
    waits.note(6.0, 8.0)
    waits.note(6.5, 7.5)  # beside another: every moment counts once
    now[0] = 9.0
    clock.backward_ended()
    now[0] = 10.0  # the optimizer
    split = clock.end()
    clock.remove()
    assert (split.compute, split.waiting, split.compression, split.hidden) == (5.0, 3.5, 1.5, 0.5)
    assert split.compute + split.waiting + split.compression == pytest.approx(split.seconds)
