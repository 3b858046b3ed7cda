"""The report's tables as text, the same for a terminal and a page."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from commhooks.units import bytes_in_words, counted, three_digits

from ..results.former_verdicts import Difference, Judgement, judgements, losses_of
from ..results.intervals import LEAST_SEEDS, Estimate
from ..results.outcomes import ACCURACY, PARTS, Outcome, Setting, Versus
from .findings import margin_in_words, no_target
from .words import (
    NEVER,
    percent,
    range_of_seconds,
    seconds_in_words,
    signed,
    spread_of,
    spread_of_seconds,
    times,
)

NO_DIFFERENCE = "no difference seen"


@dataclass(frozen=True)
class Cell:
    """A value, and below it in small print its interval and what follows from it."""

    main: str
    small: tuple[str, ...] = ()
    best: bool = False  # of its column
    warning: str = ""


@dataclass(frozen=True)
class Heading:
    """A column's name."""

    text: str
    small: str = ""
    part: str = ""  # "compute", "compression" or "waiting": shown with that part's colour
    wide: bool = False  # shown on the page, but not in a terminal


@dataclass(frozen=True)
class Grid:
    """A table; the first cell of each row is a name."""

    title: str
    headings: tuple[Heading, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""


def time_grid(setting: Setting) -> Grid:
    """Return where each hook was after the same time as the baseline, and how long it took to the target."""
    headings = [Heading("hook")]
    if setting.versus:
        first = setting.outcomes[0].hook
        headings += [Heading("after"), Heading("training loss", "then"), Heading(f"against {first}", "then")]
        headings += [Heading("held-out loss", f"against {first}", wide=True)]
    headings += [Heading("steps", "in all", wide=True), Heading("seeds", _AIM), Heading("steps", _AIM, wide=True)]
    headings += [Heading("time", _AIM), Heading("bytes", _AIM, wide=True)]
    if setting.versus:
        headings += [Heading("speed-up", _AIM), Heading("verdict")]
    best = {name: _least(setting, lambda one, name=name: getattr(one, name)) for name in _TO_TARGET}  # type: ignore[misc]  # "Cannot infer type of lambda": the default binds the name
    judged = judgements(setting)
    rows = tuple(tuple(_time_row(one, setting, judged.get(one.hook), best)) for one in setting.outcomes)
    aim = f"Target: training loss {setting.target:.3f}." if math.isfinite(setting.target) else no_target(setting)
    if len({value for value in setting.targets.values() if math.isfinite(value)}) > 1:
        aim = f"Target: training loss {setting.target:.3f}, the mean of each seed's own."
    if setting.versus:
        aim += f" {margin_in_words(setting)}"
    return Grid("After the same time" if setting.versus else "To the target", tuple(headings), rows, aim)


def outcome_grid(setting: Setting) -> Grid:
    """Return what each hook reached in the steps asked for: losses and metrics."""
    others = [name for name in setting.metrics if name != ACCURACY]
    headings = [Heading("hook"), Heading("held-out loss")]
    if setting.versus:
        headings.append(Heading(f"against {setting.outcomes[0].hook}"))
    if ACCURACY in setting.metrics:
        headings.append(Heading(ACCURACY))
    headings += [Heading(name.replace("_", " "), wide=True) for name in others]
    headings.append(Heading("training loss"))
    rows = tuple(tuple(_outcome_row(one, setting, others)) for one in setting.outcomes)
    return Grid(f"At equal steps ({setting.settings.steps:,})", tuple(headings), rows)


def cost_grid(setting: Setting) -> Grid:
    """Return what the steps asked for cost with each hook: bytes, and where the time of a step went."""
    headings = [Heading("hook"), Heading("moved", "per rank"), Heading("ratio")]
    headings.append(Heading("step", "IQM" if len(setting.seeds) > 1 else "IQM, quartiles"))
    headings += [Heading(part, part=part) for part in PARTS]
    if setting.versus:
        headings.append(Heading("speed-up", "step"))
    headings.append(Heading("these steps", wide=True))
    if setting.versus:
        headings.append(Heading("speed-up", "these steps", wide=True))
    interface = any(one.overhead.seeds for one in setting.outcomes)
    if interface:
        headings += [Heading("interface bytes", "/ counted", wide=True), Heading("link use", wide=True)]
    fastest = _least(setting, lambda one: one.step)
    rows = tuple(tuple(_cost_row(one, setting, one.hook == fastest, interface=interface)) for one in setting.outcomes)
    return Grid(f"What these {setting.settings.steps:,} steps cost", tuple(headings), rows, _caption(setting))


def overview_grid(settings: Sequence[Setting], names: Sequence[str]) -> Grid:
    """Return the speed-ups of every hook in every setting: of the step, and below it of the time to the target."""
    hooks = list(dict.fromkeys(hook for setting in settings for hook in setting.versus))
    rows = []
    for name, setting in zip(names, settings, strict=True):
        cells = [Cell(name)]
        for hook in hooks:
            versus = setting.versus.get(hook)
            if versus is None or not versus.step.seeds:
                cells.append(Cell(NEVER))
                continue
            reached = versus.to_target.seeds
            to_target = f"to target {times(versus.to_target.mean)}" if reached else "target not reached"
            if not math.isfinite(setting.target):
                to_target = "no target"
            if 0 < reached < versus.seeds:
                to_target += f", {reached} of {counted(versus.seeds, 'seed')}"
            small = (spread_of(versus.step, three_digits), to_target)
            cells.append(Cell(times(versus.step.mean), tuple(filter(None, small)), best=versus.step.sign == 1))
        rows.append(tuple(cells))
    caption = (
        "How many times as fast as the baseline a step is, with the 95 % interval from three seeds on (Student's t on "
        "logarithms, paired by seed) and both values of two, and the same for the time to the target loss. Marked: "
        "all of that lies above 1."
    )
    return Grid("Step speed-up in every setting", (Heading("setting"), *map(Heading, hooks)), tuple(rows), caption)


_AIM = "to target"
_TO_TARGET = ("seconds_to_target", "bytes_to_target")


def _time_row(
    one: Outcome, setting: Setting, judgement: Judgement | None, best: dict[str, str | None]
) -> Iterator[Cell]:
    versus = setting.versus.get(one.hook)
    yield _name(one, setting, versus)
    if setting.versus and versus is None:
        yield from (Cell(seconds_in_words(one.seconds.mean)), Cell(f"{one.last_loss.mean:.3f}"), Cell(""), Cell(""))
    elif versus is not None:
        moments = versus.moments.values()
        yield Cell(seconds_in_words(statistics.fmean(each.seconds for each in moments)) if moments else NEVER)
        yield Cell(f"{statistics.fmean(each.ours for each in moments):.3f}" if moments else NEVER)
        losses = losses_of(setting, one.hook)
        yield _loss_change(versus.same_time, losses.same_time)
        yield _loss_change(versus.held_out_then, losses.held_out_then)
    yield Cell(f"{statistics.fmean(len(result.steps) for result in one.results.values()):,.0f}")
    yield Cell(f"{len(one.reached)} of {len(one.results)}")
    reached = bool(one.reached)
    yield Cell(f"{one.steps_to_target.mean:,.0f}" if reached else NEVER)
    yield _seconds(one.seconds_to_target, best=best["seconds_to_target"] == one.hook)
    yield Cell(bytes_in_words(one.bytes_to_target.mean) if reached else NEVER, best=best["bytes_to_target"] == one.hook)
    if setting.versus:
        yield Cell("") if versus is None else _to_target(versus)
        yield Cell("" if judgement is None else judgement.verdict.value)


def _outcome_row(one: Outcome, setting: Setting, metrics: Sequence[str]) -> Iterator[Cell]:
    versus = setting.versus.get(one.hook)
    yield _name(one, setting, versus)
    yield _estimate(one.held_out_loss, "{:.3f}".format)
    if setting.versus:
        change = None if versus is None else losses_of(setting, one.hook).equal_steps
        yield Cell("") if versus is None else _loss_change(versus.loss, change)
    if ACCURACY in setting.metrics:
        cell = _estimate(one.metric(ACCURACY), percent, lowest=0, highest=1)
        points = versus.accuracy if versus is not None else None
        by = (
            ()
            if points is None or not points.seeds
            else (f"{signed(100 * points.mean, '.1f')} points", _verdict(points))
        )
        yield Cell(cell.main, (*cell.small, *filter(None, by)))
    for name in metrics:
        yield _estimate(one.metric(name), "{:.3f}".format)
    yield _estimate(one.train_loss, "{:.3f}".format)


def _to_target(versus: Versus) -> Cell:
    """Return the speed-up to the target, and over how many pairs if not over all."""
    cell, pairs = _speed_up(versus.to_target), versus.to_target.seeds
    few = f"{pairs} of {counted(versus.seeds, 'pair')}" if 0 < pairs < versus.seeds else ""
    return dataclasses.replace(cell, small=(*cell.small, *filter(None, [few])))


def _cost_row(one: Outcome, setting: Setting, fastest: bool, *, interface: bool) -> Iterator[Cell]:
    versus = setting.versus.get(one.hook)
    yield _name(one, setting, versus)
    peak = (f"peak {bytes_in_words(one.peak_bytes.mean)} a step",) if one.peak_bytes.seeds else ()
    yield Cell(bytes_in_words(one.moved_bytes.mean), peak)
    yield Cell(times(one.ratio))
    spread = range_of_seconds(one.step.mean, one.step_spread.low, one.step_spread.high)
    yield (
        _seconds(one.step, best=fastest)
        if len(setting.seeds) > 1
        else Cell(seconds_in_words(one.step.mean), (spread,), best=fastest)
    )
    for part in PARTS:
        yield Cell(seconds_in_words(one.parts[part]))
    if setting.versus:
        yield Cell("") if versus is None else _speed_up(versus.step)
    yield _seconds(one.seconds)
    if setting.versus:
        yield Cell("") if versus is None else _speed_up(versus.run)
    if interface:
        yield _estimate(one.overhead, times)
        yield _estimate(one.link_use, percent)


def _name(one: Outcome, setting: Setting, versus: Versus | None) -> Cell:
    """Return the hook's name, and whatever sets its runs apart from the others'."""
    small = (
        [f"{len(one.results)} of {counted(len(setting.seeds), 'seed')}"]
        if len(one.results) < len(setting.seeds)
        else []
    )
    if versus is not None and versus.seeds < len(one.results):
        small.append(f"compared over {counted(versus.seeds, 'seed')}")
    if versus is not None and not versus.turns:
        small.append("made at another time")
    warnings = [f"{len(one.diverged)} of {len(one.results)} diverged"] if one.diverged else []
    if one.failed:
        warnings.append(f"{counted(len(one.failed), 'run')} failed")
    if not one.replicas_identical:
        warnings.append("replicas differ")
    return Cell(one.hook, tuple(small), warning=", ".join(warnings))


def _estimate(
    estimate: Estimate, form: Callable[[float], str], *, lowest: float = -math.inf, highest: float = math.inf
) -> Cell:
    """Return the mean, and below it the interval in the same unit, as far as values are possible."""
    if not estimate.seeds:
        return Cell(NEVER)
    within = spread_of(estimate, lambda value: form(min(max(value, lowest), highest)))
    unit = form(1.0).lstrip("+0123456789.")
    return Cell(form(estimate.mean), tuple(filter(None, [within.replace(unit, "")])))


def _loss_change(estimate: Estimate, difference: Difference | None) -> Cell:
    """Return a difference of losses with its interval, and whether it matters."""
    cell = _estimate(estimate, signed)
    if difference is None:
        return cell
    said = "matters" if difference.matters else "does not matter" if difference is Difference.SAME else "not settled"
    return Cell(cell.main, (*cell.small, said))


def _verdict(estimate: Estimate) -> str:
    if set(estimate.by_seed.values()) == {estimate.neutral}:
        return "the same"
    return NO_DIFFERENCE if estimate.sign == 0 else ""


def _speed_up(estimate: Estimate) -> Cell:
    cell = _estimate(estimate, times)
    return Cell(cell.main, tuple(filter(None, (*cell.small, _verdict(estimate)))))


def _seconds(estimate: Estimate, *, best: bool = False) -> Cell:
    if not estimate.seeds:
        return Cell(NEVER)
    return Cell(seconds_in_words(estimate.mean), tuple(filter(None, [spread_of_seconds(estimate)])), best=best)


def _least(setting: Setting, measure: Callable[[Outcome], Estimate]) -> str | None:
    """Return the hook with the least mean among those measured with every one of their seeds."""
    known = {
        one.hook: found.mean
        for one in setting.outcomes
        if not one.diverged and (found := measure(one)).seeds == len(one.results)
    }
    return min(known, key=known.__getitem__) if len(known) > 1 else None


def _caption(setting: Setting) -> str:
    step = "IQM: interquartile mean, that of the middle half of a run's steps; its parts add up to it."
    if len(setting.seeds) == 1:
        return f"{step} One seed: no intervals."
    versus = " Comparisons are paired by seed." if setting.versus else ""
    if len(setting.seeds) < LEAST_SEEDS:
        over = "Means over two seeds, with both values; from three seeds on there are intervals."
    else:
        over = f"Means over {len(setting.seeds)} seeds with 95 % intervals (Student's t)."
    return f"{step} {over}{versus} Of times and speed-ups, means are geometric, and intervals those of logarithms."
