"""What runs with several seeds say together."""

from __future__ import annotations

import math

import pytest

from commhooks.experiments.report.findings import facts_of
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
