"""The shortest rounds of seldom communication over a probed network, in cases that can be computed by hand."""

from __future__ import annotations

import dataclasses

import pytest

from experiments.predicting import plan
from experiments.predicting.every import SeldomChoice
from experiments.predicting.profiles import HookProfile
from tests.commhooks.test_plan import a_probe, a_profile, hook

SLOW = 1e-6  # seconds a byte: 4 MB take 4 s, and a step without communication 0.11


def choices(*hooks: HookProfile, largest: int = 10_000_000, wanted: float = 0.9) -> dict[tuple[str, int], SeldomChoice]:
    """Return the choices by compressor and number of fragments."""
    found = plan(
        a_profile(*hooks), a_probe(per_byte=SLOW, largest=largest), wanted_utilisation=wanted, bucket_caps_mb=()
    )
    return {(one.compressor, one.rounds.fragments): one for one in found.seldom}


def test_rounds_are_the_shortest_whose_steps_take_the_wanted_part_of_the_time() -> None:
    """Sending takes 4 s a round: 0.11·H / (0.11·H + 4) is 0.9 at H = 327.3; and 0.5 at 36.4."""
    found = choices()["all-reduce", 1]
    assert found.is_enough and found.rounds.every == 328
    assert found.utilisation == pytest.approx(0.11 * 328 / (0.11 * 328 + 4))
    assert found.bytes_per_step == pytest.approx(4e6 / 328)
    assert choices(wanted=0.5)["all-reduce", 1].rounds.every == 37


def test_five_steps_of_delay_hide_a_part_of_each_of_three_fragments() -> None:
    """A fragment takes 4/3 s, of which five steps hide 0.55: (4 - 1.65) s are left, and 0.9 needs 192.3 steps."""
    assert choices()["all-reduce", 3].rounds.every == 193


def test_a_compressor_shortens_rounds_and_its_own_time_counts() -> None:
    """0.4 s on the link, and 0.05 + 0.05 s of compression on the core that trains: 0.5 s, hidden by 0.055·H."""
    found = choices(hook("small", 0.21, 0.4, compression=0.05))
    assert found["small", 1].rounds.every == 41  # 0.9 · 0.5 / (0.1 · 0.11) = 40.9
    assert found["small", 3].rounds.every == 9  # compression is never hidden: 0.9 · 0.1 / (0.1 · 0.11) = 8.2


def test_the_shortest_rounds_come_first_and_each_compressor_once() -> None:
    small = hook("small", 0.11, 0.1)
    found = choices(small, dataclasses.replace(small, policy="fused"))
    assert [key for key, one in found.items() if one.is_enough] == [
        ("small", 3),
        ("small", 1),
        ("all-reduce", 3),
        ("all-reduce", 1),
    ]
    assert found["small", 3].code == (
        'commhooks.DiLoCo(model, optimizer, every=6, compressor="small", fragments=3, delay=5)'
    )


def test_a_utilisation_that_500_steps_do_not_reach_is_not_reached() -> None:
    found = choices(wanted=0.95)["all-reduce", 1]
    assert not found.is_enough and found.rounds.every == 500
    assert found.utilisation == pytest.approx(55 / 59)


def test_a_message_beyond_the_probes_reach_takes_the_time_of_several() -> None:
    """The probe reaches four times its 750 kB: the buckets' 3 MB, but not the round's 4 MB."""
    assert choices(largest=750_000)["all-reduce", 1] == choices()["all-reduce", 1]
