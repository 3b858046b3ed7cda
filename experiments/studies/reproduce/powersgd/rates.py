"""Time and accuracy at 10, 100 and 1,000 Mbit/s.

Two hosts train a convolutional network on handwritten digits, with several seeds. At the fastest rate every run takes
all its steps: what a compressor does to the accuracy does not depend on the link. At the slower rates the same training
takes a few steps, which are timed. Steps of the compressors are taken in turns. A whole run's time at a rate is its
number of steps times the time of a step there; so is the time to a loss.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from commhooks.experiments.links.link import format_rate
from commhooks.experiments.report.plots import Theme, canvases, legend
from commhooks.experiments.report.words import NEVER, listed, signed
from commhooks.experiments.results.intervals import Estimate, differences, ratios
from commhooks.experiments.results.summary import Typical, steps_to, target_loss, unprobed
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.experiments.sweeps.execute import RunFailed, execute
from commhooks.experiments.sweeps.plan import plan
from commhooks.experiments.training.worker import RunDone
from commhooks.units import three_digits
from experiments.studies.blocks import Block, Picture, Table, with_bounds
from experiments.studies.reproduce.ablations import PAPER
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction

RANKS = 2
PARTS = ("compute", "compression", "waiting")  # of a step's seconds
_POINTS = partial(signed, form=".2f")
_TWO_DECIMALS = "{:.2f}".format
_UNTIMED = 1  # steps at the beginning: memory is allocated in the first one, and its gradients are all in one bucket


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the runs, and the number of steps at each rate."""

    task: str
    hooks: tuple[str, ...]  # the first one is the baseline
    steps: tuple[tuple[str, int], ...]  # of a run at each rate; the last one is the whole training
    seeds: int
    kind: str = "hosts"


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Make the runs of every rate."""
    found = [notes.once(rate, partial(_at_rate, settings, rate, steps, notes)) for rate, steps in settings.steps]
    return {"rates": found}


def _at_rate(settings: Settings, rate: str, steps: int, notes: Notes) -> dict[str, Any]:
    """Return what the runs at this rate measured."""
    runs = plan(
        [settings.task],
        settings.hooks,
        links=[f"{settings.kind}:rate={rate}"],
        seeds=range(settings.seeds),
        ranks=[RANKS],
        steps=steps,
        evaluate_every=steps,
    )
    with TemporaryDirectory() as folder:
        made = execute(runs, Path(folder), partial(_listen, notes))
    if made.failures:
        label, story = next((run.label, story) for run, story in made.failures.items())
        raise RuntimeError(f"{label} at {rate} failed:\n{story}")
    results = [made.results[run] for run in runs]
    target = target_loss([result.steps for result in results if result.settings.hook.label == settings.hooks[0]])
    return {
        "rate": rate,
        "steps": steps,
        "parameters": results[0].parameters,
        "target": target,
        "runs": [_in_numbers(result, target) for result in results],
    }


def _listen(notes: Notes, settings: RunSettings, message: object) -> None:
    if isinstance(message, RunDone | RunFailed):
        link = format_rate(settings.link.bits_per_second)
        notes.tell(f"  {settings.label} at {link}{' failed' * isinstance(message, RunFailed)}")


def _in_numbers(result: RunResult, target: float) -> dict[str, Any]:
    typical = Typical.of(unprobed(result.steps[_UNTIMED:] or result.steps))
    return {
        "hook": result.settings.hook.label,
        "seed": result.settings.seed,
        "seconds": typical.seconds,
        **{part: getattr(typical, part) for part in PARTS},
        "payload_bytes": statistics.fmean(step.payload_bytes for step in result.steps),
        "steps_to_target": steps_to(target, result.steps),
        "held_out_loss": result.evaluations[-1].loss,
        **result.evaluations[-1].metrics,
    }


def by_seed(found: Mapping[str, Any], hook: str, what: str) -> dict[int, float]:
    """Return one measurement of a hook's runs, NaN if it is missing."""
    return {run["seed"]: math.nan if run[what] is None else run[what] for run in found["runs"] if run["hook"] == hook}


def speed_up(found: Mapping[str, Any], hook: str, than: str) -> Estimate:
    """Return how many times as fast a step is with one hook as with another, seed by seed."""
    return Estimate.of_ratios(ratios(by_seed(found, than, "seconds"), by_seed(found, hook, "seconds")))


def gained(found: Mapping[str, Any], hook: str, than: str) -> Estimate:
    """Return by how many percentage points the accuracy with one hook exceeds that with another, seed by seed."""
    ours, theirs = (by_seed(found, one, "accuracy") for one in (hook, than))
    return Estimate.of({seed: 100 * value for seed, value in differences(ours, theirs).items()})


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return a table of accuracies and one of times for each rate, findings, and the picture."""
    *_, whole = measured["rates"]
    blocks: list[Block] = [_accuracies(settings, whole), _accuracy_finding(settings, whole)]
    for found in measured["rates"]:
        blocks += [_times(settings, found, whole), _time_finding(settings, found)]
    caption = "Speed-up of a step over all-reduce at each rate, and the accuracy after the whole training."
    return [*blocks, Picture("rates", caption, partial(_draw, settings, measured["rates"]))]


def _accuracies(settings: Settings, whole: Mapping[str, Any]) -> Table:
    base, rows = settings.hooks[0], []
    for hook in settings.hooks:
        accuracy = Estimate.of({seed: 100 * value for seed, value in by_seed(whole, hook, "accuracy").items()})
        steps = Estimate.of(by_seed(whole, hook, "steps_to_target"))
        rows.append(
            [
                hook,
                three_digits(statistics.fmean(by_seed(whole, hook, "payload_bytes").values()) / 1e3),
                with_bounds(accuracy, _TWO_DECIMALS),
                with_bounds(gained(whole, hook, base), _POINTS) if hook != base else NEVER,
                f"{steps.mean:.0f}" if steps.seeds == settings.seeds else f"{steps.seeds} of {settings.seeds} runs",
            ]
        )
    title = (
        f"{settings.task}: {whole['parameters']:,} parameters, {whole['steps']} steps on {RANKS} hosts, "
        f"{settings.seeds} seeds, compared with {base}; steps to a training loss"
    )
    columns = (
        "hook",
        "kB a step",
        "held-out accuracy, % (95 %)",
        "difference, points (95 %)",
        f"steps to loss {whole['target']:.3f}",
    )
    return Table(title, columns, rows)


def _times(settings: Settings, found: Mapping[str, Any], whole: Mapping[str, Any]) -> Table:
    base, rows = settings.hooks[0], []
    for hook in settings.hooks:
        step = Estimate.of(by_seed(found, hook, "seconds"))
        reached = Estimate.of(by_seed(whole, hook, "steps_to_target"))
        parts = [statistics.fmean(by_seed(found, hook, part).values()) for part in PARTS]
        rows.append(
            [
                hook,
                three_digits(1e3 * step.mean),
                " + ".join(three_digits(1e3 * part) for part in parts),
                with_bounds(speed_up(found, hook, base), _TWO_DECIMALS) if hook != base else NEVER,
                three_digits(whole["steps"] * step.mean),
                three_digits(reached.mean * step.mean) if reached.seeds == settings.seeds else NEVER,
            ]
        )
    title = (
        f"{found['rate']}: {found['steps']} steps for each seed, compared with {base}; the loss is "
        f"{whole['target']:.3f}"
    )
    parts_of_it = f"{' + '.join(PARTS)}, ms"
    columns = ("hook", "step, ms", parts_of_it, "times as fast (95 %)", f"{whole['steps']} steps, s", "to loss, s")
    return Table(title, columns, rows)


def _accuracy_finding(settings: Settings, whole: Mapping[str, Any]) -> str:
    base, *others = settings.hooks
    found = {hook: gained(whole, hook, base) for hook in others}
    sentences = []
    for sign, word in ((1, "higher"), (-1, "lower")):
        if points := [f"{with_bounds(one, _POINTS)} for {hook}" for hook, one in found.items() if one.sign == sign]:
            sentences.append(f"Held-out accuracy is {word} than with {base}; difference in points: {listed(points)}.")
    if same := [hook for hook, one in found.items() if not one.sign]:
        sentences.append(f"In held-out accuracy no difference from {base} was seen for {listed(same)}.")
    losses = {hook: by_seed(whole, hook, "held_out_loss").values() for hook in settings.hooks}
    lost = {hook: sum(not math.isfinite(loss) for loss in each) for hook, each in losses.items()}
    if guesses := [f"{count} of {settings.seeds} with {hook}" for hook, count in lost.items() if count]:
        sentences.append(f"Runs that diverged, and count with what they still guessed right: {listed(guesses)}.")
    return " ".join(sentences)


def _time_finding(settings: Settings, found: Mapping[str, Any]) -> str:
    base, *others = settings.hooks
    factors = {hook: speed_up(found, hook, base) for hook in others}
    sentences = []
    for sign, word in ((1, "faster"), (-1, "slower")):
        if times := [
            f"{with_bounds(one, _TWO_DECIMALS)} for {hook}" for hook, one in factors.items() if one.sign == sign
        ]:
            sentences.append(f"At {found['rate']} a step is {word} than with {base}; times as fast: {listed(times)}.")
    if same := [hook for hook, one in factors.items() if not one.sign]:
        sentences.append(f"At {found['rate']} no difference in a step's time from {base} was seen for {listed(same)}.")
    return " ".join(sentences)


def _draw(settings: Settings, rates: Sequence[Mapping[str, Any]], theme: Theme) -> Figure:
    """Draw speed-ups against rates, and accuracies by hook."""
    base, *others = settings.hooks
    figure, (speed, accuracy) = canvases("Speed-up of a step", "", 9.6, 3.8, columns=2)
    places = range(len(rates))
    for hook, colour in zip(others, theme.hooks, strict=False):
        found = [speed_up(each, hook, base) for each in rates]
        speed.plot(places, [one.mean for one in found], color=colour, marker="o", markersize=4, label=hook)
    speed.axhline(1, color=theme.first, label=base)
    speed.set_yscale("log")
    ticks = [0.5, 1, 2, 5, 10, 20]
    speed.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    speed.yaxis.set_minor_formatter(NullFormatter())
    speed.set_xlim(-0.2, len(rates) - 0.8)
    speed.set_xticks(places, [each["rate"] for each in rates])
    speed.set_ylabel(f"times as fast as {base}")
    accuracy.set_title(f"Accuracy after {rates[-1]['steps']} steps", loc="left", fontweight="bold", pad=10)
    for place, (hook, colour) in enumerate(zip(settings.hooks, (theme.first, *theme.hooks), strict=False)):
        one = Estimate.of(by_seed(rates[-1], hook, "accuracy"))
        below, above = (100 * abs(end - one.mean) for end in one.ends)
        accuracy.errorbar(place, 100 * one.mean, [[below], [above]], color=colour, marker="o", capsize=3)
    accuracy.set_xticks(range(len(settings.hooks)), [hook.replace(":", "\n") for hook in settings.hooks])
    accuracy.set_ylabel("held-out accuracy, % (95 % interval)")
    legend(figure, speed, width=9.6)
    return figure


REPRODUCTION = Reproduction(
    name="powersgd-rates",
    title="PowerSGD's time and accuracy at 10, 100 and 1,000 Mbit/s",
    source=f"{PAPER}, training times on two backends, and tables of accuracy",
    said=(
        "With a slow backend (Gloo) rank 2 shortens training by much more than with a fast one (NCCL), where plain "
        "all-reduce is nearly as fast (recalled).",
        "Accuracy stays: on CIFAR-10 94.3 % with SGD, 93.6 % with rank 1, 94.4 % with rank 2, 94.5 % with rank 4 "
        "(recalled).",
    ),
    sizes={
        "default": Settings(
            task="digits:channels=48",
            hooks=("all-reduce", "fp16", "powersgd:rank=1", "powersgd:rank=2", "powersgd:rank=4"),
            steps=(("10 Mbit/s", 5), ("100 Mbit/s", 10), ("1 Gbit/s", 100)),
            seeds=5,
        ),
        "tiny": Settings(
            task="digits:size=tiny",
            hooks=("all-reduce", "powersgd:rank=1"),
            steps=(("1 Gbit/s", 4),),
            seeds=2,
            kind="emulated",
        ),
    },
    measure=measure,
    show=show,
)
