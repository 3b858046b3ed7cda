"""The JSON of a comparison: it fits its schema, is strict, and has the figures of the tables."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from commhooks.experiments.commands.cli import app
from commhooks.experiments.report.as_json import FORMAT, SCHEMA, as_text, summary
from commhooks.experiments.report.findings import finding
from commhooks.experiments.results.outcomes import settings_of
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.experiments.specs import Spec
from tests.experiments.synthetic import diverged, result, results, stepwise

SEEDS = (0, 1, 2)
FAILED = {RunSettings(task=Spec("gpt"), hook=Spec("torch.powersgd"), steps=40): "Traceback\nRuntimeError: closed"}


def refused(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def parsed(runs: list[RunResult], failures: dict[RunSettings, str] | None = None, **more: Any) -> dict[str, Any]:
    """Return the summary of runs, written as text, read strictly, and checked by the schema."""
    options = {"baseline": None, "target_loss": None, "command": "commhooks report x", "notes": ["busy"]} | more
    text = as_text(summary(runs, failures=failures or {}, **options))
    found: dict[str, Any] = json.loads(text, parse_constant=refused)
    validator().validate(found)
    return found


@functools.cache
def validator() -> Any:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def silent() -> list[RunResult]:
    """Return runs of a single rank, which moves nothing."""
    return [stepwise(one, lambda _: {"moved_bytes": 0}) for one in (result(), result("fp16", ratio=2))]


CASES = {
    "several settings, three seeds": results(seeds=SEEDS, links=("100Mbit/s", "1Gbit/s")),
    "one seed": results(tasks=("gpt",)),
    "two seeds, one without a partner": [*results(tasks=("gpt",), seeds=(0, 1))[:-1], result("sign", seed=1)],
    "a hook that diverged": [*results(tasks=("gpt",)), diverged(result("top-k:ratio=0.01", ratio=50))],
    "a baseline that diverged": [diverged(result()), result("fp16", ratio=2)],
    "nothing moved": silent(),
    "nothing probed": [dataclasses.replace(one, probes=()) for one in results(tasks=("gpt",))],
    "no baseline in one setting": [*results(tasks=("gpt",)), result("fp16", task="digits", ratio=2)],
    "seldom": [result(), result("diloco:every=5", ratio=5)],
    "no limit of the rate": [result(link="unlimited"), result("fp16", link="unlimited")],
}


@pytest.mark.parametrize("what", CASES)
def test_the_json_fits_its_schema(what: str) -> None:
    found = parsed(CASES[what], FAILED)
    assert found["format"] == FORMAT and found["warnings"] == ["busy"]
    assert found["failures"][0]["reason"] == "RuntimeError: closed"


def test_the_figures_are_those_of_the_report() -> None:
    runs = [dataclasses.replace(one, commit="0123456789ab") for one in results(tasks=("gpt",), seeds=SEEDS)]
    (one,), (setting,) = parsed(runs)["settings"], settings_of(runs)
    assert (one["finding"], one["seeds"]) == (finding(setting), [0, 1, 2])
    assert one["link"]["rate_bits_per_second"] == 1e8
    assert one["made_with"][0]["commit"] == "0123456789ab" and len(one["made_with"]) == 1
    first, _, power = one["hooks"]
    assert (first["verdict"], first["against_baseline"], power["verdict"]["verdict"]) == (None, None, "pays")
    judged = setting.judged["powersgd:rank=4"]
    assert power["verdict"]["step_speed_up"]["interval_95"] == [judged.speed_up.low, judged.speed_up.high]
    outcome, versus = setting.outcomes[2], setting.versus["powersgd:rank=4"]
    assert power["step_seconds"]["mean"] == outcome.step.mean
    assert power["step_seconds"]["interval_95"] == list(outcome.step.ends)
    assert power["moved_bytes"]["by_seed"] == {"0": 8e6, "1": 8e6, "2": 8e6}
    speed_up = power["against_baseline"]["step_speed_up"]
    assert speed_up["mean"] == pytest.approx(first["step_seconds"]["mean"] / power["step_seconds"]["mean"])
    difference = power["against_baseline"]["held_out_loss_difference_at_equal_steps"]
    assert difference["mean"] == versus.loss.mean


def test_what_is_not_finite_is_text_and_what_was_not_measured_is_null() -> None:
    assert parsed(silent())["settings"][0]["hooks"][1]["dense_bytes_over_moved"] == "inf"
    broken = parsed(CASES["a hook that diverged"])["settings"][0]["hooks"][-1]
    assert (broken["diverged_seeds"], broken["held_out_loss"], broken["verdict"]["verdict"]) == ([0], None, "diverged")
    first = parsed(CASES["nothing probed"])["settings"][0]["hooks"][0]
    assert first["gradient_error_over_norm"] is None


@pytest.mark.usefixtures("pictures_are_not_rendered")
def test_the_command_writes_it_to_a_file_or_alone_to_standard_output(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for one in results(tasks=("gpt",)):
        one.write(tmp_path / "results")
    for where, written in (("-", None), (str(tmp_path / "summary.json"), tmp_path / "summary.json")):
        ended = CliRunner().invoke(app, ["report", str(tmp_path), "--json", where])
        assert ended.exit_code == 0 and "over time" in ended.output
        text = written.read_text() if written else ended.stdout
        validator().validate(json.loads(text, parse_constant=refused))
