"""What runs with several seeds say together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from commhooks.experiments.report.findings import facts_of
from commhooks.experiments.results.intervals import Estimate, Interval
from commhooks.experiments.results.outcomes import Setting, settings_of
from commhooks.experiments.results.summary import Typical, smoothed_losses, steps_to, total_seconds
from commhooks.experiments.runs import RunResult
from tests.experiments.synthetic import DENSE_BYTES, diverged, result, results, stepwise, with_slow_probes

SEEDS = (0, 1, 2)
POWER = "powersgd:rank=4"


def setting(runs: list[RunResult], **options: float) -> Setting:
    (found,) = settings_of(runs, **options)  # type: ignore[arg-type]  # "float": the only option used here is the target
    return found


GPT = results(tasks=("gpt",), seeds=SEEDS)


def test_runs_that_differ_only_in_hook_and_seed_are_one_setting() -> None:
    found = settings_of(results(seeds=SEEDS, links=("100Mbit/s", "1Gbit/s")))
    assert [(one.settings.task.label, one.settings.link.bits_per_second) for one in found] == [
        ("digits", 1e8), ("digits", 1e9), ("gpt", 1e8), ("gpt", 1e9),
    ]  # fmt: skip
    assert all([outcome.hook for outcome in one.outcomes] == ["all-reduce", "fp16", POWER] for one in found)
    assert all(one.seeds == SEEDS for one in found)


def test_the_baseline_comes_first_whatever_the_order_of_the_files() -> None:
    assert setting(GPT[::-1]).outcomes[0].hook == "all-reduce"
    (named,) = settings_of(GPT, baseline="fp16")
    assert named.outcomes[0].hook == "fp16" and set(named.versus) == {"all-reduce", POWER}
    with pytest.raises(ValueError, match=r"baseline 'fp8' is none of the hooks that were run: all-reduce, fp16"):
        settings_of(GPT, baseline="fp8")


def test_speed_ups_are_paired_by_seed_and_a_missing_one_leaves_the_others() -> None:
    runs = {(one.settings.hook.label, one.settings.seed): one for one in GPT}
    typical = {key: Typical.of(run.steps).seconds for key, run in runs.items()}
    expected = {seed: typical["all-reduce", seed] / typical[POWER, seed] for seed in SEEDS}
    assert setting(GPT).versus[POWER].step.by_seed == pytest.approx(expected)
    del runs["all-reduce", 1], expected[1]
    found = setting(list(runs.values()))
    assert found.versus[POWER].step.by_seed == pytest.approx(expected)
    assert found.versus[POWER].seeds == 2 and found.seeds == SEEDS


def test_whole_runs_are_sums_over_their_steps() -> None:
    found = setting([with_slow_probes(one) if one.settings.hook.label == POWER else one for one in GPT])
    first, power = found.outcomes[0], found.outcomes[2]
    assert power.ratio == pytest.approx(20)
    assert found.versus[POWER].accuracy.mean == pytest.approx(-0.02 * 0.1 * math.log(20))
    assert power.reached and power.bytes_to_target.by_seed == {
        seed: steps * DENSE_BYTES // 20 for seed, steps in power.reached.items()
    }
    taken = {one: {seed: total_seconds(run.steps) for seed, run in one.results.items()} for one in (first, power)}
    assert found.versus[POWER].run.by_seed == pytest.approx(
        {seed: taken[first][seed] / taken[power][seed] for seed in SEEDS}
    )


def test_each_seed_has_the_target_of_its_own_baseline_so_that_the_baseline_always_reaches_it() -> None:
    curves = {one.settings.seed: smoothed_losses(one.steps) for one in GPT if one.settings.hook.label == "all-reduce"}
    found = setting(GPT)
    assert found.targets == pytest.approx(
        {seed: losses[0] + 0.95 * (losses[-1] - losses[0]) for seed, losses in curves.items()}
    )
    first = found.outcomes[0]
    assert set(first.reached) == set(SEEDS)
    steps = steps_to(found.targets[1], first.results[1].steps)
    assert steps is not None
    assert first.seconds_to_target.by_seed[1] == pytest.approx(total_seconds(first.results[1].steps[:steps]))
    assert set(setting(GPT, target=2.4).targets.values()) == {2.4}


def test_a_diverged_run_is_counted_and_its_loss_is_not_averaged() -> None:
    found = setting(
        [diverged(one) if one.settings.seed == 2 and one.settings.hook.label == POWER else one for one in GPT]
    )
    outcome = found.outcomes[2]
    assert outcome.held_out_loss.seeds == 2 and math.isfinite(outcome.held_out_loss.mean)
    assert found.best == "fp16"  # though the other was faster with two seeds


def test_a_link_whose_rate_changes_has_no_use_and_a_warning() -> None:
    usual, varying = (
        setting([stepwise(result(link=link), lambda _: {"interface_bytes": 10**6})])
        for link in ("100Mbit/s", "100Mbit/s+10Mbit/s@3000s")
    )
    assert usual.outcomes[0].link_use.seeds == 1 and not varying.outcomes[0].link_use.seeds
    assert varying.outcomes[0].overhead.seeds == 1
    assert "rate changes" not in facts_of(usual) and "rate changes" in facts_of(varying)


def test_if_the_baselines_loss_did_not_fall_there_is_no_target() -> None:
    rising = [stepwise(one, lambda step: {"loss": 2 + step.step / 100}) for one in GPT]
    first = setting(rising).outcomes[0]
    assert all(map(math.isnan, first.targets.values())) and not first.reached
    assert set(setting(rising, target=2.1).outcomes[0].reached) == set(SEEDS)


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
