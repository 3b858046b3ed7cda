"""What is counted prints as people read it."""

from __future__ import annotations

from commhooks import Statistics
from commhooks.communicators.collective import KindTraffic
from commhooks.exchange import MemoryReport


def test_statistics_print_as_a_table_with_units() -> None:
    statistics = Statistics(
        steps=20,
        buckets=1,
        collectives=1_040,
        gradient_bytes=28_400_000,
        payload_bytes=812_000,
        moved_bytes=812_000,
        seconds_compressing=0.0312,
        seconds_waiting=1.5,
        by_kind={"all-reduce": KindTraffic(1, 512_000, 512_000), "all-gather": KindTraffic(1_039, 300_000, 300_000)},
        by_group={"inner": KindTraffic(5, 900, 900)},
    )
    assert str(statistics).splitlines() == [
        "20 steps, 1 bucket, 1,040 collectives",
        "gradients                   28.4 MB  1.42 MB a step",
        "in messages                  812 kB  35.0 times smaller",
        "sent by this rank            812 kB  40.6 kB a step",
        "  all-reduce                 512 kB  1 collective",
        "  all-gather                 300 kB  1,039 collectives",
        "  inner                       900 B  5 collectives",
        "compressing                 31.2 ms  1.56 ms a step",
        "waiting for collectives      1.50 s  75.0 ms a step",
        "not hidden behind backward  0.00 ms  0.00 ms a step",
    ]


def test_a_memory_report_prints_the_parts_that_there_are_and_the_largest_parameters() -> None:
    report = MemoryReport(
        gradients=4_000_000,
        residuals=4_000_000,
        residuals_on_host=0,
        bases=20_000,
        copies=0,
        working=41_000,
        by_parameter={f"layers.{n}": 1_000 * n for n in range(8)},
    )
    assert str(report).splitlines() == [
        "memory of the hook  4.06 MB  beside 4.00 MB of gradients",
        "  residuals         4.00 MB",
        "  bases             20.0 kB",
        "  working           41.0 kB",
        "of layers.7         7.00 kB",
        "of layers.6         6.00 kB",
        "of layers.5         5.00 kB",
        "of layers.4         4.00 kB",
        "of layers.3         3.00 kB",
        "and of 3 parameters more",
    ]
