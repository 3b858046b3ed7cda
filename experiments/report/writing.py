"""The report of any number of runs: one HTML page and its pictures as files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from commhooks.saving.files import named

from ..results.outcomes import Setting, settings_of
from ..results.summary import TARGET_RULE
from ..runs import RunResult, RunSettings
from .across import series_of, speed_ups
from .bars import step_time
from .curves import against_bytes, against_steps, against_time, fidelity
from .findings import names_of
from .layers import layer_picture
from .page import Picture, page
from .plots import Look, looks

PAGE = "report.html"
PLOTS = "plots"
_NONE: Mapping[RunSettings, str] = MappingProxyType({})


def write(
    results: Sequence[RunResult],
    out: Path,
    *,
    baseline: str | None,
    target_loss: float | None,
    command: str,
    notes: Sequence[str] = (),
    failures: Mapping[RunSettings, str] = _NONE,
    folders: Sequence[str] = (),
) -> Path:
    """Write report.html and plots/*.png into the folder `out`, and return the path of the page.

    Args:
        results: Finished runs, of any number of settings, hooks and seeds.
        out: The folder; it is created if it does not exist, and files of these names are replaced.
        baseline: The hook that the others are compared with; None: all-reduce if it is there, otherwise the first.
        target_loss: The training loss to reach; None: by `experiments.results.summary.TARGET_RULE`, for each setting.
        command: How to get the report again.
        notes: Warnings, for the top of the page.
        failures: The traceback of each run that failed.
        folders: Where the results are, as named in the command; none: in `out`.

    Raises:
        ValueError: No run used the baseline, or there is nothing to report.

    """
    if not results and not failures:
        raise ValueError("there is nothing to report: expected at least one finished or failed run")
    settings = settings_of(results, baseline=baseline, target=target_loss, failures=list(failures))
    hooks = list(dict.fromkeys(one.hook for setting in settings for one in setting.outcomes))
    chosen = next((setting.baseline.hook for setting in settings if setting.baseline is not None), None)
    drawn = looks(hooks, chosen)
    names = [re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")[:80] for name in names_of(settings)]
    pictures = [list(_pictures(name, setting, drawn)) for name, setting in zip(names, settings, strict=True)]
    across = [
        Picture(f"series-{number}", series.along, speed_ups(series, drawn))
        for number, series in enumerate(series_of(settings), start=1)
    ]
    (out / PLOTS).mkdir(parents=True, exist_ok=True)
    for picture in (*across, *(one for own in pictures for one in own)):
        drawing = out / PLOTS / f"{picture.name}.{picture.kind}.png"
        with named(drawing):
            drawing.write_bytes(picture.png)
    rule = TARGET_RULE if target_loss is None else f"a mean training loss of {target_loss:g}, as asked for"
    text = page(
        settings,
        pictures,
        across,
        target_rule=rule,
        command=command,
        written=datetime.now(UTC),
        notes=notes,
        failures=failures,
        folders=folders,
    )
    path = out / PAGE
    with named(path):
        path.write_text(text, encoding="utf-8")
    return path


def _pictures(name: str, setting: Setting, drawn: Mapping[str, Look]) -> Iterator[Picture]:
    """Draw all pictures of a setting."""
    yield Picture(name, "time", against_time(setting, drawn))
    yield Picture(name, "steps", against_steps(setting, drawn))
    yield Picture(name, "bytes", against_bytes(setting, drawn))
    yield Picture(name, "step-time", step_time(setting))
    gradients, layers = fidelity(setting, drawn), layer_picture(setting, drawn)
    if gradients is not None:
        yield Picture(name, "gradients", gradients)
    if layers is not None:
        yield Picture(name, "layers", layers)
