"""Self-contained HTML pages."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from commhooks.units import bytes_in_words

from ..link import format_rate
from ..runs import RunResult
from ..summary import SMOOTHING_STEPS, Summary
from .plots import DARK, LIGHT
from .words import (
    NEVER,
    by_task,
    loss_change,
    percent,
    quartiles_in_words,
    seconds_in_words,
    times,
    whole,
)

Plots = Mapping[tuple[str, str, str], bytes]  # (task, picture, theme) -> PNG
PICTURES = ("step-time", "loss-bytes", "loss-time")


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
    results: Sequence[RunResult], summaries: list[Summary], plots: Plots, *, target_rule: str, command: str
) -> str:
    """Return the report as HTML, with every picture inside it."""
    settings = results[0].settings
    return template("report.html.j2").render(
        name="compare",
        title=f"{len(by_task(summaries)[settings.task])} hooks, side by side",
        ranks=settings.ranks,
        rate=format_rate(settings.link.bits_per_second),
        latency=seconds_in_words(settings.link.latency_seconds),
        findings=[(task, _finding(rows)) for task, rows in by_task(summaries).items() if len(rows) > 1],
        sections=[_section(task, rows, results, plots) for task, rows in by_task(summaries).items()],
        smoothing=SMOOTHING_STEPS,
        target_rule=target_rule,
        facts=_facts(results),
        command=command,
    )


def template(file: str) -> Template:
    """Return a page's template, with everything that every page needs besides its own text."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.globals |= {"light": LIGHT, "dark": DARK}
    return environment.get_template(file)


def _finding(rows: list[Summary]) -> str:
    """Describe which hook reached the target first, and its costs and gains compared with the first hook."""
    first = rows[0]
    best = min(rows, key=lambda row: (row.seconds_to_target is None, row.seconds_to_target, row.step.median))
    if best is first or best.seconds_to_target is None:
        return f"No hook reached a training loss of {first.target_loss:.3f} sooner than {first.hook}."
    return (
        f"{best.hook} was first at a training loss of {first.target_loss:.3f}: after "
        f"{seconds_in_words(best.seconds_to_target)}, {first.hook} after {seconds_in_words(first.seconds_to_target)}. "
        f"Its median step took {seconds_in_words(best.step.median)}, not {seconds_in_words(first.step.median)}: "
        f"{times(best.step_speed_up)} as fast. A rank moved {bytes_in_words(best.moved_bytes)} instead of "
        f"{bytes_in_words(first.moved_bytes)}. Held-out loss after {best.steps} steps: {best.held_out_loss:.3f}, "
        f"with {first.hook} {first.held_out_loss:.3f}."
    )


def _section(task: str, rows: list[Summary], results: Sequence[RunResult], plots: Plots) -> dict[str, object]:
    result = next(result for result in results if result.settings.task == task)
    return {
        "name": {"gpt": "Language model on Python's standard library", "digits": "Handwritten digits"}.get(task, task),
        "description": result.description[0].upper() + result.description[1:],
        "parameters": f"{result.parameters:,}",
        "steps": rows[0].steps,
        "bits": rows[0].bits_per_byte is not None,
        "target": f"{rows[0].target_loss:.3f}",
        "rows": [_row(row, rows) for row in rows],
        "plots": [
            {
                "light": data_uri(plots[task, picture, "light"]),
                "dark": data_uri(plots[task, picture, "dark"]),
                "caption": f"{task}: {picture}",
                "wide": picture == "step-time",
            }
            for picture in PICTURES
        ],
    }


def _row(row: Summary, rows: list[Summary]) -> dict[str, object]:
    """Return one hook's cells; the best value of each column is marked."""
    return {
        "hook": row.hook,
        "replicas_identical": row.replicas_identical,
        "held_out_loss": f"{row.held_out_loss:.3f}",
        "change": loss_change(row, rows[0]),
        "accuracy": percent(row.accuracy),
        "bits": "" if row.bits_per_byte is None else f"{row.bits_per_byte:.3f}",
        "train_loss": f"{row.train_loss:.3f}",
        "steps_to_target": whole(row.steps_to_target),
        "seconds_to_target": seconds_in_words(row.seconds_to_target),
        "bytes_to_target": NEVER if row.bytes_to_target is None else bytes_in_words(row.bytes_to_target),
        "fastest_to_target": _is_least(row.seconds_to_target, [r.seconds_to_target for r in rows]),
        "leanest_to_target": _is_least(row.bytes_to_target, [r.bytes_to_target for r in rows]),
        "moved": bytes_in_words(row.moved_bytes),
        "ratio": times(row.ratio),
        "parts": [
            {"median": seconds_in_words(spread.median), "quartiles": quartiles_in_words(spread)}
            for spread in (row.step, row.compute, row.compression, row.waiting)
        ],
        "step_speed_up": times(row.step_speed_up),
        "fastest_step": _is_least(row.step.median, [r.step.median for r in rows]),
        "seconds": seconds_in_words(row.seconds),
        "speed_up": times(row.speed_up),
    }


def _is_least(value: float | None, values: Sequence[float | None]) -> bool:
    known = [other for other in values if other is not None]
    return value is not None and len(known) > 1 and value == min(known)


def _facts(results: Sequence[RunResult]) -> list[tuple[str, object]]:
    settings, machine = results[0].settings, results[0].machine
    loads = [float(result.machine["load"]) for result in results]
    versions = ", ".join(f"{name} {version}" for name, version in results[0].versions.items())
    ddp = {"core": "ddp_core.DistributedDataParallel", "torch": "torch.nn.parallel.DistributedDataParallel"}
    return [
        ("processor", f"{machine['processor']}, {machine['cores']} cores, {machine['threads_per_rank']} thread a rank"),
        ("load", f"{min(loads):.1f} to {max(loads):.1f} processes wanted to run, in the minute before a run's end"),
        ("system", machine["system"]),
        ("versions", versions),
        ("DDP", ddp[settings.ddp]),
        ("seed", settings.seed),
    ]


def data_uri(png: bytes) -> str:
    """Return a picture as a link that contains it."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
