"""Means over seeds, their intervals, and comparisons seed by seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from commhooks.experiments.results.intervals import Estimate, Interval


def test_an_interval_is_students() -> None:
    values = np.random.default_rng(0).normal(1, 2, 12)
    ours = Interval.of(values.tolist())
    theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))


def test_a_value_that_is_not_finite_makes_an_interval_unbounded() -> None:
    found = Interval.of([1.0, math.nan])
    assert (found.low, found.high, found.sign) == (-math.inf, math.inf, 0)


def test_two_seeds_have_their_values_and_no_interval_and_a_sign_if_they_agree() -> None:
    near, apart = Estimate.of_ratios({0: 1.1, 1: 9.5}), Estimate.of_ratios({0: 0.5, 1: 21.0})
    assert (near.interval, near.sign, dict(near.by_seed)) == (None, 1, {0: 1.1, 1: 9.5})
    assert (apart.interval, apart.sign) == (None, 0)
    assert (Estimate.of({0: -0.2, 1: -0.1}).sign, Estimate.of({0: -0.2, 1: 0.1}).sign) == (-1, 0)


def test_a_seed_without_a_number_is_left_out_and_can_be_counted() -> None:
    found = Estimate.of({0: 1.0, 1: math.nan, 2: 3.0})
    assert (found.mean, found.seeds, dict(found.by_seed)) == (2.0, 2, {0: 1.0, 2: 3.0})
    assert math.isnan(Estimate.of({0: math.inf}).mean)


def test_the_interval_of_ratios_does_not_depend_on_which_is_divided_by_which() -> None:
    values = {0: 1.5, 1: 2.0, 2: 2.4}
    ours, theirs = Estimate.of_ratios(values), Estimate.of_ratios({seed: 1 / one for seed, one in values.items()})
    assert ours.interval is not None and theirs.interval is not None
    assert (ours.mean, ours.interval.low, ours.interval.high) == pytest.approx(
        (1 / theirs.mean, 1 / theirs.interval.high, 1 / theirs.interval.low)
    )


def test_the_interval_of_ratios_covers_the_truth_about_as_often_as_it_says() -> None:
    draws = np.exp(np.random.default_rng(1).normal(math.log(3), 0.2, (600, 3)))
    found = [Estimate.of_ratios(dict(enumerate(row))).interval for row in draws]
    covered = sum(one is not None and one.low <= 3 <= one.high for one in found)
    assert 0.92 < covered / 600 < 0.98  # 95 % with a standard deviation of 0.9 %
