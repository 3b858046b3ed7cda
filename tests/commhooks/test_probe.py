"""The probe: known lines are recovered, and what contradicts itself is less certain."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from commhooks.communicators import Collective
from commhooks.communicators.collective import KINDS, ring_bytes
from commhooks.errors import SettingsError
from commhooks.experiments.planning.errors import ProbeError
from commhooks.experiments.planning.probes import MEASURED, Cost, Probe, Timing
from commhooks.experiments.planning.probing import probe, probe_over
from commhooks.experiments.planning.profiles import RoundProfile, Seconds
from commhooks.experiments.planning.sizes import SIZES
from commhooks.experiments.timing.link import HALF_SUM, Link, Transfer
from tests.commhooks.fake_network import FakeNetwork
from tests.commhooks.test_plan import a_profile, bucket, hook

LATENCIES = {"all-reduce": 2e-4, "all-gather": 1e-4, "all-to-all": 3e-4, "reduce-scatter": 5e-4}
PER_BYTE = {"all-reduce": 8e-8, "all-gather": 1.2e-7, "all-to-all": 4e-8, "reduce-scatter": 9e-8}


def on_a_line(collective: Collective, now: float) -> float:
    return LATENCIES[collective.kind] + PER_BYTE[collective.kind] * collective.payload_bytes


def a_cost(*seconds: float, payloads: tuple[int, ...] = SIZES) -> Cost:
    pairs = zip(payloads, seconds, strict=False)
    return Cost(tuple(Timing.of(payload, [each] * 4, [each / 4] * 4) for payload, each in pairs))


def a_probe(**changes: Any) -> Probe:
    network = FakeNetwork(2, on_a_line, processor=0.25)
    return dataclasses.replace(probe_over(network, 4.0, clocks=network.clocks), **changes)


def test_a_known_line_of_each_kind_is_recovered() -> None:
    found = a_probe()
    assert set(found.costs) == set(MEASURED)
    for kind in KINDS:
        cost = found.costs[kind]
        assert cost.is_line and cost.residual < 1e-6
        assert cost.line == pytest.approx((LATENCIES[kind], PER_BYTE[kind]))
        assert cost.processor_line == pytest.approx((LATENCIES[kind] / 4, PER_BYTE[kind] / 4))
    assert found.transfer("all-gather", 10**6, 2) == pytest.approx(
        Transfer(1e-4 + 0.12, (1e-4 + 0.12) / 4, ring_bytes("all-gather", 10**6, 2))
    )
    assert found.transfer(HALF_SUM, 10**6, 2).bytes_sent == ring_bytes("all-reduce", 10**6, 2)


@pytest.mark.parametrize("slow", [1.0, 100.0])
def test_it_ends_in_time_with_smaller_messages_on_a_slower_network(slow: float) -> None:
    network = FakeNetwork(2, lambda collective, now: slow * on_a_line(collective, now))
    found = probe_over(network, 20.0, clocks=network.clocks)
    assert network.now < 20.0
    assert found.costs["all-reduce"].largest == {1.0: 2**22, 100.0: 2**14}[slow]


def on_a_link(link: Link, kinds: set[str] | None = None) -> Callable[[Collective, float], float]:
    """Return what collectives of two ranks take on a link; other kinds than these fail."""

    def seconds(collective: Collective, now: float) -> float:
        is_measured = collective.payload_bytes >= SIZES[0] and collective.tensor.dtype != torch.float64
        assert kinds is None or not is_measured or collective.kind in kinds, collective.kind
        return link.transfer(collective.kind, collective.payload_bytes, 2).seconds + 1e-4

    return seconds


@pytest.mark.parametrize("rate", [20e6, 50e6, 1e9])
def test_five_seconds_suffice_to_predict_what_the_link_carries_in_a_tenth_of_a_second(rate: float) -> None:
    """Over 50 Mbit/s that covers a model of 600 kB."""
    network = FakeNetwork(2, on_a_link(Link(rate=rate, latency=2e-4)))
    found = probe_over(network, 5.0, clocks=network.clocks)
    assert network.now < 5.0
    assert found.reaches(dict.fromkeys(("all-reduce", HALF_SUM, "all-to-all"), round(0.1 * rate / 8)))


def test_for_a_profile_the_probe_sends_what_its_hooks_send_and_nothing_else() -> None:
    rounds = (RoundProfile(0.0, (("all-gather", 3000),)),)
    gathering = dataclasses.replace(hook("top-k", 0.1, 0), buckets=(bucket("abcd", 4, rounds),))
    network = FakeNetwork(2, on_a_link(Link(rate=1e9), {"all-reduce", "all-gather"}))
    found = probe_over(
        network, 5.0, clocks=network.clocks, profile=a_profile(gathering, hook("fused", 0.1, 4, policy="fused"))
    )
    assert {kind: cost.largest for kind, cost in found.costs.items()} == {"all-reduce": 4_000_000, "all-gather": 4096}


def test_ranks_whose_clocks_differ_take_as_many_turns() -> None:
    """Each rank's own figure is exchanged: had one of them a turn more, it would wait for the others for ever."""
    network = FakeNetwork(2, on_a_line)
    probe_over(network, 4.0, clocks=network.clocks)
    whole = [one for one in network.started if one.kind == "all-reduce" and one.tensor.numel() == 1]
    assert any(float(one.tensor) not in (0.0, 1.0) for one in whole)


def test_small_messages_that_are_cheaper_than_any_line_says_are_interpolated() -> None:
    cost = a_cost(1e-4, 1e-4, 1e-4, 1e-3, 4e-3, 16e-3)
    assert not cost.is_line
    assert cost.seconds(SIZES[0] / 2) == pytest.approx(1e-4)
    assert cost.seconds((SIZES[2] + SIZES[3]) / 2) == pytest.approx(5.5e-4)
    slope = (16e-3 - 4e-3) / (SIZES[5] - SIZES[4])
    assert cost.seconds(2 * SIZES[5]) == pytest.approx(16e-3 + slope * SIZES[5])


def test_a_network_that_wavers_by_a_fifth_is_reported_with_that_uncertainty() -> None:
    network = FakeNetwork(2, lambda collective, now: on_a_line(collective, now) * (1 + 0.2 * (int(now * 3) % 2)))
    found = probe_over(network, 4.0, clocks=network.clocks)
    assert 0.1 < found.disagreement < 0.3
    assert max(cost.spread() for cost in found.costs.values()) >= found.disagreement


def test_a_disturbance_in_the_first_attempt_is_repeated_within_the_time() -> None:
    network = FakeNetwork(2, lambda collective, now: on_a_line(collective, now) * (10 if 1.0 < now < 2.0 else 1))
    found = probe_over(network, 4.0, clocks=network.clocks)
    assert found.costs["all-reduce"].line == pytest.approx((LATENCIES["all-reduce"], PER_BYTE["all-reduce"]))
    assert found.took < 4.0 * 1.25


def test_a_network_too_slow_for_the_time_says_so() -> None:
    network = FakeNetwork(2, lambda collective, now: 1.0)
    with pytest.raises(ProbeError, match="too slow for the time given: all-reduce of 256 bytes took 2000 ms, barrier"):
        probe_over(network, 4.0, clocks=network.clocks)
    assert len(network.started) <= 8  # of which 3 precede the first look


def test_other_numbers_of_ranks_and_unknown_kinds_are_refused() -> None:
    found = a_probe()
    assert found.transfer("all-reduce", 100, 1) == Transfer(0.0, 0.0, 0)
    with pytest.raises(SettingsError, match="measured with 2 ranks, and is valid for those only"):
        found.transfer("all-reduce", 100, 4)
    with pytest.raises(SettingsError, match="were not probed, but all-reduce"):
        found.transfer("broadcast", 100, 2)


def test_it_survives_a_file_and_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    found = a_probe(link="two cans and a string")
    found.write(path)
    assert Probe.read(path) == found
    assert [file.name for file in tmp_path.iterdir()] == ["probe.json"]
    raw = json.loads(path.read_text())
    for text in ("", "[]", '{"format": 0}', json.dumps(raw | {"costs": {"all-reduce": {}}})):
        path.write_text(text)
        with pytest.raises(ProbeError, match=r"probe.json: expected a file of format 1 that .* wrote"):
            Probe.read(path)
    with pytest.raises(ProbeError, match=r"missing\.json: .*No such file"):
        Probe.read(tmp_path / "missing.json")


def test_the_spread_grows_with_noise_and_shrinks_with_measurements() -> None:
    def cost(times: int, noise: float) -> Cost:
        return Cost(tuple(Timing(size, Seconds(1.0, 1.0 - noise, 1.0 + noise), (), 0.0, times) for size in SIZES[:2]))

    assert cost(100, 0.5).spread() == pytest.approx(0.093)
    assert cost(400, 0.5).spread() == pytest.approx(0.0465)
    assert cost(100, 0.0).spread() == pytest.approx(0.0, abs=1e-9)


def test_without_a_group_with_one_rank_or_without_time_nothing_is_measured() -> None:
    with pytest.raises(ProbeError, match="call torch.distributed.init_process_group first"):
        probe()
    with pytest.raises(ProbeError, match="seconds must be from 1 to 120"):
        probe(seconds=180)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ProbeError, match="a single rank has no link to measure; start two ranks or more"):
            probe()
    finally:
        dist.destroy_process_group()
