"""Overlap is real: communication hides behind the backward pass."""

from __future__ import annotations

import pytest

from experiments.links.link import LinkSettings
from experiments.planning.overlap import OverlapSettings, Round, measure_overlap
from experiments.specs import Spec

LINK = LinkSettings(bits_per_second=100e6, latency_seconds=2e-4)


def test_the_ratio_is_the_step_over_the_sum_of_its_parts() -> None:
    assert Round(compute=0.5, communication=0.5, step=0.7).ratio == pytest.approx(0.7)


def test_the_link_alone_takes_the_time_of_the_gradients_and_a_step_no_less() -> None:
    task = Spec.parse("gpt:size=small", "task")
    result = measure_overlap(OverlapSettings(task=task, link=LINK, rounds=2, bucket_cap_mb=0.1))
    assert result is not None and result.buckets > 2
    for turn in result.rounds:
        assert turn.communication > 8 * 4 * 100_000 / 100e6  # it has more than 100,000 parameters
        assert turn.step > turn.communication
