"""Whether a hook pays: sentences that never contradict the curves they are about."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import stdtrit

from experiments.report.findings import finding, lead
from experiments.report.rows import time_grid
from experiments.results.former_verdicts import Difference, Judgement, Verdict, judgements, weighed
from experiments.results.intervals import Estimate
from experiments.results.moments import Moment
from experiments.results.outcomes import Setting, settings_of
from experiments.runs import Goal, RunResult
from tests.experiments.synthetic import diverged, result, stepwise

SEEDS = (0, 1, 2)
STEPS = 40
GOAL = Goal(loss=None, seconds=40.0, steps=10 * STEPS)


def made(
    hook: str, losses: Sequence[float], step_seconds: float, *, seed: int = 0, held_out: Sequence[float] = (1.0, 1.0)
) -> RunResult:
    """Return a run with this training loss at every step; its held-out loss changes evenly from step 1 to the last."""
    plain = result(hook, seed=seed, steps=STEPS)
    last, (first, end) = len(losses), held_out
    return replace(
        plain,
        steps=tuple(
            replace(plain.steps[0], step=n, loss=loss, seconds=step_seconds, ended=plain.steps[0].ended + n)
            for n, loss in enumerate(losses, start=1)
        ),
        evaluations=tuple(
            replace(plain.evaluations[0], step=n, loss=first + (end - first) * (n - 1) / (last - 1))
            for n in sorted({1, STEPS, last})
        ),
        goal=GOAL if last > STEPS else None,
    )


def falling(last: float, steps: int = STEPS, first: float = 4.0) -> list[float]:
    return [first + (last - first) * n / (steps - 1) for n in range(steps)]


def setting(*runs: RunResult, target: float | None = None) -> Setting:
    (found,) = settings_of(runs, target=target)
    return found


def verdict(found: Setting, hook: str = "sign") -> Verdict:
    return judgements(found)[hook].verdict


DENSE = made("all-reduce", falling(1.0), 1.0)


def test_a_hook_that_is_far_ahead_after_the_same_time_is_not_said_not_to_pay_for_want_of_steps() -> None:
    """Its steps are 4.39 times as fast, and its held-out loss is lower; the target is a little below its last loss."""
    dense, fast = [2.9] * 8 + [2.23] * 3 + [0.6] * 29, [2.9] * 20 + [0.68] * 20
    found = setting(made("all-reduce", dense, 1.0), made("sign", fast, 1 / 4.39, held_out=(1.0, 0.5)), target=0.65)
    said = finding(found)
    assert "does not pay" not in said
    assert re.search(
        r"After the same 9\.11 s its training loss was 0\.680, that of all-reduce 2\.\d+, which matters", said
    )
    assert verdict(found) is Verdict.OPEN and "so it must be run again with a larger --go-on" in said


FAST = 0.25  # seconds a step, a quarter of the baseline's
CASES = {
    "it reached the target sooner": (made("sign", falling(1.0), FAST), Verdict.PAYS),
    "it went on, and reached the target in less time": (made("sign", falling(1.0, 80), FAST), Verdict.PAYS),
    "it had the same time, and did not reach the target": (made("sign", falling(2.0, 160), FAST), Verdict.COSTS),
    "its steps are slower, and it learns no faster": (made("sign", falling(1.0), 1.5), Verdict.COSTS),
    "it ended early, far ahead": (made("sign", falling(1.5), FAST), Verdict.OPEN),
    "it ended early, behind": (made("sign", falling(3.9), FAST), Verdict.OPEN),
    "it is the same": (made("sign", falling(1.0), 1.0), Verdict.OPEN),
    "it is ahead in training, and behind on held-out data": (
        made("sign", falling(0.5, 160), FAST, held_out=(1.0, 9.0)), Verdict.OPEN,
    ),
    "it diverged": (diverged(made("sign", falling(1.0), FAST)), Verdict.DIVERGED),
}  # fmt: skip
SAID = {Verdict.PAYS: "sign pays here. ", Verdict.COSTS: "Compression does not pay here", Verdict.OPEN: "Whether "}


@pytest.mark.parametrize("what", CASES)
def test_one_seed_is_judged_by_its_values(what: str) -> None:
    run, expected = CASES[what]
    found = setting(DENSE, run)
    assert verdict(found) is expected
    said = finding(found)
    assert said.startswith(SAID.get(expected, "Compression does not pay here: every other hook diverged"))
    assert "One seed only: another may say otherwise." in said and "interval" not in said
    assert time_grid(found).rows[1][-1].main == expected.value


def test_a_hook_that_was_later_at_the_target_and_lower_after_the_same_time_is_not_settled() -> None:
    found = setting(DENSE, made("sign", [*[3.0] * 150, *[0.5] * 10], FAST), target=2.0)
    assert judgements(found)["sign"] == Judgement(target=-1, same_time=1, held_out=0)
    assert (
        "not settled. The best is sign: its time to the target and its loss after the same time disagree."
        in finding(found)
    )


def test_with_few_seeds_what_the_steps_of_one_run_scatter_by_is_no_difference() -> None:
    noise = [0.3 * (-1) ** n for n in range(STEPS)]
    for seeds in (1, 2):
        runs = []
        for seed in range(seeds):
            dense = [loss + scatter for loss, scatter in zip(falling(1.0), noise, strict=True)]
            runs.append(made("all-reduce", dense, 1.0, seed=seed))
            runs.append(made("sign", [loss - 0.05 for loss in dense], 1.0, seed=seed))  # and reaches it a step sooner
        assert verdict(setting(*runs)) is Verdict.OPEN
        clear = [made("sign", [loss - 1.0 for loss in falling(1.0)], 1.0, seed=seed) for seed in range(seeds)]
        assert verdict(setting(*runs[::2], *clear)) is Verdict.PAYS


def noisy(hook: str, draws: np.random.Generator, step_seconds: float = 1.0, steps: int = 2 * STEPS) -> RunResult:
    """Return a run whose loss falls from 2.3 to 0.3, with noise of 0.15."""
    n = np.arange(steps)
    return made(hook, list(0.3 + 2 * np.exp(-6 * n / steps) + draws.normal(0, 0.15, steps)), step_seconds)


def test_one_seed_of_equal_noisy_runs_seldom_gets_a_verdict_and_a_fast_hook_does() -> None:
    """A comparison of losses errs one time in 20, so of 100 trials more than 13 with a probability of 0.0005."""
    draws = np.random.default_rng(0)
    equal = [verdict(setting(noisy("all-reduce", draws), noisy("sign", draws))) for _ in range(100)]
    assert 100 - equal.count(Verdict.OPEN) <= 13
    fast = [verdict(setting(noisy("all-reduce", draws), noisy("sign", draws, FAST))) for _ in range(20)]
    assert fast.count(Verdict.PAYS) == 20


def test_the_noise_of_a_moment_is_that_of_the_losses_averaged_at_it() -> None:
    """Over 1,000 pairs of runs of pure noise, a share of 0.05 lies beyond 1.96, give or take 4 standard errors."""
    draws, far = np.random.default_rng(0), 0
    for _ in range(1000):
        ours, dense = (made(hook, list(draws.normal(1, 0.1, 60)), 1.0) for hook in ("sign", "all-reduce"))
        moment = Moment.of(ours, dense)
        far += abs(moment.ours - moment.baselines) > 1.96 * moment.noise
    assert abs(far / 1000 - 0.05) <= 4 * math.sqrt(0.05 * 0.95 / 1000)


def test_a_baseline_that_never_reaches_the_target_is_compared_after_the_same_time() -> None:
    ahead, behind = (made("sign", falling(last, 160), FAST) for last in (0.5, 3.0))
    for run, expected in ((ahead, Verdict.PAYS), (behind, Verdict.COSTS)):
        found = setting(DENSE, run, target=0.1)
        assert verdict(found) is expected
        assert "Neither it nor all-reduce reached a training loss of 0.100." in finding(found)


def test_a_baseline_that_diverged_is_no_measure() -> None:
    found = setting(diverged(DENSE), CASES["it reached the target sooner"][0])
    assert verdict(found) is Verdict.OPEN and math.isnan(found.target)
    assert "all-reduce diverged, so there is no target: name one with --target-loss." in finding(found)
    assert time_grid(found).rows[1][1].main == "—"


def test_a_hook_that_could_still_go_on_needs_more_steps_and_one_whose_steps_are_used_up_more_go_on() -> None:
    early = made("sign", falling(1.5, 50), FAST)
    used_up = replace(early, goal=replace(GOAL, steps=50))
    assert "so it needs more steps" in finding(setting(DENSE, early))
    assert "so it must be run again with a larger --go-on" in finding(setting(DENSE, used_up))


def test_losing_to_another_compressor_is_not_said_of_compression() -> None:
    slow = made("sign", falling(1.0), 1.5)
    top_k = made("top-k", falling(1.0), 1.0)
    (found,) = settings_of((top_k, slow), baseline="top-k")
    assert finding(found).startswith("No hook beats top-k here. The nearest is sign. ")
    (found,) = settings_of((top_k, diverged(slow)), baseline="top-k")
    assert finding(found).startswith("No hook beats top-k here: every other hook diverged.")
    (found,) = settings_of((top_k, made("sign", falling(1.0), FAST)), baseline="top-k")
    assert finding(found).startswith("sign beats top-k here. ")


def test_runs_without_a_seed_in_common_are_not_compared() -> None:
    found = setting(DENSE, made("sign", falling(1.0), FAST, seed=1), target=1.5)
    assert finding(found).startswith(
        "Nothing is compared with all-reduce here. "
        "Without a seed in common with all-reduce, so not compared: sign. Two seeds"
    )


def test_a_target_reached_with_different_seeds_is_reached_by_both() -> None:
    runs = [made("all-reduce", falling(last), 1.0, seed=seed) for seed, last in enumerate((1.0, 3.0))]
    runs += [made("sign", falling(last), 1.0, seed=seed) for seed, last in enumerate((3.0, 1.0))]
    said = finding(setting(*runs, target=1.5))
    assert re.search(
        r"It reached a training loss of 1\.500 in 1 of 2 seeds, after [\d.]+ s, all-reduce in 1 of 2 seeds, "
        r"after [\d.]+ s; never with the same seed\.",
        said,
    )
    assert "did not in up to" not in said


def test_of_a_single_rank_nothing_is_said_of_compression() -> None:
    runs = (DENSE, CASES["it reached the target sooner"][0])
    silent = [stepwise(run, lambda _: {"moved_bytes": 0, "dense_bytes": 0}) for run in runs]
    found = setting(*(replace(run, settings=replace(run.settings, ranks=1)) for run in silent))
    assert finding(found) == "No bytes were moved with 1 rank: there is nothing to compress."
    assert verdict(found) is Verdict.OPEN
    assert "1 rank over" in " ".join(lead([found]))


def seeded(lasts: Sequence[float], steps: int = 160) -> Setting:
    """Return the baseline and a hook with four times as many steps, whose seeds end at these losses."""
    runs = [made("all-reduce", falling(1.0), 1.0, seed=seed) for seed in range(len(lasts))]
    return setting(*runs, *(made("sign", falling(last, steps), FAST, seed=n) for n, last in enumerate(lasts)))


def test_two_seeds_show_both_values_and_decide_if_they_agree() -> None:
    agree, differ = seeded((0.5, 0.6)), seeded((0.5, 1.9))
    assert (verdict(agree), verdict(differ)) == (Verdict.PAYS, Verdict.OPEN)
    for found in (agree, differ):
        said = finding(found)
        assert "interval " not in said.replace("there are intervals", "")
        assert re.search(r"\(differences [+-][\d.]+ and [+-][\d.]+\)", said)
        cells = [cell for row in time_grid(found).rows for cell in row]
        assert not any(" to " in small for cell in cells for small in cell.small)
        assert any(" and " in small for cell in cells for small in cell.small)


def test_three_seeds_decide_beyond_what_differs_between_them() -> None:
    assert verdict(seeded((0.5, 0.6, 0.55))) is Verdict.PAYS
    assert verdict(seeded((1.5, 1.6, 1.55))) is Verdict.COSTS
    assert verdict(seeded((0.2, 3.6, 1.3))) is Verdict.OPEN
    assert "95 % interval" in finding(seeded((0.5, 0.6, 0.55)))


SURELY = {
    "a difference that is sure, and rounds to 0.000": ((2e-4, 2.1e-4, 1.9e-4), Difference.SAME),
    "sure, and half of the margin": ((0.049, 0.050, 0.051), Difference.SAME),
    "sure, and twice the margin": ((0.199, 0.200, 0.201), Difference.HIGHER),
    "lower, and sure": ((-0.199, -0.200, -0.201), Difference.LOWER),
    "surely not zero, perhaps below the margin": ((0.09, 0.11, 0.13), Difference.OPEN),
    "anything": ((-0.5, 0.0, 0.5), Difference.OPEN),
    "two seeds, both above": ((0.15, 0.3), Difference.HIGHER),
    "two seeds, one above": ((0.05, 0.3), Difference.OPEN),
    "two seeds, both within": ((0.05, -0.05), Difference.SAME),
    "one seed": ((-0.2,), Difference.LOWER),
    "none": ((), None),
}


@pytest.mark.parametrize("what", SURELY)
def test_a_difference_of_losses_matters_if_all_of_its_interval_lies_beyond_the_margin(what: str) -> None:
    values, expected = SURELY[what]
    assert weighed(Estimate.of(dict(enumerate(values))), 0.1) is expected


def test_the_noise_of_one_run_widens_what_one_seed_says() -> None:
    one = Estimate.of({0: 0.2})
    said = [weighed(one, 0.1, {0: noise}) for noise in (0.05, 0.15, math.inf)]
    assert said == [Difference.HIGHER, Difference.OPEN, Difference.OPEN]
    near = [weighed(Estimate.of({0: 0.02}), 0.1, {0: noise}) for noise in (0.05, 0.15)]
    assert near == [Difference.SAME, Difference.OPEN]


def test_a_hook_that_is_surely_but_hardly_worse_is_not_said_not_to_pay() -> None:
    """Each seed's loss is 0.001 higher after the same time; the baseline's fell by more than 2."""
    dense = falling(1.0)
    runs = [
        made(hook, [loss + off for loss in dense], 1.0, seed=seed, held_out=(1.0, 0.5 + off))
        for seed in SEEDS
        for hook, off in (("all-reduce", 0.0), ("sign", 0.001 + 1e-5 * seed))
    ]
    found = setting(*runs)
    assert found.versus["sign"].same_time.sign == 1, "a difference that an interval tells from zero"
    assert verdict(found) is not Verdict.COSTS
    assert "after the same time its loss differs by less than matters" in finding(found)
    assert time_grid(found).rows[1][3].small[-1] == "does not matter"


def test_no_verdict_is_given_against_any_comparison() -> None:
    for votes in product((1, 0, -1, None), repeat=3):
        found = Judgement(target=votes[0], same_time=votes[1], held_out=votes[2]).verdict
        assert found is not Verdict.PAYS or -1 not in votes
        assert found is not Verdict.COSTS or 1 not in votes
        assert found is not Verdict.OPEN or {*votes[:2]} <= {0, None} or {1, -1} <= {*votes}


CURVE = st.lists(st.floats(0.1, 6.0), min_size=2, max_size=5)


def drawn(points: Sequence[float], steps: int) -> list[float]:
    """Return a curve of straight lines through these points, evenly spaced."""
    return [float(one) for one in np.interp(np.linspace(0, len(points) - 1, steps), range(len(points)), points)]


def largest_bend(losses: Sequence[float]) -> float:
    """Return by how much a mean over up to 9 steps, on a line between two of them, may differ from the step's loss."""
    return max(abs(later - one) for one, later in zip(losses, losses[5:], strict=False))


@settings(max_examples=40, deadline=None)
@given(
    curves=st.lists(st.tuples(CURVE, CURVE), min_size=1, max_size=4),
    step_seconds=st.sampled_from((0.25, 0.5, 1.0, 1.6)),
    goes_on=st.booleans(),
)
def test_no_sentence_contradicts_the_curves(
    curves: list[tuple[list[float], list[float]]], step_seconds: float, goes_on: bool
) -> None:
    steps = max(STEPS, math.ceil(STEPS / step_seconds)) if goes_on else STEPS
    end = min(STEPS, steps * step_seconds)  # in seconds, of which the baseline's step takes one
    runs, differences, bends = [], [], []
    for seed, points in enumerate(curves):
        dense, ours = drawn(points[0], STEPS), drawn(points[1], steps)
        runs += [made("all-reduce", dense, 1.0, seed=seed), made("sign", ours, step_seconds, seed=seed)]
        after = [
            float(np.interp(end / each, range(1, len(one) + 1), one))
            for each, one in ((step_seconds, ours), (1.0, dense))
        ]
        differences.append(after[0] - after[1])
        bends.append(largest_bend(dense) + largest_bend(ours))
    found = setting(*runs)
    said = finding(found)
    # How far the curve's means may be from these differences, and, with three seeds, how far from zero is sure.
    bend, seeds = max(bends), len(curves)
    scatter = 0.0
    if seeds > 2:
        scatter = (statistics.stdev(differences) + 2 * bend) * float(stdtrit(seeds - 1, 0.975)) / math.sqrt(seeds)
    low, high = (end(differences) if seeds < 3 else statistics.fmean(differences) for end in (min, max))
    if high + bend + scatter < -found.margin - 0.001:
        assert "does not pay" not in said and "Do not pay" not in said
    if low - bend - scatter > found.margin + 0.001:
        assert "pays here. " not in said
    shown = re.search(r"its training loss was ([\d.]+\d), that of all-reduce ([\d.]+\d)", said)
    assert shown is not None
    mean = statistics.fmean(differences)
    assert float(shown[1]) - float(shown[2]) == pytest.approx(mean, abs=bend + 0.001)
