"""The outcomes of runs with several seeds: estimates and paired comparisons for every setting and hook."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from commhooks.experiments.results.intervals import Estimate, differences, ratios
from commhooks.experiments.results.summary import (
    Spread,
    Typical,
    smoothed_losses,
    steps_to,
    target_loss,
    total_bytes,
    total_seconds,
    typical_steps,
)
from commhooks.experiments.results.verdicts import USUAL, Judged, Margins, Run, best, judge
from commhooks.experiments.runs import RunResult, RunSettings, StepRecord
from commhooks.experiments.specs import Spec, steps_of_a_round, steps_under_way

USUAL_BASELINE = "all-reduce"
ACCURACY = "accuracy"
PARTS = ("compute", "compression", "waiting")


class Outcome:
    """One hook in one setting: its runs by seed, and estimates over all of them.

    Unless it says otherwise, an attribute is about the steps asked for, of which every run has the same number.
    """

    def __init__(
        self, hook: str, results: Mapping[int, RunResult], targets: Mapping[int, float], failed: Sequence[int] = ()
    ) -> None:
        self.hook = hook
        self.results: dict[int, RunResult] = dict(sorted(results.items()))
        self.targets = targets  # training losses, by seed; NaN: none
        self.failed: tuple[int, ...] = tuple(failed)  # seeds whose run failed

    @cached_property
    def diverged(self) -> tuple[int, ...]:
        """The seeds whose loss was not finite at some step or evaluation."""
        return tuple(
            seed
            for seed, result in self.results.items()
            if not all(math.isfinite(one.loss) for one in result.steps)
            or not all(math.isfinite(one.loss) for one in result.evaluations)
        )

    @cached_property
    def replicas_identical(self) -> bool:
        """True if all ranks ended with the same parameters in every run."""
        return all(result.replicas_identical for result in self.results.values())

    @cached_property
    def held_out_loss(self) -> Estimate:
        """Loss on held-out data after the last step."""
        return Estimate.of({seed: result.evaluation.loss for seed, result in self.results.items()})

    def metric(self, name: str) -> Estimate:
        """Return another metric on held-out data, after the last step."""
        return Estimate.of(
            {seed: result.evaluation.metrics.get(name, math.nan) for seed, result in self.results.items()}
        )

    @cached_property
    def train_loss(self) -> Estimate:
        """Training loss, mean over the last steps."""
        return self._each(lambda steps: smoothed_losses(steps)[-1])

    @cached_property
    def typical(self) -> Mapping[int, Typical]:
        """Each seed's typical step, from those not probed; of DiLoCo, from the mean steps of its rounds."""
        return {seed: Typical.of(typical_steps(result)) for seed, result in self.results.items()}

    @cached_property
    def step(self) -> Estimate:
        """Seconds of a typical step: the only figure of a step's time that tables, bars and speed-ups use."""
        return Estimate.of_times({seed: one.seconds for seed, one in self.typical.items()})

    @cached_property
    def step_spread(self) -> Spread:
        """Seconds of a step, over all seeds' steps without the probed ones."""
        return Spread.of([step.seconds for one in self.results.values() for step in typical_steps(one)])

    @cached_property
    def parts(self) -> Mapping[str, float]:
        """Seconds of each part of a typical step, by its mean share over seeds: the parts add up to `step`."""
        shares = {part: [getattr(one, part) / one.seconds for one in self.typical.values()] for part in PARTS}
        return {part: self.step.mean * statistics.fmean(own) for part, own in shares.items()}

    @cached_property
    def seconds(self) -> Estimate:
        """Training time of the whole run, warm-up included."""
        return Estimate.of_times({seed: total_seconds(one.asked_steps) for seed, one in self.results.items()})

    @cached_property
    def moved_bytes(self) -> Estimate:
        """Bytes that one rank moved in the whole run, warm-up included."""
        return self._each(total_bytes)

    @cached_property
    def peak_bytes(self) -> Estimate:
        """Bytes of the largest exchange over the steps for which it may be under way; no seeds if every step sends."""
        any_hook = next(iter(self.results.values())).settings.hook
        if steps_of_a_round(any_hook) == 1:
            return Estimate.of({})
        return self._each(lambda steps: max(step.moved_bytes for step in steps) / max(1, steps_under_way(any_hook)))

    @cached_property
    def ratio(self) -> float:
        """Bytes of the plain all-reduce over the bytes moved, the whole run."""
        dense = sum(step.dense_bytes for one in self.results.values() for step in one.asked_steps)
        moved = sum(total_bytes(one.asked_steps) for one in self.results.values())
        return dense / moved if moved else math.inf

    @cached_property
    def reached(self) -> Mapping[int, int]:
        """For each seed that reached the target, the number of steps that it took, also beyond those asked for."""
        found = {seed: steps_to(self.targets.get(seed, math.nan), one.steps) for seed, one in self.results.items()}
        return {seed: steps for seed, steps in found.items() if steps is not None}

    @cached_property
    def steps_to_target(self) -> Estimate:
        """Steps until the target is reached, over the seeds that reached it."""
        return Estimate.of(self.reached)

    @cached_property
    def seconds_to_target(self) -> Estimate:
        """Training time until the target is reached, over the seeds that reached it."""
        found = {seed: total_seconds(self.results[seed].steps[:n]) for seed, n in self.reached.items()}
        return Estimate.of_times(found)

    @cached_property
    def bytes_to_target(self) -> Estimate:
        """Bytes that one rank moved until the target is reached, over the seeds that reached it."""
        return Estimate.of({seed: total_bytes(self.results[seed].steps[:n]) for seed, n in self.reached.items()})

    @cached_property
    def overhead(self) -> Estimate:
        """Bytes that the network interface sent over the bytes counted; without seeds if none were counted there."""
        return Estimate.of_ratios(
            {
                seed: sum(sent) / total_bytes(result.asked_steps)
                for seed, result in self.results.items()
                if (sent := _interface_bytes(result)) and total_bytes(result.asked_steps)
            }
        )

    @cached_property
    def link_use(self) -> Estimate:
        """The fraction of the link's rate that the interface used over the whole run.

        It has no seeds if `overhead` has none, or if the rate changes.
        """
        return Estimate.of(
            {
                seed: 8 * sum(sent) / (total_seconds(result.asked_steps) * rate)
                for seed, result in self.results.items()
                if (sent := _interface_bytes(result))
                and not result.settings.link.schedule
                and (rate := result.settings.link.slowest)
            }
        )

    def took_turns_with(self, other: Outcome) -> bool:
        """Return whether the runs of both were made at the same time, so that the same load slowed them."""
        return all(
            took_turns(result, other.results[seed]) for seed, result in self.results.items() if seed in other.results
        )

    def _each(self, measure: Callable[[Sequence[StepRecord]], float]) -> Estimate:
        return Estimate.of({seed: measure(result.asked_steps) for seed, result in self.results.items()})


@dataclass(frozen=True)
class Versus:
    """A hook against the baseline, over the seeds that both have."""

    loss: Estimate  # held-out loss after the steps asked for, ours - the baseline's
    accuracy: Estimate  # the same for the accuracy; without seeds if the task reports none
    step: Estimate  # the baseline's typical step over ours: above 1 is faster
    run: Estimate  # the same for the whole run
    to_target: Estimate  # the same for the time to the target, over the seeds in which both reached it
    seeds: int  # that both have
    turns: bool  # whether the runs were made at the same time

    @classmethod
    def of(cls, ours: Outcome, baseline: Outcome) -> Versus:
        """Compare a hook with the baseline."""
        return cls(
            loss=Estimate.of(differences(ours.held_out_loss.by_seed, baseline.held_out_loss.by_seed)),
            accuracy=Estimate.of(differences(ours.metric(ACCURACY).by_seed, baseline.metric(ACCURACY).by_seed)),
            step=_speed_up(ours.step, baseline.step),
            run=_speed_up(ours.seconds, baseline.seconds),
            to_target=_speed_up(ours.seconds_to_target, baseline.seconds_to_target),
            seeds=len(ours.results.keys() & baseline.results.keys()),
            turns=ours.took_turns_with(baseline),
        )


@dataclass(frozen=True)
class Setting:
    """Everything but hook and seed, and the outcomes of its hooks; the baseline's comes first."""

    settings: RunSettings  # of no hook, and seed 0
    outcomes: tuple[Outcome, ...]
    baseline: Outcome | None  # None: it was not run, or failed, in this setting
    targets: Mapping[int, float]  # training loss by seed; NaN: the baseline's did not fall, and none was asked for
    seeds: tuple[int, ...]  # of any hook
    margins: Margins = USUAL

    @cached_property
    def versus(self) -> Mapping[str, Versus]:
        """Each hook but the baseline, compared with it."""
        first = self.baseline
        return {} if first is None else {one.hook: Versus.of(one, first) for one in self.outcomes if one is not first}

    @cached_property
    def judged(self) -> Mapping[str, Judged]:
        """The verdict on each hook that has a seed in common with the baseline; empty if no rank moved a byte."""
        first = self.baseline
        if first is None or self.is_silent:
            return {}
        runs = {one.hook: {seed: _run(result) for seed, result in one.results.items()} for one in self.outcomes}
        return {
            one.hook: judge(
                runs[first.hook],
                runs[one.hook],
                steps=self.settings.steps,
                every=steps_of_a_round(next(iter(one.results.values())).settings.hook),
                margins=self.margins,
            )
            for one in self.outcomes
            if one is not first and one.results.keys() & first.results.keys()
        }

    @property
    def best(self) -> str | None:
        """The hook that pays and has the lowest loss after equal time; None: none pays."""
        return best(self.judged)

    @property
    def is_silent(self) -> bool:
        """True if no rank moved a byte, as with a single rank."""
        return not any(one.moved_bytes.mean for one in self.outcomes)

    @property
    def any_result(self) -> RunResult:
        """One of the runs, for the settings they have in common."""
        return next(iter(self.outcomes[0].results.values()))

    @cached_property
    def metrics(self) -> list[str]:
        """The names of all metrics besides the loss."""
        every = [one for outcome in self.outcomes for one in outcome.results.values()]
        return list(dict.fromkeys(name for result in every for name in result.evaluation.metrics))


def settings_of(
    results: Sequence[RunResult],
    *,
    baseline: str | None = None,
    target: float | None = None,
    failures: Sequence[RunSettings] = (),
    margins: Margins = USUAL,
) -> list[Setting]:
    """Return the settings in order of appearance, each with its hooks in order of appearance.

    Args:
        results: Finished runs; those of one setting differ in hook and seed.
        baseline: The hook that the others are compared with; None: all-reduce if it is there, otherwise the first hook.
        target: The training loss to reach; None: by TARGET_RULE, for each setting.
        failures: Runs that have no result.
        margins: What matters in a verdict.

    Raises:
        ValueError: There is no such hook.

    """
    hooks = list(dict.fromkeys(one.hook for one in (*(result.settings for result in results), *failures)))
    chosen = chosen_baseline(baseline, hooks).label if hooks or baseline else ""
    grouped: dict[RunSettings, dict[str, dict[int, RunResult]]] = {}
    for result in results:
        runs = grouped.setdefault(setting_of(result.settings), {}).setdefault(result.settings.hook.label, {})
        runs[result.settings.seed] = result
    return [_setting(common, by_hook, chosen, target, failures, margins) for common, by_hook in grouped.items()]


def chosen_baseline(asked: str | None, hooks: Sequence[Spec]) -> Spec:
    """Return the baseline: the one asked for; otherwise all-reduce if it is among the hooks, or else the first.

    Raises:
        ValueError: There is no such hook.

    """
    if asked is not None:
        if Spec.parse(asked) not in hooks:
            labels = ", ".join(hook.label for hook in hooks)
            raise ValueError(f"baseline {asked!r} is none of the hooks that were run: {labels}")
        return Spec.parse(asked)
    usual = Spec.parse(USUAL_BASELINE)
    return usual if usual in hooks else hooks[0]


def setting_of(settings: RunSettings) -> RunSettings:
    """Return the settings without hook and seed."""
    return dataclasses.replace(settings.comparison_group, hook=Spec(""), seed=0)


def _setting(
    common: RunSettings,
    by_hook: Mapping[str, Mapping[int, RunResult]],
    baseline: str,
    asked: float | None,
    failures: Sequence[RunSettings],
    margins: Margins,
) -> Setting:
    own = [one for one in failures if setting_of(one) == common]
    seeds = {seed for runs in by_hook.values() for seed in runs} | {one.seed for one in own}
    targets = dict.fromkeys(seeds, asked or math.nan)
    if asked is None:
        rule = by_hook.get(baseline) or next(iter(by_hook.values()))
        found = {seed: target_loss([result.asked_steps]) for seed, result in rule.items()}
        # A hook without a partner may still tell when it reached what the baseline did with other seeds.
        targets = dict.fromkeys(seeds, Estimate.of(found).mean) | found
    outcomes = [
        Outcome(hook, runs, targets, [one.seed for one in own if one.hook.label == hook])
        for hook, runs in by_hook.items()
    ]
    outcomes.sort(key=lambda one: one.hook != baseline)
    first = outcomes[0] if outcomes[0].hook == baseline else None
    return Setting(common, tuple(outcomes), first, targets, tuple(sorted(seeds)), margins)


def _run(result: RunResult) -> Run:
    """Return what a verdict needs of a run."""
    steps = result.steps
    held_out = {one.step: one.loss for one in result.evaluations}
    return Run([step.loss for step in steps], [step.seconds for step in steps], held_out)


def _speed_up(ours: Estimate, baseline: Estimate) -> Estimate:
    return Estimate.of_ratios(ratios(baseline.by_seed, ours.by_seed))


def _interface_bytes(result: RunResult) -> list[int]:
    """Return the bytes at the network interface in every step; nothing if a step has none."""
    counted = [step.interface_bytes for step in result.asked_steps if step.interface_bytes is not None]
    return counted if len(counted) == len(result.asked_steps) else []


def took_turns(one: RunResult, other: RunResult) -> bool:
    """Return whether two runs took turns: the middle of each lies within the other one."""
    mine, its = one.asked_steps, other.asked_steps
    if min(len(mine), len(its)) < 3:
        return True  # too short to tell
    (first, middle, last), (begin, centre, end) = (
        (steps[0].ended, steps[len(steps) // 2].ended, steps[-1].ended) for steps in (mine, its)
    )
    return begin <= middle <= end and first <= centre <= last
