"""A setting as a table: one line a hook, with the same texts in a terminal, on a page and in files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from commhooks.experiments.advice import line_of
from commhooks.experiments.report.findings import advice_on
from commhooks.experiments.report.words import NEVER, percent, signed, times
from commhooks.experiments.results.intervals import Estimate
from commhooks.experiments.results.outcomes import ACCURACY, PARTS, Outcome, Setting
from commhooks.experiments.results.summary import total_seconds
from commhooks.experiments.results.verdicts import Judged, Range, Verdict
from commhooks.units import bytes_in_words, counted, seconds_in_words, three_digits

if TYPE_CHECKING:
    import pandas

_ORDER = (Verdict.PAYS, Verdict.OPEN, Verdict.COSTS, Verdict.DIVERGED)
_TOO_LONG = 50  # times the data: a verdict that needs more is not promised


@dataclass(frozen=True)
class Line:
    """What is said of one hook at a glance."""

    outcome: Outcome
    judged: Judged | None  # None: the baseline, or a hook without a seed in common with it
    lacks: str  # of a verdict that is not settled, what would settle it
    warning: str  # what went wrong with its runs; mostly empty
    code: str  # the line to type

    @property
    def hook(self) -> str:
        """Its name with its settings."""
        return self.outcome.hook

    @property
    def verdict(self) -> str:
        """The verdict in two words; empty for the baseline."""
        return self.judged.verdict.value if self.judged is not None else ""

    @property
    def speed_up(self) -> tuple[str, str]:
        """How many times as fast as the baseline's its steps are, and the interval."""
        found = None if self.judged is None else self.judged.speed_up
        return ("", "") if found is None else _texts(found, times, three_digits)

    @property
    def equal_steps(self) -> tuple[str, str]:
        """The difference of training loss at equal steps, and the interval."""
        return ("", "") if self.judged is None else _texts(self.judged.equal_steps, signed, signed)

    @property
    def equal_time(self) -> tuple[str, str]:
        """The difference of training loss after equal time, and the interval."""
        return ("", "") if self.judged is None else _texts(self.judged.equal_time, signed, signed)

    @property
    def bytes(self) -> tuple[str, str]:
        """The bytes that a rank moved in a step, and how many times fewer than a plain all-reduce moves."""
        run, ratio = next(iter(self.outcome.results.values())), self.outcome.ratio
        return bytes_in_words(self.outcome.moved_bytes.mean / run.settings.steps), "" if ratio == 1 else times(ratio)


def lines_of(setting: Setting) -> list[Line]:
    """Return the baseline's line, those of the advised hooks, and the others by verdict and loss after equal time."""
    lines, first = [_line(one, setting) for one in setting.outcomes], setting.baseline
    advice = advice_on(setting) if setting.judged else None
    named = [advice.hook, advice.faster] if advice is not None else []
    places = {hook: place for place, hook in enumerate(named) if hook is not None}
    return sorted(
        lines, key=lambda one: (one.outcome is not first, places.get(one.hook, len(places) + 2), *_rank(one.judged))
    )


def lacking(setting: Setting, hook: str) -> str:
    """Return what would settle a verdict, and how much longer the runs of the hook and the baseline would take."""
    judged, first = setting.judged[hook], setting.baseline
    if judged.verdict is not Verdict.OPEN or first is None:
        return ""
    if judged.lacks not in {"steps", "seeds"}:
        return judged.why
    if not judged.longer <= _TOO_LONG:
        return f"more than {_TOO_LONG} times the {judged.lacks} would be needed"
    runs = [run for one in setting.outcomes if one.hook in {hook, first.hook} for run in one.results.values()]
    more = seconds_in_words((judged.longer - 1) * sum(run.time_scale * total_seconds(run.steps) for run in runs))
    have = len(setting.seeds) if judged.lacks == "seeds" else setting.settings.steps
    return f"{math.ceil(judged.longer * have)} {judged.lacks} may settle it: about {more} more"


def _part(one: Outcome, part: str) -> Estimate:
    return Estimate.of({0: one.parts[part]})


# The figures of a hook: their name in files with the unit, the heading on a page, and how a value is written.
_FIGURES: tuple[tuple[str, str, Callable[[Outcome], Estimate], Callable[[float], str]], ...] = (
    ("step_seconds", "step", lambda one: one.step, seconds_in_words),
    *((f"{part}_seconds", part, partial(_part, part=part), seconds_in_words) for part in PARTS),
    ("train_loss", "training loss", lambda one: one.train_loss, "{:.3f}".format),
    ("held_out_loss", "held-out loss", lambda one: one.held_out_loss, "{:.3f}".format),
    ("seconds", "all steps asked for", lambda one: one.seconds, seconds_in_words),
    ("moved_bytes", "bytes", lambda one: one.moved_bytes, bytes_in_words),
    ("peak_bytes", "peak bytes", lambda one: one.peak_bytes, bytes_in_words),
    ("steps_to_target", "steps to target", lambda one: one.steps_to_target, "{:,.0f}".format),
    ("seconds_to_target", "time to target", lambda one: one.seconds_to_target, seconds_in_words),
    ("bytes_to_target", "bytes to target", lambda one: one.bytes_to_target, bytes_in_words),
    ("interface_over_counted", "interface bytes / counted", lambda one: one.overhead, times),
    ("link_use", "link use", lambda one: one.link_use, percent),
)


def figures(setting: Setting) -> tuple[list[str], list[list[tuple[str, str]]]]:
    """Return the headings and rows of all figures that any hook has: of each the mean, and the ends of its interval."""
    kept = [one for one in _figures(setting) if any(one[2](outcome).seeds for outcome in setting.outcomes)]
    rows = [
        [(line.hook, ""), *(_estimate(value(line.outcome), form) for _, _, value, form in kept)]
        for line in lines_of(setting)
    ]
    return ["hook", *(heading for _, heading, _, _ in kept)], rows


def frame(setting: Setting) -> pandas.DataFrame:
    """Return every figure as a number: a row a hook; the ends of the interval of X are X_low and X_high."""
    import pandas

    rows = []
    for line in lines_of(setting):
        row: dict[str, object] = {"hook": line.hook, "seeds": len(line.outcome.results), "verdict": line.verdict}
        for name in ("speed_up", "equal_steps", "equal_time") if line.judged is not None else ():
            found: Range = getattr(line.judged, name)
            column = name if name == "speed_up" else f"loss_difference_{name}"
            row |= {column: found.mean, f"{column}_low": found.low, f"{column}_high": found.high}
        for name, _, value, _ in _figures(setting):
            estimate = value(line.outcome)
            if estimate.seeds:
                row |= {name: estimate.mean}
            if estimate.seeds > 1:
                row |= {f"{name}_low": estimate.ends[0], f"{name}_high": estimate.ends[1]}
        rows.append(row)
    return pandas.DataFrame(rows)


def paper_frame(setting: Setting) -> pandas.DataFrame:
    """Return the table of a paper, as text: what a reader compares, with intervals."""
    import pandas

    def cell(found: tuple[str, str]) -> str:
        return f"{found[0]} ({found[1]})" if found[1] else found[0]

    return pandas.DataFrame(
        {
            "hook": line.hook,
            "speed-up": cell(line.speed_up),
            "loss, equal steps": cell(line.equal_steps),
            "loss, equal time": cell(line.equal_time),
            "bytes a step": line.bytes[0],
            "verdict": line.verdict,
        }
        for line in lines_of(setting)
    )


def _figures(setting: Setting) -> Sequence[tuple[str, str, Callable[[Outcome], Estimate], Callable[[float], str]]]:
    metrics = [
        (
            name,
            name.replace("_", " "),
            partial(Outcome.metric, name=name),
            percent if name == ACCURACY else "{:.3f}".format,
        )
        for name in setting.metrics
    ]
    return (*_FIGURES[:6], *metrics, *_FIGURES[6:])


def _line(one: Outcome, setting: Setting) -> Line:
    judged, versus = setting.judged.get(one.hook), setting.versus.get(one.hook)
    warnings = {
        f"{len(one.diverged)} of {len(one.results)} diverged": one.diverged,
        f"{counted(len(one.failed), 'run')} failed": one.failed,
        "replicas differ": not one.replicas_identical,
        f"{len(one.results)} of {counted(len(setting.seeds), 'seed')}": len(one.results) < len(setting.seeds),
        "made at another time": versus is not None and not versus.turns,
        "no seed in common": judged is None and versus is not None,
    }
    hook = next(iter(one.results.values())).settings.hook
    lacks = "" if judged is None else lacking(setting, one.hook)
    return Line(one, judged, lacks, ", ".join(text for text, holds in warnings.items() if holds), line_of(hook.label))


def _rank(judged: Judged | None) -> tuple[int, float]:
    if judged is None:
        return len(_ORDER), 0.0
    mean = judged.equal_time.mean
    return _ORDER.index(judged.verdict), mean if math.isfinite(mean) else math.inf


def _texts(found: Range, form: Callable[[float], str], short: Callable[[float], str]) -> tuple[str, str]:
    if not math.isfinite(found.mean):
        return NEVER, ""
    return form(found.mean), f"{short(found.low)} to {short(found.high)}" if found.low < found.high else ""


def _estimate(found: Estimate, form: Callable[[float], str]) -> tuple[str, str]:
    if not found.seeds:
        return NEVER, ""
    return form(found.mean), " to ".join(map(form, found.ends)) if found.seeds > 1 else ""
