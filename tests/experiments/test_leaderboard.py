"""The study `leaderboard` from end to end, for a few steps: what it writes, and what it refuses."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from commhooks.experiments.accuracy import Accuracy
from experiments.studies.app import app
from experiments.studies.leaderboard.board import (
    SORTED,
    Results,
    RunsFile,
    accuracy_of,
    prepare_board,
    print_board,
    write_board,
)
from experiments.studies.leaderboard.contenders import LeftOut
from tests.experiments.standing_samples import rows, runs

pytestmark = pytest.mark.a_row  # they take seconds

ONLY = ["--hook", "fp16", "--task", "digits", "--seeds", "2", "--steps", "3", "--workers", "2", "--processes", "2"]
REFUSED = [LeftOut("terngrad + EF", "its residual would <grow>")]


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["leaderboard", *words])


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def sample(command: str = "leaderboard") -> Results:
    return Results(
        standings=rows(),
        left_out=REFUSED,
        seeds=3,
        workers=4,
        descriptions={"digits": "images", "gpt": "text"},
        steps={"digits": 160, "gpt": 120},
        command=command,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the results of a leaderboard that never ran."""
    out = tmp_path_factory.mktemp("leaderboard")
    prepare_board(out / "board", overwrite=False)
    file = RunsFile(out / "board")
    for one in runs():
        file.append(one)
    write_board(sample("leaderboard <x>"), out / "board", out / "docs" / "leaderboard")
    return out


@pytest.mark.processes
def test_it_trains_times_and_writes_what_it_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = run(
        *ONLY, "--out", str(out), "--docs", str(tmp_path / "docs"), "--accuracy", str(tmp_path / "accuracy.json")
    )
    assert ended.exit_code == 0, ended.output
    said = [line for line in ended.output.splitlines() if " · " in line]
    assert len(said) == 3 and said[-1].endswith("(6 of 6 runs)")
    assert any(line.startswith("digits · fp16 + EF: accuracy 0.") for line in said)
    forms = [("all-reduce", "False"), ("fp16", "False"), ("fp16", "True")]
    standings = read(out / "standings.csv")
    assert [(row["compressor"], row["error_feedback"]) for row in standings] == forms
    assert len(read(out / "runs.csv")) == 2 * len(forms)
    assert all(float(row["compute_median"]) > 0 for row in standings)
    assert [float(row["ratio"]) for row in standings] == [1, 2, 2]
    dense, cast, fed = (float(row["vnmse"]) for row in standings)
    assert dense < 1e-12 < cast == fed < 1e-6, "in the first step nothing is owed yet"
    assert (out / "tables.md").exists() and (tmp_path / "docs" / "tables.md").exists()
    (task,) = Accuracy.read(tmp_path / "accuracy.json").tasks
    assert (task.task, task.unit, task.steps, task.seeds) == ("digits", "points", 3, 2)
    differences = [100 * float(row["difference_mean"] or 0) for row in standings]
    assert [one.mean for one in task.differences] == pytest.approx(differences)
    again = run(*ONLY, "--out", str(out))
    assert again.exit_code == 2
    assert "holds results already" in again.output


def test_the_file_for_estimates_has_every_difference_in_the_tasks_unit_and_none_of_what_diverged() -> None:
    digits, gpt = accuracy_of(sample()).tasks
    assert (digits.unit, gpt.unit) == ("points", "nats")
    assert digits.seed_range == pytest.approx(0.3), "from 96.9 to 97.2 %"
    by_name = {one.compressor: one for one in digits.differences}
    assert by_name["top-k"].mean == pytest.approx(-3.0), "94 % instead of 97"
    assert by_name["all-reduce"].mean == 0.0
    diverged = next(one for name, one in by_name.items() if "terngrad" in name)
    assert (diverged.mean, diverged.low, diverged.high) == (None, None, None)
    nats = next(one for one in gpt.differences if one.compressor == "top-k")
    assert nats.mean == pytest.approx(0.09)


def test_the_documentation_gets_tables(folder: Path) -> None:
    text = (folder / "docs" / "leaderboard" / "tables.md").read_text()
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| ")}
    assert widths == {7}  # six columns of a task's table and of the recommendations
    folded = {line.count("|") for line in text.splitlines() if line.startswith("    | ")}
    assert folded == {5}
    assert text.count(SORTED) == 2
    advised = text.split("### ")[1]
    assert "| `fp16` | 2.00× |" in advised and "`sign`" not in advised, "it costs 7 points"
    assert "| **`fp16`** ✓ | 97.0 %" in text and "| **`sign + EF`** | 96.5 %" in text


def test_every_run_can_be_read_back(folder: Path) -> None:
    found = read(folder / "board" / "runs.csv")
    assert [float(row["accuracy"]) for row in found] == pytest.approx(
        [one.trained.accuracy for one in runs()], nan_ok=True
    )


def test_the_tables_fit_a_terminal(folder: Path) -> None:
    out = StringIO()
    print_board(sample(), folder / "board", Console(file=out, width=110))
    text = out.getvalue()
    assert "…" not in text
    for words in ("top-k:ratio=0.01 + EF", "50.0×", "2.00 kB", "left out: terngrad + EF: its residual would <grow>"):
        assert words in text


@pytest.mark.parametrize(
    ("line", "words"),
    {
        "--task digits --task gtp": "did you mean 'gpt'",
        "--task gpt --task gpt": "asked for twice",
        "--hook powersgd --hook powersgd:rank=4": "asked for twice",
        "--hook ,": "hook ',' does not parse",
        "--seeds 1": "seeds must be at least 2",
        "--workers 1": "workers must be at least 2",
        f"--task digits --out {__file__}": "is a file; name a folder",
    }.items(),
)
def test_a_mistake_ends_in_words_with_2(line: str, words: str) -> None:
    ended = CliRunner().invoke(app, ["leaderboard", *line.split()], env={"COLUMNS": "300"})
    assert (ended.exit_code, words in " ".join(ended.output.split())) == (2, True), ended.output
