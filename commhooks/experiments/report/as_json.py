"""A comparison as JSON, for programs: every figure with its unit, its spread and its seeds.

`report.schema.json`, beside this file, is its schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import commhooks
from commhooks.experiments import stored
from commhooks.experiments.launch import reason_of
from commhooks.experiments.report.findings import finding, names_of
from commhooks.experiments.results.intervals import Estimate
from commhooks.experiments.results.outcomes import Outcome, Setting, Versus, settings_of
from commhooks.experiments.results.verdicts import USUAL, Judged, Margins, Range
from commhooks.experiments.runs import RunResult, RunSettings, strict

FORMAT = 2
"""The format of the JSON text; increased when its readers must change."""
SCHEMA = Path(__file__).with_name("report.schema.json")


def summary(
    results: Sequence[RunResult],
    *,
    baseline: str | None,
    target_loss: float | None,
    margins: Margins = USUAL,
    command: str,
    notes: Sequence[str],
    failures: Mapping[RunSettings, str],
) -> dict[str, Any]:
    """Return what a report shows, as `report.schema.json` describes it.

    Numbers that are not finite are the texts "nan", "inf" and "-inf", which JSON has no numbers for; what was not
    measured is None.

    Args:
        results: Finished runs, of any number of settings, hooks and seeds.
        baseline: The hook that the others are compared with; None: all-reduce if it is there, otherwise the first.
        target_loss: The training loss to reach; None: by `results.summary.TARGET_RULE`, for each setting.
        margins: What matters in a verdict.
        command: The command that writes it.
        notes: Warnings about the circumstances.
        failures: The traceback of each run that failed.

    Raises:
        ValueError: No run used the baseline.

    """
    settings = settings_of(results, baseline=baseline, target=target_loss, failures=list(failures), margins=margins)
    whole = {
        "format": FORMAT,
        "written": _time(datetime.now(UTC).timestamp()),
        "written_by": f"commhooks {commhooks.__version__}",
        "command": command,
        "warnings": list(notes),
        "settings": [_setting(name, one) for name, one in zip(names_of(settings), settings, strict=True)],
        "failures": [{"run": one.to_dict(), "reason": reason_of(text)} for one, text in failures.items()],
    }
    plain: dict[str, Any] = strict(whole)
    return plain


def as_text(found: Mapping[str, Any]) -> str:
    """Return a summary as strict JSON text."""
    return json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def write_text(found: Mapping[str, Any], path: Path) -> None:
    """Write a summary into a file as strict JSON text."""
    stored.write_text(path, as_text(found))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _setting(name: str, one: Setting) -> dict[str, Any]:
    common, link = one.settings, one.settings.link
    runs = [run for outcome in one.outcomes for run in outcome.results.values()]
    ended = [step.ended for run in runs for step in run.steps]
    made_with = [{"commit": run.commit, "versions": dict(run.versions), "machine": dict(run.machine)} for run in runs]
    return {
        "name": name,
        "task": common.task.label,
        "description": one.any_result.description,
        "parameters": one.any_result.parameters,
        "ranks": common.ranks,
        "steps": common.steps,
        "link": {
            "label": link.label,
            "kind": link.kind,
            "rate_bits_per_second": link.bits_per_second,
            "latency_seconds": link.latency_seconds,
        },
        "optimizer": None if common.optimizer is None else common.optimizer.label,
        "compute": common.compute,
        "ddp": common.ddp,
        "bucket_cap_MiB": common.bucket_cap_mb,
        "seeds": list(one.seeds),
        "measured": {"begin": _time(min(ended)), "end": _time(max(ended))},
        "made_with": [each for place, each in enumerate(made_with) if each not in made_with[:place]],
        "baseline": None if one.baseline is None else one.baseline.hook,
        "target_training_loss": _figure(Estimate.of(one.targets)),
        "finding": finding(one),
        "hooks": [_hook(outcome, one) for outcome in one.outcomes],
    }


def _hook(one: Outcome, setting: Setting) -> dict[str, Any]:
    versus = setting.versus.get(one.hook)
    judged = setting.judged.get(one.hook)
    probes = {seed: run.probes[-1] for seed, run in one.results.items() if run.probes}
    residuals = {seed: probe.residual for seed, probe in probes.items() if probe.residual is not None}
    return {
        "hook": one.hook,
        "seeds": list(one.results),
        "failed_seeds": list(one.failed),
        "diverged_seeds": list(one.diverged),
        "replicas_identical": one.replicas_identical,
        "verdict": None if judged is None else _judged(judged),
        "steps_in_all": _figure(Estimate.of({seed: len(run.steps) for seed, run in one.results.items()})),
        "step_seconds": _figure(one.step),
        "quartiles_of_step_seconds": [one.step_spread.low, one.step_spread.high],
        "parts_of_step_seconds": dict(one.parts),
        "training_seconds": _figure(one.seconds),
        "moved_bytes": _figure(one.moved_bytes),
        "peak_bytes_per_step": _figure(one.peak_bytes),
        "dense_bytes_over_moved": one.ratio,
        "interface_bytes_over_moved": _figure(one.overhead),
        "link_use_fraction": _figure(one.link_use),
        "training_loss": _figure(one.train_loss),
        "held_out_loss": _figure(one.held_out_loss),
        "held_out_metrics": {name: _figure(one.metric(name)) for name in setting.metrics},
        "steps_to_target": _figure(one.steps_to_target),
        "seconds_to_target": _figure(one.seconds_to_target),
        "bytes_to_target": _figure(one.bytes_to_target),
        "gradient_error_over_norm": _figure(Estimate.of({seed: probe.error for seed, probe in probes.items()})),
        "residual_over_gradient_norm": _figure(Estimate.of(residuals)),
        "against_baseline": None if versus is None else _versus(versus),
    }


def _judged(judged: Judged) -> dict[str, Any]:
    return {
        "verdict": judged.verdict.value,
        "why": judged.why,
        "step_speed_up": _range(judged.speed_up),
        "training_loss_difference_at_equal_steps": _range(judged.equal_steps),
        "training_loss_difference_after_equal_time": _range(judged.equal_time),
        "loss_difference_that_matters": judged.margin,
        "lacks": judged.lacks,
        "times_of_that_which_may_settle_it": judged.longer,
    }


def _versus(versus: Versus) -> dict[str, Any]:
    return {
        "seeds": versus.seeds,
        "took_turns": versus.turns,
        "step_speed_up": _figure(versus.step),
        "training_speed_up": _figure(versus.run),
        "speed_up_to_target": _figure(versus.to_target),
        "held_out_loss_difference_at_equal_steps": _figure(versus.loss),
        "accuracy_difference_at_equal_steps": _figure(versus.accuracy),
    }


def _range(found: Range) -> dict[str, Any]:
    return {"mean": found.mean, "interval_95": [found.low, found.high]}


def _figure(found: Estimate) -> dict[str, Any] | None:
    """Return an estimate's mean, values and interval; None if it was measured with no seed."""
    if not found.seeds:
        return None
    return {
        "mean": found.mean,
        "by_seed": {str(seed): value for seed, value in found.by_seed.items()},
        "interval_95": None if found.interval is None else [found.interval.low, found.interval.high],
    }
