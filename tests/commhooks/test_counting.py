"""What hooks count over Gloo is what one counts by hand."""

from __future__ import annotations

import threading

import pytest

import commhooks
from commhooks.communicators.collective import KindTraffic
from commhooks.language.requests import Layout
from commhooks.scheduling.ledger import Statistics, _Shares
from tests.commhooks.mirrored import backward
from tests.commhooks.models import Given, Shape, wrap
from tests.commhooks.workers import normal, zeros
from tests.tiers import in_turn
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
