"""Self-contained HTML pages."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

import commhooks
from commhooks.units import bytes_in_words

from ..launch import reason_of
from ..machine import trained_on
from ..results.outcomes import Setting
from ..results.summary import SMOOTHING_STEPS
from ..results.verdicts import USUAL
from ..runs import SHARDED, RunResult, RunSettings
from .findings import dilation, finding, lead, names_of
from .layers import layer_grid
from .plots import DARK, LIGHT
from .rows import cost_grid, outcome_grid, overview_grid, time_grid
from .words import link_in_words, listed, pieces, rate_in_words

PICTURES = ("time", "steps", "bytes", "step-time", "gradients", "layers", "rate", "ranks")
_CAPTIONS = {
    "time": "loss against time",
    "steps": "loss against steps",
    "bytes": "loss against bytes",
    "step-time": "where a step's time goes",
    "gradients": "error and residual over steps",
    "layers": "compression and error by layer",
    "rate": "step speed-up against the rate of the link",
    "ranks": "step speed-up against the number of ranks",
}
_WIDE = {"bytes", "step-time", "gradients", "layers"}
ABOVE_ONE = (
    "An error of 1 (dashed) is as far from the true mean as a mean of zero would be, and above 1 the hook's mean is "
    "further off than that. A hook that keeps a residual sends later what is missing now, so it may train well all the "
    "same."
)
_HOOK = (
    "A communication hook is the function with which data-parallel training averages gradients over the ranks, in "
    "place of its own all-reduce; one that compresses sends fewer bytes, and the mean that it returns is not exact."
)
_DOCUMENTATION = (
    "the guide's page “Reading a comparison”: docs/guide/comparison.md in the source code, which 'make docs' builds as "
    "site/guide/comparison.html; otherwise in 'commhooks compare --help', and at the end of this page"
)


@dataclass(frozen=True)
class Picture:
    """One picture."""

    name: str  # of its file, without kind and suffix
    kind: str  # one of PICTURES
    png: bytes  # in light colours; a dark page inverts it

    @property
    def caption(self) -> str:
        """The picture's content in words, for readers who cannot see it."""
        return _CAPTIONS[self.kind]

    @property
    def note(self) -> str:
        """A note that readers need to understand it; mostly empty."""
        return ABOVE_ONE if self.kind in {"gradients", "layers"} else ""

    @property
    def wide(self) -> bool:
        """True if it takes the page's whole width."""
        return self.kind in _WIDE

    @property
    def uri(self) -> str:
        """The picture as a link that contains it."""
        return data_uri(self.png)


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
        pictures: The pictures of each setting.
        across: Pictures across settings.
        target_rule: The rule that chose the target loss, in words.
        command: The command that makes the report again.
        written: The time at which the report is written.
        notes: Warnings, for the top of the page.
        failures: The traceback of each run that failed.
        folders: The folders with the results, as named in the command; empty: the page's own folder.

    """
    names = names_of(settings)
    results = [run for one in settings for outcome in one.outcomes for run in outcome.results.values()]
    hooks = len({outcome.hook for one in settings for outcome in one.outcomes})
    return template("report.html.j2").render(
        name="compare",
        title=f"{hooks} hooks, side by side" if hooks > 1 else "one hook",
        lead=[_HOOK, *lead(settings)] if settings else [_HOOK],
        about=_about(results, command, written),
        above_one=ABOVE_ONE,
        notes=[*notes, *_mixed(results)],
        failures=_failed(failures),
        findings=[(name, finding(setting)) for name, setting in zip(names, settings, strict=True)],
        overview=overview_grid(settings, names) if len(settings) > 1 else None,
        across=across,
        sections=[
            {
                "name": name,
                "facts": _facts_of(setting),
                "grids": (time_grid(setting), outcome_grid(setting), cost_grid(setting)),
                "layers": layer_grid(setting),
                "plots": own,
            }
            for name, setting, own in zip(names, settings, pictures, strict=True)
        ],
        goes_on=any(run.goal is not None for run in results),
        several_seeds=any(len(one.seeds) > 1 for one in settings),
        links=list(dict.fromkeys(link_in_words(one.settings.link) for one in settings)),
        emulated=any(one.settings.link.kind == "emulated" for one in settings),
        interface=any(outcome.overhead.seeds for one in settings for outcome in one.outcomes),
        smoothing=SMOOTHING_STEPS,
        matters=f"{100 * USUAL.matters:g} %",
        target_rule=target_rule,
        facts=_facts(settings, results),
        command=command,
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


def _facts_of(setting: Setting) -> str:
    run, settings = setting.any_result, setting.settings
    description = run.description[0].upper() + run.description[1:]
    seeds = f"seeds {', '.join(map(str, setting.seeds))}" if len(setting.seeds) > 1 else f"seed {setting.seeds[0]}"
    optimizer = "" if settings.optimizer is None else f" Optimizer: {settings.optimizer.label}."
    return (
        f"{description}. {run.parameters:,} parameters, {settings.steps:,} steps, {settings.ranks} ranks over "
        f"{link_in_words(settings.link)}; {seeds}.{optimizer} "
        f"{trained_on(run.machine, is_limited=settings.link.is_limited)} {dilation([setting])}"
    )


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


def _about(results: Sequence[RunResult], command: str, written: datetime) -> list[tuple[str, str]]:
    """Return when, with which code and by which command this was made, and where it is explained."""
    code = _each(code_of(run) for run in results) or f"commhooks {commhooks.__version__}"
    ended = [step.ended for run in results for step in run.steps]
    measured = [("measured", period_in_words(min(ended), max(ended)))] if ended else []
    return [
        *measured,
        ("written", f"{written.astimezone(UTC):%Y-%m-%d, %H:%M} UTC"),
        ("code", code),
        ("command", command),
        ("explained in", _DOCUMENTATION),
    ]


def code_of(run: RunResult) -> str:
    """Return the version of commhooks that made a run, and the commit if it was a checkout."""
    version = f"commhooks {run.versions.get('commhooks', 'of an unknown version')}"
    return version if run.commit is None else f"{version}, commit {run.commit}"


def period_in_words(begin: float, end: float) -> str:
    """Return two Unix times as '2026-11-26, 09:51 to 09:55 UTC'."""
    first, last = (datetime.fromtimestamp(seconds, UTC) for seconds in (begin, end))
    if f"{first:%Y-%m-%d %H:%M}" == f"{last:%Y-%m-%d %H:%M}":
        return f"{first:%Y-%m-%d, %H:%M} UTC"
    same_day = first.date() == last.date()
    return f"{first:%Y-%m-%d, %H:%M} to {last:{'%H:%M' if same_day else '%Y-%m-%d, %H:%M'}} UTC"


def _mixed(results: Sequence[RunResult]) -> list[str]:
    """Return warnings about runs that are not of one kind."""
    said = []
    if len({tuple(sorted(run.versions.items())) for run in results}) > 1:
        said.append("These runs were made with different versions of the packages (see the end of the page).")
    if len({run.commit for run in results}) > 1:
        said.append("These runs were made with different commits of commhooks.")
    known = {"processor": "", "cores": 0, "system": "", "device": "CPU", "backend": "gloo"}
    kinds = {tuple(run.machine.get(name, usual) for name, usual in known.items()) for run in results}
    if len(kinds) > 1:
        said.append("These runs were made on different machines: times of different settings cannot be compared.")
    return said


def _facts(settings: Sequence[Setting], results: Sequence[RunResult]) -> list[tuple[str, str]]:
    if not results:
        return []
    ddp = {
        "core": "ddp_core.DistributedDataParallel",
        "torch": "torch.nn.parallel.DistributedDataParallel",
        SHARDED: "none: FSDP2 shards the model over the ranks",
    }
    loads = [float(run.machine["load"]) for run in results]
    peaks = [
        f"{bytes_in_words(run.peak_memory)} of the device under {run.settings.hook.label}"
        for run in results
        if run.peak_memory is not None
    ]
    buckets = [
        f"{mib:g} MiB"
        if (mib := one.settings.bucket_cap_mb)
        else "FSDP2's modules"
        if one.settings.is_sharded
        else "of the DDP's own size"
        for one in settings
    ]
    return [
        ("processor", _each(f"{m['processor']}, {m['cores']} cores" for m in (run.machine for run in results))),
        ("threads", _each(f"{run.machine['threads_per_rank']} of each rank" for run in results)),
        *([("peak memory", _each(peaks))] if peaks else []),
        ("load", f"{min(loads):.1f} to {max(loads):.1f} processes wanted to run, in the minute before a run's end"),
        ("system", _each(str(run.machine["system"]) for run in results)),
        ("versions", _each(", ".join(f"{name} {text}" for name, text in run.versions.items()) for run in results)),
        ("DDP", _each(ddp[one.settings.ddp] for one in settings)),
        ("buckets", _each(buckets)),
        ("seeds", ", ".join(map(str, sorted({seed for one in settings for seed in one.seeds})))),
    ]


def _each(texts: Iterable[str]) -> str:
    """Return the different texts."""
    return "; ".join(dict.fromkeys(texts))
