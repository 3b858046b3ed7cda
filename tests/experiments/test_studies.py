"""The studies' command line: mistakes end in words, before anything is measured."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.studies.app import app

PREDICTIONS = "predictions --kind emulated --load 999 --file cases.json --page page.md"
MISTAKES = {
    "benhc": "No such command 'benhc'",
    "bench powersdg": "did you mean 'powersgd'",
    "bench levels --results nowhere/bench.json": "cannot be written",
    "bench hook": "did you mean 'hooks'?",
    "bench --quick --check benchmarks.json": "not comparable",
    "bench --render": "name it with --results",
    "reproduce sharded-lsos": "did you mean 'sharded-loss'",
    "reproduce sharded-loss --size huge": "size 'huge' is not known",
    "predictions --file damaged.json --page page.md --at-most 0": "damaged.json: expected cases of format 1",
    "predictions --file nowhere/cases.json": "cannot be written",
    f"{PREDICTIONS} --seconds 0": "a profile takes a time above zero",
    f"{PREDICTIONS} --seconds 0.5": "a probe takes 1 to 120 seconds",
    "costs nowhere/costs.json": "cannot be written",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_ends_in_words_with_2(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("damaged.json").write_text("{")
    ended = CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": "300"})
    assert MISTAKES[line] in " ".join(ended.output.split())
    assert ended.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["damaged.json"], "nothing is left behind"
