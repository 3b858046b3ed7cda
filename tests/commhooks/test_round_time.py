"""The time of rounds of low-communication training, in cases that can be computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from commhooks.experiments.timing.link import Link
from commhooks.experiments.timing.rounds import Rounds, round_time
from commhooks.experiments.timing.step_time import Bucket, Stage, Step, step_time

A_STEP = 0.1


def exchange(seconds: float, *, compression: float = 0.0, after: float = 0.0) -> list[Bucket]:
    """Return a step's buckets, two, whose sums between two ranks take so many seconds at 8 Mbit/s, a byte each µs."""
    stage = Stage(compression / 2, (("all-reduce", round(1e6 * seconds / 2)),))
    return [Bucket(0.0, (stage,), after / 2)] * 2


def seconds_of(rounds: Rounds, buckets: list[Bucket], cores: int = 1) -> float:
    return round_time(rounds, buckets, A_STEP, Link(rate=8e6, algorithm="ring"), 2, cores=cores).seconds


@pytest.mark.parametrize("fragments", [1, 3, 30])
def test_without_a_delay_training_waits_for_all_that_is_sent(fragments: int) -> None:
    found = round_time(
        Rounds(every=30, fragments=fragments), exchange(2.1), A_STEP, Link(rate=8e6, algorithm="ring"), 2
    )
    assert found.seconds == pytest.approx(3 + 2.1) and found.waiting == pytest.approx(2.1)
    assert found.utilisation == pytest.approx(3 / 5.1) and found.bytes_sent == pytest.approx(2.1e6)


@pytest.mark.parametrize(
    ("delay", "takes", "waits"),
    [
        (5, 1.5, 0.0),  # 0.5 s for each of three fragments, which five steps hide
        (5, 2.1, 0.6),  # 0.7 s each, of which five steps hide 0.5
        (10, 2.7, 0.0),  # 0.9 s each: the link is free again when the next fragment comes
        (15, 3.6, 0.6),  # 1.2 s each, and a fragment every second: the link is never free
        (29, 3.6, 0.6),  # however long the delay
    ],
)
def test_a_delay_hides_what_the_link_can_carry_meanwhile(delay: int, takes: float, waits: float) -> None:
    assert seconds_of(Rounds(every=30, fragments=3, delay=delay), exchange(takes)) == pytest.approx(3 + waits)


def test_fragments_may_be_of_different_sizes() -> None:
    """1.5 s in fragments of 0.3, 0.3 and 0.9: five steps hide all of the first two, and 0.5 of the last."""
    unequal = Rounds(every=30, fragments=3, delay=5, shares=(0.2, 0.2, 0.6))
    assert seconds_of(unequal, exchange(1.5)) == pytest.approx(3.4)
    with pytest.raises(ValueError, match="shares must be one for each fragment, at least 0, with a sum of 1"):
        Rounds(every=30, fragments=3, shares=(0.5, 0.5))


def test_compression_takes_a_core_of_its_own_if_there_is_one() -> None:
    buckets = exchange(0.9, compression=0.3, after=0.15)  # 0.1 s, 0.3 s on the link, and 0.05 s for each of three
    diloco = Rounds(every=30, fragments=3, delay=5)
    assert seconds_of(diloco, buckets) == pytest.approx(3.45)
    assert seconds_of(diloco, buckets, cores=2) == pytest.approx(3.0)
    assert seconds_of(Rounds(every=30, fragments=3), buckets, cores=2) == pytest.approx(4.35)


def test_a_mean_that_is_due_at_the_end_of_the_step_is_no_other_than_a_gradients() -> None:
    link = Link(rate=8e6, algorithm="ring")
    buckets = tuple(Bucket(0.02 * number, (Stage(0.005, (("all-reduce", 30_000),)),), 0.003) for number in range(1, 6))
    due = tuple(Bucket(one.ready, one.stages, one.after, due=0.1) for one in buckets)
    for cores in (1, 2):
        assert step_time(Step(compute=0.1, buckets=due, cores=cores), link, 4) == step_time(
            Step(compute=0.1, buckets=buckets, cores=cores), link, 4
        )


def test_a_schedule_that_cannot_work_is_refused() -> None:
    for fragments, delay in ((0, 0), (31, 0), (1, 30), (1, -1)):
        with pytest.raises(ValueError, match="fragments must be from 1 to every, and delay from 0 to 29, below every"):
            Rounds(every=30, fragments=fragments, delay=delay)
    with pytest.raises(ValueError, match="no bucket's mean can be due before its gradients are ready"):
        Step(compute=1.0, buckets=(Bucket(0.5, (), due=0.4),))


def test_the_guide_tells_the_share_of_time_that_is_spent_computing() -> None:
    dense = [Bucket(0.0, (Stage(0.0, (("all-reduce", 4 * 124_000_000),)),))]
    links = [Link(rate=rate, latency=0.015) for rate in (20e6, 100e6, 1e9)]
    shares = [round_time(Rounds(every=30), dense, 1.0, link, 2).utilisation for link in links]
    page = Path(__file__).parents[2] / "docs" / "guide" / "diloco.md"
    row = "| DiLoCo, `every=30` | {:.0%} | {:.0%} | {:.0%} |".format(*shares).replace("%", " %")
    assert row in page.read_text(encoding="utf-8")
