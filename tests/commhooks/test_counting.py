"""What hooks count over Gloo is what one counts by hand."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

import commhooks
from commhooks import make_compressor
from commhooks.communicators.collective import KindTraffic
from commhooks.language.requests import Layout
from commhooks.scheduling.ledger import Statistics, _Shares
from tests.cases import LowRankBytes
from tests.commhooks.mirrored import backward
from tests.commhooks.models import MODELS, Given, Shape, wrap
from tests.commhooks.workers import normal, zeros
from tests.tiers import in_turn, thorough
from tests.world import on_ranks

# Parameters of 40×60, 9, 30×20 and 1: 3010 elements. At rank 2 the first message holds P of 40×2 and of 30×2, and the
# 10 elements that are not compressed: 150 elements, 600 bytes; the second Q of 60×2 and 20×2: 160 elements, 640 bytes.
MOVED = {2: (12040, 600, 640), 3: (16053, 800, 853), 4: (18060, 900, 960)}
"""By ranks: bytes that each sends for the dense message of 12040 bytes, and for those two: 2(W-1)/W of them."""
PAYLOADS = {
    "weights.0": (5, 3 * 9600, 9600 + 2 * (320 + 480)),
    "weights.1": (3, 3 * 36, 3 * 36),
    "weights.2": (5, 3 * 2400, 2400 + 2 * (240 + 160)),
    "weights.3": (3, 3 * 4, 3 * 4),
}
"""By parameter: collectives of one dense step and two compressed ones, gradient bytes, payload bytes."""
SHAPES: list[Shape] = [(40, 60), (9,), (30, 20), ()]


@on_ranks("world_size", check_exit=True)
@pytest.mark.parametrize(("world_size", "kind"), in_turn([2, 3, 4], ["torch", "core"]))
def test_a_state_of_powersgd_counts_what_a_pencil_counts(rank: int, kind: str, world_size: int) -> None:
    """Make a step of all-reduce and two of PowerSGD of rank 2, in one bucket, under each policy."""
    dense, first, second = MOVED[world_size]
    gradients = normal(zeros(*SHAPES), world_size, seed=0)[rank]
    for policy in ("fifo", "fused"):
        state = commhooks.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=1, policy=policy)
        assert (state.compression_stats(), state.statistics(), state.by_parameter()) == ((0.0, 0, 0), Statistics(), {})
        model = wrap(kind, Given(*SHAPES))
        state.bind(model)
        model.register_comm_hook(state, commhooks.powerSGD_hook)  # type: ignore[operator]  # 'Tensor not callable'
        for _ in range(3):
            backward(model, gradients)
        assert state.compression_stats() == (3010 / 310, 2 * 3010, 2 * 310)  # without the warm-up
        total, last = state.statistics(), state.last_step()
        assert (total.steps, total.buckets, total.collectives) == (3, 3, 1 + 2 + 2)
        assert (total.gradient_bytes, total.payload_bytes) == (3 * 12040, 12040 + 2 * 1240)
        assert total.moved_bytes == dense + 2 * (first + second)
        assert (last.steps, last.buckets, last.collectives) == (1, 1, 2)
        assert (last.gradient_elements, last.gradient_bytes) == (3010, 12040)
        assert (last.payload_elements, last.payload_bytes, last.ratio) == (310, 1240, 12040 / 1240)
        assert last.moved_bytes == first + second
        assert last.by_kind == {"all-reduce": KindTraffic(2, 1240, first + second)}
        by_parameter = state.by_parameter()
        assert by_parameter.keys() == PAYLOADS.keys()
        for name, of in by_parameter.items():
            assert of.steps == 3
            assert (of.collectives, of.gradient_bytes, of.payload_bytes) == PAYLOADS[name]
            # Five messages, each rounded down to whole bytes, and the share in them to the nearest.
            assert of.moved_bytes == pytest.approx(2 * (world_size - 1) / world_size * of.payload_bytes, abs=6)


RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "rank 1": ({"rank": 1}, 2),
    "rank 2": ({"rank": 2}, 2),
    "rank 4": ({"rank": 4}, 2),
    "alternating": ({"rank": 2, "alternating": True}, 1),
}
"""Settings of PowerSGD, and the rounds that it makes."""


@on_ranks(2, check_exit=True)
@pytest.mark.parametrize(
    ("kind", "runs"),
    [("torch", ["rank 4", "alternating"]), *thorough([("torch", list(RUNS)), ("core", list(RUNS))])],
    ids=["torch-some", "torch-all", "core-all"],
)
def test_powersgd_makes_one_collective_of_a_round_fused_and_one_of_a_round_and_bucket_in_fifo(
    rank: int, kind: str, runs: list[str]
) -> None:
    """Assert as many collectives as a step ("fused"), or its units ("fifo"), have rounds, and no more bytes."""
    for buckets, (shapes, bucket_cap_mb) in MODELS.items():
        gradients = normal(zeros(*shapes), 2, seed=0)[rank]
        elements = sum(math.prod(shape) for shape in shapes)
        for name, (settings, rounds) in ((name, RUNS[name]) for name in runs):
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
                    # From the third step on the buckets are those of the last one: the first, and all others together.
                    units = min(of_step, 2) if step > 1 else of_step
                    most = rounds * (units if policy == "fifo" else 1)
                    # At rank 4 a matrix of 6×125 is not compressed, so a bucket of one alone makes one round.
                    few = policy == "fifo" and name == "rank 4" and steps[-1].collectives >= units
                    assert steps[-1].collectives == most or few, where
                _demand_sums(attachment, steps)
                attachment.close()


def _demand_sums(attachment: commhooks.Handle[Any], steps: list[Statistics]) -> None:
    """Assert that the totals, and the parameters' shares together, are the sums of the steps."""
    total, shares = attachment.statistics(), attachment.by_parameter().values()
    for field in ("steps", "buckets", "collectives", "gradient_bytes", "payload_elements", "payload_bytes"):
        assert getattr(total, field) == sum(getattr(step, field) for step in steps), field
    assert total.seconds_compressing > 0 and total.seconds_exposed > 0
    assert {share.steps for share in shares} == {len(steps)}
    assert sum(share.gradient_bytes for share in shares) == total.gradient_bytes
    assert sum(share.payload_bytes for share in shares) == total.payload_bytes


def test_no_traffic_is_added_while_shares_are_divided() -> None:
    def note(layout: Layout) -> None:
        shares.note([(((layout,), (1,)), (1, 0, 8, 0, 0))])

    class Disturbed(Layout):
        @property
        def elements(self) -> int:  # asked for in the midst of dividing
            if not worker.is_alive():
                worker.start()
                worker.join(0.05)
            return 1

    shares, worker = _Shares(), threading.Thread(target=note, args=[Layout(("late",), (1,))])
    note(Disturbed(("early",), (1,)))
    assert shares.by_parameter().keys() == {"early"}
    worker.join()
    assert shares.by_parameter()["late"].gradient_bytes == 8
