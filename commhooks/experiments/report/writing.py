"""The report of any number of runs: one HTML page, and its pictures and tables as files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

import matplotlib
from matplotlib.figure import Figure

from commhooks.experiments.report.across import series_of, speed_ups
from commhooks.experiments.report.bars import step_time
from commhooks.experiments.report.curves import fidelity, progress
from commhooks.experiments.report.findings import names_of
from commhooks.experiments.report.layers import layer_picture
from commhooks.experiments.report.lines import frame, paper_frame
from commhooks.experiments.report.page import Picture, page
from commhooks.experiments.report.plots import LIGHT, Look, files_of, looks, style
from commhooks.experiments.results.outcomes import ACCURACY, Setting, settings_of
from commhooks.experiments.results.summary import TARGET_RULE
from commhooks.experiments.results.verdicts import USUAL, Margins
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.saving.files import named

PAGE = "report.html"
PLOTS = "plots"
TABLES = "tables"
_NONE: Mapping[RunSettings, str] = MappingProxyType({})


def write(
    results: Sequence[RunResult],
    out: Path,
    *,
    baseline: str | None,
    target_loss: float | None,
    margins: Margins = USUAL,
    command: str,
    notes: Sequence[str] = (),
    failures: Mapping[RunSettings, str] = _NONE,
    folders: Sequence[str] = (),
) -> Path:
    """Write a page, its plots (PNG, SVG, PDF) and tables (CSV, LaTeX) into the folder `out`; return the page's path.

    Args:
        results: Finished runs, of any number of settings, hooks and seeds.
        out: The folder; it is created if it does not exist, and files of these names are replaced.
        baseline: The hook that the others are compared with; None: all-reduce if it is there, otherwise the first.
        target_loss: The training loss to reach; None: by `results.summary.TARGET_RULE`, for each setting.
        margins: What matters in a verdict.
        command: How to get the report again.
        notes: Warnings.
        failures: The traceback of each run that failed.
        folders: Where the results are, as named in the command; none: in `out`.

    Raises:
        ValueError: No run used the baseline, or there is nothing to report.

    """
    if not results and not failures:
        raise ValueError("there is nothing to report: expected at least one finished or failed run")
    settings = settings_of(results, baseline=baseline, target=target_loss, failures=list(failures), margins=margins)
    hooks = list(dict.fromkeys(one.hook for setting in settings for one in setting.outcomes))
    chosen = next((setting.baseline.hook for setting in settings if setting.baseline is not None), None)
    drawn = looks(hooks, chosen)
    names = [re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")[:80] for name in names_of(settings)]
    for folder in (PLOTS, TABLES):
        (out / folder).mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(style(LIGHT)):
        pictures = [
            [_written(out, name, kind, figure) for kind, figure in _figures(setting, drawn)]
            for name, setting in zip(names, settings, strict=True)
        ]
        across = [
            _written(out, f"series-{number}", series.along, speed_ups(series, drawn))
            for number, series in enumerate(series_of(settings), start=1)
        ]
    for name, setting in zip(names, settings, strict=True):
        _write(out / TABLES / f"{name}.csv", frame(setting).to_csv(index=False))
        latex = paper_frame(setting).to_latex(index=False, escape=True, column_format="lrrrrl")
        _write(out / TABLES / f"{name}.tex", latex.replace("×", "$\\times$"))
    rule = TARGET_RULE if target_loss is None else f"a mean training loss of {target_loss:g}, as asked for"
    text = page(
        settings,
        pictures,
        across,
        drawn,
        target_rule=rule,
        command=command,
        written=datetime.now(UTC),
        notes=notes,
        failures=failures,
        folders=folders,
    )
    _write(out / PAGE, text)
    return out / PAGE


def _figures(setting: Setting, drawn: Mapping[str, Look]) -> Iterator[tuple[str, Figure]]:
    """Draw all pictures of a setting, each with its kind; the first is the one that is not folded."""
    for against in ("time", "steps", "bytes"):
        yield against, progress(setting, drawn, against)
    if ACCURACY in setting.metrics:
        yield "metric", progress(setting, drawn, "time", metric=ACCURACY)
    yield "step-time", step_time(setting)
    for kind, figure in (("gradients", fidelity(setting, drawn)), ("layers", layer_picture(setting, drawn))):
        if figure is not None:
            yield kind, figure


def _written(out: Path, name: str, kind: str, figure: Figure) -> Picture:
    """Write a picture in every format, and return it for the page."""
    made = files_of(figure)
    for suffix, content in made.items():
        _write(out / PLOTS / f"{name}.{kind}.{suffix}", content)
    return Picture(name, kind, made["png"])


def _write(path: Path, content: str | bytes) -> None:
    with named(path):
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
