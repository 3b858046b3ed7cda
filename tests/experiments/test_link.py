"""The emulated link: what a rate means, and that no transfer beats it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commhooks.communicators import Collective
from commhooks.experiments.links.gloo import course_of
from commhooks.experiments.links.link import EmulatedLink, LinkSettings
from commhooks.language import Group


@pytest.mark.parametrize(
    ("text", "settings", "label"),
    [
        ("emulated:", {}, "unlimited"),
        ("real", {"kind": "real"}, "real"),
        ("hosts:rate=100Mbit/s", {"kind": "hosts", "bits_per_second": 1e8}, "hosts:100Mbit/s"),
        (
            "emulated:rate=20Mbit/s, down=100Mbit/s, latency=5ms",
            {"bits_per_second": 2e7, "down_bits_per_second": 1e8, "latency_seconds": 5e-3},
            "20Mbit/s,down=100Mbit/s,latency=5ms",
        ),
        (
            "rate=100Mbit/s+10Mbit/s@30s+unlimited@60s,framing=off",
            {"bits_per_second": 1e8, "schedule": ((30.0, 1e7), (60.0, None)), "framing": False},
            "100Mbit/s+10Mbit/s@30s+unlimited@60s,framing=off",
        ),
    ],
)
def test_a_link_is_read_and_written(text: str, settings: dict[str, Any], label: str) -> None:
    assert LinkSettings.parse(text) == LinkSettings(**settings)
    assert LinkSettings(**settings).label == label


rates = st.none() | st.floats(1e-3, 1e15)
times = st.floats(1e-9, 1e6)


@given(rates, rates, st.just(0.0) | times, st.lists(st.tuples(times, rates), unique_by=lambda pair: pair[0]))
def test_every_link_survives_being_written_and_read(
    rate: float | None, down: float | None, latency: float, schedule: list[tuple[float, float | None]]
) -> None:
    link = LinkSettings(
        bits_per_second=rate,
        down_bits_per_second=None if schedule else down,
        latency_seconds=latency,
        schedule=tuple(sorted(schedule)),
    )
    assert LinkSettings.parse(link.label) == link
    as_json = json.loads(json.dumps(dataclasses.asdict(link)))
    assert LinkSettings(**as_json) == link


RING = 3 * 4000 // 4  # once around a ring of four, of 4,000 bytes


@pytest.mark.parametrize(
    ("collective", "of_two", "of_four"),
    [
        (Collective("all-reduce", torch.zeros(1000)), (4000, 2), (2 * RING, 6)),
        (Collective("all-gather", torch.zeros(1000)), (1.5 * 4000, 1), (4 * RING, 3)),  # two wait for each other's half
        (Collective("all-to-all", torch.zeros(4, 250)), (2 * 2000, 2), (1.5 * RING, 1)),  # two exchange in turns
        (Collective("reduce-scatter", torch.zeros(4, 250)), (2 * 2000, 2), (1.5 * RING, 1)),  # an exchange of rows
    ],
    ids=lambda value: value.kind if isinstance(value, Collective) else "",
)
def test_a_collective_needs_the_time_of_its_bytes_and_of_its_hops(
    collective: Collective, of_two: tuple[float, int], of_four: tuple[float, int]
) -> None:
    link = LinkSettings(bits_per_second=8e6, latency_seconds=0.01, framing=False)
    for ranks, (bytes_sent, hops) in ((2, of_two), (4, of_four)):
        assert link.seconds_for(collective, ranks) == pytest.approx(bytes_sent / 1e6 + hops * 0.01)
    assert link.seconds_for(collective, 1) == 0.0


@pytest.mark.parametrize(("ranks", "transfers"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (8, 6)])
def test_a_broadcast_passes_the_link_once_for_every_branch_and_level_of_its_tree(ranks: int, transfers: int) -> None:
    link = LinkSettings(bits_per_second=8e6, framing=False)
    assert link.seconds_of(course_of("broadcast", 1000, ranks)) == pytest.approx(transfers * 1e-3)


@pytest.mark.parametrize(
    ("at", "seconds"),
    [
        (0.0, 1.0),  # 2 MB at 16 Mbit/s, through as the rate falls
        (2.0, 2.0),  # at 8 Mbit/s
        (0.5, 1.5),  # half of it at either
        (3.5, 0.5),  # half a megabyte, and the rest without a limit
        (9.0, 0.0),
    ],
)
def test_the_rate_of_every_moment_of_a_transfer_counts(at: float, seconds: float) -> None:
    link = LinkSettings(bits_per_second=16e6, schedule=((1.0, 8e6), (4.0, None)), framing=False)
    assert link.seconds_for(megabytes(2), 2, at=at) == pytest.approx(seconds)


def test_the_link_is_between_machines() -> None:
    link = LinkSettings(bits_per_second=8e6, latency_seconds=0.01)
    inside, between = (Collective("all-reduce", torch.zeros(250), group=Group(kind, 2)) for kind in ("inner", "outer"))
    assert link.seconds_for(inside, 6) == 0.0
    assert link.seconds_for(between, 6) == link.seconds_for(Collective("all-reduce", torch.zeros(250)), 3) > 0


class FakeTime:
    """A clock that only sleeping moves, and communicators that are done after so many seconds of it."""

    rank = 0
    world_size = 2
    result = torch.zeros(1)

    def __init__(self, seconds: float = 0.0) -> None:
        self.now, self.seconds = 0.0, seconds

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def start(self, collective: Collective) -> FakeTime:
        return self

    def wait(self, timeout_seconds: float | None = None) -> None:
        self.sleep(self.seconds)

    def link(self, text: str = "8Mbit/s,framing=off") -> EmulatedLink:
        return EmulatedLink(self, LinkSettings.parse(text), clock=self.clock, sleep=self.sleep)


def megabytes(count: float) -> Collective:
    """Return a collective for which each of two ranks sends so many megabytes."""
    tensor: Tensor = torch.empty(int(count * 250_000))
    return Collective("all-reduce", tensor)


@pytest.mark.parametrize(
    ("size", "inner_seconds", "idle", "compute", "end"),
    [
        (2, 0.0, 0.0, 0.0, 2.0),  # as long as its bytes
        (2, 5.0, 0.0, 0.0, 5.0),  # what is slower than the link stays slower
        (1, 0.0, 0.0, 0.75, 1.0),  # what was carried during compute costs no waiting
        (1, 0.0, 10.0, 0.0, 11.0),  # an idle link saves nothing up
    ],
)
def test_a_collective_ends_with_its_bytes(
    size: float, inner_seconds: float, idle: float, compute: float, end: float
) -> None:
    time = FakeTime(inner_seconds)
    link = time.link()
    time.sleep(idle)
    pending = link.start(megabytes(size))
    time.sleep(compute)
    pending.wait()
    assert time.now == pytest.approx(end)


def test_transfers_queue_and_never_share_the_rate() -> None:
    time, ends = FakeTime(), []
    link = time.link()
    for each in [link.start(megabytes(1)) for _ in range(3)]:
        each.wait()
        ends.append(time.now)
    assert ends == pytest.approx([1.0, 2.0, 3.0])
    for text in ("unlimited", "hosts:1Mbit/s", "real"):
        free = FakeTime()
        free.link(text).start(megabytes(9)).wait()
        assert free.now == 0.0, "without a limit, and of another kind, a link adds nothing"
