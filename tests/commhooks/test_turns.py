"""Units of a line on NCCL that are issued before the host has read whose turn it is, and their means."""

from __future__ import annotations

import pytest
import torch

from commhooks.language.bucket import BucketView, Slot
from commhooks.language.entries import ParameterState
from commhooks.language.requests import Layout
from commhooks.scheduling import turns
from commhooks.scheduling.turns import Order, spoil

STEP = "ABBCABC"
"""The channels of a step's units; such as gathers for two passes, between which others come."""


def followed(order: Order, channels: str, steps: dict[str, int]) -> list[int]:
    """Let channels take their turns, a step of their own in each; return what the order says of each."""
    found = []
    for channel in channels:
        steps[channel] = steps.get(channel, -1) + 1
        found.append(order.follow(ord(channel), steps[channel], 0))
    return found


def test_an_order_repeats_the_last_round_until_a_unit_departs_from_it() -> None:
    order, steps = Order(), dict[str, int]()
    assert not any(followed(order, STEP, steps)[:5])  # then "AB" comes again
    followed(order, STEP, steps)
    for _ in range(3):
        assert followed(order, STEP, steps) == [len(STEP)] * len(STEP)
    skipping = followed(order, STEP.replace("C", ""), steps)
    assert skipping[:3] == [len(STEP)] * 3 and skipping[3] == 0
    with_another = [followed(order, STEP + "D", steps) for _ in range(4)]
    assert with_another[0][-1] == 0  # the new one
    assert with_another[3] == [len(STEP) + 1] * (len(STEP) + 1)


def test_a_step_that_is_not_the_next_one_departs_from_the_order() -> None:
    order = Order()
    for step in range(4):
        lengths = [order.follow(0, step, bucket) for bucket in range(3)]
    assert lengths == [3] * 3
    assert order.follow(0, 7, 0) == 0
    assert order.follow(0, 7, 2) == 0


def test_an_order_remembers_the_last_units_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_UNITS_TO_KEEP", 10)
    order, steps = Order(), dict[str, int]()
    for step in range(20):
        assert followed(order, STEP, steps) == [len(STEP)] * len(STEP) or step < 2
        assert len(order._units) <= 20
    for _ in range(3):
        assert not any(followed(order, "abcdefghijklmnopqrstu", steps))


def spoilt(bucket: BucketView) -> list[int]:
    """Return where a mean is NaN after it has been spoilt; before, nothing has changed without a reason."""
    mean = bucket.mean
    mean.fill_(-0.0)
    spoil(bucket, torch.tensor(False))
    assert torch.equal(torch.signbit(mean), torch.ones_like(mean, dtype=torch.bool)) and not mean.any()
    spoil(bucket, torch.tensor(True))
    return mean.isnan().nonzero().view(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_an_element_of_each_parameters_mean_is_spoilt(dtype: torch.dtype) -> None:
    memory, output = torch.zeros(9, dtype=dtype), torch.zeros(12, dtype=dtype)[3:]
    bounds = [(0, 4), (4, 4), (4, 9)]
    for mean in (memory, output):
        slots = [
            Slot(torch.zeros(end - begin), memory[begin:end], ParameterState(str(begin)), mean[begin:end])
            for begin, end in bounds
        ]
        bucket = BucketView(0, memory, slots, output=None if mean is memory else output)
        if dtype.is_complex:
            spoil(bucket, torch.tensor(True))
            assert mean.isnan().nonzero().view(-1).tolist() == [0, 4]
        else:
            assert spoilt(bucket) == [0, 4]


def test_an_element_of_each_parameters_shard_is_spoilt_and_of_each_gathered_parameter() -> None:
    rows, mean = torch.zeros(2, 5), torch.zeros(5)
    slots = [
        Slot(torch.zeros(2 * (end - begin)), rows[:, begin:end], ParameterState(str(begin)), mean[begin:end])
        for begin, end in [(0, 2), (2, 5)]
    ]
    assert spoilt(BucketView(0, rows, slots, output=mean)) == [0, 2]
    gathered = BucketView(0, torch.zeros(5), output=torch.zeros(10))
    gathered.layout = Layout(("a", "b", "c"), (2, 0, 3))
    assert spoilt(gathered) == [0, 2]


def test_a_sparse_mean_is_spoilt() -> None:
    mean = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0]).to_sparse()
    spoil(BucketView(0, mean), torch.tensor(True))
    assert mean.to_dense().isnan().any()
