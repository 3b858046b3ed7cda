"""The verdict on a hook, on synthetic runs whose right verdict is known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commhooks.experiments.results.outcomes import settings_of
from commhooks.experiments.results.verdicts import Judged, Margins, Run, Verdict, judge
from tests.experiments.synthetic import results

ROOT = Path(__file__).parents[2]
STEPS = 80
Runs = dict[int, Run]


def runs(
    ratio: float, worse: float, *, seeds: int = 1, first: int = 0, jitter: float = 0.05, steps: int = STEPS
) -> tuple[Runs, Runs]:
    """Return a baseline's and a hook's runs: steps `ratio` times as fast, and a loss that is higher by `worse`."""
    baseline, hook = {}, {}
    for seed in range(first, first + seeds):
        draw = np.random.default_rng(seed)
        more = int(steps * max(1, ratio)) + 1
        curve = 2.5 + 3 * (1 + np.arange(more) / 5) ** -0.7 + 0.1 * draw.standard_normal(more)  # the same batches
        mine = curve + worse * np.minimum(1, np.arange(more) / 20) + 0.002 * draw.standard_normal(more)
        load = np.exp(jitter * np.repeat(draw.standard_normal(more // 10 + 1), 10))[:more]  # slows both alike
        times = [load * np.exp(jitter * np.abs(draw.standard_normal(more))) / speed for speed in (1.0, ratio)]
        made = max(steps, min(int(np.searchsorted(np.cumsum(times[1]), times[0][:steps].sum())) + 1, more))
        baseline[seed] = Run(curve[:steps].tolist(), times[0][:steps].tolist())
        hook[seed] = Run(mine[:made].tolist(), times[1][:made].tolist())
    return baseline, hook


def judged(ratio: float, worse: float, *, seeds: int = 1, first: int = 0, jitter: float = 0.05) -> Judged:
    return judge(*runs(ratio, worse, seeds=seeds, first=first, jitter=jitter), steps=STEPS)


@pytest.mark.parametrize(
    ("ratio", "worse", "verdict"),
    [
        (1.4, 0.0, Verdict.PAYS),  # faster and no worse
        (0.9, 0.0, Verdict.COSTS),
        (0.9, 0.2, Verdict.COSTS),
        (5.0, 0.1, Verdict.PAYS),  # by the loss after equal time
        (1.15, 0.4, Verdict.COSTS),
    ],
)
def test_one_seed_settles_what_is_clear(ratio: float, worse: float, verdict: Verdict) -> None:
    assert all(judged(ratio, worse, first=seed).verdict is verdict for seed in range(20))


def test_four_seeds_settle_it_too_and_seeds_that_disagree_do_not() -> None:
    assert judged(1.4, 0.0, seeds=4).verdict is Verdict.PAYS and judged(0.9, 0.1, seeds=4).verdict is Verdict.COSTS
    (baseline, pays), (others, costs) = runs(2.0, 0.0), runs(2.0, 2.0, first=1)
    found = judge(baseline | others, pays | costs, steps=STEPS)
    assert found.verdict is Verdict.OPEN and found.lacks == "seeds" and found.longer == 2


def test_the_baseline_against_itself_never_pays() -> None:
    found = [judged(1.0, 0.0, first=seed).verdict for seed in range(200)]
    assert found.count(Verdict.PAYS) == 0 and found.count(Verdict.COSTS) > 180


def test_what_noise_hides_is_open_and_so_many_more_steps_mostly_settle_it() -> None:
    found = {seed: judged(1.12, 0.0, jitter=0.4, first=seed) for seed in range(20)}
    noisy = {seed: one for seed, one in found.items() if one.lacks == "steps" and one.longer < 20}
    assert len(noisy) > 8 and all(one.verdict is Verdict.OPEN for one in noisy.values())
    settled = 0
    for seed, one in noisy.items():
        steps = int(1.5 * STEPS * one.longer)
        again = judge(*runs(1.12, 0.0, jitter=0.4, first=seed, steps=steps), steps=steps)
        settled += again.verdict is not Verdict.OPEN
    assert settled > len(noisy) / 2


def test_only_a_loss_that_is_not_finite_has_diverged_and_of_the_baseline_nothing_follows() -> None:
    baseline, hook = runs(1.5, 0.0, seeds=2)
    broken = {seed: replace(run, losses=[*run.losses[:-1], math.inf]) for seed, run in hook.items()}
    assert judge(baseline, hook | {1: broken[1]}, steps=STEPS).verdict is Verdict.DIVERGED
    lost = {seed: replace(run, losses=[math.nan, *run.losses[1:]]) for seed, run in baseline.items()}
    assert judge(baseline | {1: lost[1]}, hook, steps=STEPS).verdict is Verdict.PAYS
    found = judge(lost, hook, steps=STEPS)
    assert found.verdict is Verdict.OPEN and "baseline's loss is not finite" in found.why


def test_the_margins_are_the_users() -> None:
    baseline, hook = runs(1.1, 0.1)
    assert judge(baseline, hook, steps=STEPS, margins=Margins(matters=0.05)).verdict is Verdict.PAYS
    assert judge(baseline, hook, steps=STEPS).verdict is not Verdict.PAYS
    baseline, hook = runs(1.1, 0.0)
    assert judge(baseline, hook, steps=STEPS, margins=Margins(saves=0.2)).verdict is Verdict.COSTS
    with pytest.raises(ValueError, match=r"saves must be a fraction between 0 and 1 \(got 5\)"):
        Margins(saves=5)


def test_rounds_are_compared_where_steps_alternate() -> None:
    """Nine steps in ten send nothing: the median step is four times as fast, and the round no faster."""
    baseline, hook = runs(1.0, 0.0, jitter=0.02)
    seconds = np.where(np.arange(STEPS) % 10 == 9, 0.775 * 10 + 0.25, 0.25) * hook[0].seconds[:STEPS]
    hook = {0: Run(hook[0].losses[:STEPS], seconds.tolist())}
    assert judge(baseline, hook, steps=STEPS).verdict is Verdict.PAYS
    found = judge(baseline, hook, steps=STEPS, every=10)
    assert found.verdict is Verdict.COSTS and found.speed_up.mean == pytest.approx(1.0, abs=0.1)
    assert judge(baseline, hook, steps=STEPS, every=STEPS).verdict is Verdict.OPEN, "one round says nothing"


@pytest.mark.parametrize(("ratio", "worse"), [(1.5, 0.0), (5.0, 0.1)])
def test_a_hook_whose_held_out_loss_is_higher_by_what_matters_does_not_pay(ratio: float, worse: float) -> None:
    baseline, hook = runs(ratio, worse)
    least = dict.fromkeys((20, STEPS), 3.0)
    own = least | {len(hook[0].losses): 3.0}
    held = {0: replace(baseline[0], held_out=least)}
    assert judge(held, {0: replace(hook[0], held_out=own)}, steps=STEPS).verdict is Verdict.PAYS
    found = judge(held, {0: replace(hook[0], held_out=dict.fromkeys(own, 3.2))}, steps=STEPS)
    assert found.verdict is Verdict.OPEN and "but its held-out loss is higher by 0.200" in found.why


def test_a_setting_judges_all_its_hooks_and_names_the_best() -> None:
    (setting,) = settings_of(results(tasks=["gpt"], seeds=range(2)))
    assert setting.judged.keys() == {"fp16", "powersgd:rank=4"} and setting.best in setting.judged
    assert setting.judged["fp16"].verdict is Verdict.PAYS
    losses = [[step.loss for step in one.steps] for one in setting.outcomes[0].results.values()]
    fall = np.mean([own[0] - np.mean(own[-10:]) for own in losses])
    assert setting.judged["fp16"].margin == pytest.approx(0.01 * fall, rel=1e-6)


def test_of_ten_repetitions_of_whole_comparisons_one_seed_is_seldom_wrong() -> None:
    """The verdicts of `docs/reproductions/verdicts.md`: what all seeds say together is right."""
    found: dict[str, Runs] = {}
    for path in (ROOT / "docs" / "reproductions" / "verdicts").glob("*-*.npz"):
        with np.load(path) as data:
            for key in (key for key in data.files if key.endswith("|steps")):
                losses, seconds = data[key].T.tolist()
                held_out = {int(step): loss for step, loss in data[key.replace("|steps", "|held out")].tolist()}
                seed = int(path.stem.rpartition("-")[2])
                found.setdefault(key, {})[seed] = Run(losses, seconds, held_out)
    said: list[tuple[Verdict, Verdict]] = []
    for key, hook in found.items():
        baseline = found[f"{key.partition('|')[0]}|all-reduce|steps"]
        if hook is not baseline:
            steps = min(len(run.losses) for run in baseline.values())
            together = judge(baseline, hook, steps=steps).verdict
            said += [(judge({s: baseline[s]}, {s: hook[s]}, steps=steps).verdict, together) for s in hook]
    assert len(said) == 160
    assert sum(one is together for one, together in said) >= 146
    assert sum(one not in {together, Verdict.OPEN} for one, together in said) <= 1
