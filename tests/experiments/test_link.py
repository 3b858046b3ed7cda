"""The emulated link: what a rate means, and that no transfer beats it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commhooks import Collective, Group
from experiments.link import EmulatedLink, LinkSettings, format_rate, parse_latency, parse_rate


@pytest.mark.parametrize(
    ("text", "bits_per_second"),
    [
        ("100Mbit/s", 100e6),
        ("10 Gbit/s", 10e9),
        ("1Gbps", 1e9),
        ("1.5 gbps", 1.5e9),
        ("100mbit", 100e6),
        ("12.5MB/s", 100e6),
        ("12.5 MBps", 100e6),
        ("64kbit/s", 64e3),
        ("9600 bit/s", 9600),
        (".5Tbit/s", 0.5e12),
        ("unlimited", None),
    ],
)
def test_a_rate_is_read_in_decimal_units(text: str, bits_per_second: float | None) -> None:
    assert parse_rate(text) == bits_per_second


@pytest.mark.parametrize(
    "text", ["", "fast", "100", "100 furlongs", "-1Mbit/s", "1Mibit/s", "Mbit/s", "100Mbit/h", "1e3"]
)
def test_a_rate_that_does_not_parse_is_an_error_that_shows_how(text: str) -> None:
    with pytest.raises(ValueError, match=r"does not parse: expected a number and a unit, such as '100Mbit/s'"):
        parse_rate(text)


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="above zero"):
        parse_rate("0Mbit/s")


@given(st.integers(1, 999), st.sampled_from(["kbit/s", "Mbit/s", "Gbit/s"]))
def test_a_rate_survives_being_written_and_read(number: int, unit: str) -> None:
    rate = parse_rate(f"{number}{unit}")
    assert parse_rate(format_rate(rate)) == pytest.approx(rate)


@pytest.mark.parametrize(("text", "seconds"), [("0.2ms", 2e-4), ("50us", 5e-5), ("1s", 1.0), ("0", 0.0)])
def test_a_latency_is_read(text: str, seconds: float) -> None:
    assert parse_latency(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "5min", "-1ms"])
def test_a_latency_that_does_not_parse_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="latency .* does not parse"):
        parse_latency(text)


@pytest.mark.parametrize("settings", [{"bits_per_second": 0.0}, {"bits_per_second": -1.0}, {"latency_seconds": -1.0}])
def test_link_settings_that_cannot_be_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be in"):
        LinkSettings(**settings)


@pytest.mark.parametrize(
    ("collective", "bytes_sent", "hops"),
    [
        (Collective("all-reduce", torch.zeros(1000)), 2 * 3 * 4000 // 4, 6),
        (Collective("all-gather", torch.zeros(1000)), 3 * 4000, 3),
        (Collective("all-to-all", torch.zeros(4, 250)), 3 * 4000 // 4, 3),
        (Collective("reduce-scatter", torch.zeros(4, 250)), 3 * 4000 // 4, 3),
    ],
    ids=lambda value: value.kind if isinstance(value, Collective) else "",
)
def test_a_ring_of_four_needs_the_time_of_its_bytes_and_of_its_hops(
    collective: Collective, bytes_sent: int, hops: int
) -> None:
    link = LinkSettings(bits_per_second=8e6, latency_seconds=0.01)
    assert link.seconds_for(collective, 4) == pytest.approx(bytes_sent / 1e6 + hops * 0.01)
    assert link.seconds_for(collective, 1) == 0.0


def test_the_link_is_between_machines() -> None:
    link = LinkSettings(bits_per_second=8e6, latency_seconds=0.01)
    inside, between = (Collective("all-reduce", torch.zeros(250), group=Group(kind, 2)) for kind in ("inner", "outer"))
    assert link.seconds_for(inside, 6) == 0.0
    assert link.seconds_for(between, 6) == link.seconds_for(Collective("all-reduce", torch.zeros(250)), 3) > 0


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Instant:
    """A communicator that is done after so many seconds of fake time."""

    rank = 0
    world_size = 2

    def __init__(self, time: FakeTime, seconds: float = 0.0) -> None:
        self._time = time
        self._seconds = seconds
        self.result = torch.zeros(1)

    def start(self, collective: Collective) -> Instant:
        return self

    def wait(self, timeout_seconds: float | None = None) -> None:
        self._time.sleep(self._seconds)


def emulated(time: FakeTime, *, inner_seconds: float = 0.0) -> EmulatedLink:
    link = LinkSettings(bits_per_second=8e6)
    return EmulatedLink(Instant(time, inner_seconds), link, clock=time.clock, sleep=time.sleep)


def megabytes(count: float) -> Collective:
    """Return a collective for which each of two ranks sends so many megabytes."""
    tensor: Tensor = torch.empty(int(count * 250_000))
    return Collective("all-reduce", tensor)


def test_a_collective_lasts_as_long_as_its_bytes() -> None:
    time = FakeTime()
    emulated(time).start(megabytes(2)).wait()
    assert time.now == pytest.approx(2.0)


def test_a_collective_that_is_slower_than_the_link_stays_slower() -> None:
    time = FakeTime()
    emulated(time, inner_seconds=5.0).start(megabytes(2)).wait()
    assert time.now == pytest.approx(5.0)


def test_transfers_queue_and_never_share_the_rate() -> None:
    time = FakeTime()
    link = emulated(time)
    pending = [link.start(megabytes(1)) for _ in range(3)]
    ends = []
    for each in pending:
        each.wait()
        ends.append(time.now)
    assert ends == pytest.approx([1.0, 2.0, 3.0])


def test_what_was_carried_during_compute_costs_no_waiting() -> None:
    time = FakeTime()
    pending = emulated(time).start(megabytes(1))
    time.sleep(0.75)  # compute
    pending.wait()
    assert time.now == pytest.approx(1.0)


def test_an_idle_link_saves_nothing_up() -> None:
    time = FakeTime()
    link = emulated(time)
    time.sleep(10)
    link.start(megabytes(1)).wait()
    assert time.now == pytest.approx(11.0)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 2)), min_size=1, max_size=8))
def test_the_rate_is_never_exceeded(transfers: list[tuple[float, float]]) -> None:
    time = FakeTime()
    link = emulated(time)
    begin, carried = time.now, 0.0
    for idle, size in transfers:
        time.sleep(idle)
        collective = megabytes(size)
        link.start(collective).wait()
        carried += collective.ring_bytes(2) / 1e6
        assert carried <= time.now - begin + 1e-6


def test_a_wait_that_runs_out_raises_and_may_be_repeated() -> None:
    time = FakeTime()
    pending = emulated(time).start(megabytes(1))
    for _ in range(3):
        with pytest.raises(TimeoutError, match="has not carried"):
            pending.wait(0.3)
    pending.wait(0.3)
    assert time.now == pytest.approx(1.0)


def test_an_unlimited_link_adds_nothing() -> None:
    time = FakeTime()
    EmulatedLink(Instant(time), LinkSettings(), clock=time.clock, sleep=time.sleep).start(megabytes(9)).wait()
    assert time.now == 0.0
