"""What a person gets to see: the page, its pictures and tables, and the terminal; and the JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.console import Console
from typer.testing import CliRunner

from commhooks.experiments.commands.cli import app
from commhooks.experiments.report.as_json import FORMAT, SCHEMA, as_text, summary
from commhooks.experiments.report.findings import finding
from commhooks.experiments.report.lines import lines_of
from commhooks.experiments.report.table import print_tables
from commhooks.experiments.report.writing import write
from commhooks.experiments.results.outcomes import Setting, settings_of
from commhooks.experiments.results.verdicts import Judged, Range, Verdict
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.experiments.specs import Spec
from tests.experiments.synthetic import diverged, result, results, stepwise

SEEDS = (0, 1, 2)
FAILED = RunSettings(task=Spec("gpt"), hook=Spec("torch.powersgd"), steps=40)
OF_A_PERSON = "top-k:ratio=0.01,note=<b>"
POWER = "powersgd:rank=4"


def setting(runs: list[RunResult], **options: Any) -> Setting:
    (found,) = settings_of(runs, **options)
    return found


def judged(found: Setting, **verdicts: Judged) -> Setting:
    """Return the setting with these verdicts in place of its own."""
    vars(found)["judged"] = {hook.replace("_", "-"): one for hook, one in verdicts.items()}
    return found


def open_verdict(lacks: str, longer: float) -> Judged:
    some = Range(0.1, -0.1, 0.3)
    return Judged(Verdict.OPEN, "nobody knows", some, some, some, 0.01, lacks=lacks, longer=longer)


class Links(HTMLParser):
    """Collects what a page would fetch, and its text in order, with what is folded apart."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.words, self.open_words, self._folded = "", "", 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._folded += tag == "details" and ("open", None) not in attrs
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href", "srcset"}]

    def handle_endtag(self, tag: str) -> None:
        self._folded -= tag == "details" and self._folded > 0

    def handle_data(self, data: str) -> None:
        self.words += f" {data.strip()}"
        self.open_words += "" if self._folded else f" {data.strip()}"


@pytest.mark.a_row  # a page with all its pictures takes seconds
def test_the_page_shows_a_picture_a_table_and_a_sentence_for_each_setting_and_folds_the_rest(tmp_path: Path) -> None:
    """Of two links, three seeds, a hook that diverges, one without a seed, and runs that failed."""
    found = results(tasks=("gpt",), seeds=SEEDS, links=("100Mbit/s", "1Gbit/s"))
    found += [diverged(result(OF_A_PERSON, ratio=50, seed=seed)) for seed in (0, 1)]
    failures = {dataclasses.replace(FAILED, seed=n): "Traceback\n  File\nRuntimeError: <gloo> closed" for n in SEEDS}
    more: dict[str, Any] = {"command": "commhooks compare <x>", "notes": ["4 ranks share 2 cores"]}
    text = write(found, tmp_path, baseline=None, target_loss=None, failures=failures, **more).read_text()
    shown = Links()
    shown.feed(text)
    assert len(shown.fetched) == 2 * 7 + 1  # the pictures of each setting, and one across them
    assert all(link.startswith("data:image/png;base64,") for link in shown.fetched)
    assert not re.search(r"url\(|@import|<script", text)
    first, second = (text[text.index(f"<h2>{name}") :] for name in ("100 Mbit/s", "1 Gbit/s"))
    for section in (first, second):
        places = [section.index(what) for what in ("loss over time", "<table", "card finding", "<details")]
        assert places == sorted(places)
    words = " ".join(shown.open_words.split())
    assert words.count("RuntimeError") == 1 and "torch.powersgd · 2 ranks · unlimited · seeds 0, 1 and 2" in words
    assert (
        words.count("Use fp16: ") == words.count(f"faster still is {POWER}: after equal time its loss is lower by") == 2
    )
    assert 'copy commhooks.attach(model, "fp16")' in words
    assert "2 of 2 diverged, 2 of 3 seeds" in words
    assert "Student's t" not in words and "Student's t" in shown.words
    assert "commhooks compare &lt;x&gt;" in text and "note=&#39;&lt;b&gt;&#39;" in text
    assert "4 ranks share 2 cores" in shown.words


def test_a_report_of_nothing_is_refused_and_one_of_failures_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one finished or failed run"):
        write([], tmp_path, baseline=None, target_loss=None, command="")
    path = write([], tmp_path, baseline=None, target_loss=None, command="", failures={FAILED: ""})
    assert "no reason given" in path.read_text()


@pytest.mark.parametrize("width", [160, 110, 80])
def test_the_terminal_has_at_most_25_lines_a_setting_and_they_fit(width: int) -> None:
    out = StringIO()
    many = [result(f"top-k:ratio=0.0{n}", ratio=n, seed=seed, slower=1.5) for n in range(10, 30) for seed in SEEDS]
    print_tables([*results(tasks=("gpt",), seeds=SEEDS), *many], Console(file=out, width=width))
    lines = out.getvalue().strip().splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    (row,) = (line for line in lines if line.startswith(POWER))
    assert row.split()[-1] == "pays" and "200 kB" in row and "×" in row
    assert "and 10 hooks more, on the page" in lines
    typed = [line.strip() for line in lines[-2:]]
    assert typed == ['commhooks.attach(model, "fp16")', f'commhooks.attach(model, "{POWER}")']


def test_the_sentence_names_what_pays_or_the_baseline_or_what_is_lacking() -> None:
    runs = [result(seed=seed) for seed in (0, 1)] + [result("fp16", ratio=2, seed=seed) for seed in (0, 1)]
    assert finding(setting(runs)).startswith("Use fp16: its steps are 1.73 times as fast")
    worse = setting([result(link="100Gbit/s"), result("sign", ratio=30, slower=1.5, link="100Gbit/s")])
    assert finding(worse).startswith("None pays: stay with all-reduce. The nearest is sign: ")
    unsure = judged(setting(runs), fp16=open_verdict("steps", 2.6))
    assert finding(unsure) == "Whether a hook pays is not settled. The nearest is fp16: nobody knows."
    (_, line) = lines_of(unsure)
    assert line.lacks.startswith("104 steps may settle it: about ") and line.lacks.endswith(" s more")
    taken = sum(step.seconds for run in runs for step in run.steps)
    assert f"{1.6 * taken:.0f}" in line.lacks
    (_, line) = lines_of(judged(setting(runs), fp16=open_verdict("seeds", 2.0)))
    assert line.lacks.startswith("4 seeds ")
    (_, line) = lines_of(judged(setting(runs), fp16=open_verdict("steps", 1e6)))
    assert line.lacks == "more than 50 times the steps would be needed"
    assert finding(setting([result()])).endswith("there is nothing to compare.")
    silent = [stepwise(one, lambda _: {"moved_bytes": 0}) for one in runs]
    assert finding(setting(silent)) == "No bytes were moved with 2 ranks: there is nothing to compress."


def test_lines_are_in_the_order_of_verdicts_and_name_what_went_wrong() -> None:
    runs = [*results(tasks=("gpt",)), result("sign", slower=9), diverged(result("top-k", ratio=50))]
    found = lines_of(setting(runs, failures=[dataclasses.replace(runs[1].settings, seed=7)]))
    assert [line.verdict for line in found] == ["", "pays", "pays", "does not pay", "diverged"]
    assert found[0].hook == "all-reduce" and found[-1].warning == "1 of 1 diverged, 1 of 2 seeds"
    (fp16,) = (line for line in found if line.hook == "fp16")
    assert fp16.warning == "1 run failed, 1 of 2 seeds"
    alone = lines_of(setting([result(), result("fp16", seed=1)]))
    assert "no seed in common" in alone[1].warning and not alone[1].verdict
    later = [result(), stepwise(result("fp16"), lambda step: {"ended": step.ended + 1e6})]
    assert lines_of(setting(later))[1].warning == "made at another time"


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
    "diloco": [result(), result("diloco:every=5", ratio=5)],
    "no limit of the rate": [result(link="unlimited"), result("fp16", link="unlimited")],
}


@pytest.mark.parametrize("what", CASES)
def test_the_json_fits_its_schema(what: str) -> None:
    found = parsed(CASES[what], {FAILED: "Traceback\nRuntimeError: closed"})
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
