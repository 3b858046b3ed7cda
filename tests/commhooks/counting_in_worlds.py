"""What the tests of counting run on every rank."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch.distributed as dist

import commhooks
from commhooks import make_compressor
from commhooks.scheduling.ledger import ParameterTraffic, Statistics
from tests.cases import LowRankBytes
from tests.commhooks.mirrored import backward
from tests.commhooks.models import MODELS, Given, Shape, wrap
from tests.commhooks.workers import normal, zeros

SHAPES: list[Shape] = [(40, 60), (9,), (30, 20), ()]


@dataclasses.dataclass(frozen=True)
class Counted:
    """What a state of PowerSGD tells on one rank."""

    stats: tuple[float, int, int]
    total: Statistics
    last: Statistics
    by_parameter: dict[str, ParameterTraffic]


def powersgd_state(rank: int, kind: str) -> dict[str, Counted]:
    """Make a step of all-reduce and two of PowerSGD of rank 2, in one bucket, under each policy."""
    counted = {}
    gradients = normal(zeros(*SHAPES), dist.get_world_size(), seed=0)[rank]
    for policy in ("fifo", "fused"):
        state = commhooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=1, policy=policy)
        assert (state.compression_stats(), state.statistics(), state.by_parameter()) == ((0.0, 0, 0), Statistics(), {})
        model = wrap(kind, Given(*SHAPES))
        state.bind(model)
        model.register_comm_hook(state, commhooks.powerSGD_hook)  # type: ignore[operator]  # 'Tensor not callable'
        for _ in range(3):
            backward(model, gradients)
        counted[policy] = Counted(
            state.compression_stats(), state.statistics(), state.last_step(), state.by_parameter()
        )
    return counted


RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "rank 1": ({"rank": 1}, 2),
    "rank 2": ({"rank": 2}, 2),
    "rank 4": ({"rank": 4}, 2),
    "alternating": ({"rank": 2, "alternating": True}, 1),
}
"""Settings of PowerSGD, and the rounds that it makes."""


def collectives_of_a_step(rank: int, kind: str) -> None:
    """Assert as many collectives as a step ("fused"), or its buckets ("fifo"), have rounds, and no more bytes."""
    for buckets, (shapes, bucket_cap_mb) in MODELS.items():
        gradients = normal(zeros(*shapes), 2, seed=0)[rank]
        elements = sum(math.prod(shape) for shape in shapes)
        for name, (settings, rounds) in RUNS.items():
            formula = LowRankBytes(**settings)
            for policy in ("fifo", "fused"):
                model = wrap(kind, Given(*shapes), bucket_cap_mb=bucket_cap_mb)
                attachment = commhooks.attach(model, make_compressor("powersgd", **settings), policy=policy)
                steps = []
                for step in range(4):
                    backward(model, gradients)
                    steps.append(attachment.last_step())
                    payload = formula(list(model.parameters()), step, 2)
                    where = f"{name}, {policy}, {buckets} buckets, step {step}"
                    assert steps[-1].payload_bytes == steps[-1].moved_bytes == payload, (
                        where
                    )  # two ranks: 2(W-1)/W is 1
                    assert (steps[-1].steps, steps[-1].gradient_elements) == (1, elements), where
                    of_step = 1 if step == 0 else buckets  # buckets are cut after the first step
                    assert steps[-1].buckets == of_step, where
                    most = rounds * (of_step if policy == "fifo" else 1)
                    # At rank 4 a matrix of 6×125 is not compressed, so a bucket of one alone makes one round.
                    few = policy == "fifo" and name == "rank 4" and steps[-1].collectives >= of_step
                    assert steps[-1].collectives == most or few, where
                _demand_sums(attachment, steps)
                attachment.detach()


def _demand_sums(attachment: commhooks.Attachment, steps: list[Statistics]) -> None:
    """Assert that the totals, and the parameters' shares together, are the sums of the steps."""
    total, shares = attachment.statistics(), attachment.by_parameter().values()
    for field in ("steps", "buckets", "collectives", "gradient_bytes", "payload_elements", "payload_bytes"):
        assert getattr(total, field) == sum(getattr(step, field) for step in steps), field
    assert total.seconds_compressing > 0 and total.seconds_exposed > 0
    assert {share.steps for share in shares} == {len(steps)}
    assert sum(share.gradient_bytes for share in shares) == total.gradient_bytes
    assert sum(share.payload_bytes for share in shares) == total.payload_bytes
