"""Sweeps: a YAML file becomes runs, what is finished is not run again, and all of it loads into one table."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import types
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pandas
import pytest
from typer.testing import CliRunner

from commhooks import experiments
from commhooks.experiments import api
from commhooks.experiments.commands.cli import app
from commhooks.experiments.launch import WorldError
from commhooks.experiments.report.page import HEAD
from commhooks.experiments.runs import RunSettings
from commhooks.experiments.sweeps import plan, sweep
from commhooks.experiments.sweeps.execute import Listener, Made
from commhooks.experiments.sweeps.store import load_table, read_failures, table_of, write_failure
from commhooks.experiments.sweeps.yaml_file import read_sweep
from tests.experiments.synthetic import result, results, with_slow_probes

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("pictures_are_not_rendered")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


def test_what_is_listed_inherits_what_it_does_not_say(written: Path) -> None:
    written.write_text("""
task: digits:size=small
seeds: 3
runs:
- hook: [fp16, "powersgd:rank=2,start_after=5"]
- {hook: fp16, seed: 7, ranks: 3}
""")
    found = read_sweep(written)
    assert found.out == Path("runs/mine")
    assert [(one.hook.name, one.seed, one.ranks, one.steps) for one in found.runs] == [
        *((hook, seed, 2, 40) for seed in range(3) for hook in ("fp16", "powersgd")),
        ("fp16", 7, 3, 40),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file must have settings"),
        ("task: [digits", "is not YAML"),
        ("task: digits\nhok: fp16", "line 2: key 'hok' is not known: .*; did you mean 'hook'"),
        ("task: digits\n\nhook: [fp16, powersgd:rank=4,start_after=5]", "line 3: hook 'start_after=5' .* put quotes"),
        ("task: digits\ntask: gpt", "line 2: task is given twice .first on line 1.; .*'task: .first, second.'"),
        ("task: digits\nruns:\n- hook: fp16\n- hook: [bf16, fp16]", "fp16 · seed 0 is listed twice"),
        ("task: digits\nseeds: 2\nseed: 1", "give seed or seeds"),
        ("task: !!python/name:os.system", "could not determine a constructor"),
        ("task: digits\nhook: &hook [*hook]", "recursive"),
        ("task: digits\nseeds: 99999999999999999999", "line 2: 99,999,999,999,999,999,999 runs are more than"),
        (f"task: digits\nseed: {list(range(300))}\nsteps: {list(range(1, 301))}", "90,000 runs are more than"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_place(text: str, words: str, written: Path) -> None:
    written.write_text(text)
    with pytest.raises(ValueError, match=rf"{written.name}(?s:.*){words}"):
        read_sweep(written)


@pytest.mark.a_row
def test_the_examples_are_sweeps_and_say_which_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "why_not", lambda: None)
    sizes = {"quick": 4 * 2, "slow-links": 2 * 2 * 5 * 3 + 2 * 4 * 3, "slow-links-long": 2 * 2 * 3}
    files = sorted((ROOT / "docs" / "examples" / "sweeps").glob("*.yaml"), key=lambda path: path.stem)
    assert [path.stem for path in files] == sorted(sizes)
    for path in files:
        assert len(set(read_sweep(path).runs)) == sizes[path.stem]
        assert ("as root" in path.read_text()) == ("hosts:" in path.read_text())


FAILING = "fp16"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[RunSettings]]:
    """Let runs be made without ranks, but for those of one hook, which fail; return what was to be run each time."""
    calls: list[list[RunSettings]] = []

    def execute(runs: Sequence[RunSettings], out: Path, listener: Listener, **_: object) -> Made:
        calls.append(list(runs))
        made = Made()
        for settings in runs:
            if settings.hook.label == FAILING:
                made.failures[settings] = "rank 1 failed:\nRuntimeError: the disk is full"
            else:
                made.results[settings] = dataclasses.replace(result(steps=settings.steps), settings=settings)
                made.results[settings].write(out / "results")
        return made

    monkeypatch.setattr(sweep, "execute", execute)
    return calls


COMMAND = ["compare", "--task", "digits:size=small", "--steps", "10"]


def test_a_run_that_fails_is_listed_and_tried_again(asked: list[list[RunSettings]], tmp_path: Path) -> None:
    words = [*COMMAND, "--seeds", "2", "--out", str(tmp_path), "--hook", "all-reduce", "--hook", FAILING]
    for number in range(2):
        ended = CliRunner().invoke(app, words)
        assert ended.exit_code == 1, ended.output
        assert "2 of 4 runs failed; tracebacks in" in ended.output
        assert "fp16 · seed 1" in ended.output and "RuntimeError: the disk is full" in ended.output
        assert ("2 of 4 runs are finished already" in ended.output) == (number == 1)
    assert [len(runs) for runs in asked] == [4, 2]
    failed = read_failures([tmp_path])
    assert set(failed) == set(asked[1])
    assert "the disk is full" in failed[asked[1][0]]
    assert all(path.stem == one.name for path, one in zip(sorted(tmp_path.glob("failures/*")), failed, strict=True))


def test_folders_load_into_one_table(tmp_path: Path) -> None:
    for number, one in enumerate(results(seeds=(0, 1))):
        (tmp_path / str(number % 2) / "results").mkdir(parents=True, exist_ok=True)
        with_slow_probes(one).write(tmp_path / str(number % 2) / "results")
    table = load_table(tmp_path / "0", tmp_path / "1" / "results", str(tmp_path / "0"))
    assert len(table) == len(results(seeds=(0, 1)))  # one row a run, though a folder is named twice
    kinds = {name: table[name].dtype.kind for name in ("ranks", "seed", "steps", "seconds", "replicas_identical")}
    assert kinds == {"ranks": "i", "seed": "i", "steps": "i", "seconds": "f", "replicas_identical": "b"}
    assert table["bucket_cap_mb"].isna().all() and table["interface_bytes"].dtype.kind == "f"
    assert pandas.api.types.is_string_dtype(table["optimizer"]) and table["optimizer"].isna().all()
    assert table["seconds"].min() > 20 * 9 and table["step_seconds"].max() < 1  # probed steps are not typical
    assert table[table["task"] == "gpt"].groupby("hook")["ratio"].mean()["powersgd:rank=4"] == pytest.approx(20)
    by_step = load_table(tmp_path / "0", tmp_path / "1", steps=True)
    assert len(by_step) == table["steps"].sum() and (by_step["run_steps"] == 40).all()
    with pytest.raises(ValueError, match="holds no results: expected a folder written by"):
        load_table(tmp_path)


def test_a_row_of_the_table_has_typical_steps_and_a_column_for_each_setting_of_a_hook() -> None:
    row, steps = table_of([result()]).iloc[0], result().steps
    middle = sorted(steps, key=lambda step: step.seconds)[10:30]
    parts = {part: statistics.fmean(getattr(step, part) for step in middle) for part in PARTS}
    assert {part: row[f"{part}_seconds"] for part in PARTS} == pytest.approx(parts)
    assert row["step_seconds"] == pytest.approx(sum(parts.values()))
    assert row["train_loss"] == pytest.approx(statistics.fmean(step.loss for step in steps[-10:]))
    partly = dataclasses.replace(result(), steps=(dataclasses.replace(steps[0], interface_bytes=1), *steps[1:]))
    assert table_of([partly])["interface_bytes"].isna().all()  # a sum of some would not be that of the run
    ablation = table_of([result(f"powersgd:{text}") for text in ("rank=4", "rank=1,error_feedback=false")] + [result()])
    assert list(ablation["hook_name"]) == ["powersgd", "powersgd", "all-reduce"]
    assert list(ablation["rank"][:2]) == [4.0, 1.0] and list(ablation["error_feedback"][:2]) == [True, False]
    assert ablation["rank"].isna()[2] and "ratio" in ablation and "hook_ratio" in table_of([result("top-k:ratio=0.1")])


def test_a_report_is_made_again_from_several_folders(tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    for number, one in enumerate(results()):
        (folders[number % 2] / "results").mkdir(parents=True, exist_ok=True)
        one.write(folders[number % 2] / "results")
    write_failure(folders[0], results()[1].settings, "made since, in the other folder")
    page = tmp_path / "both" / "report.html"
    page.parent.mkdir()
    page.write_text(HEAD + "old")
    words = ["report", *map(str, folders), "--out", str(page.parent)]
    assert CliRunner().invoke(app, words).exit_code == 0
    text = page.read_text()
    assert "powersgd:rank=4" in text and f"<code>{folders[0]}</code>, <code>{folders[1]}</code>" in text
    assert "<code>results/</code>" not in text and "made since" not in text
    ended = CliRunner().invoke(app, [*words, "--baseline", "fp61"])
    assert ended.exit_code == 2 and "did you mean 'fp16'" in ended.output
    assert CliRunner().invoke(app, ["report", str(folders[0])]).exit_code == 0
    assert "<code>results/</code>" in (folders[0] / "report.html").read_text()


def test_a_script_compares_in_five_lines(asked: list[list[RunSettings]], tmp_path: Path) -> None:
    compare = partial(experiments.compare, ["digits:size=small"], seeds=2, steps=10, out=tmp_path)
    table = compare(["all-reduce", "bf16"])
    assert list(table["hook"]) == ["all-reduce", "bf16"] * 2
    assert len(experiments.load_table(tmp_path)) == 4
    with pytest.raises(WorldError, match=r"2 of 4 runs failed; .*failures.* Calling compare again tries"):
        compare(["all-reduce", FAILING], quiet=True)
    assert [len(runs) for runs in asked] == [4, 2]


@pytest.mark.parametrize(
    ("script", "refused"),
    [
        ("def main():\n    compare()\nmain()", True),
        ("if __name__ == '__main__':\n    compare()", False),
    ],
)
def test_a_script_whose_ranks_would_run_it_again_is_refused(
    script: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check needs nothing but the call's place, so that this costs no import of torch."""
    path, main = tmp_path / "script.py", types.ModuleType("__main__")
    path.write_text(script)
    vars(main).update(__file__=str(path), compare=api._refuse_unguarded_call)
    monkeypatch.setitem(sys.modules, "__main__", main)
    words = r"script.py, line \d+: .* `if __name__ == \"__main__\":`"
    with pytest.raises(RuntimeError, match=words) if refused else nullcontext():
        exec(compile(script, str(path), "exec"), vars(main))


PARTS = ("compute", "compression", "waiting")
