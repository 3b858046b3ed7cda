"""Self-contained HTML pages."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from commhooks.experiments.launch import reason_of
from commhooks.experiments.report.findings import facts_of, finding, names_of
from commhooks.experiments.report.lines import Line, figures, lines_of
from commhooks.experiments.report.plots import DARK, LIGHT, Look
from commhooks.experiments.report.words import listed, pieces, rate_in_words
from commhooks.experiments.results.outcomes import Setting
from commhooks.experiments.results.verdicts import Verdict
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.units import bytes_in_words, counted, three_digits

PICTURES = {
    "time": "loss over time",
    "steps": "loss over steps",
    "bytes": "loss over bytes",
    "metric": "held-out accuracy over time",
    "step-time": "where a step's time goes",
    "gradients": "error of the mean and residual over steps",
    "layers": "compression and error by layer",
    "rate": "step speed-up against the rate of the link",
    "ranks": "step speed-up against the number of ranks",
}
"""The kinds of pictures, each with what it shows, for those who cannot see it."""
_MACHINE = {"processor": "", "cores": 0, "system": "", "device": "CPU", "backend": "gloo"}
"""What makes a machine, with the values of results that do not say it."""
_WIDE = {"step-time", "gradients", "layers"}
_MARKS = {Verdict.PAYS: "pays", Verdict.COSTS: "costs", Verdict.OPEN: "open", Verdict.DIVERGED: "costs"}


@dataclass(frozen=True)
class Picture:
    """One picture."""

    name: str  # of its file, without kind and suffix
    kind: str  # one of PICTURES
    png: bytes  # in light colours; a dark page inverts it

    @property
    def caption(self) -> str:
        """The picture's content in words."""
        return PICTURES[self.kind]

    @property
    def wide(self) -> bool:
        """True if it takes the page's whole width."""
        return self.kind in _WIDE

    @property
    def uri(self) -> str:
        """The picture as a link that contains it."""
        return data_uri(self.png)


@dataclass(frozen=True)
class _Bar:
    """A speed-up drawn as a bar: places in percent of its width."""

    end: float
    low: float
    high: float
    one: float  # where the baseline ends


def head(name: str) -> str:
    """Return the beginning of a command's report."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>commhooks {name}: """


HEAD = head("compare")


def page(
    settings: Sequence[Setting],
    pictures: Sequence[Sequence[Picture]],
    across: Sequence[Picture],
    drawn: Mapping[str, Look],
    *,
    target_rule: str,
    command: str,
    written: datetime,
    notes: Sequence[str],
    failures: Mapping[RunSettings, str],
    folders: Sequence[str] = (),
) -> str:
    """Return the report as HTML, with every picture inside it.

    Args:
        settings: The outcomes, by setting.
        pictures: The pictures of each setting; the first one is shown, the others are folded.
        across: Pictures across settings.
        drawn: The look of each hook in the pictures.
        target_rule: The rule that chose the target loss, in words.
        command: The command that makes the report again.
        written: The time at which the report is written.
        notes: Warnings.
        failures: The traceback of each run that failed.
        folders: The folders with the results, as named in the command; empty: the page's own folder.

    """
    names = names_of(settings)
    results = [run for one in settings for outcome in one.outcomes for run in outcome.results.values()]
    return template("report.html.j2").render(
        name="compare",
        title=listed(names) if 0 < len(names) < 4 else counted(len(names), "setting"),
        notes=[*notes, *_mixed(results)],
        failures=_failed(failures),
        sections=[
            {
                "name": name,
                "facts": facts_of(setting),
                "rows": _rows(lines_of(setting)),
                "finding": finding(setting),
                "plots": own,
                "figures": figures(setting),
            }
            for name, setting, own in zip(names, settings, pictures, strict=True)
        ],
        overview=_overview(settings, names) if len(settings) > 1 else None,
        across=across,
        colours={hook: look.colour for hook, look in drawn.items()},
        target_rule=target_rule,
        facts=_facts(results, command, written),
        folders=folders,
    )


def template(file: str) -> Template:
    """Return a page's template, with everything that every page needs besides its own text."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.globals |= {"light": LIGHT, "dark": DARK}
    environment.filters["breakable"] = breakable
    return environment.get_template(file)


def breakable(text: str) -> Markup:
    """Return a name as HTML that breaks into lines only at spaces and after the colon and the commas of a hook."""
    return Markup("<wbr>").join(Markup('<span class="piece">{}</span>').format(piece) for piece in pieces(text))


def data_uri(png: bytes) -> str:
    """Return a picture as a link that contains it."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _rows(lines: Sequence[Line]) -> list[tuple[Line, _Bar | None, str]]:
    """Return each line with the bar of its speed-up, all on one scale, and the class of its verdict."""
    found = {line.hook: line.judged.speed_up for line in lines if line.judged is not None}
    # An interval that is much wider than every bar must not squeeze the bars.
    top = max([1.0, *(min(one.high, 1.5 * max(one.mean, 1.0)) for one in found.values())])
    bars = {
        hook: _Bar(*(100 * min(max(value, 0.0) / top, 1.0) for value in (one.mean, one.low, one.high, 1.0)))
        for hook, one in found.items()
    }
    return [
        (line, bars.get(line.hook), _MARKS[line.judged.verdict] if line.judged is not None else "") for line in lines
    ]


def _overview(settings: Sequence[Setting], names: Sequence[str]) -> tuple[list[str], list[list[tuple[str, str]]]]:
    """Return for every setting and hook how many times as fast its steps are, and the verdict."""
    hooks = list(dict.fromkeys(hook for setting in settings for hook in setting.judged))
    rows = []
    for name, setting in zip(names, settings, strict=True):
        judged = [setting.judged.get(hook) for hook in hooks]
        cells = [
            ("", "") if one is None else (f"{three_digits(one.speed_up.mean)}×", one.verdict.value) for one in judged
        ]
        rows.append([(name, ""), *cells])
    return ["setting", *hooks], rows


def _failed(failures: Mapping[RunSettings, str]) -> list[tuple[str, str]]:
    """Return each hook and setting that failed, with its seeds, and why."""
    seeds: dict[tuple[str, str], list[int]] = {}
    for one, text in failures.items():
        what = f"{one.task.label} · {one.hook.label} · {one.ranks} ranks · {rate_in_words(one.link)}"
        seeds.setdefault((what, reason_of(text)), []).append(one.seed)
    return [
        (f"{what} · {'seed' if len(own) == 1 else 'seeds'} {listed([str(seed) for seed in sorted(own)])}", why)
        for (what, why), own in seeds.items()
    ]


def code_of_run(run: RunResult) -> str:
    """Return the version of commhooks that made a run, and the commit if it was a checkout."""
    version = f"commhooks {run.versions.get('commhooks', 'of an unknown version')}"
    return version if run.commit is None else f"{version}, commit {run.commit}"


def _mixed(results: Sequence[RunResult]) -> list[str]:
    """Return warnings about runs that are not of one kind."""
    kinds: Mapping[str, set[Any]] = {
        "with different versions of the packages": {tuple(sorted(run.versions.items())) for run in results},
        "with different commits of commhooks": {run.commit for run in results},
        "on different machines: times of different settings cannot be compared": {
            tuple(run.machine.get(name, usual) for name, usual in _MACHINE.items()) for run in results
        },
    }
    return [f"These runs were made {what}." for what, found in kinds.items() if len(found) > 1]


def _facts(results: Sequence[RunResult], command: str, written: datetime) -> list[tuple[str, str]]:
    """Return when, where, with what and by which command the runs were made."""
    found = [("written", f"{written:%Y-%m-%d, %H:%M} UTC"), ("command", command)]
    if not results:
        return found
    first, last = (datetime.fromtimestamp(pick(run.steps[-1].ended for run in results), UTC) for pick in (min, max))
    loads = [float(run.machine["load"]) for run in results]
    machines = [run.machine for run in results]
    peaks = [
        f"{bytes_in_words(run.peak_memory)} of the device under {run.settings.hook.label}"
        for run in results
        if run.peak_memory is not None
    ]
    return [
        ("measured", f"{first:%Y-%m-%d, %H:%M} to {last:%Y-%m-%d, %H:%M} UTC"),
        *found,
        ("code", _each(code_of_run(run) for run in results)),
        ("versions", _each(", ".join(f"{name} {text}" for name, text in run.versions.items()) for run in results)),
        ("processor", _each(f"{m['processor']}, {m['cores']} cores" for m in machines)),
        ("threads", _each(f"{m['threads_per_rank']} of each rank" for m in machines)),
        *([("peak memory", _each(peaks))] if peaks else []),
        ("load", f"{min(loads):.1f} to {max(loads):.1f} processes wanted to run, in the minute before a run's end"),
        ("system", _each(str(m["system"]) for m in machines)),
        ("DDP", _each("FSDP2" if one.settings.is_sharded else f"{one.settings.ddp} DDP" for one in results)),
    ]


def _each(texts: Iterable[str]) -> str:
    """Return the different texts."""
    return "; ".join(dict.fromkeys(texts))
