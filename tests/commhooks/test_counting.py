"""What hooks count over Gloo is what one counts by hand. What each rank runs is in counting_in_worlds.py."""

from __future__ import annotations

import pytest

from commhooks.communicators.collective import KindTraffic
from tests.commhooks import counting_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])

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


@both_ddps
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_state_of_powersgd_counts_what_a_pencil_counts(kind: str, world_size: int) -> None:
    dense, first, second = MOVED[world_size]
    for of_policies in run_ranks(on_every_rank.powersgd_state, world_size, kind, check_exit=True):
        for counted in of_policies.values():
            assert counted.stats == (3010 / 310, 2 * 3010, 2 * 310)  # without the warm-up
            total, last = counted.total, counted.last
            assert (total.steps, total.buckets, total.collectives) == (3, 3, 1 + 2 + 2)
            assert (total.gradient_bytes, total.payload_bytes) == (3 * 12040, 12040 + 2 * 1240)
            assert total.moved_bytes == dense + 2 * (first + second)
            assert (last.steps, last.buckets, last.collectives) == (1, 1, 2)
            assert (last.gradient_elements, last.gradient_bytes) == (3010, 12040)
            assert (last.payload_elements, last.payload_bytes, last.ratio) == (310, 1240, 12040 / 1240)
            assert last.moved_bytes == first + second
            assert last.by_kind == {"all-reduce": KindTraffic(2, 1240, first + second)}
            assert counted.by_parameter.keys() == PAYLOADS.keys()
            for name, of in counted.by_parameter.items():
                assert of.steps == 3
                assert (of.collectives, of.gradient_bytes, of.payload_bytes) == PAYLOADS[name]
                # Five messages, each rounded down to whole bytes, and the share in them to the nearest.
                assert of.moved_bytes == pytest.approx(2 * (world_size - 1) / world_size * of.payload_bytes, abs=6)


@pytest.mark.parametrize("kind", ["torch", pytest.param("core", marks=pytest.mark.soak)])
def test_powersgd_makes_one_collective_of_a_round_fused_and_one_of_a_round_and_bucket_in_fifo(kind: str) -> None:
    run_ranks(on_every_rank.collectives_of_a_step, 2, kind, check_exit=True)
